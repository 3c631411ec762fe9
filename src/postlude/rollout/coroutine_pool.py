"""CoroutinePool: runs coroutines in one thread, each with a time limit, and a limited number concurrently."""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections import deque
from collections.abc import Coroutine
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from postlude.pool.worker_pool import CallResult
from postlude.user_code import describe_error

if TYPE_CHECKING:
    import asyncio

END_SECONDS = 60.0  # for cancelled coroutines to end
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
        self._running: dict[int, _Running] = {}  # in the order of their deadlines
        self._done: deque[int] = deque()  # ids of those that ended since the last poll
        self._started: weakref.WeakSet[Coroutine[Any, Any, Any]] = weakref.WeakSet()
        self._changed = threading.Condition()
        self._woken = False

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
            name = f"loop of {self.name}"
            self._thread = threading.Thread(target=_run, args=(self._loop,), name=name, daemon=True)
            self._thread.start()
        self._started.add(coroutine)
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        self._running[call_id] = _Running(future, time.monotonic() + self.timeout)
        future.add_done_callback(partial(self._notify, call_id))

    def poll(self, timeout: float | None = 0.0) -> dict[int, CallResult]:
        """Returns finished coroutines by id, each once.

        Waits up to `timeout` seconds for the first one, or without limit if None.
        """
        end = None if timeout is None else time.monotonic() + timeout
        while True:
            finished = self._finished()
            self._start_waiting()
            now = time.monotonic()
            if finished or self._woken or not self._running or (end is not None and now >= end):
                self._woken = False
                return finished
            nearest = next(iter(self._running.values())).deadline
            limit = (nearest if end is None else min(nearest, end)) - now
            with self._changed:
                self._changed.wait_for(lambda: self._woken or self._done, max(0.0, limit))

    def wake(self) -> None:
        """Makes `poll` return, now or when it is called next. Any thread may call it."""
        with self._changed:
            self._woken = True
            self._changed.notify_all()

    def cancel(self, call_id: int) -> None:
        """Cancels a coroutine that has not ended. Any thread may call it of one that has started."""
        if (running := self._running.get(call_id)) is not None:
            running.future.cancel()
            return
        for waiting in [waiting for waiting in self._waiting if waiting[0] == call_id]:
            self._waiting.remove(waiting)
            waiting[1].close()

    def close(self) -> None:
        """Cancels running coroutines, after a short time in which they may end, waits for their end, and stops the
        thread."""
        end = time.monotonic() + GRACE
        while self._waiting:
            self._waiting.popleft()[1].close()
        while self._running and time.monotonic() < end:
            self.poll(end - time.monotonic())
        self._running.clear()
        if self._loop is not None:
            self._cancel_started(self._loop)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(GRACE)  # one that a call blocks ends with the process
            self._loop = None

    def _cancel_started(self, loop: asyncio.AbstractEventLoop) -> None:
        """Cancels all coroutines, and waits until they have ended."""
        import asyncio  # noqa: PLC0415 - as in `_start`

        async def cancel() -> None:
            tasks = [task for task in asyncio.all_tasks() if task.get_coro() in self._started]
            for task in tasks:
                if not task.cancelling():  # a second time would end what it does at its end
                    task.cancel()
            if tasks:
                await asyncio.wait(tasks, timeout=END_SECONDS)

        ended = asyncio.run_coroutine_threadsafe(cancel(), loop)
        if self._alive():
            with contextlib.suppress(TimeoutError):
                ended.result(END_SECONDS)

    def _notify(self, call_id: int, _: Future[Any]) -> None:
        with self._changed:
            self._done.append(call_id)
            self._changed.notify_all()

    def _finished(self) -> dict[int, CallResult]:
        now, finished, late = time.monotonic(), dict[int, CallResult](), False
        while self._done:
            if (running := self._running.pop(call_id := self._done.popleft(), None)) is not None:
                finished[call_id] = _result(running.future)
        while self._running:
            call_id, running = next(iter(self._running.items()))
            if now < running.deadline:
                break
            del self._running[call_id]
            running.future.cancel()
            late = True
            message = f"{self.name} took more than {self.timeout:g} s and was given up."
            finished[call_id] = CallResult(failure="timed_out", error=message)
        if late and not self._alive():
            self._loop = None
        return finished

    def _alive(self) -> bool:
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
    """Runs a loop until it is stopped, and ends its threads. A coroutine that calls sys.exit ends alone."""
    while True:
        try:
            loop.run_forever()
            return loop.run_until_complete(loop.shutdown_default_executor())
        except (SystemExit, KeyboardInterrupt):
            continue  # asyncio lets these out of the loop; the coroutine's future has them too
