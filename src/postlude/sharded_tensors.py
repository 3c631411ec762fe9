"""Tensors on disk in shards: each rank writes its own to one safetensors file; any rank reads any region.

The index, plain JSON, says which file has which shard of which tensor, and the length and checksum of each file:

    {"files": {"part-00000.safetensors": {"bytes": 4096, "crc32": 123}},
     "tensors": {"norm.weight": {"dtype": "F32", "shape": [128], "parts": [["part-00000.safetensors", [0], [128]]]}}}

It is merged from what each rank wrote, so no rank lists a directory or reads another's file.
"""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from postlude.safetensors_file import DTYPES, TensorInfo, as_bytes, build_header

BUCKET_BYTES = 1 << 28
STATE = "state.json"  # holds a directory's index, and is written last
FORMAT = 2
CheckpointIndex = dict[str, Any]


@dataclass(frozen=True)
class TensorShard:
    """A region of a tensor: its values, where it starts in the whole, and the shape of the whole."""

    values: Tensor
    start: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def size(self) -> tuple[int, ...]:
        return tuple(self.values.shape)


class StagingBuffers:
    """Host memory for one rank's shards, reused from one save to the next.

    Buckets are pinned if values come from a GPU, so that nothing is added to the GPU's memory. Together they are the
    data of the file.
    """

    def __init__(self, bucket_bytes: int = BUCKET_BYTES) -> None:
        self.bucket_bytes = bucket_bytes
        self.buckets: list[Tensor] = []
        self.pinned = False

    @torch.no_grad()
    def take(self, shards: Mapping[str, TensorShard]) -> StagedFile:
        """Copies these shards. The next `take` overwrites the copy."""
        head = build_header({name: TensorInfo(shard.values.dtype, shard.size) for name, shard in shards.items()})
        devices = {shard.values.device for shard in shards.values() if shard.values.is_cuda}
        self._fit(head.total, pinned=bool(devices))
        for name, start in head.starts.items():
            self._copy(shards[name].values, start)
        for device in devices:
            torch.cuda.synchronize(device)  # the copies are read by another thread
        without_values = {name: replace(shards[name], values=shards[name].values.to("meta")) for name in head.starts}
        return StagedFile(head.data, without_values, self.buckets)

    def _fit(self, total: int, *, pinned: bool) -> None:
        sizes = [min(self.bucket_bytes, total - start) for start in range(0, total, self.bucket_bytes)]
        if [len(bucket) for bucket in self.buckets] != sizes or self.pinned != pinned:
            self.buckets = []  # frees the old ones first
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
    """One rank's shards in host memory, ready to be written."""

    head: bytes
    shards: Mapping[str, TensorShard]
    """In the order of the file, without their values."""
    buckets: Sequence[Tensor]

    def write(self, path: Path) -> CheckpointIndex:
        """Writes the file. Returns its index; an empty one, without a file, if there are no shards."""
        if not self.shards:
            return {"files": {}, "tensors": {}}
        total, length = 0, 0
        with path.open("wb") as file:
            for chunk in (memoryview(self.head), *map(_bytes, self.buckets)):
                file.write(chunk)
                total = zlib.crc32(chunk, total)
                length += len(chunk)
            file.flush()
            os.fsync(file.fileno())  # rank 0 syncs what its own machine wrote
        tensors = {
            name: {
                "dtype": DTYPES[shard.values.dtype],
                "shape": list(shard.shape),
                "parts": [[path.name, list(shard.start), list(shard.size)]],
            }
            for name, shard in self.shards.items()
        }
        return {"files": {path.name: {"bytes": length, "crc32": total}}, "tensors": tensors}


def _bytes(bucket: Tensor) -> memoryview:
    view: memoryview = bucket.numpy().data
    return view


def merge_indexes(indexes: Iterable[CheckpointIndex]) -> CheckpointIndex:
    """Returns one index of several files."""
    merged: CheckpointIndex = {"files": {}, "tensors": {}}
    for index in indexes:
        merged["files"] |= index["files"]
        for name, entry in index["tensors"].items():
            known = merged["tensors"].setdefault(name, {**entry, "parts": []})
            known["parts"] += entry["parts"]
    return merged


def read_state(directory: Path, entries: Sequence[str] = ("files", "tensors")) -> dict[str, Any]:
    """Reads `state.json`: the index and other entries. Raises unless it has this format and these entries."""
    if not (directory / STATE).is_file():
        raise FileNotFoundError(f"{directory} has no {STATE}, so it is not a checkpoint, or not a complete one.")
    try:
        state: dict[str, Any] = json.loads((directory / STATE).read_text())
        version = state["format"]
        missing = [entry for entry in entries if entry not in state]
        if version == FORMAT and missing:
            raise ValueError(f"{missing[0]!r} is missing")
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{directory / STATE} cannot be read ({error}); load another checkpoint.") from error
    if version != FORMAT:
        raise ValueError(f"{directory} has format {version}, but this version of postlude reads format {FORMAT}.")
    parts = (part[0] for entry in state.get("tensors", {}).values() for part in entry["parts"])
    if outside := next((name for name in (*state.get("files", ()), *parts) if Path(name).name != name), None):
        raise ValueError(f"{directory / STATE} names {outside}, which is not beside it; load another checkpoint.")
    return state


def damaged_files(directory: Path, files: Mapping[str, Mapping[str, int]]) -> list[str]:
    """Returns which of these files differ from what was written. Raises FileNotFoundError if one is missing."""
    missing = [name for name in files if not (directory / name).is_file()]
    if missing:
        raise FileNotFoundError(f"{directory} lacks {', '.join(missing)}; load another checkpoint.")
    return [
        name
        for name, entry in files.items()
        if (directory / name).stat().st_size != entry["bytes"] or crc32(directory / name) != entry["crc32"]
    ]


def crc32(path: Path) -> int:
    """Returns the checksum of a file."""
    total = 0
    with path.open("rb") as file:
        while chunk := file.read(1 << 22):
            total = zlib.crc32(chunk, total)
    return total


class ShardReader:
    """Reads regions of the tensors in a directory, by its index. It opens only the files that it needs."""

    def __init__(self, directory: Path, index: CheckpointIndex) -> None:
        self.directory, self.tensors = directory, index["tensors"]
        self._open: dict[str, safe_open] = {}

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape of the whole tensor."""
        return tuple(self.tensors[name]["shape"])

    def read(self, name: str, start: Sequence[int] | None = None, size: Sequence[int] | None = None) -> Tensor:
        """Reads one region of a tensor to the CPU; all of it by default."""
        shape = self.shape(name)
        dtype = next(dtype for dtype, text in DTYPES.items() if text == self.tensors[name]["dtype"])
        values = torch.empty(tuple(shape if size is None else size), dtype=dtype)
        shard = TensorShard(values, tuple((0,) * len(shape) if start is None else start), shape)
        for file, overlap in self._overlaps(name, shard):
            self._copy(file, name, shard, overlap)
        return values

    @torch.no_grad()
    def read_into(self, shards: Mapping[str, TensorShard]) -> None:
        """Overwrites the values of these shards, file by file."""
        by_file: dict[str, list[tuple[str, TensorShard, _Overlap]]] = {}
        for name, shard in shards.items():
            for file, overlap in self._overlaps(name, shard):
                by_file.setdefault(file, []).append((name, shard, overlap))
        for file in sorted(by_file):
            for name, shard, overlap in by_file[file]:
                self._copy(file, name, shard, overlap)
            del self._open[file]

    def _overlaps(self, name: str, shard: TensorShard) -> list[tuple[str, _Overlap]]:
        """Returns the files that have parts of a shard, and which."""
        overlaps, covered = [], 0
        for file, start, size in self.tensors[name]["parts"]:
            low = [max(saved, first) for saved, first in zip(start, shard.start, strict=True)]
            high = [
                min(saved + saved_size, first + count)
                for saved, saved_size, first, count in zip(start, size, shard.start, shard.size, strict=True)
            ]
            if all(begin < end for begin, end in zip(low, high, strict=True)):
                overlaps.append((file, (_slices(low, high, start), _slices(low, high, shard.start))))
                covered += math.prod(end - begin for begin, end in zip(low, high, strict=True))
        if covered != shard.values.numel():
            raise ValueError(f"{self.directory} does not hold all of {name}; load another checkpoint.")
        return overlaps

    def _copy(self, file: str, name: str, shard: TensorShard, overlap: _Overlap) -> None:
        if file not in self._open:
            try:
                self._open[file] = safe_open(self.directory / file, framework="pt", device="cpu")
            except (SafetensorError, OSError) as error:
                raise ValueError(
                    f"{self.directory / file} is not a readable safetensors file ({error}); load another checkpoint."
                ) from error
        in_file, in_shard = overlap
        if in_file:
            shard.values[in_shard].copy_(self._open[file].get_slice(name)[in_file])
        else:  # a single number has no slices
            shard.values.copy_(self._open[file].get_tensor(name))


_Overlap = tuple[tuple[slice, ...], tuple[slice, ...]]
"""The overlap of two shards, as slices of the one in a file and of the requested one."""


def _slices(low: Sequence[int], high: Sequence[int], origin: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(begin - zero, end - zero) for begin, end, zero in zip(low, high, origin, strict=True))
