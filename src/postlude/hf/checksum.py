"""Digests of weights, none of them cryptographic: `checksum` of files, and sums over tensors."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from postlude.hf.family import TensorSource
from postlude.hf.tensor_sources import SafetensorsSource

LINE = 8192  # words in a row of `word_sum`
MULTIPLIERS = (-0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15)  # of splitmix64


class ChecksummedSource:
    """The tensors of a source, each summed up as it is taken."""

    def __init__(self, source: TensorSource) -> None:
        self.source = source
        self._sums: dict[str, str] = {}

    def names(self) -> Iterable[str]:
        return self.source.names()

    def take(self, name: str) -> Tensor:
        tensor = self.source.take(name)
        self._sums[name] = f"{tensor.dtype} {tuple(tensor.shape)} {int(word_sum(tensor))}"
        return tensor

    def shape(self, name: str) -> tuple[int, ...]:
        return self.source.shape(name)

    def checksum(self) -> str:
        """Returns the checksum of all tensors. Reads those that were not taken yet."""
        for name in self.names():
            if name not in self._sums:
                self.take(name)
        lines = (f"{name} {self._sums[name]}\n" for name in sorted(self._sums))
        return hashlib.blake2b("".join(lines).encode(), digest_size=16).hexdigest()


def checksum(directory: Path) -> str:
    """Returns the checksum of a directory's safetensors: names, dtypes, shapes and values."""
    return ChecksummedSource(SafetensorsSource(directory)).checksum()


def word_sum(tensor: Tensor) -> Tensor:
    """Returns a sum of a tensor's bytes that depends on their order: [] int64, modulo 2 ** 64."""
    data = tensor.contiguous().flatten().view(torch.uint8)
    words = (F.pad(data, (0, -len(data) % 4)) if len(data) % 4 else data).view(torch.int32)
    rows, rest = divmod(len(words), LINE)
    total = position_sum(words[: len(words) - rest].view(rows, LINE), (rows + 1, LINE), (0, 0))
    return total + position_sum(words[len(words) - rest :].view(1, rest), (rows + 1, LINE), (rows, 0))


def position_sum(values: Tensor, shape: Sequence[int], start: Sequence[int]) -> Tensor:
    """Returns the sum of integers of at most 32 bits, each times a weight that its position gives: [] int64.

    `values` are the part from `start` on of a tensor of `shape`. The sums of all parts add up, modulo 2 ** 64, to that
    of the whole, however it is divided.
    """
    if not values.numel():
        return values.new_zeros((), dtype=torch.int64)
    row = torch.zeros((), dtype=torch.int64, device=values.device)  # its number, among those of the whole tensor
    for size, first, length in zip(shape[:-1], start, values.shape, strict=False):
        row = row.unsqueeze(-1) * size + torch.arange(first, first + length, device=values.device)
    columns = values.shape[-1] if values.dim() else 1
    column = torch.arange(columns, device=values.device) + (start[-1] if values.dim() else 0)
    row_weights, column_weights = _weights(row.flatten(), 1), _weights(column, 2)
    matrix = values.reshape(-1, columns)
    step = max(1, (1 << 24 if values.is_cuda else 1 << 18) // columns)  # rows that are widened to int64 at a time
    sums = [(rows.long().mul_(column_weights)).sum(1) for rows in matrix.split(step)]
    return (torch.cat(sums) * row_weights).sum()


def name_weight(name: str) -> int:
    """Returns an odd number of 64 bits by which the sum over a tensor of this name is multiplied."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little", signed=True) | 1


def _weights(positions: Tensor, seed: int) -> Tensor:
    """Returns an odd number for each position, as if it were random."""
    weights = positions + (seed << 60)
    for multiplier in MULTIPLIERS:
        weights = (weights ^ (weights >> 30)) * multiplier
    return (weights ^ (weights >> 31)) | 1
