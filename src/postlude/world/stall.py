"""A rank whose host waits for its GPU without end, because another rank does not come to a collective.

Over gloo such a wait ends with an exception. Over NCCL it is a kernel that spins, so the host hangs in whatever waits
for the GPU and cannot raise. A thread notices that the host has not moved for a while and that its GPU does not either.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable

import torch

LOOKS = 20  # how often the host is looked at in the time after which it counts as stalled
PROOF = 5.0  # seconds that a GPU has to pass one event


class GPU:
    """A GPU's default stream, on which a rank computes."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.default_stream(device)

    def is_stuck(self, seconds: float) -> bool:
        """Whether what was launched until now is not done within so many seconds."""
        event = torch.cuda.Event()
        event.record(self.stream)
        end = time.monotonic() + seconds
        while not event.query():
            if time.monotonic() > end:
                return True
            time.sleep(0.02)
        return False


class StallWatch:
    """Calls `stalled` when the thread that made this has stood at one instruction for `seconds`, its GPU stuck."""

    def __init__(self, seconds: float, is_stuck: Callable[[float], bool], stalled: Callable[[], None]) -> None:
        self.seconds, self.is_stuck, self.stalled = seconds, is_stuck, stalled
        self.watched = threading.get_ident()
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._watch, name="postlude-stall", daemon=True)
        self.thread.start()

    def close(self) -> None:
        """Stop looking."""
        self.over.set()
        if threading.current_thread() is not self.thread:
            self.thread.join(1.0)

    def _watch(self) -> None:
        position, since = None, time.monotonic()
        while not self.over.wait(self.seconds / LOOKS):
            frame = sys._current_frames().get(self.watched)
            current = (id(frame), frame.f_lasti) if frame is not None else None
            del frame
            if current != position:
                position, since = current, time.monotonic()
            elif time.monotonic() - since >= self.seconds:
                if self.is_stuck(PROOF):
                    self.stalled()
                    return
                since = time.monotonic()
