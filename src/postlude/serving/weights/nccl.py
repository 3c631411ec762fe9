"""NCCL as vLLM's workers meet it: a communicator made from an id that was sent to them, without torch's own groups.

torch's groups agree on their id between themselves, and vLLM's workers are not of them; so the few calls that it takes
are made on the library that torch has loaded. Nothing waits without end: communicators are made and watched without
blocking, and one that is abandoned is aborted, which ends what it has on the GPU, too.
"""

from __future__ import annotations

import base64
import ctypes
import threading
import time
from functools import cache
from typing import Any

import torch
from torch import Tensor

from postlude.serving.weights.channel import LOST, SLEEP, ChannelError

LIBRARY = "libnccl.so.2"
SUCCESS, IN_PROGRESS = 0, 7
UINT8, FLOAT32, SUM = 1, 7, 0  # as nccl.h numbers them
ABORTED_WITHIN = 10.0  # seconds; an abort waits for what is on the GPU to notice


class UniqueId(ctypes.Structure):
    """ncclUniqueId: where the ranks of a communicator meet."""

    _fields_ = (("internal", ctypes.c_char * 128),)


class Config(ctypes.Structure):
    """ncclConfig_t as of 2.14, by which newer libraries know that the rest is left to them."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
    )


@cache
def library() -> ctypes.CDLL:
    """The library, with the types of what is called."""
    found = ctypes.CDLL(LIBRARY)
    pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    arguments: dict[str, list[Any]] = {
        "ncclGetUniqueId": [ctypes.POINTER(UniqueId)],
        "ncclCommInitRankConfig": [ctypes.POINTER(pointer), number, UniqueId, number, ctypes.POINTER(Config)],
        "ncclCommGetAsyncError": [pointer, ctypes.POINTER(number)],
        "ncclAllReduce": [pointer, pointer, size, number, number, pointer, pointer],
        "ncclBroadcast": [pointer, pointer, size, number, number, pointer, pointer],
        "ncclCommAbort": [pointer],
    }
    for name, types in arguments.items():
        function = getattr(found, name)
        function.argtypes, function.restype = types, number
    found.ncclGetErrorString.argtypes, found.ncclGetErrorString.restype = [number], ctypes.c_char_p
    return found


class NCCLRendezvous:
    """A communicator of `size` ranks, this one being the first, that others join by its id."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.size, self.device = size, device
        self.id = UniqueId()
        check(library().ncclGetUniqueId(ctypes.byref(self.id)))

    @property
    def info(self) -> dict[str, Any]:
        """The id, as vLLM 0.32 takes it of trainers that share no store with it."""
        return {"nccl_unique_id_b64": base64.b64encode(bytes(self.id)).decode()}

    def open(self, seconds: float) -> NCCLChannel:
        """Wait for the others."""
        return NCCLChannel(self.id, self.size, self.device, seconds)


class NCCLChannel:
    """A communicator between GPUs, and a stream of its own."""

    def __init__(self, unique_id: UniqueId, size: int, device: torch.device, seconds: float) -> None:
        self.device, self.seconds = device, seconds
        self._communicator = ctypes.c_void_p()
        config = Config(ctypes.sizeof(Config), 0xCAFEBEEF, 21400, 0)
        try:
            with torch.cuda.device(device):
                communicator = ctypes.byref(self._communicator)
                self._call(library().ncclCommInitRankConfig(communicator, size, unique_id, 0, ctypes.byref(config)))
                self._stream = torch.cuda.Stream(device)
                self._done = torch.cuda.Event()
                self._greet()
        except ChannelError:
            self.close()
            raise

    def begin(self, data: Tensor) -> None:
        """Send bytes, after what the current stream has to do with them."""
        assert self._communicator, "it was closed"
        with torch.cuda.device(self.device):
            self._stream.wait_stream(torch.cuda.current_stream(self.device))
            data.record_stream(self._stream)
            place, stream = data.data_ptr(), self._stream.cuda_stream
            self._call(
                library().ncclBroadcast(place, place, data.numel(), UINT8, 0, self._communicator, stream),
            )
            self._done.record(self._stream)

    def is_done(self) -> bool:
        """Whether they were sent."""
        state = ctypes.c_int()
        check(library().ncclCommGetAsyncError(self._communicator, ctypes.byref(state)))
        if state.value != IN_PROGRESS:
            check(state.value)
        return bool(self._done.query())

    def close(self) -> None:
        """Abort it, in a thread that is left to itself if the library does not come back."""
        if not self._communicator:
            return
        communicator, self._communicator = self._communicator, ctypes.c_void_p()

        def abort() -> None:
            with torch.cuda.device(self.device):
                library().ncclCommAbort(communicator)

        thread = threading.Thread(target=abort, name="postlude nccl abort", daemon=True)
        thread.start()
        thread.join(ABORTED_WITHIN)

    def _greet(self) -> None:
        """The sum of one number that vLLM's workers make before anything else."""
        one = torch.zeros(1, device=self.device)
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        place, stream = one.data_ptr(), self._stream.cuda_stream
        self._call(library().ncclAllReduce(place, place, 1, FLOAT32, SUM, self._communicator, stream))
        self._done.record(self._stream)
        deadline = time.monotonic() + self.seconds
        while not self.is_done():
            if time.monotonic() > deadline:
                raise ChannelError(f"did not greet within {self.seconds:g} s of joining")
            time.sleep(SLEEP)

    def _call(self, result: int) -> None:
        """See a call of the library through: one that does not block may have only begun."""
        deadline = time.monotonic() + self.seconds
        state = ctypes.c_int(result)
        while state.value == IN_PROGRESS:
            if time.monotonic() > deadline:
                raise ChannelError(f"did not come to take weights within {self.seconds:g} s")
            time.sleep(SLEEP)
            check(library().ncclCommGetAsyncError(self._communicator, ctypes.byref(state)))
        check(state.value)


def check(result: int) -> None:
    """Raise what the library says went wrong."""
    if result != SUCCESS:
        said = library().ncclGetErrorString(result).decode(errors="replace")
        raise ChannelError(f"{LOST}: NCCL says {said!r}")
