"""Messages between the HTTP process and rank 0 of a base model's ranks. No torch here.

Both send lists: all messages that wait at once, so that a burst of small ones is one write and one read.
"""

from __future__ import annotations

import queue
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from postlude.tinker.backend import PassRequest

READY, RAN, RESULT, ERROR, PROGRESS = "ready", "ran", "result", "error", "progress"
"""What rank 0 sends: (kind, id of the call, value). RAN comes before the result of a pass, which is large."""
Message = TypeVar("Message")


@dataclass(frozen=True)
class Call:
    """A call of the HTTP process: a method of `Worker`, or of `RankModels`, and its arguments."""

    call_id: int
    method: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class Cancel:
    """Ends a sample call."""

    call_id: int


@dataclass(frozen=True)
class StagePass:
    """A pass, sent before its turn; a call of `run_staged` runs it."""

    number: int
    request: PassRequest


@dataclass(frozen=True)
class UnstagePass:
    """Drops a staged pass."""

    number: int


def take_all(messages: queue.SimpleQueue[Message]) -> list[Message]:
    """Waits for a message. Returns all that are there."""
    received = [messages.get()]
    while not messages.empty():
        received.append(messages.get())
    return received
