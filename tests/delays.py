"""Random delays where threads, tasks and processes meet. They show tests and code that depend on the machine's speed.

`pytest -p tests.delays --delays SEED` delays what another thread, task or process waits for, as a busy machine does,
but more often. A test that fails with it alone depends on an order that nothing ensures.
"""

from __future__ import annotations

import asyncio
import functools
import os
import queue
import random
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

import pytest

SHORT, LONG = 0.02, 0.4  # seconds
SHORT_SHARE, LONG_SHARE = 0.2, 0.02  # of the calls


class Delays:
    """Draws delays, each process from a generator of its own."""

    def __init__(self, seed: int) -> None:
        self.seed, self.process = seed, os.getpid()
        self.random = random.Random(seed)

    def draw(self) -> float:
        """Returns the next delay in seconds."""
        if self.process != os.getpid():
            self.process, self.random = os.getpid(), random.Random(self.seed + os.getpid())
        share = self.random.random()
        return self.random.uniform(0, LONG if share < LONG_SHARE else SHORT) if share < SHORT_SHARE else 0.0

    def wait(self) -> None:
        """Sleeps for the next delay."""
        if delay := self.draw():
            time.sleep(delay)

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the function with a delay before and after it."""

        @functools.wraps(function)
        def delayed(*arguments: Any, **keywords: Any) -> Any:
            self.wait()
            try:
                return function(*arguments, **keywords)
            finally:
                self.wait()

        return delayed

    def before(self, owner: Any, name: str) -> None:
        """Makes a method wait before each call."""
        method = getattr(owner, name)

        @functools.wraps(method)
        def delayed(*arguments: Any, **keywords: Any) -> Any:
            self.wait()
            return method(*arguments, **keywords)

        setattr(owner, name, delayed)

    async def later(self, coroutine: Coroutine[Any, Any, Any], delay: float) -> Any:
        """Runs a coroutine after a delay."""
        try:
            await asyncio.sleep(delay)
        except BaseException:
            coroutine.close()
            raise
        return await coroutine


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the option."""
    parser.addoption("--delays", type=int, metavar="SEED", help="delay threads, tasks and processes at random")


def pytest_configure(config: pytest.Config) -> None:
    """Puts the delays where threads, tasks and processes begin, end and exchange something."""
    seed = config.getoption("--delays")
    if seed is None:
        return
    delays = Delays(seed)
    for owner, name in (
        (queue.Queue, "put"),
        (Connection, "send"),
        (Connection, "recv"),
        (os, "replace"),
        (os, "rename"),
    ):
        delays.before(owner, name)
    run, submit, create_task = threading.Thread.run, ThreadPoolExecutor.submit, asyncio.BaseEventLoop.create_task

    def run_later(thread: threading.Thread) -> None:
        delays.wait()
        run(thread)

    def submit_later(
        pool: ThreadPoolExecutor, function: Callable[..., Any], /, *arguments: Any, **keywords: Any
    ) -> Any:
        return submit(pool, delays.around(function), *arguments, **keywords)

    def create_later(loop: asyncio.BaseEventLoop, coroutine: Any, **keywords: Any) -> Any:
        delay = delays.draw()
        if delay and asyncio.iscoroutine(coroutine):
            coroutine = delays.later(coroutine, delay)
        return create_task(loop, coroutine, **keywords)

    for owner, name, function in (
        (threading.Thread, "run", run_later),
        (ThreadPoolExecutor, "submit", submit_later),
        (asyncio.BaseEventLoop, "create_task", create_later),
    ):
        setattr(owner, name, function)
