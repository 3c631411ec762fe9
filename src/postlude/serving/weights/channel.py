"""Channel: sends bytes from one rank of the trainer to every worker of one server, over NCCL or gloo.

Each server has its own channel, a process group in which the trainer is rank 0. So a failed server does not block the
others, whose workers have no timeout of their own.

Between CPUs it is a gloo group outside of torch's default group. Between GPUs it is an NCCL communicator made from a
unique id that vLLM's workers receive: torch's process groups exchange their id among their own ranks, and these workers
are not in them. So this calls the NCCL library that torch has loaded. No call blocks: communicators are non-blocking
and polled, and one that fails is aborted, which also ends its work on the GPU.
"""

from __future__ import annotations

import base64
import ctypes
import socket
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import cache, partial
from typing import Any, Protocol
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import Tensor

from postlude.world.rendezvous import host_store

POLL_SECONDS = 0.0005
LOST = "was lost while it received weights"
STORE_TIMEOUT = 300.0  # seconds
LIBRARY = "libnccl.so.2"
SUCCESS, IN_PROGRESS = 0, 7
UINT8, FLOAT32, SUM = 1, 7, 0  # as nccl.h numbers them
ABORT_TIMEOUT = 10.0  # seconds; an abort waits for the work on the GPU to notice


class ChannelError(Exception):
    """A failure of a channel, as a clause that follows the server's address."""


class Channel(Protocol):
    def start_send(self, data: Tensor) -> None:
        """Starts to send bytes, [n] uint8, to every worker. They must not change until `is_done`."""

    def is_done(self) -> bool:
        """Whether the send is complete. Raises `ChannelError` if it failed."""

    def close(self) -> None:
        """Closes the channel, also during a send."""


class ChannelRendezvous(Protocol):
    """A channel that the workers of a server are about to join."""

    @property
    def info(self) -> dict[str, Any]:
        """The address to join at, as fields of vLLM's `init_info`."""

    def open(self, timeout: float) -> Channel:
        """Waits for all workers. They must join at the same time, within `timeout` seconds."""


def open_all(rendezvous: Mapping[str, ChannelRendezvous], timeout: float) -> tuple[dict[str, Channel], dict[str, str]]:
    """Opens channels in parallel. Returns the open ones and the failures, by server."""
    opened: dict[str, Channel] = {}
    failures: dict[str, str] = {}

    def open_channel(url: str) -> None:
        try:
            opened[url] = rendezvous[url].open(timeout)
        except ChannelError as error:
            failures[url] = str(error)

    if rendezvous:
        with ThreadPoolExecutor(len(rendezvous)) as threads:
            list(threads.map(open_channel, rendezvous))
    return opened, failures


def send_all(channels: Mapping[str, Channel], data: Tensor, timeout: float) -> dict[str, str]:
    """Sends bytes through all channels in parallel. Returns the failures by server."""
    failed: dict[str, str] = {}

    def is_finished(url: str, action: Callable[[], Any]) -> bool:
        """Runs `action` and returns its result; True if the channel failed."""
        try:
            return bool(action())
        except ChannelError as error:
            failed[url] = str(error)
            return True

    for url, channel in channels.items():
        is_finished(url, partial(channel.start_send, data))
    deadline = time.monotonic() + timeout
    waiting = [url for url in channels if url not in failed]
    while waiting := [url for url in waiting if not is_finished(url, channels[url].is_done)]:
        if time.monotonic() > deadline:
            failed |= dict.fromkeys(waiting, f"did not receive weights within {timeout:g} s")
            break
        time.sleep(POLL_SECONDS)
    return failed


class GlooRendezvous:
    """A gloo group of `size` ranks, whose store is on this machine."""

    def __init__(self, url: str, size: int) -> None:
        self.size = size
        self.address = local_address(url)
        self.store = host_store(self.address, 0, STORE_TIMEOUT)

    @property
    def info(self) -> dict[str, Any]:
        return {"master_address": self.address, "master_port": self.store.port}

    def open(self, timeout: float) -> GlooChannel:
        try:
            group = dist.ProcessGroupGloo(self.store, 0, self.size, timedelta(seconds=timeout))
        except RuntimeError as error:
            raise ChannelError(f"did not join to receive weights within {timeout:g} s") from error
        return GlooChannel(group, self.store)


class GlooChannel:
    """An open channel between CPUs."""

    def __init__(self, group: Any, store: Any) -> None:
        self._group, self._store = group, store
        self._work: dist.Work | None = None

    def start_send(self, data: Tensor) -> None:
        assert self._group is not None, "the channel is closed"
        try:
            self._work = self._group.broadcast(data, 0)
        except RuntimeError as error:
            raise ChannelError(LOST) from error

    def is_done(self) -> bool:
        assert self._work is not None, "no send was started"
        if not self._work.is_completed():
            return False
        try:
            self._work.wait()
        except RuntimeError as error:
            raise ChannelError(LOST) from error
        return True

    def close(self) -> None:
        self._work = self._group = self._store = None


def local_address(url: str) -> str:
    """Returns the address of this machine that a server at `url` can reach."""
    parts = urlsplit(url)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((parts.hostname or "localhost", parts.port or 80))  # sends nothing, but chooses the route
        return str(probe.getsockname()[0])


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
