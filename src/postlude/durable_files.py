"""Files that survive a kill and a loss of power: synced to the disk before the rename that makes them current."""

from __future__ import annotations

import errno
import os
import secrets
from contextlib import suppress
from io import FileIO
from pathlib import Path


def write_atomic(path: Path, content: bytes, *, private: bool = False, durable: bool = True) -> None:
    """Replaces a file atomically: a kill leaves the old or the new content. A private one is for its owner alone.

    Without `durable` a loss of power may leave an empty file: for what is written again soon.
    """
    aside = path.with_name(f".{path.name}.{secrets.token_hex(8)}")  # a link that waits under this name is not followed
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(aside, flags, 0o600 if private else 0o666)
        with FileIO(descriptor, "wb") as file:
            write_all(file, content)
            if durable:
                os.fsync(file.fileno())
        aside.replace(path)
    except OSError as error:
        with suppress(OSError):
            aside.unlink()
        raise OSError(error.errno, error.strerror, str(path)) from error
    if durable:
        sync(path.parent)


def write_all(file: FileIO, content: bytes) -> None:
    """Writes all bytes to an unbuffered file."""
    unwritten = memoryview(content)
    while unwritten:
        unwritten = unwritten[file.write(unwritten) :]


def publish(aside: Path, target: Path) -> None:
    """Renames a complete file or directory to its final name, once all that is in it is on the disk."""
    sync_tree(aside)
    aside.rename(target)
    sync(target.parent)


def sync_tree(path: Path) -> None:
    """Writes a file, or a directory with everything below it, through to the disk."""
    for entry in (*path.rglob("*"), path):
        if not entry.is_symlink():
            sync(entry)


def sync(path: Path) -> None:
    """Writes a file, or the entries of a directory, through to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP) or not path.is_dir():  # some file systems sync no directory
            raise
    finally:
        os.close(descriptor)
