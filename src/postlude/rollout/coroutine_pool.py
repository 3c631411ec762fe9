"""Coroutines that run beside everything else, in a thread of their own, each with a time limit."""

from __future__ import annotations

import threading
import time
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, NamedTuple

from postlude.pool.worker_pool import CallResult
from postlude.user_code import describe_error

if TYPE_CHECKING:
    import asyncio

GRACE = 1.0  # seconds in which a loop that was to cancel something must show that it is alive


class _UnderWay(NamedTuple):
    future: Future[Any]
    deadline: float


class CoroutinePool:
    """Runs coroutines of `name`, hundreds at once. One that takes more than `timeout` seconds is given up.

    One that blocks its thread, with no `await`, cannot be ended. It is left behind with its thread, and what is
    submitted later gets another: so it costs itself, and those that were under way beside it.
    """

    def __init__(self, name: str, timeout: float) -> None:
        if not timeout > 0:
            raise ValueError(f"timeout is {timeout}, but a call needs some seconds, more than 0.")
        self.name, self.timeout = name, timeout
        self._loop: asyncio.AbstractEventLoop | None = None
        self._under_way: dict[int, _UnderWay] = {}
        self._changed = threading.Condition()

    def submit(self, ticket: int, coroutine: Coroutine[Any, Any, Any]) -> None:
        """Begin a coroutine, and go on."""
        import asyncio  # noqa: PLC0415 - a config that is wrong is told so without it

        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=_run, args=(self._loop,), name=f"loop of {self.name}", daemon=True).start()
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        self._under_way[ticket] = _UnderWay(future, time.monotonic() + self.timeout)
        future.add_done_callback(self._ring)

    def poll(self, timeout: float | None = 0.0) -> dict[int, CallResult]:
        """Outcomes by their tickets, each told once: waits up to `timeout` seconds for the first, for ever if None."""
        until = None if timeout is None else time.monotonic() + timeout
        while True:
            found = self._found()
            now = time.monotonic()
            if found or not self._under_way or (until is not None and now >= until):
                return found
            nearest = min(each.deadline for each in self._under_way.values())
            limit = (nearest if until is None else min(nearest, until)) - now
            with self._changed:
                self._changed.wait_for(self._any_done, max(0.0, limit))

    def close(self) -> None:
        """End what is under way, after a moment in which it may end by itself, and the thread."""
        until = time.monotonic() + GRACE
        while self._under_way and time.monotonic() < until:
            self.poll(until - time.monotonic())
        for each in self._under_way.values():
            each.future.cancel()
        self._under_way.clear()
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._loop = None

    def _any_done(self) -> bool:
        return any(each.future.done() for each in self._under_way.values())

    def _ring(self, _: Future[Any]) -> None:
        with self._changed:
            self._changed.notify_all()

    def _found(self) -> dict[int, CallResult]:
        now, found, late = time.monotonic(), {}, False
        for ticket, (future, deadline) in list(self._under_way.items()):
            if future.done():
                found[ticket] = self._outcome(future)
            elif now >= deadline:
                future.cancel()
                late = True
                sentence = f"{self.name} took more than {self.timeout:g} s and was given up."
                found[ticket] = CallResult(failure="timed_out", error=sentence)
            if ticket in found:
                del self._under_way[ticket]
        if late and not self._alive():
            self._loop = None
        return found

    def _outcome(self, future: Future[Any]) -> CallResult:
        if future.cancelled():
            return CallResult(failure="raised", error="it cancelled itself")
        error = future.exception()
        if error is not None:
            return CallResult(failure="raised", error=describe_error(error))
        return CallResult(future.result())

    def _alive(self) -> bool:
        """Whether the thread still does what it is told."""
        heard = threading.Event()
        if self._loop is not None:
            self._loop.call_soon_threadsafe(heard.set)
        return heard.wait(GRACE)


def _run(loop: asyncio.AbstractEventLoop) -> None:
    """Run a loop until it is stopped. What a coroutine ends with sys.exit costs itself: the others go on."""
    while True:
        try:
            return loop.run_forever()
        except (SystemExit, KeyboardInterrupt):
            continue  # asyncio lets these out of the loop; whose coroutine it was has the exception
