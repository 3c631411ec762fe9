"""CoroutinePool: runs coroutines in one thread, each with a time limit, and a limited number concurrently."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, NamedTuple

from postlude.pool.worker_pool import CallResult
from postlude.user_code import describe_error

if TYPE_CHECKING:
    import asyncio

GRACE = 1.0  # seconds for a loop to react before it is taken for blocked


class _Running(NamedTuple):
    future: Future[Any]
    deadline: float


class CoroutinePool:
    """Runs coroutines of `name`, hundreds concurrently. One that takes more than `timeout` seconds is cancelled.

    With `limit`, at most so many run concurrently. The others wait, which does not count as their time.

    A coroutine that blocks its thread cannot be cancelled. The thread is then abandoned, and later coroutines get a new
    one: the coroutine that blocks costs itself and those that ran beside it.
    """

    def __init__(self, name: str, timeout: float, limit: int | None = None) -> None:
        if not timeout > 0:
            raise ValueError(f"timeout is {timeout}, but a call needs some seconds, more than 0.")
        if limit is not None and limit < 1:
            raise ValueError(f"the limit of calls at once is {limit}, but the minimum is 1.")
        self.name, self.timeout, self.limit = name, timeout, limit
        self._waiting: deque[tuple[int, Coroutine[Any, Any, Any]]] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._running: dict[int, _Running] = {}
        self._changed = threading.Condition()

    def submit(self, call_id: int, coroutine: Coroutine[Any, Any, Any]) -> None:
        """Starts a coroutine, as soon as fewer than `limit` run."""
        self._waiting.append((call_id, coroutine))
        self._start_waiting()

    def _start_waiting(self) -> None:
        while self._waiting and (self.limit is None or len(self._running) < self.limit):
            self._start(*self._waiting.popleft())

    def _start(self, call_id: int, coroutine: Coroutine[Any, Any, Any]) -> None:
        import asyncio  # noqa: PLC0415 - so that an error in a config is found without it

        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=_run, args=(self._loop,), name=f"loop of {self.name}", daemon=True).start()
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        self._running[call_id] = _Running(future, time.monotonic() + self.timeout)
        future.add_done_callback(self._notify)

    def poll(self, timeout: float | None = 0.0) -> dict[int, CallResult]:
        """Returns finished coroutines by id, each once.

        Waits up to `timeout` seconds for the first one, or without limit if None.
        """
        end = None if timeout is None else time.monotonic() + timeout
        while True:
            finished = self._finished()
            self._start_waiting()
            now = time.monotonic()
            if finished or not self._running or (end is not None and now >= end):
                return finished
            nearest = min(running.deadline for running in self._running.values())
            limit = (nearest if end is None else min(nearest, end)) - now
            with self._changed:
                self._changed.wait_for(self._any_done, max(0.0, limit))

    def close(self) -> None:
        """Cancels running coroutines, after a short time in which they may end, and stops the thread."""
        end = time.monotonic() + GRACE
        while self._waiting:
            self._waiting.popleft()[1].close()
        while self._running and time.monotonic() < end:
            self.poll(end - time.monotonic())
        for running in self._running.values():
            running.future.cancel()
        self._running.clear()
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._loop = None

    def _any_done(self) -> bool:
        return any(running.future.done() for running in self._running.values())

    def _notify(self, _: Future[Any]) -> None:
        with self._changed:
            self._changed.notify_all()

    def _finished(self) -> dict[int, CallResult]:
        now, finished, late = time.monotonic(), {}, False
        for call_id, (future, deadline) in list(self._running.items()):
            if future.done():
                finished[call_id] = _result(future)
            elif now >= deadline:
                future.cancel()
                late = True
                message = f"{self.name} took more than {self.timeout:g} s and was given up."
                finished[call_id] = CallResult(failure="timed_out", error=message)
            if call_id in finished:
                del self._running[call_id]
        if late and not self._alive():
            self._loop = None
        return finished

    def _alive(self) -> bool:
        """Whether the loop still reacts."""
        reacted = threading.Event()
        if self._loop is not None:
            self._loop.call_soon_threadsafe(reacted.set)
        return reacted.wait(GRACE)


def _result(future: Future[Any]) -> CallResult:
    if future.cancelled():
        return CallResult(failure="raised", error="it cancelled itself")
    error = future.exception()
    if error is not None:
        return CallResult(failure="raised", error=describe_error(error))
    return CallResult(future.result())


def _run(loop: asyncio.AbstractEventLoop) -> None:
    """Runs a loop until it is stopped. A coroutine that calls sys.exit ends alone."""
    while True:
        try:
            return loop.run_forever()
        except (SystemExit, KeyboardInterrupt):
            continue  # asyncio lets these out of the loop; the coroutine's future has them too
