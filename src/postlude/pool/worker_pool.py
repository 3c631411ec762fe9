"""WorkerPool: calls one function in other processes, where it may raise, hang or crash at the cost of one call.

`open_pool` opens one. `ProcessPool` has processes on this machine, `cluster.actor_pool.ActorPool` has actors on Ray.
`InlinePool` calls the function in this process, and `NullPool` belongs to ranks that make no calls.
"""

from __future__ import annotations

import atexit
import itertools
import pickle
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias

from postlude.pool.worker import call_function
from postlude.user_code import describe_error

FailureKind: TypeAlias = Literal["raised", "invalid", "timed_out", "died"]
FAILURE_KINDS: tuple[FailureKind, ...] = ("raised", "invalid", "timed_out", "died")

MAX_CALLS_PER_MESSAGE = 64
MESSAGE_SECONDS = 0.02  # how long the calls of one message may take together, so that one slow call delays few others
START_LIMIT = 120.0  # seconds for a worker to load its function


class WorkerError(ValueError):
    """The function cannot be called at all: it cannot be loaded, or its arguments cannot be sent."""


@dataclass(frozen=True)
class CallResult:
    """The value of one call (numbers, text, lists and dicts), or the kind of its failure and a message."""

    value: Any = None
    failure: FailureKind | None = None
    error: str | None = None

    @staticmethod
    def of(reply: Mapping[str, Any]) -> CallResult:
        return CallResult(reply.get("value"), reply.get("failure"), reply.get("error"))


class WorkerPool:
    """Calls that wait for a worker, and results that wait to be polled.

    A subclass runs the workers, usually in `_step`, from `thread`: it takes ids from `waiting` and records results
    with `_record`. `changed` guards everything that the thread and callers share.
    """

    lost: int | None = None
    """Workers lost through no fault of a call, whose calls others made again. None where that cannot happen."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.calls: dict[int, bytes] = {}  # pickled arguments of calls without a result
        self.waiting: deque[int] = deque()  # ids of calls that no worker has
        self.results: dict[int, CallResult] = {}
        self.cancelled: set[int] = set()
        self.seconds_per_call = MESSAGE_SECONDS  # a moving average; until it is known, each call is sent alone
        self.error: BaseException | None = None
        self.closed = False
        self.changed = threading.Condition()
        self.thread = threading.Thread(target=self._run, name=f"workers of {name}", daemon=True)
        self._call_ids = itertools.count()
        atexit.register(self.close)

    def submit(self, arguments: tuple[Any, ...] | bytes) -> int:
        """Queues a call and returns its id. `arguments` may be pickled already."""
        call = arguments if isinstance(arguments, bytes) else _pickle_arguments(arguments)
        with self.changed:
            self._check_open()
            call_id = next(self._call_ids)
            self.calls[call_id] = call
            self.waiting.append(call_id)
            self._wake()
        return call_id

    def poll(self, timeout: float | None = 0.0, call_ids: Collection[int] | None = None) -> dict[int, CallResult]:
        """Returns finished calls by id, each once, or only those of `call_ids`.

        Waits up to `timeout` seconds for the first one, or without limit if None.
        """

        def ready() -> list[int]:
            candidates = list(self.results) if call_ids is None else call_ids
            return [call_id for call_id in candidates if call_id in self.results]

        with self.changed:
            self.changed.wait_for(lambda: self.error or self.closed or ready(), timeout)
            if self.error is not None:
                raise self.error
            if not ready():
                self._check_open()
            return {call_id: self.results.pop(call_id) for call_id in ready()}

    def call_all(self, calls: Sequence[tuple[Any, ...] | bytes]) -> list[CallResult]:
        call_ids: list[int] = []
        results: dict[int, CallResult] = {}
        try:
            for call in calls:
                call_ids.append(self.submit(call))
            while len(results) < len(call_ids):
                results |= self.poll(None, set(call_ids) - results.keys())
        except BaseException:
            self.cancel(call_ids)
            raise
        return [results[call_id] for call_id in call_ids]

    def cancel(self, call_ids: Iterable[int]) -> None:
        with self.changed:
            for call_id in call_ids:
                self.results.pop(call_id, None)
                if call_id in self.calls:
                    self.cancelled.add(call_id)
            self._wake()

    def close(self) -> None:
        """Ends every worker. Whoever waits in `poll` gets a `WorkerError`."""
        with self.changed:
            if self.closed:
                return
            self.closed = True
            self._wake()
            self.changed.notify_all()
        atexit.unregister(self.close)
        if self.thread.is_alive() and self.thread is not threading.current_thread():
            self.thread.join()
        self._stop_workers()

    def _run(self) -> None:
        try:
            while not self.closed:
                self._step()
        except BaseException as error:  # such as a new worker that cannot load the function: `poll` raises it
            with self.changed:
                self.error = error
                self.changed.notify_all()

    def _step(self) -> None:
        """Sends calls to workers, and waits for replies or for `_wake`. The thread calls it again and again."""

    def _wake(self) -> None:
        """Makes the thread look at the shared state again, if there is one; called with `changed` held."""

    def _stop_workers(self) -> None:
        """Ends every worker, if there are any, after the thread has ended."""

    def _check_open(self) -> None:
        if self.closed:
            raise WorkerError(f"the workers of {self.name} were closed. Make new ones.")

    def _next_calls(self, workers: int) -> list[int]:
        """Takes the ids of the next message to one of `workers` workers; with `changed` held."""
        share = len(self.waiting) // (2 * workers)  # the last messages are small, so that workers end together
        size = max(1, min(MAX_CALLS_PER_MESSAGE, share, int(MESSAGE_SECONDS / self.seconds_per_call)))
        return [self.waiting.popleft() for _ in range(min(size, len(self.waiting)))]

    def _record(self, results: Mapping[int, CallResult]) -> None:
        """Stores the results of calls; with `changed` held."""
        for call_id, result in results.items():
            del self.calls[call_id]
            if call_id in self.cancelled:
                self.cancelled.discard(call_id)
            else:
                self.results[call_id] = result


class PoolFactory(Protocol):
    """Opens a pool of `count` workers for a function that `pack_function` packed. A call may take `timeout` seconds."""

    def __call__(self, function: bytes, name: str, count: int, timeout: float) -> WorkerPool:
        """Opens a pool. `name` is the function's name in messages."""


class InlinePool(WorkerPool):
    """Calls the function in this process, at once. Nothing is timed out, and a crash ends this process."""

    def __init__(self, function: Callable[..., Any], name: str) -> None:
        super().__init__(name)
        self.function = function

    def submit(self, arguments: tuple[Any, ...] | bytes) -> int:
        self._check_open()
        call_id = next(self._call_ids)
        self.results[call_id] = CallResult.of(call_function(self.function, arguments))
        return call_id

    def poll(self, timeout: float | None = 0.0, call_ids: Collection[int] | None = None) -> dict[int, CallResult]:
        """Returns finished calls by call id. Never waits."""
        return super().poll(0.0, call_ids)


class NullPool(WorkerPool):
    """A pool without workers, for ranks other than rank 0, which score nothing."""

    def __init__(self, function: bytes, name: str, count: int, timeout: float) -> None:
        super().__init__(name)

    def submit(self, arguments: tuple[Any, ...] | bytes) -> int:
        raise WorkerError(f"this rank has no workers for {self.name}: rank 0 scores all completions.")


def _pickle_arguments(arguments: tuple[Any, ...]) -> bytes:
    try:
        return pickle.dumps(tuple(arguments))  # a plain tuple, so that a worker imports nothing of ours to read it
    except Exception as error:
        raise WorkerError(
            f"the arguments of a call cannot be sent to a worker process ({describe_error(error)}). "
            f"Keep examples to plain data, or use workers=0."
        ) from error
