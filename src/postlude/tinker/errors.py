"""Failures in words for the client, which retries 408, 409, 429 and 5xx and raises the others to its user."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Literal

from postlude.serving.http.errors import HTTPError


def describe_failure(error: Exception) -> tuple[str, Literal["user", "server"]] | None:
    """Returns a sentence about an error that was foreseen, and whose fault it is; None for any other."""
    if isinstance(error, (ValueError, TypeError, OverflowError)):
        return str(error), "user"
    if isinstance(error, HTTPError):
        return str(error), "user" if error.status < 500 else "server"
    return None


def storage_sentence(error: OSError, directory: Path) -> str:
    """Returns a sentence about a write that failed, for the client."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return (
            f"the disk of the server's state directory {directory} is full, so nothing of this was saved. Delete "
            "checkpoints, or have space made, and save again; training goes on meanwhile."
        )
    return f"the server's state directory {directory} cannot be written: {error.strerror or error}; nothing was saved."
