"""Random delays where threads, tasks and processes meet. They show tests and code that depend on the machine's speed.

`pytest -p tests.delays --delays SEED` delays what another thread, task or process waits for, as a busy machine does,
but more often: in each test other places of the code are slow, and every call may be a little late. A test that fails
with it alone depends on an order that nothing ensures. The same seed makes the same places of its process slow again.
"""

from __future__ import annotations

import asyncio
import builtins
import functools
import io
import os
import random
import socket
import subprocess
import sys
import time
import weakref
from asyncio import BaseEventLoop
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from queue import Queue
from threading import Event, Thread
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest

SHORT, LONG = 0.02, 0.4  # seconds
LATE, SLOW = 0.2, 0.1  # the share of calls that are late by up to SHORT; of places whose first calls are, by up to LONG
SLOW_CALLS = 3  # of a slow place, in each test and process
LIBRARY = os.path.dirname(os.__file__)
MEETINGS: dict[Any, str] = {
    Queue: "put get",
    Connection: "send send_bytes recv",
    Event: "set wait",
    socket.socket: "connect send sendall",
    os: "replace rename remove unlink mkdir kill",
    subprocess.Popen: "__init__ wait",
    BaseProcess: "start run",
}
sleep, sleep_async = time.sleep, asyncio.sleep  # tests may replace them


class Delays:
    """Draws delays from the seed, the test, and the place of the call."""

    def __init__(self) -> None:
        self.seed, self.test, self.process = "", "", os.getpid()
        self.calls, self.slow = Counter[str](), set[str]()

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        self.test, self.calls, self.slow = item.nodeid, Counter(), set()

    def pytest_exception_interact(self, report: pytest.TestReport) -> None:
        report.sections.append(("slow places", "\n".join(sorted(self.slow))))

    def draw(self, place: str) -> float:
        """Returns the seconds by which the next call at a place is late."""
        self.calls[place] += 1
        chosen = random.Random(f"{self.seed} {self.test} {os.getpid() - self.process} {place}")
        if chosen.random() < SLOW and self.calls[place] <= SLOW_CALLS:
            self.slow.add(place)
            return chosen.uniform(SHORT, LONG)
        late = random.Random(f"{chosen.random()} {self.calls[place]}")
        return late.uniform(0, SHORT) if late.random() < LATE else 0.0

    def wait(self, place: str) -> None:
        if delay := self.draw(place):
            sleep(delay)

    def around(self, function: Any, place: str = "") -> Any:
        """Returns the function with delays before and after it. Without a place it is that of the caller."""

        @functools.wraps(function)
        def delayed(*arguments: Any, **keywords: Any) -> Any:
            where = place or f"{function.__qualname__} {_caller()}"
            self.wait(f"before {where}")
            try:
                return function(*arguments, **keywords)
            finally:
                self.wait(f"after {where}")

        return delayed


@functools.cache
def install() -> Delays:
    """Puts delays where threads, tasks and processes begin, end and exchange something, and where files appear."""
    sys.setswitchinterval(1e-4)
    delays = Delays()
    for owner, names in MEETINGS.items():
        for name in names.split():
            setattr(owner, name, delays.around(getattr(owner, name)))
    start, submit, create_task, open_file = Thread.start, ThreadPoolExecutor.submit, BaseEventLoop.create_task, open

    def start_thread(thread: Any) -> None:
        thread.run = delays.around(thread.run, f"thread {_caller()}")
        start(thread)

    def submit_call(pool: Any, function: Any, /, *arguments: Any, **keywords: Any) -> Any:
        return submit(pool, delays.around(function, f"call {_caller()}"), *arguments, **keywords)

    async def run_later(coroutine: Any, delay: float) -> Any:
        await sleep_async(delay)
        return await coroutine

    last_start: Any = weakref.WeakKeyDictionary()  # of each loop: its tasks begin in the order of their creation

    def create_later(loop: Any, coroutine: Any, **keywords: Any) -> Any:
        now, earlier = loop.time(), last_start.get(loop, -LONG)
        start = max(now + delays.draw(f"task {_caller()}"), earlier + 1e-6)
        if (start > now or earlier > now - LONG) and asyncio.iscoroutine(coroutine):
            last_start[loop] = start
            later = run_later(coroutine, max(start - now, 1e-6))
            later.__qualname__ = coroutine.__qualname__
            weakref.finalize(later, coroutine.close)  # one that is cancelled before it begins
            coroutine = later
        return create_task(loop, coroutine, **keywords)

    def open_slowly(file: Any, mode: str = "r", *arguments: Any, **keywords: Any) -> Any:
        opened = open_file(file, mode, *arguments, **keywords)
        if "r" not in mode:
            delays.wait(f"open {_caller()}")  # the file is there, and what is written into it is not
        return opened

    Thread.start, ThreadPoolExecutor.submit, BaseEventLoop.create_task = start_thread, submit_call, create_later  # type: ignore[method-assign,assignment]
    builtins.open = io.open = open_slowly
    return delays


def _caller() -> str:
    """Returns the place in the code, outside of Python's library, that made the call."""
    frame = sys._getframe(2)
    while frame.f_back and frame.f_code.co_filename.startswith((LIBRARY, "<", __file__)):
        frame = frame.f_back
    return f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno}"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--delays", type=int, metavar="SEED", help="delay threads, tasks and processes at random")


def pytest_configure(config: pytest.Config) -> None:
    """Delays this process and, by `sitecustomize.py`, those that it starts."""
    if (seed := config.getoption("--delays")) is not None:
        delays = install()
        delays.seed = os.environ["POSTLUDE_TEST_DELAYS"] = str(seed)
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (os.path.dirname(__file__), os.getenv("PYTHONPATH"))))
        config.pluginmanager.register(delays)
