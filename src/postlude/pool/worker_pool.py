"""WorkerPool: calls that wait, and outcomes that are waited for, whoever makes the calls and wherever."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias

FailureKind: TypeAlias = Literal["raised", "invalid", "timed_out", "died"]
FAILURE_KINDS: tuple[FailureKind, ...] = ("raised", "invalid", "timed_out", "died")

LARGEST_PARCEL = 64  # calls sent at once
PARCEL = 0.02  # seconds that the calls sent at once may take together: what is slow holds up no more than that
START_LIMIT = 120.0  # seconds for a worker to load its function


class WorkerError(ValueError):
    """The function cannot be called at all: what was named, or handed to it, cannot be meant."""


@dataclass(frozen=True)
class CallResult:
    """What came of one call: a value of numbers, text, lists and dicts, or a failure and a sentence about it."""

    value: Any = None
    failure: FailureKind | None = None
    error: str | None = None

    @staticmethod
    def of(reply: Mapping[str, Any]) -> CallResult:
        """As a worker says it (`worker.answer`)."""
        return CallResult(reply.get("value"), reply.get("failure"), reply.get("error"))


class WorkerPool(ABC):
    """Calls that wait to be made, and those who wait for what comes of them, behind `changed`.

    Who makes the calls, and where, is a subclass's: it takes tickets from `waiting` and puts outcomes into `done`.
    """

    lost: int | None = None
    """How many workers went with no fault of a call's, so that others did what they were at. None: none can."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.calls: dict[int, bytes] = {}  # not answered yet
        self.waiting: deque[int] = deque()
        self.done: dict[int, CallResult] = {}
        self.cancelled: set[int] = set()
        self.seconds_per_call = PARCEL  # seconds a call, of late; until that is known, each is sent by itself
        self.error: BaseException | None = None
        self.closed = False
        self.changed = threading.Condition()
        self.thread: threading.Thread | None = None  # the subclass's, which hands out calls

    def give(self, ticket: int, call: bytes) -> None:
        """Have a call made."""
        with self.changed:
            self.calls[ticket] = call
            self.waiting.append(ticket)
            self._wake()

    def take(self, timeout: float | None, of: Collection[int] | None) -> dict[int, CallResult]:
        """What has come of all, or of some."""

        def there() -> list[int]:
            return [ticket for ticket in (list(self.done) if of is None else of) if ticket in self.done]

        with self.changed:
            self.changed.wait_for(lambda: self.error or self.closed or there(), timeout)
            if self.error is not None:
                raise self.error
            if self.closed and not there():
                raise WorkerError(f"the workers of {self.name} were closed. Make new ones.")
            return {ticket: self.done.pop(ticket) for ticket in there()}

    def forget(self, tickets: Iterable[int]) -> None:
        """Nobody wants these any more."""
        with self.changed:
            self.cancelled |= {ticket for ticket in tickets if ticket in self.calls}
            for ticket in tickets:
                self.done.pop(ticket, None)
            self._wake()

    def close(self) -> None:
        """Hand out nothing more, tell whoever waits, and end every worker."""
        with self.changed:
            if self.closed:
                return
            self.closed = True
            self._wake()
            self.changed.notify_all()
        thread = self.thread
        if thread is not None and thread.is_alive() and thread is not threading.current_thread():
            thread.join()  # else it is this one, as garbage is found anywhere
        self._stop_workers()

    @abstractmethod
    def _stop_workers(self) -> None:
        """End every worker. Nobody else touches them any more."""

    @abstractmethod
    def _wake(self) -> None:
        """Let whoever hands out calls look again; with `changed` held."""

    def _next_calls(self, workers: int) -> list[int]:
        """The next calls for one of so many workers; with `changed` held."""
        share = len(self.waiting) // (2 * workers)  # the last are small
        size = max(1, min(LARGEST_PARCEL, share, int(PARCEL / self.seconds_per_call)))
        return [self.waiting.popleft() for _ in range(min(size, len(self.waiting)))]

    def _record(self, outcomes: Mapping[int, CallResult]) -> None:
        """Put down what has come of calls; with `changed` held."""
        for ticket, outcome in outcomes.items():
            del self.calls[ticket]
            if ticket in self.cancelled:
                self.cancelled.discard(ticket)
            else:
                self.done[ticket] = outcome


class PoolFactory(Protocol):
    """Finds workers for a function, which `start` tells them how to load; each call has `timeout` seconds."""

    def __call__(self, start: bytes, name: str, count: int, timeout: float) -> WorkerPool:
        """`count` workers. `name` is what the function is called in sentences."""


class NullPool(WorkerPool):
    """No workers, for a rank that has nothing judged."""

    def __init__(self, start: bytes, name: str, count: int, timeout: float) -> None:
        super().__init__(name)

    def close(self) -> None:
        """There is nobody to tell."""

    def _stop_workers(self) -> None:
        """There is nobody to end."""

    def _wake(self) -> None:
        raise WorkerError(f"this rank has no workers for {self.name}: the first one has answers judged.")
