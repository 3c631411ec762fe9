"""Tensors on disk in parts: each rank writes what it holds to a safetensors file of its own; any rank reads any box.

The catalogue, plain JSON, says which file has which part of which tensor, how long each file is and what it sums up to:

    {"files": {"part-00000.safetensors": {"bytes": 4096, "crc32": 123}},
     "tensors": {"norm.weight": {"dtype": "F32", "shape": [128], "parts": [["part-00000.safetensors", [0], [128]]]}}}

It is made of what the ranks say they wrote, so nobody lists a directory or reads another's file to know it.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from postlude.safetensors_file import DTYPES, TensorInfo, as_bytes, build_header

BUCKET_BYTES = 1 << 28
STATE = "state.json"  # what holds a directory's catalogue, and is written last
FORMAT = 2
CheckpointIndex = dict[str, Any]


@dataclass(frozen=True)
class TensorShard:
    """A box of a tensor: its values, where in the whole it begins, and the shape of the whole."""

    values: Tensor
    start: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def size(self) -> tuple[int, ...]:
        """Its extent."""
        return tuple(self.values.shape)

    @property
    def outline(self) -> ShardInfo:
        """All of it but the values."""
        return ShardInfo(DTYPES[self.values.dtype], self.start, self.size, self.shape)


@dataclass(frozen=True)
class ShardInfo:
    """A part without its values."""

    dtype: str
    start: tuple[int, ...]
    size: tuple[int, ...]
    shape: tuple[int, ...]


class StagingBuffers:
    """Host memory for one rank's parts, kept from one save to the next.

    It is filled in buckets, pinned where values come from a GPU: nothing is added to the GPU's memory, and the buckets
    one after another are the data of the file to be written.
    """

    def __init__(self, bucket_bytes: int = BUCKET_BYTES) -> None:
        self.bucket_bytes = bucket_bytes
        self.buckets: list[Tensor] = []
        self.pinned = False

    @torch.no_grad()
    def take(self, parts: Mapping[str, TensorShard]) -> StagedFile:
        """A copy of these parts as they are now. It is overwritten by the next one taken."""
        head = build_header({name: TensorInfo(part.values.dtype, part.size) for name, part in parts.items()})
        devices = {part.values.device for part in parts.values() if part.values.is_cuda}
        self._fit(head.total, pinned=bool(devices))
        for name, start in head.starts.items():
            self._copy(parts[name].values, start)
        for device in devices:
            torch.cuda.synchronize(device)  # the copies are read by another thread
        return StagedFile(head.data, {name: parts[name].outline for name in head.starts}, self.buckets)

    def _fit(self, total: int, *, pinned: bool) -> None:
        sizes = [min(self.bucket_bytes, total - start) for start in range(0, total, self.bucket_bytes)]
        if [len(bucket) for bucket in self.buckets] != sizes or self.pinned != pinned:
            self.buckets = []  # let go of the old ones first
            self.pinned = pinned
            self.buckets = [torch.empty(size, dtype=torch.uint8, pin_memory=pinned) for size in sizes]

    def _copy(self, values: Tensor, position: int) -> None:
        flat = as_bytes(values)
        done = 0
        while done < len(flat):
            bucket, offset = divmod(position + done, self.bucket_bytes)
            count = min(len(flat) - done, self.bucket_bytes - offset)
            self.buckets[bucket][offset : offset + count].copy_(flat[done : done + count], non_blocking=True)
            done += count


@dataclass(frozen=True)
class StagedFile:
    """One rank's parts in host memory, ready to be written."""

    head: bytes
    parts: Mapping[str, ShardInfo]
    buckets: Sequence[Tensor]

    def write(self, path: Path) -> CheckpointIndex:
        """Write the file, and return the catalogue of it alone; an empty one, and no file, if there are no parts."""
        if not self.parts:
            return {"files": {}, "tensors": {}}
        total, length = 0, 0
        with path.open("wb") as file:
            for chunk in (memoryview(self.head), *map(_bytes, self.buckets)):
                file.write(chunk)
                total = zlib.crc32(chunk, total)
                length += len(chunk)
        tensors = {
            name: {
                "dtype": part.dtype,
                "shape": list(part.shape),
                "parts": [[path.name, list(part.start), list(part.size)]],
            }
            for name, part in self.parts.items()
        }
        return {"files": {path.name: {"bytes": length, "crc32": total}}, "tensors": tensors}


def _bytes(bucket: Tensor) -> memoryview:
    view: memoryview = bucket.numpy().data
    return view


def merge_indexes(catalogues: Iterable[CheckpointIndex]) -> CheckpointIndex:
    """One catalogue of several files."""
    whole: CheckpointIndex = {"files": {}, "tensors": {}}
    for each in catalogues:
        whole["files"] |= each["files"]
        for name, entry in each["tensors"].items():
            known = whole["tensors"].setdefault(name, {**entry, "parts": []})
            known["parts"] += entry["parts"]
    return whole


def read_state(directory: Path, entries: Sequence[str] = ("files", "tensors")) -> dict[str, Any]:
    """What `state.json` says: the catalogue and whatever else, if it is of this version and has these entries."""
    if not (directory / STATE).is_file():
        raise FileNotFoundError(f"{directory} has no {STATE}, so it is not a checkpoint, or not a complete one.")
    try:
        state: dict[str, Any] = json.loads((directory / STATE).read_text())
        found = state["format"]
        missing = [entry for entry in entries if entry not in state]
        if found == FORMAT and missing:
            raise ValueError(f"{missing[0]!r} is missing")
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{directory / STATE} cannot be read ({error}); load another checkpoint.") from error
    if found != FORMAT:
        raise ValueError(f"{directory} has format {found}, but this version of postlude reads format {FORMAT}.")
    return state


def damaged_files(directory: Path, files: Mapping[str, Mapping[str, int]]) -> list[str]:
    """Which of these files are not what was written. A missing one is an error of its own."""
    missing = [name for name in files if not (directory / name).is_file()]
    if missing:
        raise FileNotFoundError(f"{directory} lacks {', '.join(missing)}; load another checkpoint.")
    return [
        name
        for name, entry in files.items()
        if (directory / name).stat().st_size != entry["bytes"] or crc32(directory / name) != entry["crc32"]
    ]


def crc32(path: Path) -> int:
    """The sum of a file's bytes."""
    total = 0
    with path.open("rb") as file:
        while chunk := file.read(1 << 22):
            total = zlib.crc32(chunk, total)
    return total


class ShardReader:
    """Boxes of the tensors in a directory, by its catalogue. It opens only the files that hold what is asked for."""

    def __init__(self, directory: Path, catalogue: CheckpointIndex) -> None:
        self.directory, self.tensors = directory, catalogue["tensors"]
        self._open: dict[str, safe_open] = {}

    def shape(self, name: str) -> tuple[int, ...]:
        """Of the whole tensor."""
        return tuple(self.tensors[name]["shape"])

    def read(self, name: str, start: Sequence[int] | None = None, size: Sequence[int] | None = None) -> Tensor:
        """One box of a tensor, on the CPU; all of it by default."""
        shape = self.shape(name)
        dtype = next(dtype for dtype, text in DTYPES.items() if text == self.tensors[name]["dtype"])
        values = torch.empty(tuple(shape if size is None else size), dtype=dtype)
        part = TensorShard(values, tuple((0,) * len(shape) if start is None else start), shape)
        for file, box in self._boxes(name, part):
            self._copy(file, name, part, box)
        return values

    @torch.no_grad()
    def read_into(self, parts: Mapping[str, TensorShard]) -> None:
        """Overwrite the values of these parts, file by file."""
        by_file: dict[str, list[tuple[str, TensorShard, _Box]]] = {}
        for name, part in parts.items():
            for file, box in self._boxes(name, part):
                by_file.setdefault(file, []).append((name, part, box))
        for file in sorted(by_file):
            for name, part, box in by_file[file]:
                self._copy(file, name, part, box)
            del self._open[file]

    def _boxes(self, name: str, part: TensorShard) -> list[tuple[str, _Box]]:
        """Which files have a part, and what of it."""
        found, covered = [], 0
        for file, start, size in self.tensors[name]["parts"]:
            low = [max(one, other) for one, other in zip(start, part.start, strict=True)]
            high = [
                min(one + length, other + wanted)
                for one, length, other, wanted in zip(start, size, part.start, part.size, strict=True)
            ]
            if all(begin < end for begin, end in zip(low, high, strict=True)):
                found.append((file, (_slices(low, high, start), _slices(low, high, part.start))))
                covered += math.prod(end - begin for begin, end in zip(low, high, strict=True))
        if covered != part.values.numel():
            raise ValueError(f"{self.directory} does not hold all of {name}; load another checkpoint.")
        return found

    def _copy(self, file: str, name: str, part: TensorShard, box: _Box) -> None:
        if file not in self._open:
            try:
                self._open[file] = safe_open(self.directory / file, framework="pt", device="cpu")
            except (SafetensorError, OSError) as error:
                raise ValueError(
                    f"{self.directory / file} is not a readable safetensors file ({error}); load another checkpoint."
                ) from error
        there, here = box
        if there:
            part.values[here].copy_(self._open[file].get_slice(name)[there])
        else:  # a single number has no slices
            part.values.copy_(self._open[file].get_tensor(name))


_Box = tuple[tuple[slice, ...], tuple[slice, ...]]
"""What two parts of a tensor have in common, as slices of the one in a file and of the one asked for."""


def _slices(low: Sequence[int], high: Sequence[int], origin: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(begin - zero, end - zero) for begin, end, zero in zip(low, high, origin, strict=True))
