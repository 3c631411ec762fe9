"""checksum: a digest of weights, by which a writer and a reader check that they agree."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from postlude.hf.family import TensorSource
from postlude.hf.tensor_sources import SafetensorsSource

LINE = 4096  # words of 8 bytes that are summed without regard to their order


class ChecksummedSource:
    """The tensors of a source, each summed up as it is taken."""

    def __init__(self, source: TensorSource) -> None:
        self.source = source
        self._sums: dict[str, str] = {}

    def names(self) -> Iterable[str]:
        """Returns the names of all tensors."""
        return self.source.names()

    def take(self, name: str) -> Tensor:
        """Returns one tensor."""
        tensor = self.source.take(name)
        self._sums[name] = f"{tensor.dtype} {tuple(tensor.shape)} {int(word_sum(tensor))}"
        return tensor

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape of one tensor."""
        return self.source.shape(name)

    def checksum(self) -> str:
        """Returns the checksum of all tensors. Reads those that were not taken yet."""
        for name in self.names():
            if name not in self._sums:
                self.take(name)
        lines = (f"{name} {self._sums[name]}\n" for name in sorted(self._sums))
        return hashlib.blake2b("".join(lines).encode(), digest_size=16).hexdigest()


def checksum(directory: Path) -> str:
    """Returns the checksum of a directory's safetensors: names, dtypes, shapes and values. It is not cryptographic."""
    return ChecksummedSource(SafetensorsSource(directory)).checksum()


def word_sum(tensor: Tensor) -> Tensor:
    """Returns a sum of a tensor's bytes as words, weighted by line: [] int64, modulo 2 ** 64."""
    data = tensor.contiguous().flatten().view(torch.uint8)
    words = (F.pad(data, (0, -len(data) % 8)) if len(data) % 8 else data).view(torch.int64)
    aligned = len(words) // LINE * LINE
    lines = torch.cat((words[:aligned].view(-1, LINE).sum(1), words[aligned:]))
    return (lines * (2 * torch.arange(len(lines), device=lines.device) + 1)).sum()
