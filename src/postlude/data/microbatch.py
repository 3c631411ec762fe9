"""Microbatch: packed tokens, their targets, and the caller's columns, shifted by one to the predicting position."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from postlude.data.prefix_tree import SegmentTree
from postlude.ops.collectives import heads_to_sequence, sequence_to_heads, sum_over_group
from postlude.ops.packing import Packing, to_device
from postlude.ops.row_gather import RowGather
from postlude.world.mesh import SINGLE_RANK, Axis

IGNORE = -100
"""The target of a position that predicts nothing: the last one of each sequence, and padding."""
ROUTING = "routing"
"""The column of a batch with the experts of its tokens: see `Microbatch.routing`."""
SAMPLING_MASK = "sampling_mask"
"""The column of a batch with the tokens that each token was sampled from, [length, k] ids plus 1; 0 for none."""


@dataclass(frozen=True, eq=False)
class SequenceRows:
    """Where the tokens of a sequence are that are not this rank's, or not next to each other.

    They are on other context-parallel ranks, or in segments that sequences share. The tokens of all ranks are gathered
    over `axis` in rank order, [size * T, ...].
    """

    axis: Axis
    """The ranks that share every sequence."""
    queries: Packing
    """Runs of this rank's tokens: two chunks of each sequence under context parallelism, else segments."""
    keys: Packing
    """For each run, its sequence from the start to the end of the run."""
    key_rows: RowGather
    """The rows of the keys, [keys.total, ...], among the gathered tokens."""
    full_packing: Packing
    """The whole sequences in order, over all ranks' tokens."""
    full_rows: RowGather
    """The rows of the tokens of `full_packing` among the gathered tokens."""
    row_sources: Tensor
    """[size * T] int64, for each gathered token one of its places in `full_packing`; 0 for padding."""

    def to(self, device: torch.device | str) -> SequenceRows:
        """Returns the same rows with every tensor on `device`."""
        return replace(
            self,
            queries=self.queries.to(device),
            keys=self.keys.to(device),
            key_rows=self.key_rows.to(device),
            full_packing=self.full_packing.to(device),
            full_rows=self.full_rows.to(device),
            row_sources=to_device(self.row_sources, device),
        )


@dataclass(frozen=True, eq=False)
class SharedSegments:
    """The tokens that the layers compute for a microbatch whose sequences share tokens, each of those once."""

    microbatch: Microbatch
    """This rank's tokens, segment by segment. Its `packing` has the segments. It has no targets and columns."""
    tree: SegmentTree
    multiplicity: Tensor
    """[T] fp32, the number of sequences that share each token."""
    rows: RowGather
    """The rows of this rank's tokens of the whole sequences, [T / tp], among all ranks' tokens of segments."""
    first_copies: Tensor
    """[T] int64 of the whole sequences: the first position here with the same hidden state and the same target."""
    distinct_targets: int
    """The number of different pairs of hidden state and target, positions without a target left out."""
    segment_of_pair: Tensor
    """[pairs] int64: with `sequence_of_pair`, every segment of every sequence."""
    sequence_of_pair: Tensor

    def to(self, device: torch.device | str) -> SharedSegments:
        return replace(
            self,
            microbatch=self.microbatch.to(device),
            multiplicity=to_device(self.multiplicity, device),
            rows=self.rows.to(device),
            first_copies=to_device(self.first_copies, device),
            segment_of_pair=to_device(self.segment_of_pair, device),
            sequence_of_pair=to_device(self.sequence_of_pair, device),
        )


class HeadExchange:
    """All-to-all between chunks of sequences with all heads and whole sequences with some heads (Ulysses).

    For operations along a sequence, such as a scan. Tokens that sequences share are repeated in each. Without context
    parallelism and shared tokens it does nothing.
    """

    def __init__(self, packing: Packing, sequence_rows: SequenceRows | None) -> None:
        self.packing = packing if sequence_rows is None else sequence_rows.full_packing
        self.axis = SINGLE_RANK if sequence_rows is None else sequence_rows.axis
        self._sequence_rows = sequence_rows

    def local_heads(self, heads: Tensor) -> Tensor:
        """Returns this rank's block of a per-head tensor [heads, ...]."""
        return heads[slice(*self.axis.block(len(heads)))]

    def to_heads(self, tensor: Tensor) -> Tensor:
        """Exchanges this rank's tokens with all heads [T, heads, ...] for whole sequences [total, local heads, ...]."""
        if self._sequence_rows is None:
            return tensor
        return self._sequence_rows.full_rows(sequence_to_heads(tensor, self.axis.group))

    def to_sequences(self, tensor: Tensor) -> Tensor:
        """Exchanges whole sequences [total, local heads, ...] for this rank's tokens [T, heads, ...]."""
        if self._sequence_rows is None:
            return tensor
        return heads_to_sequence(tensor.index_select(0, self._sequence_rows.row_sources), self.axis.group)


@dataclass(frozen=True)
class ColumnStats:
    """Statistics of a column's values at positions with a target, computed on the CPU."""

    nonzero: int
    """The number of values that are not zero."""
    minimum: float
    maximum: float

    @classmethod
    def of(cls, column: Tensor, targets: Tensor) -> ColumnStats:
        """Returns the stats of a column [T, ...], given targets [T], both on the host.

        It uses numpy, since a step waits for this: torch's thread pool is slow for small tensors on a busy machine.
        """
        array = (column.float() if column.is_floating_point() else column).detach().numpy()
        values = array[targets.numpy() != IGNORE]
        if not values.size:
            return cls(0, 0.0, 0.0)
        by_token = values.reshape(len(values), -1).any(1) if values.ndim > 1 else values
        return cls(int(np.count_nonzero(by_token)), float(values.min()), float(values.max()))


@dataclass(frozen=True, eq=False)
class Microbatch:
    """`n` sequences packed end to end over `T` tokens. Targets and columns are shifted to the predicting position.

    A microbatch may be empty (T = n = 0), so that all ranks have the same number of microbatches.
    Under context parallelism `shard_context` gives each rank its chunks of every sequence. Under context or tensor
    parallelism the end of a sequence may be padding, whose token and columns are zero.
    """

    tokens: Tensor
    """[T] int64."""
    packing: Packing
    """Where each sequence, or this rank's part of it, is."""
    positions: Tensor
    """[T] int64, each token's position in its sequence."""
    targets: Tensor
    """[T] int64, the next token of the same sequence; `IGNORE` at each sequence's last position."""
    columns: Mapping[str, Tensor]
    """Each [T, ...]; entry t is the caller's value for token t + 1, zero at each sequence's last position."""
    batch_indices: Tensor
    """[T] int64, each token's index among all tokens of the batch in the caller's order; -1 for padding."""
    sequences: tuple[int, ...]
    """The index of each packed sequence in the caller's list."""
    index: int
    """Its index among the `count` microbatches of its batch."""
    count: int
    """The number of microbatches in the batch."""
    batch_tokens: int
    """The number of tokens in all microbatches of the batch."""
    batch_targets: int
    """The number of positions with a target in all microbatches: the denominator of a mean over the batch."""
    target_count: int
    """The number of positions of this microbatch with a target (`targets != IGNORE`), known on the host."""
    padding: int = 0
    """The number of tokens of this microbatch that are padding, known on the host."""
    sequence_rows: SequenceRows | None = None
    """Where the other tokens of its sequences are; None where sequences are whole and share none."""
    mtp_microbatches: tuple[Microbatch, ...] = ()
    """For each multi-token-prediction depth d = 1, 2, …, the same positions shifted by d: `tokens` are those d ahead,
    `targets` and `columns` those of the token after that. Positions past the end of a sequence are padding."""
    routing: Tensor | None = None
    """[T, routers, top_k] integers, the experts of each input token. -1: the router chooses. Unlike a column it is
    not shifted."""
    tree: SegmentTree | None = None
    """The segments of sequences that begin alike, if their tokens are computed once: see `segments`."""
    segments: SharedSegments | None = None
    """The tokens that the layers compute, where sequences share some: `shard_context` makes them. The output
    processor's hidden states are those of whole sequences in any case."""
    temperature: float = 1.0
    """The temperature that the tokens were sampled with: the default of the head's log-probs."""
    last_values: Mapping[str, Tensor] = field(default_factory=dict)
    """By column, its value at each sequence's last token, [n, ...], wherever the column was made: see `last_value`."""
    column_stats: Mapping[str, ColumnStats] = field(default_factory=dict)
    """By column, its statistics; computed in `to`, if the microbatch is on the CPU before."""

    def __post_init__(self) -> None:
        total = self.packing.total
        for name in ("tokens", "positions", "targets", "batch_indices"):
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
        if self.routing is not None and (self.routing.ndim != 3 or len(self.routing) != total):
            raise ValueError(
                f'"{ROUTING}" has shape {tuple(self.routing.shape)}, but the packing holds {total} tokens. Give the '
                f"experts of each token in every router, [{total}, routers, top_k]."
            )
        if len(self.sequences) != self.packing.count:
            raise ValueError(
                f"sequences has {len(self.sequences)} indices, but {self.packing.count} sequences are packed. "
                f"Give the caller's index of each one."
            )
        if not 0 <= self.index < self.count:
            raise ValueError(
                f"index is {self.index}, but the batch has {self.count} microbatches. Count them from 0 to count - 1."
            )
        if not 0 < self.temperature < math.inf:
            raise ValueError(f"the temperature of a batch is {self.temperature}, but logits are divided by it. Use 1.")

    def __len__(self) -> int:
        """Returns the number of tokens, T."""
        return self.packing.total

    @property
    def layer_microbatch(self) -> Microbatch:
        """The microbatch that the layers compute: that of `segments`, or this one."""
        return self if self.segments is None else self.segments.microbatch

    @property
    def head_exchange(self) -> HeadExchange:
        """The exchange to whole sequences, for operations along them that can be sharded by heads."""
        return HeadExchange(self.packing, self.sequence_rows)

    @property
    def cu_seqlens(self) -> Tensor:
        """[n + 1] int32, the boundaries of the sequences."""
        return self.packing.cu_seqlens

    @property
    def token_mask(self) -> Tensor | None:
        """[T] bool, False at padding; None when there is no padding."""
        return self.batch_indices >= 0 if self.padding else None

    def column(self, name: str) -> Tensor:
        """Returns the column `name`, [T, ...], shifted to the predicting position."""
        if name not in self.columns:
            available = ", ".join(f'"{known}"' for known in self.columns) or "none"
            raise LookupError(
                f'the microbatch has no column "{name}" (it has: {available}). Name one of these, or give it to '
                "pack(columns=...) or Batch(columns=...)."
            )
        return self.columns[name]

    def last_value(self, name: str) -> Tensor:
        """Returns the column's value at the last token of each sequence, [n, ...]; of one token too, unlike `column`.

        It is the value of the sequence if the caller gave one for all its tokens.
        """
        self.column(name)  # refuses an unknown one
        return to_device(self.last_values[name], self.tokens.device)

    def sequence_sum(self, values: Tensor) -> Tensor:
        """Returns the sum of `values` [T, ...] over each sequence: [n, ...], in float32 or wider, differentiable.

        Padding is ignored. Under context parallelism every rank gets the sums over whole sequences, and the backward
        sums the gradients of all ranks.
        """
        token_mask = self.token_mask
        if token_mask is not None and values.shape[:1] == token_mask.shape:
            values = values.masked_fill(~token_mask.view(-1, *[1] * (values.ndim - 1)), 0)
        sums = self.packing.sum(values)
        if self.sequence_rows is None:
            return sums
        axis = self.sequence_rows.axis
        if axis.group is None:
            raise ValueError(
                f"a sum over sequences that {axis.size} ranks share needs the group of those ranks, but the axis they "
                "were sharded along has none. Shard along the cp axis of a Mesh."
            )
        return sum_over_group(sums, axis.group)

    def to(self, device: torch.device | str) -> Microbatch:
        """Returns the same microbatch with every tensor on `device`, and `column_stats` if it comes from the host."""
        column_stats = self.column_stats
        if self.tokens.device.type == "cpu":
            column_stats = {name: ColumnStats.of(column, self.targets) for name, column in self.columns.items()}
        return replace(
            self,
            column_stats=column_stats,
            tokens=to_device(self.tokens, device),
            packing=self.packing.to(device),
            positions=to_device(self.positions, device),
            targets=to_device(self.targets, device),
            columns={name: to_device(column, device) for name, column in self.columns.items()},
            batch_indices=to_device(self.batch_indices, device),
            sequence_rows=self.sequence_rows and self.sequence_rows.to(device),
            segments=self.segments and self.segments.to(device),
            mtp_microbatches=tuple(shifted.to(device) for shifted in self.mtp_microbatches),
            routing=None if self.routing is None else to_device(self.routing, device),
        )
