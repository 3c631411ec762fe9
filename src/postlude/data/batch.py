"""Batch: the caller's sequences and columns, before they are packed."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class BatchSharding:
    """Which rank holds which sequences of a batch."""

    lengths: Sequence[int]
    """The number of tokens of every sequence of the batch."""
    owners: Sequence[int]
    """The data-parallel rank that holds each sequence."""
    bins: Sequence[Sequence[int]] | None = None
    """The plan of microbatches, if it was made already. Bin k belongs to data-parallel rank k % ranks."""
    budget: int | None = None
    """The token budget that `bins` were planned with."""


@dataclass(frozen=True)
class Batch:
    """Sequences of tokens, and columns of values per token or per sequence.

    It is the *global* batch, equal on every rank. `Batch.sharded` makes one of which each rank has only its own
    sequences. A column has one entry per sequence: a value for every token, [length, ...], or one scalar for all. The
    value of token i is aligned to the position that predicts it. Only "routing", the experts of each token ([length,
    routers, top_k]), is aligned to the token itself. `groups`, one per sequence of the global batch, keep sequences in
    one microbatch, such as the two of a pair.
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
        """Returns a batch of which this rank holds a part, such as its own rollouts.

        Every rank passes the same `lengths` of all sequences of the batch; the same `owners`, the data-parallel rank
        (`engine.mesh.dp.rank`) that holds and runs each; the same `groups`, each with one owner; and the same names of
        columns. `sequences` are this rank's own, in the order of `lengths`, and columns have one entry for each. Ranks
        that differ only in pp, cp or tp hold the same sequences. A rank may hold none.

        Results of an engine are for the sequences held here, in their order.
        """
        return cls(sequences, columns or {}, groups, BatchSharding(list(lengths), list(owners)))

    def __len__(self) -> int:
        """The number of sequences of the global batch."""
        return len(self.sequences) if self.sharding is None else len(self.sharding.lengths)

    @property
    def lengths(self) -> list[int]:
        """The number of tokens of each sequence of the global batch."""
        return [len(sequence) for sequence in self.sequences] if self.sharding is None else list(self.sharding.lengths)
