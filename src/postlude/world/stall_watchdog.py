"""Detects a rank whose host waits for its GPU without end, because another rank does not come to a collective.

Over gloo such a wait ends with an exception. Over NCCL it is a kernel that spins, so the host hangs in whatever waits
for the GPU and cannot raise. A thread notices that neither the host nor the GPU has moved for a while.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from collections.abc import Callable

SAMPLES = 20  # how often the host's position is read in the time after which it counts as stalled
GPU_SECONDS = 5.0  # the time that a GPU has to pass one event


class GPUProbe:
    """The default stream of a GPU, on which a rank computes.

    ctypes calls the driver without Python's lock: the call may hang behind the one that the host hangs in.
    """

    def __init__(self, index: int) -> None:
        self.index = index

    def is_stuck(self, seconds: float) -> bool:
        """Returns whether work that is already launched does not finish within so many seconds."""
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
    """Calls `on_stall` if the creating thread stays at one instruction for `seconds` while its GPU is stuck."""

    def __init__(self, seconds: float, is_stuck: Callable[[float], bool], on_stall: Callable[[], None]) -> None:
        self.seconds, self.is_stuck, self.on_stall = seconds, is_stuck, on_stall
        self.watched = threading.get_ident()
        self.closed = threading.Event()
        self.thread = threading.Thread(target=self._watch, name="postlude-stall", daemon=True)
        self.thread.start()

    def close(self) -> None:
        """Ends the thread."""
        self.closed.set()
        self.thread.join(1.0)

    def _watch(self) -> None:
        position, since = None, time.monotonic()
        while not self.closed.wait(self.seconds / SAMPLES):
            frame = sys._current_frames().get(self.watched)
            current = (id(frame), frame.f_lasti) if frame is not None else None
            del frame
            if current != position:
                position, since = current, time.monotonic()
            elif time.monotonic() - since >= self.seconds:
                if self.is_stuck(GPU_SECONDS):
                    self.on_stall()
                    return
                since = time.monotonic()
