"""WorkDirectories: temporary directories of a process, which later processes remove if it was killed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

PREFIX = "postlude-work-"  # of the directory of a process, which has its work directories
LOCK = "lock"  # a file in it that the process has locked, for as long as it lives


class WorkDirectories:
    """Makes work directories in a new directory of `parent`, and removes those there of processes that are gone.

    By default `parent` is the directory of temporary files.
    """

    def __init__(self, parent: Path | None = None) -> None:
        parent = parent or Path(tempfile.gettempdir())
        new = Path(tempfile.mkdtemp(prefix="postlude-new-", dir=parent))
        lock = os.open(new / LOCK, os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        self._open_files = contextlib.ExitStack()
        self._open_files.callback(os.close, lock)
        self.path = new.rename(new.with_name(PREFIX + new.name.removeprefix("postlude-new-")))  # with its lock
        for other in parent.glob(f"{PREFIX}*"):
            if other != self.path:
                _remove_if_abandoned(other)

    def make(self) -> Path:
        return Path(tempfile.mkdtemp(prefix="work-", dir=self.path))

    @contextlib.contextmanager
    def temporary(self) -> Iterator[Path]:
        """Yields a new work directory, and removes it."""
        workdir = self.make()
        try:
            yield workdir
        finally:
            shutil.rmtree(workdir, ignore_errors=True)

    def close(self) -> None:
        """Removes all of them. A second call does nothing."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._open_files.close()


def _remove_if_abandoned(directory: Path) -> None:
    """Removes the directory of a process of this user that has ended."""
    try:
        if directory.lstat().st_uid != os.getuid() or directory.is_symlink():
            return
        lock = os.open(directory / LOCK, os.O_RDWR | os.O_NOFOLLOW)
    except OSError:
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # it is in use
        return
    else:
        shutil.rmtree(directory, ignore_errors=True)
    finally:
        os.close(lock)
