"""The files of `status/`: where each rank of a run is, written while it runs, for `postlude status` on any machine.

Each rank writes its own file, from a thread, so that a rank that hangs is seen too. A file that cannot be written is
one warning.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

from postlude.durable_files import write_atomic
from postlude.recipes.config.secrets import mask
from postlude.recipes.run.progress import RunProgress, WarningCount

STATUS = "status"
HEARTBEAT = 5.0  # seconds between two writes of a rank at most
RANKS_PER_SECOND = 20  # that write to a shared directory, of many ranks
CHANGES = 1.0  # seconds between two writes of rank 0, which shows where it is
WRITTEN = {field.name for field in fields(RunProgress)} | {
    "rank",
    "ranks",
    "host",
    "machine",
    "pid",
    "ticks",
    "began",
    "heartbeat",
    "every",
    "ended",
    "remaining_seconds",
    "warnings",
    "last_warning",
    "last_warning_time",
}
"""What a file has."""
LOG = logging.getLogger("postlude")


class StatusFile:
    """Writes one rank's file until `close`. Rank 0 first deletes those of an earlier start, before the others write."""

    def __init__(
        self, run: Path, progress: RunProgress, warnings: WarningCount, *, rank: int = 0, ranks: int = 1
    ) -> None:
        self.path, self.progress = status_path(run, rank), progress
        self._rank, self._ranks, self._began = rank, ranks, time.time()
        self._every = max(HEARTBEAT, ranks / RANKS_PER_SECOND)
        self._process = process_identity()
        self._warnings, self._warned, self._closed = warnings, False, threading.Event()
        self.write()
        self._thread = threading.Thread(target=self._keep_writing, name="postlude status", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        self._thread.join(HEARTBEAT)  # a directory that hangs does not keep the run
        if not self._thread.is_alive():
            self.write()

    def _keep_writing(self) -> None:
        written, content = time.monotonic(), self._where()
        while not self._closed.wait(CHANGES if self._rank == 0 else self._every):
            before, content = content, self._where()
            if content != before or time.monotonic() - written >= self._every:
                written = time.monotonic()
                self.write()

    def _where(self) -> tuple[Any, ...]:
        progress = self.progress
        return progress.step, progress.activity, progress.activity_began, progress.part, self._warnings.count

    def write(self) -> None:
        entry = {
            "rank": self._rank,
            "ranks": self._ranks,
            **self._process,
            "began": self._began,
            "heartbeat": time.time(),
            "every": self._every,
            "ended": self._closed.is_set(),
            **vars(self.progress),
            "longest": dict(self.progress.longest),  # which the training thread may change meanwhile
            "remaining_seconds": self.progress.remaining_seconds,
            "warnings": self._warnings.count,
            "last_warning_time": self._warnings.last_time,
            **mask({"last_warning": self._warnings.last, "error": self.progress.error}),
        }
        try:
            self.path.parent.mkdir(exist_ok=True)
            write_atomic(self.path, json.dumps(entry).encode(), durable=False)
        except OSError as error:
            if not self._warned:
                self._warned = True
                LOG.warning(
                    "%s cannot be written (%s), so `postlude status` does not see where the run is. The run continues.",
                    *(self.path, error.strerror),
                )


def status_path(run: Path, rank: int) -> Path:
    return run / STATUS / f"rank-{rank}.json"


def clear_status(run: Path) -> None:
    """Deletes the files of an earlier start, which may have had more ranks."""
    with suppress(OSError):
        shutil.rmtree(run / STATUS)


def process_identity() -> dict[str, Any]:
    """Returns what tells this process from all others, on this machine and others."""
    return {"host": socket.gethostname(), "machine": _machine(), "pid": os.getpid(), "ticks": _start_ticks(os.getpid())}


def is_alive(entry: Mapping[str, Any]) -> bool | None:
    """Returns whether the process of `process_identity` runs; None if it is on another machine or in a container."""
    if entry.get("machine") != _machine():
        return None
    ticks = _start_ticks(int(entry["pid"]))
    return ticks is not None and ticks == entry.get("ticks")


def _machine() -> str:
    """Returns the machine's boot and this process's namespace of process ids."""
    with suppress(OSError):
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    return socket.gethostname()


def _start_ticks(pid: int) -> int | None:
    """Returns when a process started, in ticks since the boot: another one may get its id. None if there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])  # a zombie has ended
