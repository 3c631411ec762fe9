"""A channel between GPUs: an NCCL communicator made from a unique id that vLLM's workers receive.

torch's process groups exchange their id among their own ranks, and vLLM's workers are not in them. So this calls the
NCCL library that torch has loaded. No call blocks: communicators are non-blocking and polled, and one that fails is
aborted, which also ends its work on the GPU.
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

from postlude.serving.weights.channel import LOST, POLL_SECONDS, ChannelError

LIBRARY = "libnccl.so.2"
SUCCESS, IN_PROGRESS = 0, 7
UINT8, FLOAT32, SUM = 1, 7, 0  # as nccl.h numbers them
ABORT_TIMEOUT = 10.0  # seconds; an abort waits for the work on the GPU to notice


class UniqueId(ctypes.Structure):
    """ncclUniqueId: identifies a communicator to its ranks."""

    _fields_ = (("internal", ctypes.c_char * 128),)


class NCCLConfig(ctypes.Structure):
    """ncclConfig_t of version 2.14. Newer libraries use defaults for the fields that came later."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
    )


@cache
def library() -> ctypes.CDLL:
    """Returns the NCCL library, with the types of the functions that are called."""
    nccl = ctypes.CDLL(LIBRARY)
    pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    arguments: dict[str, list[Any]] = {
        "ncclGetUniqueId": [ctypes.POINTER(UniqueId)],
        "ncclCommInitRankConfig": [ctypes.POINTER(pointer), number, UniqueId, number, ctypes.POINTER(NCCLConfig)],
        "ncclCommGetAsyncError": [pointer, ctypes.POINTER(number)],
        "ncclAllReduce": [pointer, pointer, size, number, number, pointer, pointer],
        "ncclBroadcast": [pointer, pointer, size, number, number, pointer, pointer],
        "ncclCommAbort": [pointer],
    }
    for name, types in arguments.items():
        function = getattr(nccl, name)
        function.argtypes, function.restype = types, number
    nccl.ncclGetErrorString.argtypes, nccl.ncclGetErrorString.restype = [number], ctypes.c_char_p
    return nccl


class NCCLRendezvous:
    """A communicator of `size` ranks, with this process as rank 0, that others join by its id."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.size, self.device = size, device
        self.id = UniqueId()
        check(library().ncclGetUniqueId(ctypes.byref(self.id)))

    @property
    def info(self) -> dict[str, Any]:
        """The id, as vLLM 0.32 takes it from trainers without a shared store."""
        return {"nccl_unique_id_b64": base64.b64encode(bytes(self.id)).decode()}

    def open(self, timeout: float) -> NCCLChannel:
        """Waits for the workers."""
        return NCCLChannel(self.id, self.size, self.device, timeout)


class NCCLChannel:
    """An open channel between GPUs, with its own stream."""

    def __init__(self, unique_id: UniqueId, size: int, device: torch.device, timeout: float) -> None:
        self.device, self.timeout = device, timeout
        self._communicator = ctypes.c_void_p()
        config = NCCLConfig(ctypes.sizeof(NCCLConfig), 0xCAFEBEEF, 21400, 0)
        try:
            with torch.cuda.device(device):
                communicator = ctypes.byref(self._communicator)
                self._call(library().ncclCommInitRankConfig(communicator, size, unique_id, 0, ctypes.byref(config)))
                self._stream = torch.cuda.Stream(device)
                self._done = torch.cuda.Event()
                self._handshake()
        except ChannelError:
            self.close()
            raise

    def start_send(self, data: Tensor) -> None:
        """Starts to send bytes, after the current stream has written them."""
        assert self._communicator, "the channel is closed"
        with torch.cuda.device(self.device):
            self._stream.wait_stream(torch.cuda.current_stream(self.device))
            data.record_stream(self._stream)
            pointer, stream = data.data_ptr(), self._stream.cuda_stream
            self._call(library().ncclBroadcast(pointer, pointer, data.numel(), UINT8, 0, self._communicator, stream))
            self._done.record(self._stream)

    def is_done(self) -> bool:
        """Whether the send is complete."""
        state = ctypes.c_int()
        check(library().ncclCommGetAsyncError(self._communicator, ctypes.byref(state)))
        if state.value != IN_PROGRESS:
            check(state.value)
        return bool(self._done.query())

    def close(self) -> None:
        """Aborts the communicator, in a thread that is abandoned if the library does not return."""
        if not self._communicator:
            return
        communicator, self._communicator = self._communicator, ctypes.c_void_p()

        def abort() -> None:
            with torch.cuda.device(self.device):
                library().ncclCommAbort(communicator)

        thread = threading.Thread(target=abort, name="postlude nccl abort", daemon=True)
        thread.start()
        thread.join(ABORT_TIMEOUT)

    def _handshake(self) -> None:
        """Takes part in the all-reduce of one number with which vLLM's workers begin."""
        number = torch.zeros(1, device=self.device)
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        pointer, stream = number.data_ptr(), self._stream.cuda_stream
        self._call(library().ncclAllReduce(pointer, pointer, 1, FLOAT32, SUM, self._communicator, stream))
        self._done.record(self._stream)
        deadline = time.monotonic() + self.timeout
        while not self.is_done():
            if time.monotonic() > deadline:
                raise ChannelError(f"did not finish the first all-reduce within {self.timeout:g} s of joining")
            time.sleep(POLL_SECONDS)

    def _call(self, result: int) -> None:
        """Waits until a non-blocking call of the library is complete."""
        deadline = time.monotonic() + self.timeout
        state = ctypes.c_int(result)
        while state.value == IN_PROGRESS:
            if time.monotonic() > deadline:
                raise ChannelError(f"did not join to receive weights within {self.timeout:g} s")
            time.sleep(POLL_SECONDS)
            check(library().ncclCommGetAsyncError(self._communicator, ctypes.byref(state)))
        check(state.value)


def check(result: int) -> None:
    """Raises the library's error as a `ChannelError`."""
    if result != SUCCESS:
        message = library().ncclGetErrorString(result).decode(errors="replace")
        raise ChannelError(f"{LOST}: NCCL reports {message!r}")
