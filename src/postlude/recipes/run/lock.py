"""One process a run: a lock in its directory that ends with the process that holds it, however that ends."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import socket
import time
from io import FileIO
from pathlib import Path

LOCK = "run.lock"
LOG = logging.getLogger("postlude")


class RunLocked(OSError):
    """Another process holds the run."""


class RunLock:
    """Holds a directory from when it is made until `release`, or until the process is gone.

    The system keeps the lock, not the file: one that a crash left behind holds nothing. On NFS it reaches as far as
    the server's own locks; a file system without any is said aloud, and the run goes on unguarded.
    """

    def __init__(self, directory: Path) -> None:
        self.path = directory / LOCK
        self._file: FileIO | None = self._take()

    def release(self) -> None:
        """Let others have the directory, and leave no file in it."""
        if self._file is not None:
            file, self._file = self._file, None
            self.path.unlink(missing_ok=True)  # while it is held, so that it is no one else's
            file.close()

    def _take(self) -> FileIO:
        while True:
            file = FileIO(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644), "r+")
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                words = _holder(file)
                file.close()
                raise RunLocked(
                    f"{self.path.parent} is in use by {words}. Wait for it, end it, or give another directory (--run)."
                ) from None
            except OSError as error:
                LOG.warning(
                    "%s cannot be locked (%s): see to it yourself that no second process writes there.",
                    self.path.parent,
                    error.strerror,
                )
            if self._is(file):
                break
            file.close()  # its holder took it away as it ended, after it was opened here
        file.truncate()
        holder = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
        file.write(json.dumps(holder).encode() + b"\n")
        return file

    def _is(self, file: FileIO) -> bool:
        try:
            return os.path.samestat(os.fstat(file.fileno()), self.path.stat())
        except FileNotFoundError:
            return False


def wait_for(directory: Path, patience: float) -> None:
    """Wait for a process that is ending to let go of a directory. One that holds on is for `RunLock` to refuse."""
    until = time.monotonic() + patience
    while (directory / LOCK).exists() and time.monotonic() < until:
        try:
            RunLock(directory).release()
        except RunLocked:
            time.sleep(0.2)


def _holder(file: FileIO) -> str:
    """Who holds a lock, by what it wrote there."""
    try:
        found = json.loads(file.read())
        return f"process {found['pid']} on {found['host']}, since {found['since']}"
    except (ValueError, KeyError, OSError):  # it has only just begun
        return "another process"
