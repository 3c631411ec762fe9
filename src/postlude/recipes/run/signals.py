"""SIGINT, SIGTERM, SIGHUP and SIGUSR1 (Slurm's warning) end a run after its step. A second ends the process at once.

While completions are sampled, the step may take long: there `StopRequested` ends it in the middle.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any

from postlude.json_log import is_json, json_line
from postlude.world.signals import ending_signals

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
DUPLICATE_SECONDS = 1.0  # a terminal and a launcher both deliver one Ctrl-C: the second is ignored this long


class StopRequested(Exception):
    """A signal asked the run to end while it waited."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def announce_stop(number: int, show_notice: Callable[[str], bool] = lambda notice: False) -> None:
    """Says that a signal ends the run: in the live panel if `show_notice` returns true, else on standard error."""
    message = f"{signal.Signals(number).name}: the run ends after this step; another ends it at once."
    if not show_notice(message):
        text = f"{json_line('warning', message)}\n" if is_json() else f"\n{message}\n"
        with suppress(OSError):  # the terminal may be closed
            os.write(2, text.encode())  # the signal may interrupt a print


class StopSignals:
    """A context in which `received` is the first stop signal of this process, or 0.

    Outside the main thread Python delivers no signals, so their handlers stay as they are. A signal that the system
    sends because this rank's launcher has died ends the process.
    """

    def __init__(self, *, verbose: bool) -> None:
        self.received = 0
        self.show_notice: Callable[[str], bool] = lambda notice: False
        """Shows a line in the live panel, if there is one. A signal handler calls it, so it must not wait."""
        self._verbose, self._received_at = verbose, 0.0
        self._handlers: dict[int, Any] = {}
        self._launcher = os.getppid() if "RANK" in os.environ else None

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            self._handlers = {number: signal.signal(number, self._receive) for number in ending_signals(STOP_SIGNALS)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers = {}

    def check(self) -> None:
        if self.received:
            raise StopRequested(self.received)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._launcher not in (None, os.getppid()):
            self.__exit__()
            signal.raise_signal(number)
        elif not self.received:
            self.received, self._received_at = number, now
            if self._verbose:
                announce_stop(number, self.show_notice)
        elif now - self._received_at > DUPLICATE_SECONDS:
            self.__exit__()
            signal.raise_signal(number)
