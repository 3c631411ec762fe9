"""ModelRequests: the requests that create, train, save and load models. Each is queued and returns a future."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

from pydantic import BaseModel

from postlude.serving.http.errors import HTTPError
from postlude.tinker import bodies
from postlude.tinker.backend import (
    AdamParams,
    ForwardBackward,
    LoadState,
    ModelSpec,
    OptimStep,
    PassRequest,
    SaveForSampler,
    SaveState,
    SnapshotSampler,
    TinkerBackend,
)
from postlude.tinker.futures import JSON, Future, digest
from postlude.tinker.paths import Kind, TinkerPath, check_name
from postlude.tinker.sampling import SamplingSession
from postlude.tinker.service import ClientSession, TinkerService
from postlude.tinker.state import Checkpoint, Run, SamplerRecord
from postlude.tinker.training import Operation, OperationRole, TrainedModel
from postlude.tinker.wire import encode_pass, read_pass_request

LOG = logging.getLogger("postlude")
LARGE = 64 * 1024  # a thread reads requests of more bytes, so that others do not wait for them
SAVE_KINDS: dict[Kind, str] = {
    "weights": "save_weights",
    "sampler_weights": "save_weights_for_sampler",
    "external_weights": "save_weights_external",
}


class _WaitingPass:
    """A pass from its arrival to its turn. A large one is read and given to the backend before its turn."""

    def __init__(self, backend: TinkerBackend, model_id: str, read: Callable[[], PassRequest], *, large: bool) -> None:
        self._backend, self._model_id, self._read, self._large = backend, model_id, read, large
        self._reading: asyncio.Task[PassRequest] | None = None

    def prepare(self) -> None:
        """Begins to read it."""
        if self._large:
            self._reading = asyncio.create_task(self._read_and_stage())
            self._reading.add_done_callback(lambda task: task.cancelled() or task.exception())  # raised in its turn

    def drop(self) -> None:
        """Frees it, since it will not run."""
        if self._reading is not None and not self._reading.cancel() and self._reading.exception() is None:
            self._backend.unstage(self._reading.result())

    async def run(self, ran: Callable[[], None]) -> bytes:
        """Runs it, and calls `ran` once the next request can be run. Returns the result as it is sent."""
        if self._reading is None:
            self.prepare()
        request = self._read() if self._reading is None else await self._reading
        result = await self._backend.train(ForwardBackward(self._model_id, request), ran)
        return await asyncio.to_thread(encode_pass, result) if self._large else encode_pass(result)

    async def _read_and_stage(self) -> PassRequest:
        request = await asyncio.to_thread(self._read)
        self._backend.stage(self._model_id, request)
        return request


class ModelRequests:
    """The training half of a service."""

    def __init__(self, service: TinkerService) -> None:
        self._service = service
        self._backend, self._state, self._training = service.backend, service.state, service.training

    async def create_model(self, owner: str, body: bodies.CreateModelBody) -> Future:
        session = self._service.session(owner, body.session_id)
        spec = ModelSpec(body.base_model, body.lora_config)
        model = await self._new_model(session, body.model_seq_id, spec, body.user_metadata)

        async def create(_: Callable[[], None]) -> JSON:
            bodies.check_optimizer(body.optimizer_config)
            await self._create(model)
            return {"type": "create_model", "model_id": model.model_id}

        return self._training.submit(model, 0, Operation("create_model", _digest(body), create))

    async def _new_model(
        self, session: ClientSession, number: int, spec: ModelSpec, user_metadata: dict[str, Any] | None
    ) -> TrainedModel:
        """Returns the model of a session with a number: the same one for a retry."""
        model_id = f"{session.record.session_id}:train:{number}"
        if model_id in self._training.models:
            return self._training.models[model_id]
        if model_id in self._state.runs:
            raise HTTPError(410, self._service.why_gone(model_id))
        if len(self._training.models) >= self._service.limits.models:
            raise HTTPError(
                400,
                f"{len(self._training.models)} models are being trained, which is the limit of this server. End a "
                "session, or start the server with a larger --max-models.",
            )
        limit = self._service.limits.models_per_key
        if sum(model.owner == session.record.owner for model in self._training.models.values()) >= limit:
            raise HTTPError(
                400,
                f"{limit} models of this key are being trained, which is its limit. End a session, or start the server "
                "with a larger --max-models-per-key.",
            )
        if spec.lora is None:
            self._check_full_models()
        self._service.base(spec.base_model)
        model = TrainedModel(model_id, session.record.owner, session.record.session_id, spec)
        self._training.models[model_id] = model
        now = time.time()
        run = Run(model_id, model.owner, model.session_id, spec, now, now, dict(user_metadata or {}))
        try:
            await self._service.save(run)
        except HTTPError:
            del self._training.models[model_id]
            raise
        return model

    def _check_full_models(self) -> None:
        """Refuses another model of which all weights are trained, if there are as many as allowed."""
        limit = self._service.limits.full_models
        running = sum(model.spec.lora is None for model in self._training.models.values())
        if limit == 0:
            raise HTTPError(400, "this server trains adapters only (--max-full-models 0): give a lora_config.")
        if running >= limit:
            raise HTTPError(
                400,
                f"all weights of {running} models are being trained, which is the limit of this server. Give a "
                "lora_config, end the session of another, or start the server with a larger --max-full-models.",
            )

    async def _create(self, model: TrainedModel) -> None:
        await self._backend.create_model(model.model_id, model.spec)
        model.created = True

    def get_info(self, owner: str, body: bodies.ModelBody) -> JSON:
        model = self._service.model(owner, body.model_id)
        info = self._service.bases[model.spec.base_model]
        return {
            "type": "get_info",
            "model_id": model.model_id,
            "model_name": info.name,
            "model_data": {"model_name": info.name, "tokenizer_id": info.tokenizer},
            "is_lora": model.spec.lora is not None,
            "lora_rank": model.spec.lora.rank if model.spec.lora is not None else None,
            "optimizer_config": {"type": "adamw"},
        }

    async def forward_backward(self, owner: str, message: Any, size: int) -> Future:
        """Queues a pass; `message` is the request as it was sent."""
        model = self._service.model(owner, message.model_id)
        info = self._service.bases[model.spec.base_model]

        def read() -> PassRequest:
            if message.loss_fn not in info.losses:
                raise ValueError(
                    f"the loss {message.loss_fn[:60]!r} is not supported; there are {', '.join(info.losses)}."
                )
            request = read_pass_request(message, info.max_context_length, info.vocab_size)
            self._service.metrics.trained_tokens.add(sum(len(datum.tokens) for datum in request.data))
            return request

        large = size > LARGE
        body_digest = await asyncio.to_thread(_digest_of, message) if large else _digest_of(message)
        waiting = _WaitingPass(self._backend, model.model_id, read, large=large)
        role: OperationRole = "other" if message.forward_only else "pass"
        operation = Operation("forward_backward", body_digest, waiting.run, role, size, waiting.prepare, waiting.drop)
        return self._training.submit(model, message.seq_id, operation)

    async def optim_step(self, owner: str, body: bodies.OptimStepBody) -> Future:
        model = self._service.model(owner, body.model_id)

        async def run(_: Callable[[], None]) -> JSON:
            bodies.check_optimizer(body.optimizer_params)
            metrics = await self._backend.train(OptimStep(model.model_id, body.adam_params or AdamParams()))
            finite = {name: value for name, value in metrics.items() if math.isfinite(value)}  # the client's type
            reply: JSON = {"type": "optim_step", "metrics": finite}
            if metrics.get("skipped"):
                reply["reason"] = (
                    f"the gradients overflow: their norm is {metrics.get('grad_norm')}. The step was skipped, its "
                    "gradients were dropped, and the weights are as before."
                )
                LOG.warning("optim_step of %s: %s", model.model_id, reply["reason"])
            return reply

        return self._training.submit(model, body.seq_id, Operation("optim_step", _digest(body), run, "step"))

    async def save_state(self, owner: str, body: bodies.SaveBody) -> Future:
        return self._save(owner, "weights", body)

    async def save_for_sampler(self, owner: str, body: bodies.SaveBody) -> Future:
        """Queues a save of weights for sampling or, without a name, a sampler in memory."""
        if body.path is None and body.sampling_session_seq_id is not None:
            return self._snapshot(owner, body)
        return self._save(owner, "sampler_weights", body)

    async def save_external(self, owner: str, body: bodies.SaveBody) -> Future:
        """Queues a save of weights for use elsewhere."""
        return self._save(owner, "external_weights", body)

    def _save(self, owner: str, kind: Kind, body: bodies.SaveBody) -> Future:
        model = self._service.model(owner, body.model_id)

        async def run(_: Callable[[], None]) -> JSON:
            if body.age_encryption_recipients:
                raise ValueError("age_encryption_recipients is not supported: files are written as they are.")
            if kind == "external_weights" and not body.path:
                raise ValueError("save_weights_external needs a path: give a name.")
            name = check_name(body.path or f"{kind.removesuffix('_weights')}-{body.seq_id}")
            path = TinkerPath(model.model_id, kind, name)
            if path in self._state.checkpoints and not body.overwrite:  # before the work
                raise ValueError(f"{path} exists already: give another name, or overwrite=True to save_state.")
            now = time.time()
            expires = now + body.ttl_seconds if body.ttl_seconds is not None else None
            metadata = dict(body.user_metadata or {})
            checkpoint = Checkpoint(path, owner, model.spec, now, 0, expires=expires, user_metadata=metadata)
            with self._state.new_directory() as aside:
                command = SaveState if kind == "weights" else SaveForSampler
                await self._backend.train(command(model.model_id, aside))
                saved = await asyncio.to_thread(self._state.publish, aside, checkpoint, overwrite=body.overwrite)
            self._state.remember(saved)
            with contextlib.suppress(HTTPError):  # the checkpoint is saved, whatever becomes of this
                await self._service.save(replace(self._state.runs[model.model_id], last_request=now))
            return {"type": SAVE_KINDS[kind], "path": str(path), "size_bytes": saved.size}

        return self._training.submit(model, body.seq_id, Operation(SAVE_KINDS[kind], _digest(body), run))

    def _snapshot(self, owner: str, body: bodies.SaveBody) -> Future:
        """Queues a sampler of a model's weights at this point of its requests, in memory."""
        model = self._service.model(owner, body.model_id)
        sampler_id = f"{model.session_id}:sample:{body.sampling_session_seq_id}"
        record = SamplerRecord(sampler_id, model.spec.base_model, snapshot=True, full=model.spec.lora is None)

        async def run(_: Callable[[], None]) -> JSON:
            if sampler_id in self._service.samplers.samplers:
                raise ValueError(f"{sampler_id} samples other weights already: give another sampling_session_seq_id.")
            await self._backend.train(SnapshotSampler(model.model_id, sampler_id))
            await self._service.samplers.register_snapshot(SamplingSession(record, owner, model.session_id))
            await self._service.record_sampler(model.session_id, record)
            return {"type": "save_weights_for_sampler", "sampling_session_id": sampler_id}

        return self._training.submit(model, body.seq_id, Operation("save_weights_for_sampler", _digest(body), run))

    async def load(self, owner: str, body: bodies.LoadBody) -> Future:
        """Queues a load into a model, or the creation of a model from a checkpoint."""
        if body.model_id is not None and body.seq_id is not None:
            model = self._service.model(owner, body.model_id)
            number, kind, create = body.seq_id, "load_weights", False
        elif body.session_id is not None and body.model_seq_id is not None:
            session = self._service.session(owner, body.session_id)
            spec = self._service.checkpoint(owner, TinkerPath.parse(body.path)).spec
            if body.base_model is not None and body.base_model != spec.base_model:
                raise HTTPError(
                    400, f"{body.path} was trained from {spec.base_model}; it cannot be loaded as {body.base_model}."
                )
            model = await self._new_model(session, body.model_seq_id, spec, body.user_metadata)
            number, kind, create = 0, "create_model", True
        else:
            raise HTTPError(400, "load_weights needs model_id and seq_id, or session_id and model_seq_id.")

        async def run(_: Callable[[], None]) -> JSON:
            bodies.check_optimizer(body.optimizer_config)
            path = TinkerPath.parse(body.path)
            checkpoint = self._service.checkpoint(owner, path)
            _check_loadable(checkpoint, model.spec)
            if create:
                await self._create(model)
            await self._backend.train(LoadState(model.model_id, self._state.directory_of(path), body.optimizer))
            model.failed_pass = None
            return {"type": "load_weights", "path": body.path, "model_id": model.model_id}

        return self._training.submit(model, number, Operation(kind, _digest(body), run))


def _digest(body: BaseModel) -> bytes:
    return digest(body.model_dump_json().encode())


def _digest_of(message: Any) -> bytes:
    """Returns the digest of a protobuf message, whose maps may be sent in another order each time."""
    return digest(message.SerializeToString(deterministic=True))


def _check_loadable(checkpoint: Checkpoint, spec: ModelSpec) -> None:
    """Refuses a checkpoint of another base or of other adapters than the model's."""
    path, saved = checkpoint.path, checkpoint.spec
    if path.kind != "weights":
        raise ValueError(f"{path} has no training state: load a path of save_state, tinker://RUN/weights/NAME.")

    def described(spec: ModelSpec) -> dict[str, Any]:
        lora = {"rank": None} if spec.lora is None else asdict(replace(spec.lora, seed=None))
        return {"base_model": spec.base_model} | lora

    expected, stored = described(spec), described(saved)
    wrong = [
        f"{name} {stored.get(name)} (model: {expected.get(name)})"
        for name in expected
        if stored.get(name) != expected[name]
    ]
    if wrong:
        raise ValueError(f"{path} does not fit this model: it has {', '.join(wrong)}.")
