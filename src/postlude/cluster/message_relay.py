"""Between ranks, wherever they are, and the driver: what they print and show goes there, a signal comes from there.

It needs the standard library alone, so that the actor between them starts at once.
"""

from __future__ import annotations

import asyncio
import io
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from typing import Any, TextIO


class MessageRelay:
    """An actor that keeps what ranks say until the driver asks, and a signal until ranks do."""

    def __init__(self) -> None:
        self.news: list[tuple[Any, ...]] = []
        self.signal = 0
        self.said, self.asked = asyncio.Event(), asyncio.Event()

    async def tell(self, *news: Any) -> None:
        """One thing that a rank says."""
        self.news.append(news)
        self.said.set()

    async def take(self, patience: float) -> list[tuple[Any, ...]]:
        """All that was said since; waits a while for the first."""
        if not self.news:
            with suppress(TimeoutError):
                await asyncio.wait_for(self.said.wait(), patience)
        found, self.news = self.news, []
        self.said.clear()
        return found

    async def ask(self, number: int) -> None:
        """Ask all ranks to end, by a signal."""
        self.signal = number
        self.asked.set()

    async def heard(self) -> int:
        """The signal that asks to end, once there is one."""
        await self.asked.wait()
        return self.signal


class ForwardedStream(io.TextIOBase):
    """A stream whose lines the driver prints."""

    def __init__(self, relay: Any, stream: str) -> None:
        self.relay, self.stream = relay, stream
        self.begun = ""
        self.lock = threading.Lock()

    def writable(self) -> bool:
        """It is."""
        return True

    def write(self, text: str) -> int:
        """Send whole lines, and keep the rest."""
        with self.lock:
            lines, newline, self.begun = (self.begun + text).rpartition("\n")
            if newline:
                self.relay.tell.remote("said", self.stream, lines + newline)
        return len(text)

    def end(self) -> None:
        """Send what is left."""
        if self.begun:
            self.write("\n")


@contextmanager
def forward_output(relay: Any) -> Iterator[None]:
    """Have the driver print what is printed here."""
    import ray

    out, err = ForwardedStream(relay, "stdout"), ForwardedStream(relay, "stderr")
    streams: tuple[TextIO, TextIO] = (out, err)  # type: ignore[assignment]
    with redirect_stdout(streams[0]), redirect_stderr(streams[1]):
        try:
            yield
        finally:
            out.end()
            err.end()
            with suppress(ray.exceptions.RayError):
                ray.get(relay.tell.remote("all is said"))  # before the rank's own answer comes


def forward_signals(relay: Any) -> None:
    """From now on, a signal that the driver hands on comes to this process as one of its own."""
    import ray

    def wait() -> None:
        os.kill(os.getpid(), ray.get(relay.heard.remote()))

    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # Ray's own would end it by an exception that is none of the run's
    threading.Thread(target=wait, name="signals of the driver", daemon=True).start()
