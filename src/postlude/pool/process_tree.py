"""The processes that come of one process, in other sessions too: to find, limit and end them.

A process whose parent has ended becomes a child of the nearest subreaper above it, whatever its session and environment
(Linux). So a supervisor that is a subreaper reaches them all. This file needs the standard library alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

SET_PARENT_DEATH_SIGNAL, SET_CHILD_SUBREAPER = 1, 36  # options of Linux' prctl


def become_subreaper() -> None:
    """Makes this process the parent of all descendants whose own parent ends."""
    _prctl(SET_CHILD_SUBREAPER, 1)


def end_with_parent() -> None:
    """Lets the kernel kill this process when its parent ends."""
    _prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def reap(exit_codes: dict[int, int]) -> bool:
    """Collects the exit codes of children that have ended. Returns whether there are others."""
    try:
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            exit_codes[ended[0]] = os.waitstatus_to_exitcode(ended[1])
    except ChildProcessError:
        return False
    return True


def end_descendants(child: int, exit_codes: dict[int, int]) -> None:
    """Kills the child's group and all descendants, again and again until none is left: they may start others."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child, signal.SIGKILL)
    while reap(exit_codes):
        for pid in descendants(os.getpid()):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.001)


def descendants(ancestor: int) -> Iterator[int]:
    """Yields the processes below one; none without /proc."""
    unvisited = deque([ancestor])
    while unvisited:
        with contextlib.suppress(OSError):  # it has ended
            for file in Path(f"/proc/{unvisited.popleft()}/task").glob("*/children"):
                with contextlib.suppress(OSError):
                    children = [int(pid) for pid in file.read_text().split()]
                    yield from children
                    unvisited += children
