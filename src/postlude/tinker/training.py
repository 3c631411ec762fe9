"""TrainingQueues: runs the training requests of each model in order, and lets the models of one base take turns.

Requests of a model may arrive in any order; each runs after all with a smaller `seq_id`. A request that arrives again
is not run again. If a pass fails, the gradients of the whole step are dropped, and the passes and the optimizer step
that the client had already sent fail too: no step is made of a part of its data. Once the client has fetched the
failure, what it sends next begins a new step.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import logging
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Literal

from postlude.serving.http.errors import HTTPError
from postlude.tinker.backend import DiscardGradients, ModelLost, ModelSpec, TinkerBackend
from postlude.tinker.futures import JSON, Category, Future, FutureStore, describe_failure
from postlude.tinker.limits import Limits
from postlude.tinker.state import StateDirectory, is_full, storage_sentence

LOG = logging.getLogger("postlude")
PREPARED = 4  # so many next requests of a model are read before their turn, so that ranks do not wait for them
OperationRole = Literal["pass", "step", "other"]


@dataclass(eq=False)
class Operation:
    kind: str
    body_digest: bytes
    run: Callable[[Callable[[], None]], Awaitable[JSON | bytes]]
    """Runs it. May call its argument once the next request can be run, before it returns the result."""
    role: OperationRole = "other"
    """What it is in a step: a pass that adds gradients, the optimizer step, or neither."""
    size: int = 0
    """Bytes that it holds while it waits."""
    prepare: Callable[[], None] | None = None
    """Begins what can be done before its turn; None once it has begun."""
    drop: Callable[[], None] | None = None
    """Frees what `prepare` made, if it does not run."""
    future: Future = field(init=False)
    arrived: float = field(default_factory=time.monotonic)
    acknowledged_failure: Future | None = None
    """The failed pass whose failure its client had fetched when it sent this."""


@dataclass(eq=False)
class TrainedModel:
    """A model in memory, with the requests that wait for it."""

    model_id: str
    owner: str
    session_id: str
    spec: ModelSpec
    next_seq: int = 0
    waiting: dict[int, Operation] = field(default_factory=dict)
    ended: str | None = None
    """Why it takes no more requests."""
    failed_pass: Future | None = None
    """A pass of the current step that failed."""
    created: bool = False


class _Base:
    """The models of one base, which take turns."""

    def __init__(self) -> None:
        self.ready: deque[TrainedModel] = deque()
        self.wake = asyncio.Event()
        self.running: TrainedModel | None = None


class TrainingQueues:
    def __init__(self, backend: TinkerBackend, futures: FutureStore, state: StateDirectory, limits: Limits) -> None:
        self._backend, self._futures, self._state, self._limits = backend, futures, state, limits
        self.models: dict[str, TrainedModel] = {}
        self.ended: dict[str, str] = {}  # models that were freed, and why
        self._bases = {info.name: _Base() for info in backend.base_models}
        self._queued_bytes: Counter[str] = Counter()  # by key
        self._tasks: list[asyncio.Task[None]] = []
        self._running: set[asyncio.Task[None]] = set()  # requests, also those whose result is still to come

    @property
    def waiting_count(self) -> int:
        return sum(len(model.waiting) for model in self.models.values())

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._work(base)) for base in self._bases.values()]

    async def stop(self) -> None:
        """Cancels all requests, without waiting for the ranks to finish the one that runs."""
        tasks = [*self._tasks, *self._running]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def request_id(self, model_id: str, seq_id: int) -> str:
        """Returns the id of a training request; a retry has the same."""
        return f"{model_id}:request:{seq_id}"

    def check_room(self, model: TrainedModel | None, seq_id: int, size: int) -> None:
        """Refuses a request beyond the limits with 429, unless it is the one that its model waits for."""
        if model is None or seq_id <= model.next_seq:
            return
        if len(model.waiting) >= self._limits.queued_per_model:
            raise HTTPError(
                429,
                f"{len(model.waiting)} requests of {model.model_id} wait, which is the limit; send again later.",
                retry_after=1.0,
            )
        if self._queued_bytes.total() + size > self._limits.queued_bytes:
            raise HTTPError(429, "the server holds too many bytes of requests; send again later.", retry_after=1.0)
        if self._queued_bytes[model.owner] + size > self._limits.queued_bytes_per_key:
            raise HTTPError(
                429, "the requests of this key that wait hold too many bytes; send again later.", retry_after=1.0
            )

    def submit(self, model: TrainedModel, seq_id: int, operation: Operation) -> Future:
        """Queues a request, or finds the one that it repeats. Returns its future."""
        request_id = self.request_id(model.model_id, seq_id)
        future = self._futures.find(request_id, operation.kind, operation.body_digest)
        if future is not None:
            return future
        if seq_id < model.next_seq:
            raise HTTPError(410, f"request {seq_id} of {model.model_id} has run, and its result is not kept any more.")
        if model.ended is not None:
            raise HTTPError(410, model.ended)
        self.check_room(model, seq_id, operation.size)
        operation.future = self._futures.add(request_id, model.owner, operation.kind, operation.body_digest)
        failed = model.failed_pass
        if failed is not None and failed.fetched is not None:
            operation.acknowledged_failure = failed
        model.waiting[seq_id] = operation
        self._queued_bytes[model.owner] += operation.size
        self._prepare_next(model)
        self._make_ready(model)
        return operation.future

    def refuse(
        self, model: TrainedModel, seq_id: int, kind: str, body_digest: bytes, sentence: str, role: OperationRole
    ) -> None:
        """Lets a request that cannot be read fail in its turn, so that the ones after it do not wait for it."""

        async def fail(_: Callable[[], None]) -> JSON:
            raise ValueError(sentence)

        with contextlib.suppress(HTTPError):
            self.submit(model, seq_id, Operation(kind, body_digest, fail, role))

    def end(self, model: TrainedModel, sentence: str) -> None:
        """Takes no more requests for a model, fails those that wait, and frees it in its turn."""
        if model.ended is not None:
            return
        model.ended = sentence
        self._fail_waiting(model, sentence)
        base = self._bases[model.spec.base_model]
        if model not in base.ready:
            base.ready.append(model)
        base.wake.set()

    def queue_state(self, model_id: str) -> tuple[str, str | None]:
        """Returns the state that a pending request of a model reports, and its reason."""
        model = self.models.get(model_id)
        if model is None:
            return "active", None
        base = self._bases[model.spec.base_model]
        if model in base.ready and base.running is not model:
            return "paused_capacity", f"{len(base.ready)} models with requests take turns on {model.spec.base_model}"
        return "active", None

    def fail_gaps(self) -> None:
        """Fails requests that have waited too long for an earlier one, and goes on after them."""
        now = time.monotonic()
        for model in self.models.values():
            if not model.waiting or model.next_seq in model.waiting:
                continue
            oldest = min(operation.arrived for operation in model.waiting.values())
            base = self._bases[model.spec.base_model]
            if now - oldest < self._limits.gap_seconds or base.running is model:
                continue
            sentence = (
                f"request {model.next_seq} of {model.model_id} did not arrive within {self._limits.gap_seconds:g} s, "
                f"so the requests after it ({min(model.waiting)} to {max(model.waiting)}) are not run. Gradients since "
                "the last step are dropped."
            )
            last = max(model.waiting)
            self._fail_waiting(model, sentence)

            async def drop(_: Callable[[], None], model_id: str = model.model_id) -> JSON:
                await self._backend.train(DiscardGradients(model_id))
                return {}

            operation = Operation("discard_gradients", b"", drop)
            operation.future = Future("", model.owner, operation.kind)
            model.next_seq, model.failed_pass = last, None
            model.waiting[last] = operation
            self._make_ready(model)

    def _fail_waiting(self, model: TrainedModel, sentence: str) -> None:
        for operation in model.waiting.values():
            self._queued_bytes[model.owner] -= operation.size
            operation.future.fail(sentence, "server")
            if operation.drop is not None:
                operation.drop()
        model.waiting.clear()

    def _prepare_next(self, model: TrainedModel) -> None:
        for seq_id in heapq.nsmallest(PREPARED, model.waiting):
            prepare, model.waiting[seq_id].prepare = model.waiting[seq_id].prepare, None
            if prepare is not None:
                prepare()

    def _make_ready(self, model: TrainedModel) -> None:
        base = self._bases[model.spec.base_model]
        if model.next_seq in model.waiting and model not in base.ready and base.running is not model:
            base.ready.append(model)
            base.wake.set()

    async def _work(self, base: _Base) -> None:
        while True:
            while not base.ready:
                base.wake.clear()
                await base.wake.wait()
            model = base.ready.popleft()
            base.running = model
            try:
                if model.ended is not None:
                    await self._free(model)
                else:
                    operation = model.waiting.pop(model.next_seq)
                    model.next_seq += 1  # before the client can have the result
                    self._prepare_next(model)
                    await self._run_turn(model, operation)
                    self._queued_bytes[model.owner] -= operation.size
            finally:
                base.running = None
            if model.ended is None:
                self._make_ready(model)
            elif model.model_id in self.models and model not in base.ready:
                base.ready.append(model)  # it ended while its request ran

    async def _free(self, model: TrainedModel) -> None:
        self.models.pop(model.model_id, None)
        self.ended[model.model_id] = model.ended or ""
        try:
            await self._backend.remove_model(model.model_id)
        except Exception:
            LOG.exception("removing %s failed", model.model_id)

    async def _run_turn(self, model: TrainedModel, operation: Operation) -> None:
        """Runs a request until the next one can be run. Its result may come later."""
        ran: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(self._run(model, operation, ran))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        await asyncio.wait([task, ran], return_when=asyncio.FIRST_COMPLETED)

    async def _run(self, model: TrainedModel, operation: Operation, ran: asyncio.Future[None]) -> None:
        def end_turn() -> None:
            if not ran.done():
                ran.set_result(None)

        if model.failed_pass is not None and operation.acknowledged_failure is model.failed_pass:
            model.failed_pass = None
        if model.failed_pass is not None and operation.role != "other":
            reason = model.failed_pass.failure
            assert reason is not None
            operation.future.fail(
                f"this {operation.kind} was not run, since a pass of the same step failed and a step is not made of a "
                f"part of its data; its gradients were dropped. The failure: {reason.sentence}",
                reason.category,
            )
            if operation.drop is not None:
                operation.drop()
            if operation.role == "step":
                model.failed_pass = None
            return
        try:
            operation.future.succeed(await operation.run(end_turn))
            return
        except ModelLost as error:
            sentence = f"{error} {self.last_saved(model.model_id)}"
            operation.future.fail(sentence, "server")
            self.end(model, sentence)
            return
        except Exception as error:
            sentence, category = self._describe(operation.kind, error)
        operation.future.fail(sentence, category)
        if ran.done():  # what ran after it has used its gradients
            self.end(model, f"the result of a {operation.kind} of {model.model_id} was lost: {sentence}")
        elif not model.created:
            self.end(model, f"{model.model_id} could not be created: {sentence}")
        elif operation.role == "pass":
            model.failed_pass = operation.future
            try:
                await self._backend.train(DiscardGradients(model.model_id))
            except Exception as error:
                LOG.exception("dropping the gradients of %s failed", model.model_id)
                self.end(model, f"{model.model_id} failed and its gradients cannot be dropped: {error}")

    def _describe(self, kind: str, error: Exception) -> tuple[str, Category]:
        if isinstance(error, OSError) and (error.errno is not None or is_full(error)):
            return storage_sentence(error, self._state.directory), "server"
        return describe_failure(error, kind)

    def last_saved(self, run_id: str) -> str:
        """Returns a sentence about what of a run can be loaded."""
        checkpoints = [
            checkpoint for checkpoint in self._state.checkpoints.values() if checkpoint.path.run_id == run_id
        ]
        states = sorted(
            (checkpoint for checkpoint in checkpoints if checkpoint.path.kind == "weights"),
            key=lambda checkpoint: checkpoint.created,
        )
        if not states:
            return "Nothing of it was saved with save_state, so training begins anew."
        return f"What was saved last is {states[-1].path}: create_training_client_from_state_with_optimizer loads it."
