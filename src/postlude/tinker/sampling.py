"""Samplers: opens, closes and reopens samplers within a limit, and runs sampling requests at the same time."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from postlude.generate.protocol import Progress
from postlude.serving.http.errors import HTTPError
from postlude.serving.http.metrics import GenerationMetrics
from postlude.tinker.backend import ModelLost, SampleRequest, SampleResult, TinkerBackend
from postlude.tinker.futures import Future, FutureStore, describe_failure
from postlude.tinker.limits import Limits
from postlude.tinker.paths import TinkerPath
from postlude.tinker.state import SamplerRecord, StateDirectory
from postlude.tinker.wire import encode_sample

LOG = logging.getLogger("postlude")


@dataclass(eq=False)
class SamplingSession:
    record: SamplerRecord
    owner: str
    session_id: str
    is_open: bool = False
    closed_reason: str | None = None
    """Why it cannot be used any more."""
    running: int = 0
    clients: int = 0
    """Clones of the client that joined."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class Samplers:
    def __init__(
        self,
        backend: TinkerBackend,
        futures: FutureStore,
        state: StateDirectory,
        limits: Limits,
        metrics: GenerationMetrics,
    ) -> None:
        self._backend, self._futures, self._state, self._limits = backend, futures, state, limits
        self._metrics = metrics
        self.samplers: dict[str, SamplingSession] = {}  # in the order of last use
        self.closed_reason: dict[str, str] = {}  # samplers that were freed, and why
        self._running: Counter[str] = Counter()  # requests by key
        self._tasks: dict[str, asyncio.Task[None]] = {}

    @property
    def open_count(self) -> int:
        return sum(sampler.is_open for sampler in self.samplers.values())

    def add(self, sampler: SamplingSession) -> None:
        self.samplers[sampler.record.sampler_id] = sampler

    async def open(self, sampler: SamplingSession) -> None:
        """Opens a sampler in the backend, unless it is open."""
        sampler_id = sampler.record.sampler_id
        self.samplers[sampler_id] = self.samplers.pop(sampler_id, sampler)
        async with sampler.lock:
            if sampler.closed_reason is not None:
                raise HTTPError(410, sampler.closed_reason)
            if sampler.is_open:
                return
            if sampler.record.snapshot:
                sampler.closed_reason = (
                    f"the weights of {sampler_id} were not saved with a name, and the server has been started again "
                    "since. Save them again, with a name to keep them."
                )
                raise HTTPError(410, sampler.closed_reason)
            directory = None
            if sampler.record.path is not None:
                path = TinkerPath.parse(sampler.record.path)
                checkpoint = self._state.checkpoints.get(path)
                if checkpoint is None:
                    raise HTTPError(404, f"{path} does not exist any more: it was deleted, or it has expired.")
                if sampler.record.saved not in (None, checkpoint.created):
                    raise HTTPError(410, f"{path} was saved again since; make a new sampling client to sample that.")
                directory = self._state.directory_of(path)
            await self._make_room()
            await self._backend.open_sampler(sampler_id, sampler.record.base_model, directory)
            sampler.is_open = True

    async def register_snapshot(self, sampler: SamplingSession) -> None:
        """Registers a sampler whose weights the backend has taken from a model."""
        sampler.is_open = True
        self.add(sampler)
        await self._make_room()

    async def close(self, sampler: SamplingSession, sentence: str) -> None:
        """Frees a sampler for good."""
        sampler.closed_reason = self.closed_reason[sampler.record.sampler_id] = sentence
        self.samplers.pop(sampler.record.sampler_id, None)
        if sampler.is_open:
            sampler.is_open = False
            await self._backend.close_sampler(sampler.record.sampler_id)

    def check_room(self, owner: str) -> None:
        """Refuses a request beyond the limit with 429."""
        if self._running[owner] >= self._limits.samples_per_key:
            raise HTTPError(
                429, f"{self._running[owner]} samples of this key are running, which is the limit.", retry_after=1.0
            )

    def submit(self, sampler: SamplingSession, request_id: str, body_digest: bytes, request: SampleRequest) -> Future:
        """Starts a sampling request. Returns its future."""
        future = self._futures.add(request_id, sampler.owner, "sample", body_digest)

        def end(task: asyncio.Task[None]) -> None:
            del self._tasks[request_id]
            if task.cancelled():  # maybe before it began
                future.fail("the client cancelled this request.", "user")

        self._tasks[request_id] = asyncio.create_task(self._run(sampler, future, request))
        self._tasks[request_id].add_done_callback(end)
        return future

    def cancel(self, request_id: str) -> None:
        """Ends a request that runs."""
        if (task := self._tasks.get(request_id)) is not None:
            task.cancel()

    async def sample(
        self, sampler: SamplingSession, request: SampleRequest, progress: Callable[[Progress], None] | None = None
    ) -> SampleResult:
        """Samples, and counts the request while it runs."""
        self._running[sampler.owner] += 1
        sampler.running += 1
        try:
            await self.open(sampler)
            request = replace(request, client=(sampler.owner, sampler.session_id))
            self._metrics.begin(len(request.prompt))
            result = await self._backend.sample(sampler.record.sampler_id, request, progress)
            for completion in result.completions:
                times = (completion.queue_seconds, completion.first_token_seconds)
                self._metrics.end(completion.finish_reason, len(completion.tokens), *times)
            return result
        except BaseException as error:
            reason = "cancelled" if isinstance(error, asyncio.CancelledError) else "failed"
            for _ in range(request.num_samples):
                self._metrics.end(reason)
            raise
        finally:
            sampler.running -= 1
            self._running[sampler.owner] -= 1

    async def stop(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, sampler: SamplingSession, future: Future, request: SampleRequest) -> None:
        try:
            result = await self.sample(sampler, request)
            future.succeed(encode_sample(result))
        except ModelLost as error:
            sampler.is_open = False  # one of a saved path is opened again
            if sampler.record.snapshot:
                sampler.closed_reason = str(error)
            future.fail(str(error), "server")
        except Exception as error:
            future.fail(*describe_failure(error, "request"))

    async def _make_room(self) -> None:
        """Closes the samplers unused for longest, beyond the limits."""
        opened = [sampler for sampler in self.samplers.values() if sampler.is_open]
        full = [sampler for sampler in opened if sampler.record.full]
        await self._close_idle(full, len(full) - self._limits.full_snapshots, self._limits.full_snapshots)
        await self._close_idle(opened, len(opened) + 1 - self._limits.samplers, self._limits.samplers)

    async def _close_idle(self, samplers: Sequence[SamplingSession], count: int, limit: int) -> None:
        idle = [candidate for candidate in samplers if candidate.is_open and not candidate.running]
        for sampler in idle[: max(0, count)]:
            if sampler.lock.locked():
                continue
            if sampler.record.snapshot:
                await self.close(
                    sampler,
                    f"{sampler.record.sampler_id} was closed, since {limit} newer samplers were used after it and its "
                    "weights were not saved with a name. Save weights with a name to keep them.",
                )
            else:
                sampler.is_open = False
                await self._backend.close_sampler(sampler.record.sampler_id)
