"""RunLock: one process a run. The system releases the lock when its process ends, however it ends."""

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
    """Holds a directory from its construction until `release`, or until the process ends.

    The lock is the system's, not the file: a file that a crash left locks nothing. On NFS it depends on the server's
    locks. On a file system without locks it warns, and the run continues without one.
    """

    def __init__(self, directory: Path, option: str = "--run") -> None:
        """Raises `RunLocked` if another process holds the directory, which `option` of the command names."""
        self.path, self._option = directory / LOCK, option
        self._file: FileIO | None = self._take()

    def release(self) -> None:
        """Releases the lock and deletes its file."""
        if self._file is not None:
            file, self._file = self._file, None
            self.path.unlink(missing_ok=True)  # while the lock is held, so that the file is no one else's
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
                    f"{self.path.parent} is in use by {words}. Wait for it, end it, or give another directory "
                    f"({self._option})."
                ) from None
            except OSError as error:
                LOG.warning(
                    "%s cannot be locked (%s): make sure that no second process writes there.",
                    self.path.parent,
                    error.strerror,
                )
            if self._is(file):
                break
            file.close()  # its holder deleted it after it was opened here
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
    """Waits for an ending process to release a directory. `RunLock` refuses one that does not."""
    until = time.monotonic() + patience
    while (directory / LOCK).exists() and time.monotonic() < until:
        try:
            RunLock(directory).release()
        except RunLocked:
            time.sleep(0.2)


def _holder(file: FileIO) -> str:
    """Returns who holds a lock, as it wrote into the file."""
    try:
        holder = json.loads(file.read())
        return f"process {holder['pid']} on {holder['host']}, since {holder['since']}"
    except (ValueError, KeyError, OSError):  # it has not written yet
        return "another process"
