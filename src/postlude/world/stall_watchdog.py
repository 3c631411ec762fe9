"""A rank whose host waits for its GPU without end, because another rank does not come to a collective.

Over gloo such a wait ends with an exception. Over NCCL it is a kernel that spins, so the host hangs in whatever waits
for the GPU and cannot raise. A thread notices that the host has not moved for a while and that its GPU does not either.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from collections.abc import Callable

LOOKS = 20  # how often the host is looked at in the time after which it counts as stalled
PROOF = 5.0  # seconds that a GPU has to pass one event


class GPUProbe:
    """The default stream of a GPU, on which a rank computes.

    The driver is called through ctypes, without Python's lock: a call may hang behind the one that the host hangs in.
    """

    def __init__(self, index: int) -> None:
        self.index = index

    def is_stuck(self, seconds: float) -> bool:
        """Whether what was launched until now is not done within so many seconds."""
        passed = threading.Event()
        threading.Thread(target=self._pass_an_event, args=(passed, seconds), daemon=True).start()
        return not passed.wait(seconds)

    def _pass_an_event(self, passed: threading.Event, seconds: float) -> None:
        driver = ctypes.CDLL("libcuda.so.1")
        context, event = ctypes.c_void_p(), ctypes.c_void_p()
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), ctypes.c_int(self.index))
        driver.cuCtxSetCurrent(context)
        driver.cuEventCreate(ctypes.byref(event), ctypes.c_uint(0))
        driver.cuEventRecord(event, None)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if driver.cuEventQuery(event) == 0:
                passed.set()
                return
            time.sleep(0.02)


class StallWatchdog:
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
