"""RankConnection: rank 0's end of the connection to the HTTP process.

One thread receives and decodes, another encodes and sends, so the ranks neither wait for messages that have arrived
while they ran nor for their results to be sent. Staged passes are read in the receiving thread.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

from postlude.tinker.backend import PassRequest
from postlude.tinker.datums import Pass
from postlude.tinker.messages import Call, Cancel, StagePass, take_all

CLOSE_SECONDS = 10.0
"""How long sending the last messages may take."""


class StagedPasses:
    """The passes that were sent before their turn, as `read` returned them or with the error that it raised."""

    def __init__(self, read: Callable[[PassRequest], Pass]) -> None:
        self._read = read
        self._passes: dict[int, Pass | Exception] = {}

    def receive(self, message: StagePass) -> None:
        """Reads a pass, or drops one."""
        if message.request is None:
            self._passes.pop(message.number, None)
            return
        try:
            self._passes[message.number] = self._read(message.request)
        except Exception as error:
            self._passes[message.number] = error

    def take(self, number: int) -> Pass:
        """Returns a pass, once, or raises the error of reading it."""
        staged = self._passes.pop(number)
        if isinstance(staged, Exception):
            raise staged
        return staged


class RankConnection:
    """Gives calls in the order in which they were sent, and sends messages in the order in which they are given."""

    def __init__(self, connection: Connection, staged: StagedPasses) -> None:
        self._connection, self._staged = connection, staged
        self._inbox: queue.SimpleQueue[Call | Cancel | Exception | None] = queue.SimpleQueue()
        self._next: list[Call | Cancel | Exception | None] = []  # one at most, which `poll` has seen
        self._outbox: queue.SimpleQueue[tuple[str, int | None, Any] | None] = queue.SimpleQueue()
        self._sending = threading.Lock()
        self._sender = threading.Thread(target=self._send, name="tinker results", daemon=True)

    def __enter__(self) -> RankConnection:
        self._sender.start()
        threading.Thread(target=self._receive, name="tinker calls", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._outbox.put(None)
        self._sender.join(CLOSE_SECONDS)

    def poll(self, seconds: float = 0.0) -> bool:
        """Returns whether a call has arrived, or arrives within so many seconds."""
        if not self._next and (seconds > 0 or not self._inbox.empty()):
            with suppress(queue.Empty):
                self._next.append(self._inbox.get(timeout=seconds))
        return bool(self._next)

    def recv(self) -> Call | Cancel | None:
        """Waits for the next call; None if the HTTP process has closed the connection."""
        message = self._next.pop() if self._next else self._inbox.get()
        if isinstance(message, Exception):
            raise message
        return message

    def send(self, message: tuple[str, int | None, Any]) -> None:
        self._outbox.put(message)

    def send_at_once(self, message: tuple[str, int | None, Any]) -> None:
        """Sends a small message before those that wait."""
        with self._sending, suppress(OSError):
            self._connection.send([message])

    # --- in threads

    def _receive(self) -> None:
        try:
            while True:
                for message in self._connection.recv():
                    if isinstance(message, StagePass):
                        self._staged.receive(message)
                    else:
                        self._inbox.put(message)
        except (EOFError, OSError):
            self._inbox.put(None)
        except Exception as error:
            self._inbox.put(error)

    def _send(self) -> None:
        try:
            while True:
                messages = take_all(self._outbox)
                with self._sending:
                    self._connection.send([message for message in messages if message is not None])
                if None in messages:
                    return
        except OSError:  # the HTTP process has ended, which the receiving thread notices
            return
        except Exception as error:  # a result that cannot be sent; without this thread none would be
            self._inbox.put(error)
