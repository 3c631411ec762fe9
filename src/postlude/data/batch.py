"""Batch: the caller's sequences and columns, before they are packed."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """Sequences of tokens, and columns that say something about each token or each sequence.

    It is the *global* batch: every rank has all of it, the same. A column holds one entry per sequence: its value for
    every token, [length, ...], or one scalar for all of them; the value of token i is seen where token i is predicted.
    `groups`, one per sequence, keep sequences together in a microbatch, such as the two of a pair.
    """

    sequences: Sequence[Sequence[int] | Tensor]
    columns: Mapping[str, Sequence[Any] | Tensor] = field(default_factory=dict)
    groups: Sequence[Hashable] | None = None

    def __len__(self) -> int:
        """The number of sequences."""
        return len(self.sequences)

    @property
    def lengths(self) -> list[int]:
        """Tokens of each sequence."""
        return [len(sequence) for sequence in self.sequences]
