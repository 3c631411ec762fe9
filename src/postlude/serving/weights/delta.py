"""Weights as pieces of bytes for servers that are far: those that changed since another version, or all.

A changed number is the distance to the one before and the exclusive or of its old and new bits, both in planes of
bytes, which zlib compresses well: most distances and differences are small. A piece is the length of its header, the
header in JSON, and the numbers. `ReceivedWeights` puts pieces together on a server and checks the result's checksum.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from postlude.hf.tensor_sources import ChecksummedSource, MemorySource, SafetensorsSource, checksum
from postlude.serving.request_body import Body, parse

DELTA = "delta"  # in the directory of a version: pieces of what changed
RANGE = 1 << 23  # numbers of a tensor that are compared at a time
PIECE_BYTES = 1 << 24  # before compression; a piece ends with the range that exceeds it
MAX_PIECE_BYTES = 1 << 27
LENGTH_BYTES = 8
COMPRESSION = 1  # zlib's level: others are much slower, and a few per cent smaller
WORDS: Mapping[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


@dataclass(frozen=True)
class WeightPieces:
    """The pieces of the weights in a directory."""

    directory: Path
    version: str
    checksum: str
    base: str | None = None
    """The version that `DELTA` in the directory has the changes from; None without."""
    changed: int = 0
    total: int = 0
    """How many numbers changed since `base`, of how many."""

    @classmethod
    def of(cls, directory: Path, version: str, base: Path | None) -> WeightPieces:
        """Writes what changed since the weights in the directory `base`, whose name is their version."""
        complete = cls(directory, version, checksum(directory))
        if base is None:
            return complete
        (directory / DELTA).mkdir()
        counts = np.zeros(2, dtype=np.int64)
        for index, piece in enumerate(_pieces(complete, base, counts)):
            (directory / DELTA / f"{index:06}").write_bytes(piece)
        changed, total = counts.tolist()
        return cls(directory, version, complete.checksum, base.name, changed, total)

    @property
    def delta_bytes(self) -> int:
        return sum(file.stat().st_size for file in (self.directory / DELTA).iterdir())

    def pieces(self) -> Iterator[bytes]:
        """Yields the pieces of what changed since `base`; without one, of all weights."""
        if self.base is None:
            yield from _pieces(self, None)
        else:
            for path in sorted((self.directory / DELTA).iterdir()):
                yield path.read_bytes()


Count = Annotated[int, Field(ge=0)]


class _Range(Body):
    """Some numbers of a tensor, from `start` on. `changed` is how many follow as changes; None if all follow."""

    name: str
    dtype: str
    shape: tuple[Count, ...]
    start: Count
    length: Count
    changed: Count | None


class _Header(Body):
    version: str
    base: str | None
    checksum: str
    index: Count
    last: bool
    tensors: tuple[_Range, ...]


class ReceivedWeights:
    """The weights that a server was sent in pieces, on the CPU, for the pieces of the next version."""

    def __init__(self) -> None:
        self.version: str | None = None
        """None while pieces are missing."""
        self._tensors: dict[str, Tensor] = {}
        self._unfinished, self._next_index = "", 0

    @property
    def source(self) -> MemorySource:
        return MemorySource(dict(self._tensors))

    def add(self, piece: bytes) -> bool:
        """Adds the next piece. Returns whether it was the last. A ValueError says why all weights must be sent."""
        try:
            return self._add(*_read(piece))
        except Exception:
            self.version, self._tensors, self._next_index = None, {}, 0
            raise

    def _add(self, header: _Header, content: memoryview) -> bool:
        version, index = header.version, header.index
        if index == 0:
            if header.base is None:
                self._tensors = {}
            elif header.base != self.version:
                raise ValueError(f"changes since {header.base!r} were sent, but here is {self.version!r}")
            self.version, self._unfinished, self._next_index = None, version, 0
        if (version, index) != (self._unfinished, self._next_index):
            raise ValueError(
                f"piece {index} of {version!r} was sent, but piece {self._next_index} of {self._unfinished!r} is next"
            )
        self._next_index += 1
        for place in header.tensors:
            try:
                content = self._apply(place, content)
            except (LookupError, RuntimeError, TypeError, ValueError) as error:  # it fits neither tensor nor content
                raise ValueError(f"a piece of weights has no valid range of {place.name!r:.80}: {error!r}") from error
        if not header.last:
            return False
        if (actual := ChecksummedSource(self.source).checksum()) != header.checksum:
            raise ValueError(f"all pieces of {version!r} give weights of checksum {actual}, not {header.checksum}")
        self.version = version
        return True

    def _apply(self, place: _Range, content: memoryview) -> memoryview:
        """Writes the numbers of one range. Returns the content after them."""
        name = place.name
        if place.changed is None and place.start == 0:
            dtype = getattr(torch, place.dtype, None)
            if not isinstance(dtype, torch.dtype):
                raise ValueError(f"{place.dtype!r:.40} is no dtype")
            self._tensors[name] = torch.empty(place.shape, dtype=dtype)
        words = _words(self._tensors[name])[place.start : place.start + place.length]
        if place.changed is None:
            words[:] = np.frombuffer(content, words.dtype, place.length)
            return content[words.nbytes :]
        count, size = place.changed, words.itemsize
        gaps = _from_planes(content, WORDS[4], count)
        words[np.cumsum(gaps, dtype=np.int64)] ^= _from_planes(content[4 * count :], words.dtype, count)
        return content[(4 + size) * count :]


def _pieces(weights: WeightPieces, base: Path | None, counts: NDArray[np.int64] | None = None) -> Iterator[bytes]:
    """Yields pieces. Adds to `counts` how many numbers changed, of how many."""
    header = {"version": weights.version, "base": None if base is None else base.name, "checksum": weights.checksum}
    entries: list[dict[str, Any]] = []
    parts: list[bytes] = []
    index = 0

    def finished(*, last: bool) -> bytes:
        head = json.dumps(header | {"index": index, "last": last, "tensors": entries}).encode()
        content = b"".join(parts)
        content = content if base is None else zlib.compress(content, COMPRESSION)
        return len(head).to_bytes(LENGTH_BYTES, "little") + head + content

    for entry, numbers in _ranges(SafetensorsSource(weights.directory), base):
        if counts is not None:
            counts += (entry["changed"] or 0, entry["length"])
        if numbers or base is None:
            entries.append(entry)
            parts.append(numbers)
        if sum(map(len, parts)) > PIECE_BYTES:
            yield finished(last=False)
            entries, parts, index = [], [], index + 1
    yield finished(last=True)


def _ranges(new: SafetensorsSource, base: Path | None) -> Iterator[tuple[dict[str, Any], bytes]]:
    """Yields each range of each tensor, and its numbers or those that changed."""
    old = None if base is None else SafetensorsSource(base)
    for name in new.names():
        tensor = new.take(name)
        before = None if old is None else _words(old.take(name))
        words = _words(tensor)
        for start in range(0, max(1, len(words)), RANGE):
            part = words[start : start + RANGE]
            entry = {
                "name": name,
                "dtype": str(tensor.dtype).removeprefix("torch."),
                "shape": list(tensor.shape),
                "start": start,
                "length": len(part),
                "changed": None,
            }
            if before is None:
                yield entry, part.tobytes()
                continue
            difference = part ^ before[start : start + RANGE]
            positions = difference.nonzero()[0]
            gaps = np.diff(positions, prepend=0).astype(np.uint32)
            yield entry | {"changed": len(positions)}, _planes(gaps) + _planes(difference[positions])


def _read(piece: bytes) -> tuple[_Header, memoryview]:
    start = LENGTH_BYTES + int.from_bytes(piece[:LENGTH_BYTES], "little")
    try:
        header, content = parse(_Header, piece[LENGTH_BYTES:start]), piece[start:]
        return header, memoryview(content if header.base is None else zlib.decompress(content))
    except (ValueError, zlib.error) as error:
        raise ValueError(f"a piece of weights cannot be read: {error}") from error


def _words(tensor: Tensor) -> NDArray[Any]:
    """Returns the numbers of a tensor as unsigned integers of their size, in its memory."""
    words: NDArray[Any] = tensor.contiguous().flatten().view(torch.uint8).numpy().view(WORDS[tensor.element_size()])
    return words


def _planes(values: NDArray[Any]) -> bytes:
    """Returns the first bytes of all values, then the second ones, and so on."""
    return values.view(np.uint8).reshape(len(values), values.itemsize).T.tobytes()


def _from_planes(content: memoryview, dtype: Any, count: int) -> NDArray[Any]:
    size = np.dtype(dtype).itemsize
    planes = np.frombuffer(content, np.uint8, size * count).reshape(size, count)
    values: NDArray[Any] = np.ascontiguousarray(planes.T).view(dtype)[:, 0]
    return values
