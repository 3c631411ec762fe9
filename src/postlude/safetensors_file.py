"""One safetensors file, written as its tensors come. It is byte for byte what the library's own `save_file` makes.

    8 bytes: the header's length | the header: JSON, padded with spaces to a multiple of 8 | the tensors' bytes

The header comes first, so what the tensors will be is said first (`TensorInfo`). They then come in any order, and
each is written to its place and let go of: from a CPU straight out of its memory; from a GPU through two small
pinned buffers, one filled while the other is written.
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

DTYPES = {  # in the library's order of tensors: the widest come first, so that each begins where its dtype may
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
    """What a tensor of the file will be."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """How many it takes."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Header:
    """How a file begins, and where its tensors are."""

    data: bytes
    starts: Mapping[str, int]
    """Of each tensor, in the file's order, counted from the end of the head."""
    total: int
    """Bytes of all tensors."""


def build_header(entries: Mapping[str, TensorInfo]) -> Header:
    """Where everything goes. The order of the entries does not matter."""
    for name, entry in entries.items():
        if entry.dtype not in DTYPES:
            raise ValueError(f"{name} is {entry.dtype}, which safetensors has no word for; convert it first.")
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
    """A tensor's bytes, row by row, on its device: [bytes]. A view of its memory wherever they stand there so."""
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
    """Write a file of these entries. `tensors` gives each of them once, in any order and on any device.

    Of the tensors no more is held than the one that came last. What the system refuses is an OSError with a sentence;
    the file is then there in part, so who calls this writes aside and moves what is complete.
    """
    head = build_header(entries)
    with _open(path) as put:
        put(memoryview(head.data), 0)
        for position, piece in _on_host(_pieces(entries, head, tensors, staging_bytes), staging_bytes):
            put(piece.numpy().data, position)
            del piece


def _pieces(
    entries: Mapping[str, TensorInfo], head: Header, tensors: Iterable[tuple[str, Tensor]], most: int
) -> Iterator[tuple[int, Tensor]]:
    """The tensors' bytes in pieces of at most `most`, and where in the file each goes."""
    missing = set(entries)
    for name, tensor in tensors:
        if name not in missing:
            raise ValueError(f"{name} is none of the file's tensors, or came before.")
        missing.remove(name)
        said = entries[name]
        if tensor.dtype != said.dtype or tensor.shape != said.shape:
            found = TensorInfo(tensor.dtype, tuple(tensor.shape))
            raise ValueError(f"{name} was to be {said}, but it is {found}.")
        yield from _cut(tensor, len(head.data) + head.starts[name], most)
        del tensor  # here as below: while the next one is made, nothing is held of this one
    if missing:
        raise ValueError(f"{len(missing)} of the file's tensors did not come: {', '.join(sorted(missing)[:5])}.")


def _cut(tensor: Tensor, position: int, most: int) -> Iterator[tuple[int, Tensor]]:
    data = as_bytes(tensor)
    total = data.numel()
    for start in range(0, total, most):
        yield position + start, data if total <= most else data[start : start + most]


def _on_host(pieces: Iterator[tuple[int, Tensor]], most: int) -> Iterator[tuple[int, Tensor]]:
    """Pieces of at most `most` bytes, in host memory until the next is asked for.

    Those on a GPU come one late: each is on its way here while who takes them is busy with the one before.
    """
    buffers: list[Tensor] = []
    late: tuple[int, Tensor, Callable[[], object]] | None = None
    for position, piece in pieces:
        if piece.is_cpu:
            yield position, piece
            del piece
            continue
        if not buffers:
            buffers = [_buffer(most), _buffer(most)]
        here = buffers[0][: piece.numel()]
        wait = _begin_copy(here, piece)
        del piece
        if late is not None:
            late[2]()
            yield late[0], late[1]
        late = position, here, wait
        buffers.reverse()
    if late is not None:
        late[2]()
        yield late[0], late[1]


def _buffer(size: int) -> Tensor:
    """Pinned; torch keeps it for the next file when this one is done with it."""
    return torch.empty(size, dtype=torch.uint8, pin_memory=True)


def _begin_copy(here: Tensor, away: Tensor) -> Callable[[], object]:
    """Begin to copy from a GPU, after what is queued there. What is returned waits for it."""
    stream = torch.cuda.current_stream(away.device)
    here.copy_(away, non_blocking=True)
    away.record_stream(stream)  # it may be let go of at once, whichever stream it was made on
    copied = torch.cuda.Event()
    copied.record(stream)
    return copied.synchronize


@contextmanager
def _open(path: Path) -> Iterator[Callable[[memoryview, int], None]]:
    """A file, as a function that writes bytes at a position of it."""
    file = path.open("wb", buffering=0)
    number = file.fileno()

    def put(data: memoryview, position: int) -> None:
        try:
            while data:
                written = os.pwrite(number, data, position)  # which may be a part
                data, position = data[written:], position + written
        except OSError as error:
            raise _refused(path, error) from error

    try:
        yield put
        try:
            file.close()  # some file systems say only now that they have no room
        except OSError as error:
            raise _refused(path, error) from error
    finally:
        file.close()


def _refused(path: Path, error: OSError) -> OSError:
    return OSError(f"{path} could not be written: {error.strerror} (os error {error.errno}).")
