"""Messages that carry commands to rank 0 of a base model's ranks, and results back. No torch here.

Both ends send lists: all messages that wait at once, so that a burst of small ones is one write and one read.
"""

from __future__ import annotations

import queue
from dataclasses import dataclass
from typing import Any, TypeVar

from postlude.tinker.backend import PassRequest, TinkerCommand

READY, RAN, RESULT, ERROR, PROGRESS, USAGE = "ready", "ran", "result", "error", "progress", "usage"
"""What rank 0 sends: (kind, id of the call, value). RAN comes before the result of a pass, which is large.
USAGE is of no call."""
Message = TypeVar("Message")


@dataclass(frozen=True)
class Call:
    """A command of the HTTP process, with its number."""

    call_id: int
    command: TinkerCommand[Any]


@dataclass(frozen=True)
class Cancel:
    """Ends a sample call."""

    call_id: int


@dataclass(frozen=True)
class StagePass:
    """A pass, sent before its turn; a `ForwardBackward` with its number runs it. Without a request it is dropped."""

    number: int
    request: PassRequest | None


def take_all(messages: queue.SimpleQueue[Message]) -> list[Message]:
    """Waits for a message. Returns all that are there."""
    received = [messages.get()]
    while not messages.empty():
        received.append(messages.get())
    return received
