"""One safetensors file, written tensor by tensor. It is byte for byte what the library's `save_file` writes.

    8 bytes: the header's length | the header: JSON, padded with spaces to a multiple of 8 | the tensors' bytes

The header comes first, so the dtypes and shapes of all tensors are given first (`TensorInfo`). The tensors then come in
any order, and each is written to its position and freed: from a CPU directly from its memory; from a GPU through two
small pinned buffers, one filled while the other is written.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

DTYPES = {  # in the library's order of tensors: the widest first, so that each is aligned
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float64: "F64",
    torch.complex64: "C64",
    torch.float32: "F32",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.float4_e2m1fn_x2: "F4",
    torch.bool: "BOOL",
}
ORDER = list(DTYPES)
STAGING_BYTES = 1 << 25  # of each of the two buffers


@dataclass(frozen=True)
class TensorInfo:
    """Dtype and shape of a tensor of the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Header:
    """The beginning of a file, and the positions of its tensors."""

    data: bytes
    starts: Mapping[str, int]
    """By tensor in the file's order, where its bytes start after the header."""
    total: int
    """Bytes of all tensors."""


def build_header(entries: Mapping[str, TensorInfo]) -> Header:
    """Returns the header. The order of the entries does not matter."""
    for name, entry in entries.items():
        if entry.dtype not in DTYPES:
            raise ValueError(f"{name} is {entry.dtype}, which safetensors has no name for; convert it first.")
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    starts, end = {}, 0
    for name in sorted(entries, key=lambda name: (ORDER.index(entries[name].dtype), name)):
        dtype, shape = entries[name].dtype, list(entries[name].shape)
        if dtype == torch.float4_e2m1fn_x2:
            shape[-1] *= 2  # torch counts pairs
        starts[name], end = end, end + entries[name].bytes
        header[name] = {"dtype": DTYPES[dtype], "shape": shape, "data_offsets": [starts[name], end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return Header(len(text).to_bytes(8, "little") + text, starts, end)


def as_bytes(tensor: Tensor) -> Tensor:
    """Returns a tensor's bytes, row by row, on its device: [bytes]. A view of its memory if it is contiguous."""
    rows = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return rows.as_strided((rows.numel(),), (1,)).view(torch.uint8)  # a single element may have any stride


@torch.no_grad()
def write(
    path: Path,
    entries: Mapping[str, TensorInfo],
    tensors: Iterable[tuple[str, Tensor]],
    *,
    staging_bytes: int = STAGING_BYTES,
) -> None:
    """Writes a file of these entries. `tensors` yields each of them once, in any order and on any device.

    Only the last tensor is held. An OSError leaves a partial file, so callers write to a temporary name and rename.
    """
    head = build_header(entries)
    with _open(path) as write_at:
        write_at(memoryview(head.data), 0)
        for position, piece in _on_host(_pieces(entries, head, tensors, staging_bytes), staging_bytes):
            write_at(piece.numpy().data, position)
            del piece


def _pieces(
    entries: Mapping[str, TensorInfo], head: Header, tensors: Iterable[tuple[str, Tensor]], max_bytes: int
) -> Iterator[tuple[int, Tensor]]:
    """Yields the tensors' bytes in pieces of at most `max_bytes`, with their positions in the file."""
    missing = set(entries)
    for name, tensor in tensors:
        if name not in missing:
            raise ValueError(f"{name} is not one of the file's tensors, or came twice.")
        missing.remove(name)
        expected = entries[name]
        if tensor.dtype != expected.dtype or tensor.shape != expected.shape:
            actual = TensorInfo(tensor.dtype, tuple(tensor.shape))
            raise ValueError(f"{name} was to be {expected}, but it is {actual}.")
        yield from _cut(tensor, len(head.data) + head.starts[name], max_bytes)
        del tensor  # here and below: it is freed before the next one is made
    if missing:
        raise ValueError(f"{len(missing)} of the file's tensors did not come: {', '.join(sorted(missing)[:5])}.")


def _cut(tensor: Tensor, position: int, max_bytes: int) -> Iterator[tuple[int, Tensor]]:
    data = as_bytes(tensor)
    total = data.numel()
    for start in range(0, total, max_bytes):
        yield position + start, data if total <= max_bytes else data[start : start + max_bytes]


def _on_host(pieces: Iterator[tuple[int, Tensor]], max_bytes: int) -> Iterator[tuple[int, Tensor]]:
    """Yields pieces of at most `max_bytes` bytes, in host memory until the next is requested.

    Pieces on a GPU come one late: each is copied while the caller writes the one before.
    """
    buffers: list[Tensor] = []
    delayed: tuple[int, Tensor, Callable[[], object]] | None = None
    for position, piece in pieces:
        if piece.is_cpu:
            yield position, piece
            del piece
            continue
        if not buffers:
            buffers = [_buffer(max_bytes), _buffer(max_bytes)]
        buffer = buffers[0][: piece.numel()]
        wait = _begin_copy(buffer, piece)
        del piece
        if delayed is not None:
            delayed[2]()
            yield delayed[0], delayed[1]
        delayed = position, buffer, wait
        buffers.reverse()
    if delayed is not None:
        delayed[2]()
        yield delayed[0], delayed[1]


def _buffer(size: int) -> Tensor:
    """Returns pinned memory, which torch caches for the next file."""
    return torch.empty(size, dtype=torch.uint8, pin_memory=True)


def _begin_copy(buffer: Tensor, source: Tensor) -> Callable[[], object]:
    """Starts a copy from a GPU, after the work in its queue. Returns a function that waits for it."""
    stream = torch.cuda.current_stream(source.device)
    buffer.copy_(source, non_blocking=True)
    source.record_stream(stream)  # it may be freed at once, on whichever stream it was made
    copied = torch.cuda.Event()
    copied.record(stream)
    return copied.synchronize


@contextmanager
def _open(path: Path) -> Iterator[Callable[[memoryview, int], None]]:
    """Opens a file. Yields a function that writes bytes at a position."""
    file = path.open("wb", buffering=0)
    number = file.fileno()

    def write_at(data: memoryview, position: int) -> None:
        try:
            while data:
                written = os.pwrite(number, data, position)  # may be partial
                data, position = data[written:], position + written
        except OSError as error:
            raise _refused(path, error) from error

    try:
        yield write_at
        try:
            os.fsync(number)
            file.close()  # some file systems report only now that they are full
        except OSError as error:
            raise _refused(path, error) from error
    finally:
        file.close()


def _refused(path: Path, error: OSError) -> OSError:
    return OSError(f"{path} could not be written: {error.strerror} (os error {error.errno}).")
