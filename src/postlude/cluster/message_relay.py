"""MessageRelay: carries output and progress from ranks to the driver, and a signal from the driver to ranks.

It needs the standard library only, so that its actor starts at once.
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
    """An actor that keeps messages of ranks until the driver takes them, and a signal until ranks do."""

    def __init__(self) -> None:
        self.messages: list[tuple[Any, ...]] = []
        self.signal = 0
        self.has_messages, self.has_signal = asyncio.Event(), asyncio.Event()

    async def send(self, *message: Any) -> None:
        """Adds a message of a rank."""
        self.messages.append(message)
        self.has_messages.set()

    async def take(self, timeout: float) -> list[tuple[Any, ...]]:
        """Returns the messages since the last call. Waits up to `timeout` seconds for the first."""
        if not self.messages:
            with suppress(TimeoutError):
                await asyncio.wait_for(self.has_messages.wait(), timeout)
        messages, self.messages = self.messages, []
        self.has_messages.clear()
        return messages

    async def send_signal(self, number: int) -> None:
        """Sends a signal to all ranks."""
        self.signal = number
        self.has_signal.set()

    async def wait_for_signal(self) -> int:
        """Returns the signal, once there is one."""
        await self.has_signal.wait()
        return self.signal


class ForwardedStream(io.TextIOBase):
    """A text stream whose lines the driver prints."""

    def __init__(self, relay: Any, stream: str) -> None:
        self.relay, self.stream = relay, stream
        self.partial_line = ""
        self.lock = threading.Lock()

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        """Sends complete lines, and keeps the rest."""
        with self.lock:
            lines, newline, self.partial_line = (self.partial_line + text).rpartition("\n")
            if newline:
                self.relay.send.remote("output", self.stream, lines + newline)
        return len(text)

    def finish(self) -> None:
        if self.partial_line:
            self.write("\n")


@contextmanager
def forward_output(relay: Any) -> Iterator[None]:
    """Sends what this process prints inside the block to the driver, which prints it."""
    import ray

    out, err = ForwardedStream(relay, "stdout"), ForwardedStream(relay, "stderr")
    streams: tuple[TextIO, TextIO] = (out, err)  # type: ignore[assignment]
    with redirect_stdout(streams[0]), redirect_stderr(streams[1]):
        try:
            yield
        finally:
            out.finish()
            err.finish()
            with suppress(ray.exceptions.RayError):
                ray.get(relay.send.remote("end of output"))  # before the rank's result


def forward_signals(relay: Any) -> None:
    import ray

    def wait() -> None:
        os.kill(os.getpid(), ray.get(relay.wait_for_signal.remote()))

    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # Ray's own handler would raise an exception
    threading.Thread(target=wait, name="signals of the driver", daemon=True).start()
