"""The one batch: packed tokens, their targets, and the caller's columns beside them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from postlude.ops.packing import Packing

IGNORE = -100
"""The target of a position that predicts nothing: the last one of each sequence."""


@dataclass(frozen=True, eq=False)
class Microbatch:
    """`n` sequences packed end to end over `T` tokens, everything aligned to the position that predicts.

    A microbatch may be empty (T = n = 0): it fills up the count and weighs nothing.
    """

    tokens: Tensor
    """[T] int64."""
    packing: Packing
    """Where each sequence lies."""
    positions: Tensor
    """[T] int64, each token's place in its own sequence."""
    targets: Tensor
    """[T] int64, the next token of the same sequence; `IGNORE` at each sequence's last position."""
    columns: Mapping[str, Tensor]
    """Each [T, ...]; entry t is the caller's value for token t + 1, zero at each sequence's last position."""
    sequences: tuple[int, ...]
    """The place of each packed sequence in the caller's list."""
    index: int
    """Which of the `count` microbatches of its batch this is."""
    count: int
    """The number of microbatches in the batch."""
    batch_tokens: int
    """The number of tokens in all microbatches of the batch."""
    batch_targets: int
    """The number of positions with a target in all microbatches: the denominator of a mean over the batch."""

    def __post_init__(self) -> None:
        total = self.packing.total
        for name in ("tokens", "positions", "targets"):
            tensor: Tensor = getattr(self, name)
            if tensor.shape != (total,) or tensor.dtype != torch.int64:
                raise ValueError(
                    f"{name} is {tensor.dtype} of shape {tuple(tensor.shape)}, but the packing holds {total} tokens. "
                    f"Give torch.int64 of shape ({total},)."
                )
        for name, column in self.columns.items():
            if column.ndim == 0 or column.shape[0] != total:
                raise ValueError(
                    f'column "{name}" has shape {tuple(column.shape)}, but the packing holds {total} tokens. '
                    f"Give one value per token, [{total}, ...]."
                )
        if len(self.sequences) != self.packing.count:
            raise ValueError(
                f"sequences names {len(self.sequences)} places, but {self.packing.count} sequences are packed. "
                f"Give the caller's index of each one."
            )
        if not 0 <= self.index < self.count:
            raise ValueError(
                f"index is {self.index}, but the batch has {self.count} microbatches. Count them from 0 to count - 1."
            )

    def __len__(self) -> int:
        """Return T, the number of tokens."""
        return self.packing.total

    @property
    def cu_seqlens(self) -> Tensor:
        """[n + 1] int32, the boundaries of the sequences."""
        return self.packing.cu_seqlens

    def column(self, name: str) -> Tensor:
        """Return the column `name`, [T, ...], aligned to the predicting position."""
        if name not in self.columns:
            available = ", ".join(f'"{other}"' for other in self.columns) or "none"
            raise LookupError(
                f'the microbatch has no column "{name}" (it has: {available}). Give it to pack(columns=...).'
            )
        return self.columns[name]

    def sequence_sum(self, values: Tensor) -> Tensor:
        """Sum `values` [T, ...] over each sequence: [n, ...], in float32 or wider, differentiable."""
        return self.packing.sum(values)

    def to(self, device: torch.device | str) -> Microbatch:
        """Return the same microbatch with every tensor on `device`."""
        return replace(
            self,
            tokens=self.tokens.to(device),
            packing=self.packing.to(device),
            positions=self.positions.to(device),
            targets=self.targets.to(device),
            columns={name: column.to(device) for name, column in self.columns.items()},
        )
