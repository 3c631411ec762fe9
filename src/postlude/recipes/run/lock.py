"""RunLock: one process a run. The system releases the lock when its process ends, however it ends."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
import socket
import time
from collections.abc import Iterator, Mapping
from io import FileIO
from pathlib import Path
from typing import Any

from postlude.recipes.run.files import CONFIG, RECORD
from postlude.recipes.run.start_mode import CHECKPOINTS, ROWS

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


def check_overwrite(run: Path, config: Mapping[str, Any]) -> None:
    """Refuses a directory that is no run, that a process is writing, or that the new run reads from."""
    path = run.expanduser().absolute()
    if not path.exists() or (path.is_dir() and not any(entry.name != ROWS for entry in path.iterdir())):
        return
    if not (path / CONFIG).is_file() or not ((path / RECORD).is_file() or (path / CHECKPOINTS).is_dir()):
        raise ValueError(
            f"{path} is no run directory (it has no {CONFIG} with {RECORD}), so --overwrite deletes nothing. Give "
            "another directory (--run)."
        )
    if (path / LOCK).exists():
        RunLock(path).release()  # raises if another process holds it
    for key, text in _texts(config):
        inside = Path(text.rpartition(":")[0] if ".py:" in text else text).expanduser().absolute()
        if key != "run" and path in (inside, *inside.parents) and inside.exists() and path / ROWS not in inside.parents:
            raise ValueError(
                f"{key} is {text}, in the run that --overwrite would delete. Move it, or give another directory "
                "(--run)."
            )


def delete_run(run: Path) -> None:
    """Deletes the run in a directory that `check_overwrite` accepted. Rows that a call gave stay."""
    path = run.expanduser().absolute()
    if os.environ.get("RANK", "0") != "0" or not path.exists():
        return
    lock = RunLock(path)
    try:
        (path / CONFIG).unlink(missing_ok=True)  # the first, so that what a kill leaves is no run
        for entry in path.iterdir():
            if entry.name in (ROWS, LOCK):
                continue
            shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
    finally:
        lock.release()


def _texts(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, str) and value:
        yield path, value
    items = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    for name, item in items:
        yield from _texts(item, f"{path}.{name}" if path else str(name))
