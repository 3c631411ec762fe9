"""Signals that ask a process to end: which of them may, and how they are forwarded to child processes.

SIGUSR1 is what Slurm sends before a time limit (`--signal=USR1@300`).
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)


def ending_signals(numbers: Iterable[signal.Signals]) -> list[signal.Signals]:
    """Returns those of the signals that may end this process: under nohup, SIGHUP may not."""
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [number for number in numbers if not (ignored and number == signal.SIGHUP)]


class SignalForwarding:
    """While it is entered, a signal that would end this process goes to its children instead, once to each.

    Children that are alive after `grace` seconds, or when a second signal comes, are killed. Children start with these
    signals blocked, so that none dies of one while it imports.
    """

    def __init__(self, grace: float) -> None:
        self.grace = grace
        self.received: list[int] = []
        self.exited = threading.Event()
        self.earlier_children = set(multiprocessing.active_children())
        self.handlers: dict[int, Any] = {}

    def __enter__(self) -> SignalForwarding:
        if threading.current_thread() is threading.main_thread():  # Python handles signals in no other
            self.handlers = {number: signal.getsignal(number) for number in ending_signals(SIGNALS)}
            for number in self.handlers:
                signal.signal(number, lambda number, _: self.received.append(number))
            self.thread = threading.Thread(target=self._forward, name="postlude-signals", daemon=True)
            self.thread.start()
            self.mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # the thread above still takes them
        return self

    def __exit__(self, *_: object) -> None:
        if self.handlers:
            signal.pthread_sigmask(signal.SIG_SETMASK, self.mask)
            self.exited.set()
            self.thread.join()
            for number, handler in self.handlers.items():
                signal.signal(number, handler)

    def _forward(self) -> None:
        signalled: set[int] = set()
        deadline = float("inf")
        while not self.exited.wait(0.05):
            if not self.received:
                continue
            deadline = min(deadline, time.monotonic() + self.grace)
            for child in set(multiprocessing.active_children()) - self.earlier_children:
                if len(self.received) > 1 or time.monotonic() > deadline:
                    child.kill()
                elif child.pid is not None and child.pid not in signalled:
                    signalled.add(child.pid)
                    with suppress(ProcessLookupError):
                        os.kill(child.pid, self.received[0])
