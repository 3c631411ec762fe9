"""TinkerService: sessions, samplers and results, as the routes of the API use them. It knows nothing of HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from postlude.serving.http.errors import HTTPError
from postlude.tinker import bodies
from postlude.tinker.backend import BaseModelInfo, SampleRequest, TinkerBackend
from postlude.tinker.futures import JSON, Future, FutureStore, digest
from postlude.tinker.limits import Limits, check_prompt
from postlude.tinker.metrics import TinkerMetrics
from postlude.tinker.paths import TinkerPath
from postlude.tinker.sampling import Samplers, SamplingSession
from postlude.tinker.state import (
    Checkpoint,
    SamplerRecord,
    SessionRecord,
    StateDirectory,
    StateRecord,
    storage_sentence,
)
from postlude.tinker.training import TrainedModel, TrainingQueues

LOG = logging.getLogger("postlude")
SWEEP_SECONDS = 5.0
SNAPSHOTS = 256  # most snapshot samplers that the record of a session lists


@dataclass(eq=False)
class ClientSession:
    """A session that this server has heard of since it started."""

    record: SessionRecord
    heartbeat: float = field(default_factory=time.monotonic)


class TinkerService:
    def __init__(self, backend: TinkerBackend, state: StateDirectory, limits: Limits | None = None) -> None:
        self.backend, self.state, self.limits = backend, state, limits or Limits()
        self.bases: dict[str, BaseModelInfo] = {info.name: info for info in backend.base_models}
        self.metrics = TinkerMetrics(backend.usage)
        self.futures = FutureStore(self.limits, self.metrics.end)
        self.training = TrainingQueues(backend, self.futures, state, self.limits)
        self.samplers = Samplers(backend, self.futures, state, self.limits, self.metrics.generation)
        self.sessions: dict[str, ClientSession] = {}
        gauge, training, samplers = self.metrics.add_gauge, self.training, self.samplers
        gauge("sessions", "Sessions of clients that are alive.", lambda: len(self.sessions))
        gauge("models", "Models in memory.", lambda: len(training.models))
        gauge("samplers", "Samplers in memory.", lambda: samplers.open_count)
        gauge("training_waiting", "Training requests that wait for their turn.", lambda: training.waiting_count)
        self.started = time.time()
        self._sweeper: asyncio.Task[None] | None = None
        self._saving = asyncio.Lock()

    async def start(self) -> None:
        """Begins to run requests. The backend has been started, and the state directory is open."""
        self.sessions = {
            name: ClientSession(record) for name, record in self.state.sessions.items() if record.finished is None
        }
        self.training.start()
        self._sweeper = asyncio.create_task(self._sweep())

    async def stop(self) -> None:
        """Ends polls and requests."""
        self.futures.close()
        if self._sweeper is not None:
            self._sweeper.cancel()
            await asyncio.gather(self._sweeper, return_exceptions=True)
        await self.samplers.stop()
        await self.training.stop()

    # Sessions

    async def create_session(self, owner: str, body: bodies.CreateSessionBody) -> JSON:
        open_sessions = sum(session.record.owner == owner for session in self.sessions.values())
        if open_sessions >= self.limits.sessions_per_key:
            raise HTTPError(429, f"{open_sessions} sessions of this key are open, which is the limit.", retry_after=5.0)
        record = SessionRecord(
            secrets.token_hex(8),
            owner,
            time.time(),
            sdk_version=body.sdk_version,
            display_name=body.display_name,
            project_id=body.project_id,
            user_metadata=dict(body.user_metadata or {}),
        )
        LOG.info("session %s: client tinker %s", record.session_id, body.sdk_version or "of unknown version")
        await self.save(record)
        self.sessions[record.session_id] = ClientSession(record)
        return {"type": "create_session", "session_id": record.session_id}

    def heartbeat(self, owner: str, body: bodies.SessionBody) -> JSON:
        self.session(owner, body.session_id).heartbeat = time.monotonic()
        return {"type": "session_heartbeat"}

    async def finish_session(self, owner: str, session_id: str, reason: str) -> None:
        """Ends a session at its client's wish. Its models are freed; its samplers stay until heartbeats stop."""
        self.session_record(owner, session_id)  # raises if it is not the key's
        await self._record_end(session_id, reason[:40])
        self._end_models(session_id, f"the client finished the session {session_id}, so its models were freed.")

    def session(self, owner: str, session_id: str) -> ClientSession:
        """Returns a session that is alive."""
        record, session = self.session_record(owner, session_id), self.sessions.get(session_id)
        if session is None or record.finished is not None:
            raise HTTPError(410, f"the session {session_id} has ended ({record.finished}). Make a new ServiceClient.")
        return session

    def session_record(self, owner: str, session_id: str) -> SessionRecord:
        record = self.state.sessions.get(session_id)
        if record is None or record.owner != owner:
            raise HTTPError(404, f"there is no session {session_id[:60]!r}.")
        return record

    def _keep_alive(self, session_id: str) -> None:
        if session_id in self.sessions:
            self.sessions[session_id].heartbeat = time.monotonic()

    # Models

    def base(self, name: str) -> BaseModelInfo:
        if name not in self.bases:
            names = ", ".join(self.bases)
            raise HTTPError(404, f"there is no base model {name[:80]!r} here; there are {names}.", "model_not_found")
        return self.bases[name]

    def model(self, owner: str, model_id: str) -> TrainedModel:
        """Returns a model of a key that takes requests."""
        model = self.training.models.get(model_id)
        if model is not None and model.owner == owner:
            self._keep_alive(model.session_id)
            return model
        run = self.state.runs.get(model_id)
        if run is None or run.owner != owner:
            raise HTTPError(404, f"there is no model {model_id[:80]!r}.")
        raise HTTPError(410, self.why_gone(model_id))

    def why_gone(self, model_id: str) -> str:
        """Returns why a model takes no requests any more, and what of it can be loaded."""
        reason = self.training.ended.get(model_id)
        if reason is None:
            started = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(self.started))
            reason = f"{model_id} is not in memory: the server was started again at {started}."
        return f"{reason} {self.training.last_saved(model_id)}"

    def checkpoint(self, owner: str, path: TinkerPath) -> Checkpoint:
        """Returns a checkpoint that a key may read: its own, or one that is public."""
        checkpoint = self.state.checkpoints.get(path)
        if checkpoint is None or checkpoint.is_expired() or not (checkpoint.owner == owner or checkpoint.public):
            sentence = f"there is no checkpoint {path}: it was not saved, was deleted, or has expired."
            raise HTTPError(404, sentence, "model_not_found")
        return checkpoint

    # Samplers

    async def create_sampling_session(self, owner: str, body: bodies.SamplingSessionBody) -> JSON:
        """Makes a sampler of a saved path or of a base model."""
        session = self.session(owner, body.session_id)
        sampler_id = f"{session.record.session_id}:sample:{body.sampling_session_seq_id}"
        record = self.sampler_record(owner, sampler_id, body.base_model, body.model_path)
        opened = self.samplers.samplers.get(sampler_id)
        if opened is not None and opened.record != record:
            raise HTTPError(400, f"{sampler_id} samples other weights already: give another sampling_session_seq_id.")
        if opened is None:
            sampler = SamplingSession(record, owner, session.record.session_id)
            self.samplers.add(sampler)
            try:
                await self.samplers.open(sampler)
                await self.record_sampler(session.record.session_id, record)
            except BaseException:
                self.samplers.samplers.pop(sampler_id, None)
                raise
        return {"type": "create_sampling_session", "sampling_session_id": sampler_id}

    def join_sampling_session(self, owner: str, body: bodies.JoinBody) -> JSON:
        """Counts a clone of a sampler's client."""
        sampler = self.sampler(owner, body.sampling_session_id)
        sampler.clients += 1
        return {"type": "join_sampling_session", "client_counter": sampler.clients}

    def sampler_record(
        self, owner: str, sampler_id: str, base_model: str | None, model_path: str | None
    ) -> SamplerRecord:
        """Returns what a sampler of a base model or of a saved path is, if the key may read it."""
        if model_path is None:
            if base_model is None:
                raise HTTPError(400, "give base_model or model_path.")
            return SamplerRecord(sampler_id, self.base(base_model).name)
        path = TinkerPath.parse(model_path)
        checkpoint = self.checkpoint(owner, path)
        if path.kind != "sampler_weights":
            raise HTTPError(
                400, f"{path} is not for sampling: save it with save_weights_for_sampler, which gives sampler_weights."
            )
        if base_model not in (None, checkpoint.spec.base_model):
            raise HTTPError(400, f"{path} was trained from {checkpoint.spec.base_model}, not from {base_model}.")
        self.base(checkpoint.spec.base_model)
        return SamplerRecord(sampler_id, checkpoint.spec.base_model, path=str(path), saved=checkpoint.created)

    async def record_sampler(self, session_id: str, record: SamplerRecord) -> None:
        """Adds a sampler to the record of its session, so that it can be opened after a restart."""

        def with_sampler(session: SessionRecord) -> SessionRecord:
            other_samplers = [sampler for sampler in session.samplers if sampler.sampler_id != record.sampler_id]
            snapshots = [sampler for sampler in other_samplers if sampler.snapshot]
            dropped = set(snapshots[: max(0, len(snapshots) - SNAPSHOTS)])  # a loop makes one in every step
            return replace(
                session, samplers=(*(sampler for sampler in other_samplers if sampler not in dropped), record)
            )

        await self.save_session(session_id, with_sampler)

    def sampler(self, owner: str, sampler_id: str) -> SamplingSession:
        """Returns a sampler of a key; one of an earlier start of the server is opened again."""
        sampler = self.samplers.samplers.get(sampler_id)
        if sampler is not None and sampler.owner == owner:
            self._keep_alive(sampler.session_id)
            return sampler
        session_id = sampler_id.partition(":")[0]
        record = self.state.sessions.get(session_id)
        known = record.samplers if record is not None and record.owner == owner else ()
        matching = [candidate for candidate in known if candidate.sampler_id == sampler_id]
        if not matching:
            raise HTTPError(404, f"there is no sampling session {sampler_id[:80]!r}.")
        if sampler_id in self.samplers.closed_reason:
            raise HTTPError(410, self.samplers.closed_reason[sampler_id])
        sampler = SamplingSession(matching[0], owner, session_id)
        self.samplers.add(sampler)
        return sampler

    def sample(self, owner: str, body: bodies.SampleBody) -> Future:
        """Starts a sampling request; a retry finds the first one."""
        sampler = self.sampler(owner, body.sampling_session_id)
        request_id = f"{body.sampling_session_id}:request:{body.seq_id}"
        body_digest = digest(body.model_dump_json().encode())
        future = self.futures.find(request_id, "sample", body_digest)
        if future is None:
            request = self._sample_request(self.base(sampler.record.base_model), body)
            self.samplers.check_room(owner)
            future = self.samplers.submit(sampler, request_id, body_digest, request)
            future.reply["sample_sequence_ids"] = [f"{request_id}:{number}" for number in range(body.num_samples)]
        return future

    def _sample_request(self, info: BaseModelInfo, body: bodies.SampleBody) -> SampleRequest:
        params, context = body.sampling_params, info.max_context_length
        prompt = check_prompt(body.prompt.tokens(), params.max_tokens, context, info.vocab_size)
        if body.num_samples > self.limits.num_samples:
            raise ValueError(f"num_samples is {body.num_samples}; the limit is {self.limits.num_samples}.")
        if body.prompt_alt_tokens_k > 0:
            raise ValueError("prompt_alt_tokens_k is not supported; use topk_prompt_logprobs.")
        if body.record_stability_info:
            raise ValueError("record_stability_info is not supported.")
        last_n = body.prompt_logprobs_last_n
        if last_n is not None and not 1 <= last_n < max(2, len(prompt)):
            raise ValueError(f"prompt_logprobs_last_n is {last_n}: give 1 to {len(prompt) - 1} for this prompt.")
        target = body.target_prompt_logprobs
        return SampleRequest(
            prompt,
            params.sampling(room=context - len(prompt)),
            body.num_samples,
            prompt_logprobs=bool(body.prompt_logprobs),
            prompt_logprobs_last_n=last_n,
            topk_prompt_logprobs=body.topk_prompt_logprobs,
            topk_sample_logprobs=body.topk_sample_logprobs,
            target_prompt_tokens=target.targets(len(prompt) - 1) if target is not None else None,
        )

    # Futures

    def future(self, owner: str, request_id: str) -> Future:
        """Returns a future of a key. Raises HTTPError with what became of it if it is not kept."""
        future = self.futures.get(request_id)
        if future is not None and future.owner == owner:
            return future
        parent = request_id.rpartition(":request:")[0]
        if parent in self.state.runs:
            model = self.model(owner, parent)  # raises if it is gone
            raise HTTPError(410, f"{request_id} is not known any more; {model.model_id} goes on at {model.next_seq}.")
        if parent:
            self.sampler(owner, parent)
            raise HTTPError(410, f"{request_id} is not known any more; send the request again.")
        raise HTTPError(404, f"there is no request {request_id[:80]!r}.")

    def cancel(self, owner: str, body: bodies.RequestBody) -> None:
        """Ends a sampling request; a training request is not ended."""
        if self.future(owner, body.request_id).kind == "sample":
            self.samplers.cancel(body.request_id)

    # Housekeeping

    async def save(self, record: StateRecord) -> None:
        """Saves a record. If the disk is full, the client is told to try again later."""
        async with self._saving:
            await self._save(record)

    async def save_session(self, session_id: str, change: Callable[[SessionRecord], SessionRecord]) -> None:
        """Changes the record of a session and saves it. Concurrent changes are made one after the other."""
        async with self._saving:
            await self._save(change(self.state.sessions[session_id]))

    async def _save(self, record: StateRecord) -> None:
        try:
            await asyncio.to_thread(self.state.write, record)
        except OSError as error:
            raise HTTPError(503, storage_sentence(error, self.state.directory), retry_after=5.0) from error
        self.state.remember(record)

    async def delete(self, path: TinkerPath) -> None:
        """Deletes a checkpoint: at once for clients, its files after that."""
        self.state.checkpoints.pop(path, None)
        await asyncio.to_thread(self.state.delete_files, path)

    async def _record_end(self, session_id: str, reason: str) -> None:
        """Saves why a session ended, before its models are freed: what a client sees freed has ended on disk too."""

        def ended(session: SessionRecord) -> SessionRecord:
            return replace(session, finished=reason, ended=time.time()) if session.finished is None else session

        await self.save_session(session_id, ended)

    def _end_models(self, session_id: str, sentence: str) -> None:
        for model in list(self.training.models.values()):
            if model.session_id == session_id:
                self.training.end(model, sentence)

    async def _sweep(self) -> None:
        """Drops what is old: results, sessions without a heartbeat, expired checkpoints, gaps in sequences."""
        while True:
            await asyncio.sleep(min(SWEEP_SECONDS, self.limits.session_seconds / 4, self.limits.gap_seconds / 4))
            for step in (self._drop_old, self._expire_sessions, self._expire_checkpoints, self._forget_sessions):
                try:
                    await step()
                except Exception:
                    LOG.exception("housekeeping failed")

    async def _drop_old(self) -> None:
        self.futures.drop_old()
        self.training.fail_gaps()

    async def _expire_checkpoints(self) -> None:
        for path in [path for path, checkpoint in self.state.checkpoints.items() if checkpoint.is_expired()]:
            LOG.info("%s has expired", path)
            await self.delete(path)

    async def _expire_sessions(self) -> None:
        now = time.monotonic()
        for session_id, session in list(self.sessions.items()):
            if now - session.heartbeat < self.limits.session_seconds:
                continue
            sentence = (
                f"the session {session_id} had no heartbeat for {self.limits.session_seconds:g} s and expired, so its "
                "models and samplers were freed."
            )
            LOG.info("%s", sentence)
            del self.sessions[session_id]
            with contextlib.suppress(HTTPError):  # on a full disk its models are freed all the same
                await self._record_end(session_id, "expired")
            self._end_models(session_id, sentence)
            for sampler in [
                candidate for candidate in self.samplers.samplers.values() if candidate.session_id == session_id
            ]:
                await self.samplers.close(sampler, sentence)

    async def _forget_sessions(self) -> None:
        """Deletes finished sessions that are old, and the oldest ones of a key beyond its limit."""
        kept: Counter[str] = Counter()
        finished = [record for record in self.state.sessions.values() if record.finished is not None]
        used = {model.session_id for model in self.training.models.values()} | set(self.sessions)
        for record in sorted(finished, key=lambda record: record.ended or record.created, reverse=True):
            kept[record.owner] += 1
            old = time.time() - (record.ended or record.created) > self.limits.finished_seconds
            if (old or kept[record.owner] > self.limits.sessions_per_key) and record.session_id not in used:
                async with self._saving:
                    self.state.forget(record)
