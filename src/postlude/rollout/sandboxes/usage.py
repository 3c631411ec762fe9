"""What a program uses: processes, threads and memory of all that came of it, and the size of its work directory.

This file needs the standard library alone.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

from postlude.pool.process_tree import descendants

PAGE = os.sysconf("SC_PAGE_SIZE")


class ProcessUsage:
    """Counts what the descendants of a process use, from time to time."""

    def __init__(self, ancestor: int, processes: int | None, memory_bytes: int | None) -> None:
        self.ancestor, self.processes, self.memory_bytes = ancestor, processes, memory_bytes

    @property
    def limited(self) -> bool:
        return self.processes is not None or self.memory_bytes is not None

    def exceeded(self) -> str | None:
        """Returns the name of a limit that is exceeded now."""
        pids, threads = list[int](), 0
        for pid in descendants(self.ancestor):
            pids.append(pid)
            threads += _threads(pid)
            if self.processes is not None and threads > self.processes:
                return "process limit"  # before all are counted: they may multiply faster
        if self.memory_bytes is None or sum(map(_resident_bytes, pids)) <= self.memory_bytes:
            return None
        # Pages that several processes share were counted for each. The exact sum takes longer.
        return "memory limit" if sum(map(_proportional_bytes, pids)) > self.memory_bytes else None


def _threads(pid: int) -> int:
    try:
        return len(os.listdir(f"/proc/{pid}/task"))
    except OSError:  # it has ended
        return 0


def _resident_bytes(pid: int) -> int:
    """Returns the memory of a process, shared pages included."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE
    except OSError:  # it has ended
        return 0


def _proportional_bytes(pid: int) -> int:
    """Returns the memory of a process, where n processes that share a page have 1/n of it each."""
    with contextlib.suppress(OSError):  # it has ended, or may not be read
        if match := re.search(r"^Pss:\s+(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE):
            return int(match[1]) << 10
    return _resident_bytes(pid)


def directory_bytes(directory: str, limit: int) -> int:
    """Returns what all files in a directory take on its disk, or a number above the limit as soon as that is reached.

    Links are not followed. An entry counts as one page at least.
    """
    total, unvisited = 0, [directory]
    while unvisited and total <= limit:
        with contextlib.suppress(OSError), os.scandir(unvisited.pop()) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):  # removed meanwhile
                    total += max(PAGE, entry.stat(follow_symlinks=False).st_blocks * 512)
                    if entry.is_dir(follow_symlinks=False):
                        unvisited.append(entry.path)
                if total > limit:
                    break
    return total
