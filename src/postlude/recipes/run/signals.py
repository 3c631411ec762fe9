"""SIGINT, SIGTERM and SIGHUP ask a run to end after its step; a second one ends the process at once.

Who waits for others' answers does not know how long a step will take: there it ends in the middle, by `StopRequested`.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import suppress
from types import FrameType
from typing import Any

from postlude.world.launcher import ending_signals

ASKING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SAME = 1.0  # seconds in which a second signal is the first one, come another way: a terminal's and a launcher's


class StopRequested(Exception):
    """A signal asked the run to end while it waited."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def asked(number: int) -> bytes:
    """What is said when a signal asks a run to end."""
    return f"\n{signal.Signals(number).name}: the run ends after this step; another ends it at once.\n".encode()


class StopSignals:
    """While it is entered, `heard` is the first signal that asked this process to end, or 0.

    Where it is entered in another thread than the first, Python hears no signals, and they do what they always did. So
    does one that comes because the launcher of this rank is gone: the system sends it, and there is no one to end for.
    """

    def __init__(self, *, speaks: bool) -> None:
        self.heard = 0
        self._speaks, self._at = speaks, 0.0
        self._handlers: dict[int, Any] = {}
        self._launcher = os.getppid() if "RANK" in os.environ else None

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            self._handlers = {number: signal.signal(number, self._hear) for number in ending_signals(ASKING)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers = {}

    def check(self) -> None:
        """Raise `StopRequested` if one was heard."""
        if self.heard:
            raise StopRequested(self.heard)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._launcher not in (None, os.getppid()):
            self.__exit__()
            signal.raise_signal(number)
        elif not self.heard:
            self.heard, self._at = number, now
            if self._speaks:
                with suppress(OSError):  # a terminal that has hung up takes no words
                    os.write(2, asked(number))  # what is interrupted may be in the middle of a print
        elif now - self._at > SAME:
            self.__exit__()
            signal.raise_signal(number)
