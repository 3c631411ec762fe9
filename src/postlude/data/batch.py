"""Batch: the caller's sequences and columns, before they are packed."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class BatchSharding:
    """Which part of a batch a rank was given."""

    lengths: Sequence[int]
    """Tokens of every sequence of the batch."""
    owners: Sequence[int]
    """For each of them, the data-parallel rank that holds it."""
    bins: Sequence[Sequence[int]] | None = None
    """The plan of microbatches, if it was made already: bin k is of data-parallel rank k % ranks."""
    budget: int | None = None
    """The tokens of a microbatch that `bins` were planned for."""


@dataclass(frozen=True)
class Batch:
    """Sequences of tokens, and columns that say something about each token or each sequence.

    It is the *global* batch: every rank has all of it, the same. `Batch.sharded` makes one of which each rank has
    its own sequences only. A column holds one entry per sequence given: its value for every token, [length, ...],
    or one scalar for all of them; the value of token i is seen where token i is predicted. Only what "routing"
    says of token i, the experts that it is sent to ([length, routers, top_k]), is seen where it is the input.
    `groups`, one per sequence of the global batch, keep sequences together in a microbatch, such as the two of a pair.
    """

    sequences: Sequence[Sequence[int] | Tensor]
    columns: Mapping[str, Sequence[Any] | Tensor] = field(default_factory=dict)
    groups: Sequence[Hashable] | None = None
    sharding: BatchSharding | None = None

    @classmethod
    def sharded(
        cls,
        sequences: Sequence[Sequence[int] | Tensor],
        columns: Mapping[str, Sequence[Any] | Tensor] | None = None,
        *,
        lengths: Sequence[int],
        owners: Sequence[int],
        groups: Sequence[Hashable] | None = None,
    ) -> Batch:
        """A batch of which this rank holds a part, such as the rollouts that were made here.

        Every rank passes the same `lengths`, of all sequences of the batch; the same `owners`, the data-parallel rank
        (`engine.mesh.dp.rank`) of each, which also runs it; the same `groups`, each within one holder; and the same
        names of columns. `sequences` are this rank's own, in the order in which `lengths` lists them, and columns have
        one entry for each. Ranks that differ in pp, cp or tp alone hold the same. A rank may hold none.

        What is asked of an engine with it comes back for the sequences held here, in their order.
        """
        return cls(sequences, columns or {}, groups, BatchSharding(list(lengths), list(owners)))

    def __len__(self) -> int:
        """The number of sequences in the global batch."""
        return len(self.sequences) if self.sharding is None else len(self.sharding.lengths)

    @property
    def lengths(self) -> list[int]:
        """Tokens of each sequence of the global batch."""
        return [len(sequence) for sequence in self.sequences] if self.sharding is None else list(self.sharding.lengths)
