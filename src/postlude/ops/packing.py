"""Packing: the borders of sequences in packed tokens (THD layout), and indices derived from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Packing:
    """The lengths of `n` sequences laid end to end over `T` tokens, on the host and on the device.

    `lengths`: n integers, each at least 1; `n` may be 0. `cu_seqlens`: [n + 1] int32, their running sum from 0.
    The host copy means that no shape waits for the device. Operations cache tables made from the packing in `tables`.
    """

    lengths: tuple[int, ...]
    cu_seqlens: Tensor = field(compare=False)
    parents: tuple[int, ...] | None = None
    """Where sequences share their beginnings: by segment, the one that it continues, or -1. They are in the order of a
    depth-first walk, so what continues a segment follows it."""
    tables: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        for index, length in enumerate(self.lengths):
            if length < 1:
                raise ValueError(
                    f"packed sequence {index} has length {length}, but the minimum is 1. Leave out empty sequences."
                )
        if self.cu_seqlens.shape != (self.count + 1,) or self.cu_seqlens.dtype != torch.int32:
            raise ValueError(
                f"cu_seqlens is {self.cu_seqlens.dtype} of shape {tuple(self.cu_seqlens.shape)}, but "
                f"{self.count} lengths need torch.int32 of shape ({self.count + 1},). Use Packing.from_lengths."
            )

    @classmethod
    def from_lengths(
        cls,
        lengths: Sequence[int],
        device: torch.device | str | None = None,
        *,
        parents: tuple[int, ...] | None = None,
    ) -> Packing:
        boundaries = list(accumulate(lengths, initial=0))
        return cls(tuple(lengths), to_device(torch.tensor(boundaries, dtype=torch.int32), device), parents)

    @property
    def count(self) -> int:
        return len(self.lengths)

    @property
    def total(self) -> int:
        return sum(self.lengths)

    @property
    def max_length(self) -> int:
        return max(self.lengths, default=0)

    @property
    def longest_path(self) -> int:
        """The length of the longest sequence, with what its segment continues."""
        paths = zip(self.lengths, self.paths_above(), strict=True)
        return max((length + sum(self.lengths[above] for above in path) for length, path in paths), default=0)

    def paths_above(self) -> list[tuple[int, ...]]:
        """Returns the segments that each segment continues, from the first on."""
        paths: list[tuple[int, ...]] = []
        for parent in self.parents or (-1,) * self.count:
            paths.append(() if parent < 0 else (*paths[parent], parent))
        return paths

    def tree_lengths(self) -> list[int]:
        """Returns the number of tokens of each segment and of all that continue it."""
        tokens = list(self.lengths)
        for segment, path in reversed(list(enumerate(self.paths_above()))):
            if path:
                tokens[path[-1]] += tokens[segment]
        return tokens

    def slices(self) -> list[tuple[int, int]]:
        """Returns `(start, stop)` of each sequence, as host integers."""
        return list(pairwise(accumulate(self.lengths, initial=0)))

    def positions(self) -> Tensor:
        """Returns [T] int64: each token's position in its own sequence, from 0."""
        starts = self.cu_seqlens[self.sequence_index()]
        return torch.arange(self.total, device=self.cu_seqlens.device) - starts

    def sequence_index(self) -> Tensor:
        """Returns [T] int64: the sequence of each token."""
        sequences = torch.arange(self.count, device=self.cu_seqlens.device)
        return sequences.repeat_interleave(self.cu_seqlens.diff(), output_size=self.total)

    def sum(self, values: Tensor) -> Tensor:
        """Sums `values` [T, ...] over each sequence: [n, ...], differentiable.

        Floating values are summed in float32 or a wider dtype of their own, others in int64. On CUDA the order of
        summation is fixed only under `torch.use_deterministic_algorithms`.
        """
        if values.ndim == 0 or values.shape[0] != self.total:
            raise ValueError(
                f"values to sum have shape {tuple(values.shape)}, but the packing holds {self.total} tokens. "
                f"Give one value per token, [{self.total}, ...]."
            )
        counted = not (values.is_floating_point() or values.is_complex())
        dtype = torch.int64 if counted else torch.promote_types(values.dtype, torch.float32)
        sums = torch.zeros(self.count, *values.shape[1:], dtype=dtype, device=values.device)
        return sums.index_add(0, self.sequence_index(), values.to(dtype))

    def to(self, device: torch.device | str) -> Packing:
        return Packing(self.lengths, to_device(self.cu_seqlens, device), self.parents)


@dataclass(frozen=True)
class Rectangle:
    """Queries that all see the same keys: the rows of segments that continue a segment, and its first rows."""

    segment: int
    first_key: int
    keys: int
    first_query: int
    queries: int

    @property
    def key_rows(self) -> slice:
        return slice(self.first_key, self.first_key + self.keys)

    @property
    def query_rows(self) -> slice:
        return slice(self.first_query, self.first_query + self.queries)


def to_device(tensor: Tensor, device: torch.device | str | None) -> Tensor:
    """Returns the tensor on `device`. From host to GPU it is copied through pinned memory, without a wait."""
    if device is None:
        return tensor
    if tensor.device.type == "cpu" and torch.device(device).type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def copy_to_host(tensor: Tensor) -> Tensor:
    """Returns a copy on the host, which a GPU may still be writing."""
    if not tensor.is_cuda:
        return tensor.clone()
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
