"""Messages between the HTTP process and rank 0 of a base model's ranks. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

READY, RESULT, ERROR, PROGRESS = "ready", "result", "error", "progress"
"""What rank 0 sends: (kind, id of the call, value)."""


@dataclass(frozen=True)
class Call:
    """A call of the HTTP process: a method of `Worker` and its arguments."""

    call_id: int
    method: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class Cancel:
    """Ends a sample call."""

    call_id: int
