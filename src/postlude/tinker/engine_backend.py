"""EngineBackend: trains with Engine and samples with the native generator, in processes of their own. No torch here."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from postlude.generate.protocol import Progress, SamplingUsage
from postlude.layout import Layout
from postlude.tinker.backend import (
    BaseModelInfo,
    CloseSampler,
    CreateModel,
    ForwardBackward,
    ModelLost,
    ModelSpec,
    OpenSampler,
    PassRequest,
    RemoveModel,
    Result,
    SampleCommand,
    SampleRequest,
    SampleResult,
    SnapshotSampler,
    TrainingCommand,
)
from postlude.tinker.settings import WorkerSettings, parse_model
from postlude.tinker.worker_process import WorkerDied, WorkerProcess


@dataclass(frozen=True)
class _Sampler:
    """Where the weights of a sampler are: a directory, the base (None), or only in the worker that has a `snapshot`."""

    base_model: str
    directory: Path | None
    snapshot: WorkerProcess | None = None


class EngineBackend:
    """One group of ranks for each base model. `models` are MODEL or NAME=MODEL.

    If the ranks of a base end, its models and the snapshots of samplers are lost. The next call starts new ranks, and
    opens the samplers of directories again.
    """

    def __init__(
        self,
        models: Sequence[str],
        *,
        layout: Layout | None = None,
        dtype: str | None = None,
        device: str | None = None,
        ray: str | None = None,
        **limits: Any,
    ) -> None:
        if not models:
            raise ValueError("give at least one MODEL.")
        self.settings: dict[str, WorkerSettings] = {}
        for text in models:
            name, source = parse_model(text)
            if name in self.settings:
                raise ValueError(f"two models have the name {name!r}. Give one another name: NAME=MODEL.")
            self.settings[name] = WorkerSettings(
                name=name, source=source, layout=layout or Layout(), dtype=dtype, device=device, ray=ray, **limits
            )
        self._workers: dict[str, WorkerProcess] = {}
        self._starting = asyncio.Lock()
        self._models: dict[str, tuple[str, WorkerProcess]] = {}  # by model id, its base and the ranks that have it
        self._samplers: dict[str, _Sampler] = {}
        self._opened: dict[tuple[str, WorkerProcess], asyncio.Task[None]] = {}
        self._infos: dict[str, BaseModelInfo] = {}
        self._stopped = False

    @property
    def base_models(self) -> Sequence[BaseModelInfo]:
        """The base models; empty before `start`."""
        return tuple(self._infos.values())

    async def start(self) -> None:
        """Starts the ranks of all base models. If one cannot be loaded, all are ended and it raises."""
        try:
            for name in self.settings:
                await self._worker(name)
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        self._stopped = True
        await asyncio.gather(*(worker.stop() for worker in self._workers.values()))

    async def create_model(self, model_id: str, spec: ModelSpec) -> None:
        worker = await self._worker(spec.base_model)
        await worker.call(CreateModel(model_id, spec))
        self._models[model_id] = (spec.base_model, worker)

    async def train(self, command: TrainingCommand[Result], ran: Callable[[], None] | None = None) -> Result:
        """Runs a command on the ranks that have its model."""
        base_model, worker = self._model(command.model_id)
        sent: TrainingCommand[Any] = command
        if isinstance(command, ForwardBackward) and isinstance(command.request, PassRequest):
            number = worker.take_staged(command.request)
            sent = command if number is None else replace(command, request=number)
        try:
            result: Result = await worker.call(sent, ran=ran)
        except WorkerDied as error:
            raise ModelLost(
                f"model {command.model_id} is lost: {error} Load its last checkpoint into a new model."
            ) from error
        if isinstance(command, SnapshotSampler):
            self._samplers[command.sampler_id] = _Sampler(base_model, None, worker)
        return result

    async def remove_model(self, model_id: str) -> None:
        _, worker = self._models.pop(model_id, ("", None))
        if worker is not None and worker.death is None:
            await worker.call(RemoveModel(model_id))

    def stage(self, model_id: str, request: PassRequest) -> None:
        """Sends a pass to rank 0, which reads it while others run. Beyond the limit it is sent in its turn."""
        _, worker = self._models.get(model_id, ("", None))
        if worker is not None:
            worker.stage(request)

    def unstage(self, request: PassRequest) -> None:
        for worker in self._workers.values():
            worker.unstage(request)

    async def open_sampler(self, sampler_id: str, base_model: str, directory: Path | None) -> None:
        self._samplers[sampler_id] = _Sampler(base_model, directory)
        try:
            await self._sampler_worker(sampler_id)
        except BaseException:
            self._samplers.pop(sampler_id, None)
            raise

    async def close_sampler(self, sampler_id: str) -> None:
        self._samplers.pop(sampler_id, None)
        for key in [key for key in self._opened if key[0] == sampler_id]:
            del self._opened[key]
        for worker in self._workers.values():
            if worker.death is None:
                await worker.call(CloseSampler(sampler_id))

    async def sample(
        self, sampler_id: str, request: SampleRequest, progress: Callable[[Progress], None] | None = None
    ) -> SampleResult:
        """Samples. If the ranks die, new ones repeat the request, unless part of it was given to `progress`."""
        try:
            return await self._sample(sampler_id, request, progress)
        except WorkerDied:
            if progress is not None:
                raise
            return await self._sample(sampler_id, request, None)

    def usage(self) -> SamplingUsage:
        """Returns how busy sampling was when the ranks reported it last, at most a second ago while they sample."""
        return sum((worker.usage for worker in self._workers.values()), SamplingUsage())

    async def _sample(
        self, sampler_id: str, request: SampleRequest, progress: Callable[[Progress], None] | None
    ) -> SampleResult:
        worker = await self._sampler_worker(sampler_id)
        return await worker.call(SampleCommand(sampler_id, request, streamed=progress is not None), progress)

    async def _worker(self, base_model: str) -> WorkerProcess:
        """Returns the ranks of a base model, started if they do not run."""
        if base_model not in self.settings:
            raise ValueError(f"there is no base model {base_model!r} here: there are {', '.join(self.settings)}.")
        async with self._starting:
            worker = self._workers.get(base_model)
            if worker is None or worker.death is not None:
                if self._stopped:
                    raise RuntimeError("the server has stopped.")
                worker = WorkerProcess(self.settings[base_model])
                self._workers[base_model] = worker
                self._infos[base_model] = await worker.start()
            return worker

    def _model(self, model_id: str) -> tuple[str, WorkerProcess]:
        if model_id not in self._models:
            raise ValueError(f"there is no model {model_id!r}: create it first.")
        base_model, worker = self._models[model_id]
        if worker.death is not None:
            raise ModelLost(f"model {model_id} is lost: {worker.death} Load its last checkpoint into a new model.")
        return base_model, worker

    async def _sampler_worker(self, sampler_id: str) -> WorkerProcess:
        """Returns the ranks that have a sampler, with its weights loaded."""
        if sampler_id not in self._samplers:
            raise ValueError(f"there is no sampler {sampler_id!r}: open it first.")
        sampler = self._samplers[sampler_id]
        if sampler.snapshot is not None:
            if sampler.snapshot.death is not None:
                raise ModelLost(f"the weights of sampler {sampler_id} are lost: {sampler.snapshot.death}")
            return sampler.snapshot
        worker = await self._worker(sampler.base_model)
        key = (sampler_id, worker)
        if key not in self._opened:
            call = worker.call(OpenSampler(sampler_id, sampler.directory))
            self._opened[key] = asyncio.ensure_future(call)
        try:
            await asyncio.shield(self._opened[key])
        except BaseException:
            if self._opened.get(key) is not None and self._opened[key].done():
                del self._opened[key]
            raise
        return worker
