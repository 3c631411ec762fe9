"""RowGather: selects rows of a tensor, some several times. The order in which gradients are summed is fixed."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd import Function

from postlude.ops.packing import to_device

COPIES_AT_ONCE = 8  # gradients of one row that are read at once: bounds the memory of the backward


@dataclass(frozen=True, eq=False)
class RowGather:
    """`gather(source)` returns `source[rows]`: [S, ...] -> [R, ...].

    The gradient of a row is summed over its copies in fp32 and always in the same order, unlike that of torch's
    indexing on a GPU. Tables are made when they are first needed.
    """

    host_rows: NDArray[np.int64]
    """[R], on the host."""
    source_rows: int
    """S, the number of rows of a source."""
    device: torch.device | str | None = None

    @cached_property
    def rows(self) -> Tensor:
        """[R] int64."""
        return self._on_device(self.host_rows)

    @cached_property
    def copies(self) -> tuple[tuple[Tensor, Tensor], ...]:
        """For each number n ≥ 1 of copies: the source rows with n copies [u], and their indices in `rows` [u, n]."""
        counts = np.bincount(self.host_rows, minlength=self.source_rows)
        by_source, ends = np.argsort(self.host_rows, kind="stable"), np.cumsum(counts)
        copies = []
        for count in np.unique(counts[counts > 0]):
            sources = np.flatnonzero(counts == count)
            indices = by_source[(ends[sources] - count)[:, None] + np.arange(count)]
            copies.append((self._on_device(sources), self._on_device(indices)))
        return tuple(copies)

    def _on_device(self, array: NDArray[np.int64]) -> Tensor:
        return to_device(torch.from_numpy(array), self.device)

    def __call__(self, source: Tensor) -> Tensor:
        """Returns the rows, [R, ...]."""
        if len(source) != self.source_rows:
            raise ValueError(f"rows are gathered from {self.source_rows}, but the source has {len(source)}.")
        gathered: Tensor = _Gather.apply(source, self)
        return gathered

    def sum_copies(self, gathered: Tensor) -> Tensor:
        """Returns the sum over the copies of each source row, [R, ...] -> [S, ...]: the gradient of the gather."""
        total = gathered.new_zeros(self.source_rows, *gathered.shape[1:])
        for sources, copies in self.copies:
            first, *others = copies.split(COPIES_AT_ONCE, dim=1)
            if first.shape[1] == 1:
                total[sources] = gathered[first[:, 0]]
                continue
            dtype = torch.promote_types(gathered.dtype, torch.float32)
            addends = gathered[first].sum(1, dtype=dtype)
            for some in others:
                addends += gathered[some].sum(1, dtype=dtype)
            total[sources] = addends.to(total.dtype)
        return total

    def to(self, device: torch.device | str) -> RowGather:
        return RowGather(self.host_rows, self.source_rows, device)


class _Gather(Function):
    @staticmethod
    def forward(ctx: Any, source: Tensor, gather: RowGather) -> Tensor:
        ctx.gather = gather
        return source.index_select(0, gather.rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.gather.sum_copies(gradients[0]), None
