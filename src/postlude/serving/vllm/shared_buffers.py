"""Memory that two processes of one machine share: of a GPU, by CUDA IPC, or of the host, as a file without a name.

The GPU's is allocated by the driver, not by torch, whose segments have other tensors in them. Besides the standard
library this file needs torch only: the trainer and vLLM's workers both use it.
"""

from __future__ import annotations

import base64
import ctypes
import os
from functools import cache
from typing import Protocol

import torch
from torch import Tensor

LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
HANDLE_BYTES = 64


class Buffer(Protocol):
    """Memory that another process sees as well."""

    data: Tensor
    """Its bytes, [n] uint8."""
    handle: str
    """How another process opens it."""

    def close(self) -> None:
        """Frees or unmaps it. Every process that has opened it should have closed it before its owner does."""


def allocate_buffer(device: torch.device, size: int) -> Buffer:
    """Allocates `size` bytes on this process's GPU, or in host memory."""
    return GPUBuffer(device, size) if device.type == "cuda" else HostBuffer(size=size)


def open_buffer(device: torch.device, handle: str) -> Buffer:
    """Opens another process's buffer on the same device."""
    return GPUBuffer(device, handle=handle) if device.type == "cuda" else HostBuffer(handle)


def device_name(device: torch.device) -> str:
    """Returns a name of the device that is the same in all processes of this machine."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else device.type


class HostBuffer:
    """A file in memory that is in no directory, so the memory is freed when the last process that has it ends.

    The handle is a path of the process that made it.
    """

    def __init__(self, path: str | None = None, *, size: int = 0) -> None:
        self._file: int | None = None
        if path is None:
            self._file = os.memfd_create("postlude")
            os.truncate(self._file, size)
            path = f"/proc/{os.getpid()}/fd/{self._file}"
        self.handle = path
        self.data = torch.from_file(path, shared=True, size=os.stat(path).st_size, dtype=torch.uint8)

    def close(self) -> None:
        """Closes the file, if this process made it. The mapping ends with the tensor."""
        del self.data
        if self._file is not None:
            os.close(self._file)


class IPCHandle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_ubyte * HANDLE_BYTES),)


class GPUBuffer:
    """Memory of a GPU. The handle is CUDA's as base64, and the number of bytes."""

    def __init__(self, device: torch.device, size: int = 0, *, handle: str | None = None) -> None:
        self._owned, self._pointer = handle is None, ctypes.c_uint64()
        torch.cuda.synchronize(device)  # makes torch's context of the device the driver's current one
        ipc_handle = IPCHandle()
        if handle is None:
            torch.cuda.empty_cache()  # torch's unused memory is not free for the driver
            check("cuMemAlloc", driver().cuMemAlloc_v2(ctypes.byref(self._pointer), size))
            check("cuIpcGetMemHandle", driver().cuIpcGetMemHandle(ctypes.byref(ipc_handle), self._pointer))
            handle = f"{base64.b64encode(bytes(ipc_handle)).decode()}:{size}"
        else:
            encoded, _, text = handle.partition(":")
            size, ipc_handle = int(text), IPCHandle.from_buffer_copy(base64.b64decode(encoded))
            pointer = ctypes.byref(self._pointer)
            check("cuIpcOpenMemHandle", driver().cuIpcOpenMemHandle_v2(pointer, ipc_handle, LAZY_PEER_ACCESS))
        self.handle, self.device = handle, device
        self.data = torch.as_tensor(_DeviceMemory(self._pointer.value or 0, size), device=device)

    def close(self) -> None:
        """Frees it if this process allocated it, else unmaps it."""
        torch.cuda.synchronize(self.device)
        del self.data
        if self._owned:
            check("cuMemFree", driver().cuMemFree_v2(self._pointer))
        else:
            check("cuIpcCloseMemHandle", driver().cuIpcCloseMemHandle(self._pointer))


class _DeviceMemory:
    """Memory of a GPU that torch takes as a tensor of bytes."""

    def __init__(self, pointer: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (pointer, False),
            "strides": None,
            "version": 3,
        }


@cache
def driver() -> ctypes.CDLL:
    """Returns the CUDA driver, with the types of the functions that are called."""
    cuda = ctypes.CDLL("libcuda.so.1")
    pointer, number = ctypes.c_uint64, ctypes.c_int
    cuda.cuMemAlloc_v2.argtypes = [ctypes.POINTER(pointer), ctypes.c_size_t]
    cuda.cuMemFree_v2.argtypes = [pointer]
    cuda.cuIpcGetMemHandle.argtypes = [ctypes.POINTER(IPCHandle), pointer]
    cuda.cuIpcOpenMemHandle_v2.argtypes = [ctypes.POINTER(pointer), IPCHandle, ctypes.c_uint]
    cuda.cuIpcCloseMemHandle.argtypes = [pointer]
    for name in ("cuMemAlloc_v2", "cuMemFree_v2", "cuIpcGetMemHandle", "cuIpcOpenMemHandle_v2", "cuIpcCloseMemHandle"):
        getattr(cuda, name).restype = number
    return cuda


def check(name: str, result: int) -> None:
    """Raises for an error of the driver."""
    if result:
        raise RuntimeError(f"the CUDA driver's {name} gives error {result} for memory that trainer and server share.")
