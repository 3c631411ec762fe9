"""Batch: the caller's sequences and columns, before they are packed."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from postlude.data.prefix_tree import PrefixOrder


@dataclass(frozen=True)
class BatchSharding:
    """How the sequences of a batch are divided over data-parallel ranks."""

    lengths: Sequence[int]
    """The number of tokens of every sequence of the batch."""
    owners: Sequence[int]
    """The data-parallel rank that holds each sequence."""
    bins: Sequence[Sequence[int]] | None = None
    """The sequences of each microbatch, if they are planned already. Bin k belongs to data-parallel rank k % ranks."""
    budget: int | None = None
    """The token budget that `bins` were planned with."""
    prefixes: PrefixOrder | None = None
    """The shared tokens that `bins` were planned with."""


@dataclass(frozen=True)
class Batch:
    """Sequences of tokens, and columns of values per token or per sequence.

    All ranks pass the same *global* batch. With `Batch.sharded` each rank passes only its own sequences.

    A column has one entry per sequence: a tensor [length, ...] with one value per token, or one scalar for all tokens.
    Packing shifts a column by one: the value of token i goes to position i - 1, which predicts token i. The column
    "routing", [length, routers, top_k], is not shifted: entry i has the experts of token i as an input. With the column
    "sampling_mask", [length, k] token ids plus 1 and 0 for none, log-probs and entropies are those of the distribution
    over the tokens of the mask; of an empty one, over the vocabulary.

    `groups` has one entry per sequence of the global batch. Sequences of the same group stay in one microbatch, such as
    chosen and rejected of a preference pair. GRPO's groups are not given here: microbatches may divide them.

    `temperature` is the one that the tokens were sampled with. All log-probs of the batch are computed at it.
    """

    sequences: Sequence[Sequence[int] | Tensor]
    columns: Mapping[str, Sequence[Any] | Tensor] = field(default_factory=dict)
    groups: Sequence[Hashable] | None = None
    sharding: BatchSharding | None = None
    temperature: float = 1.0

    @classmethod
    def sharded(
        cls,
        sequences: Sequence[Sequence[int] | Tensor],
        columns: Mapping[str, Sequence[Any] | Tensor] | None = None,
        *,
        lengths: Sequence[int],
        owners: Sequence[int],
        groups: Sequence[Hashable] | None = None,
        temperature: float = 1.0,
    ) -> Batch:
        """Returns a batch of which this rank holds a part, such as the rollouts that it sampled.

        Every rank passes the same `lengths`, `owners`, `groups`, `temperature` and names of columns. Ranks with the
        same data-parallel rank pass the same sequences. Engine methods return results for this rank's sequences, in the
        order given.

        Args:
            sequences: this rank's sequences, in the order of `lengths`. There may be none.
            columns: by name, one entry for each of `sequences`.
            lengths: the number of tokens of every sequence of the batch.
            owners: for every sequence, the data-parallel rank (`engine.mesh.dp.rank`) that holds and runs it.
            groups: one per sequence of the batch; all sequences of a group have the same owner.
            temperature: the one that the tokens were sampled with.
        """
        return cls(sequences, columns or {}, groups, BatchSharding(list(lengths), list(owners)), temperature)

    def __len__(self) -> int:
        """Returns the number of sequences of the global batch."""
        return len(self.sequences) if self.sharding is None else len(self.sharding.lengths)

    @property
    def lengths(self) -> list[int]:
        """The number of tokens of each sequence of the global batch."""
        return [len(sequence) for sequence in self.sequences] if self.sharding is None else list(self.sharding.lengths)
