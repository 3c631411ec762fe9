"""Shards a microbatch for context parallelism: every rank gets two chunks of every sequence, and equal work.

A sequence is padded to 2 · size chunks of equal width, and rank r takes chunks r and 2 · size - 1 - r: an early one,
whose queries see few keys, and a late one, whose queries see many. Targets and columns are aligned to the predicting
position before, so none is needed from another rank. Segments that sequences share are sharded in the same way.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import lcm

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from postlude.data.microbatch import IGNORE, Microbatch, SequenceRows, SharedSegments
from postlude.data.prefix_tree import SegmentTree
from postlude.ops.packing import Packing, to_device
from postlude.ops.row_gather import RowGather
from postlude.world.mesh import SINGLE_RANK, Axis

Indices = NDArray[np.int64]


def shard_context(microbatch: Microbatch, cp: Axis, tp: Axis = SINGLE_RANK) -> Microbatch:
    """Returns this rank's chunks `rank` and `2 * size - 1 - rank` of every sequence, adjacent.

    Positions stay those in the whole sequence. Every rank gets the same number of tokens, a multiple of `tp.size`.
    For that, sequences are padded at their ends to a multiple of 2 · size, and the last one further if needed: token 0,
    target `IGNORE`, columns 0, batch index and routing -1, positions continued. With one rank only the last sequence is
    padded. A microbatch that needs no padding, or is empty, is returned as it is. Shared tokens become `segments`.
    """
    if microbatch.padding or microbatch.sequence_rows is not None or microbatch.segments is not None:
        raise ValueError(
            f"microbatch {microbatch.index} is padded or sharded already, but only a whole one can be sharded. "
            f"Shard it once, as pack made it."
        )
    if not len(microbatch):
        return microbatch
    chunks = _Chunks.of(microbatch.packing, cp, tp)
    shifted = enumerate(microbatch.mtp_microbatches, start=1)
    mtp = tuple(_shard(at_depth, chunks, depth) for depth, at_depth in shifted)
    sharded = _shard(microbatch, chunks)
    if microbatch.tree is not None:
        sharded = replace(sharded, segments=_shard_segments(microbatch, microbatch.tree, sharded, chunks, tp))
    return replace(sharded, mtp_microbatches=mtp) if mtp else sharded


@dataclass(frozen=True)
class _Chunks:
    """This rank's chunks of packed sequences, or with one rank the sequences."""

    cp: Axis
    packing: Packing
    """The sequences without padding."""
    numbers: tuple[int, ...]
    """Which chunks of a sequence are this rank's."""
    widths: tuple[int, ...]
    """By sequence, the tokens of each of its chunks."""
    sequence: Indices
    """[T], the sequence of each of this rank's tokens."""
    offset: Indices
    """[T], its position in the sequence."""

    @classmethod
    def of(cls, packing: Packing, cp: Axis, tp: Axis) -> _Chunks:
        numbers = (cp.rank, 2 * cp.size - 1 - cp.rank) if cp.size > 1 else (0,)
        per_sequence = 2 * cp.size if cp.size > 1 else 1
        padded = [length + -length % per_sequence for length in packing.lengths]
        padded[-1] += -sum(padded) % lcm(per_sequence, cp.size * tp.size)
        widths = [length // per_sequence for length in padded]
        sequence = np.repeat(np.arange(len(widths)), [len(numbers) * width for width in widths])
        offset = np.concatenate([np.arange(number * w, (number + 1) * w) for w in widths for number in numbers])
        return cls(cp, packing, numbers, tuple(widths), sequence, offset)

    @property
    def is_whole(self) -> bool:
        return self.cp.size == 1 and len(self.offset) == self.packing.total

    @property
    def real(self) -> NDArray[np.bool_]:
        """[T], False at padding."""
        return self.offset < np.array(self.packing.lengths)[self.sequence]

    @property
    def whole_rows(self) -> Indices:
        """[T], the row of each token in the whole microbatch; 0 at padding."""
        starts = np.cumsum(self.packing.lengths) - np.array(self.packing.lengths)
        return np.where(self.real, starts[self.sequence] + self.offset, 0)

    def count_before(self, end: int) -> int:
        """Returns how many of this rank's tokens are at least `end` tokens before their sequence's end."""
        return int((self.offset < np.array(self.packing.lengths)[self.sequence] - end).sum())

    def gathered_rows(self) -> list[Indices]:
        """Returns, by sequence, the row of each of its tokens, padding included, once all ranks' are gathered."""
        size, count, tokens = self.cp.size, len(self.numbers), len(self.offset)
        rows, start = [], 0
        for width in self.widths:
            if size == 1:
                rows.append(np.arange(start, start + width))
            else:
                early = [rank * tokens + start + np.arange(width) for rank in range(size)]
                late = [rank * tokens + start + width + np.arange(width) for rank in reversed(range(size))]
                rows.append(np.concatenate((*early, *late)))
            start += count * width
        return rows


def _shard(microbatch: Microbatch, chunks: _Chunks, depth: int = 0) -> Microbatch:
    """Shards a microbatch whose positions predict `depth` tokens further ahead than the next."""
    if chunks.is_whole:
        return microbatch
    device, count = microbatch.tokens.device, len(chunks.numbers)
    rows, real = (to_device(torch.from_numpy(array), device) for array in (chunks.whole_rows, chunks.real))
    padding = len(chunks.offset) - chunks.count_before(depth)

    def take(values: Tensor, fill: int) -> Tensor:
        selected = values[rows]
        return selected.masked_fill(~real.view(-1, *[1] * (values.ndim - 1)), fill) if padding else selected

    return replace(
        microbatch,
        tokens=take(microbatch.tokens, 0),
        packing=Packing.from_lengths([count * width for width in chunks.widths], device),
        positions=to_device(torch.from_numpy(chunks.offset), device),
        targets=take(microbatch.targets, IGNORE),
        columns={name: take(column, 0) for name, column in microbatch.columns.items()},
        batch_indices=take(microbatch.batch_indices, -1),
        routing=None if microbatch.routing is None else take(microbatch.routing, -1),
        target_count=chunks.count_before(depth + 1),
        padding=padding,
        column_stats={},
        sequence_rows=_sequence_rows(chunks, None, device) if chunks.cp.size > 1 else None,
    )


def _shard_segments(
    microbatch: Microbatch, tree: SegmentTree, local: Microbatch, whole: _Chunks, tp: Axis
) -> SharedSegments:
    """Returns the shared segments of a microbatch. `local` and `whole` are the chunks of its sequences on this rank."""
    device = microbatch.tokens.device
    segments = Packing.from_lengths(tree.lengths, device)
    sequence_starts = np.cumsum(microbatch.packing.lengths) - np.array(microbatch.packing.lengths)
    firsts = sequence_starts[list(tree.holders)] + np.array(tree.starts)  # the row of each segment's first token
    rows = np.concatenate([np.arange(first, first + n) for first, n in zip(firsts, tree.lengths, strict=True)])
    index = to_device(torch.from_numpy(rows), device)
    unsharded = replace(
        microbatch,
        tokens=microbatch.tokens[index],
        packing=segments,
        positions=microbatch.positions[index],
        targets=torch.full_like(index, IGNORE),
        columns={},
        last_values={},
        batch_indices=microbatch.batch_indices[index],
        sequences=tuple(range(segments.count)),
        target_count=0,
        routing=None if microbatch.routing is None else microbatch.routing[index],
        mtp_microbatches=(),
        tree=None,
    )
    chunks = _Chunks.of(segments, whole.cp, tp)
    positions = np.array(tree.starts)[chunks.sequence] + chunks.offset
    sharded = replace(
        _shard(unsharded, chunks),
        positions=to_device(torch.from_numpy(positions), device),
        sequence_rows=_sequence_rows(chunks, tree, device),
    )
    if chunks.cp.size == 1:
        paths = Packing.from_lengths(sharded.packing.lengths, device, parents=tree.parents)
        sharded = replace(sharded, packing=paths)
    by_segment = chunks.gathered_rows()
    by_sequence = [np.concatenate([by_segment[g][: tree.lengths[g]] for g in path]) for path in tree.paths]
    of_whole = np.where(whole.real, np.concatenate(by_sequence)[whole.whole_rows], 0)
    targets = local.targets.cpu().numpy()
    first_copies = _first_copies(of_whole, targets)
    pairs = [(segment, sequence) for sequence, path in enumerate(tree.paths) for segment in path]
    segment_of_pair, sequence_of_pair = (torch.tensor(column) for column in zip(*pairs, strict=True))
    multiplicity = torch.tensor(tree.multiplicities, dtype=torch.float32)[torch.from_numpy(chunks.sequence)]
    return SharedSegments(
        sharded,
        tree,
        to_device(multiplicity, device),
        RowGather(of_whole[slice(*tp.block(len(of_whole)))], whole.cp.size * len(chunks.offset), device),
        first_copies=to_device(torch.from_numpy(first_copies), device),
        distinct_targets=int((targets[first_copies == np.arange(len(targets))] != IGNORE).sum()),
        segment_of_pair=to_device(segment_of_pair, device),
        sequence_of_pair=to_device(sequence_of_pair, device),
    )


def _first_copies(rows: Indices, targets: Indices) -> Indices:
    """Returns, by position, one with the same row and target: the first with that row, if its target is the same."""
    first = np.zeros(rows.max() + 1, dtype=np.int64)
    first[rows[::-1]] = np.arange(len(rows))[::-1]  # the last value that is written stays
    candidates = first[rows]
    return np.where(targets[candidates] == targets, candidates, np.arange(len(rows)))


def _sequence_rows(chunks: _Chunks, tree: SegmentTree | None, device: torch.device) -> SequenceRows:
    """Returns the keys before the end of each chunk, and the whole sequences. With a tree, `chunks` are of segments."""
    lengths, by_segment = chunks.packing.lengths, chunks.gathered_rows()
    nothing = np.zeros(0, dtype=np.int64)
    above: list[Indices] = []  # by segment, the rows of the tokens before it in its sequences
    for segment in range(len(lengths)):
        parent = -1 if tree is None else tree.parents[segment]
        parts = (nothing,) if parent < 0 else (above[parent], by_segment[parent][: lengths[parent]])
        above.append(np.concatenate(parts))
    keys = [
        np.concatenate((above[segment], by_segment[segment][: (number + 1) * width]))
        for segment, width in enumerate(chunks.widths)
        for number in chunks.numbers
    ]
    last_segments = range(len(lengths)) if tree is None else tree.last_segments
    # Padding is at the end of a sequence: part of it where nothing is shared, else left out, as more may follow it.
    stops = [len(by_segment[segment]) if tree is None else lengths[segment] for segment in range(len(lengths))]
    full = [np.concatenate((above[segment], by_segment[segment][: stops[segment]])) for segment in last_segments]
    gathered, full_rows = chunks.cp.size * len(chunks.offset), np.concatenate(full)
    row_sources = np.zeros(gathered, dtype=np.int64)
    row_sources[full_rows] = np.arange(len(full_rows))
    queries = [width for width in chunks.widths for _ in chunks.numbers]
    return SequenceRows(
        axis=chunks.cp,
        queries=Packing.from_lengths(queries, device),
        keys=Packing.from_lengths(list(map(len, keys)), device),
        key_rows=RowGather(np.concatenate(keys), gathered, device),
        full_packing=Packing.from_lengths(list(map(len, full)), device),
        full_rows=RowGather(full_rows, gathered, device),
        row_sources=to_device(torch.from_numpy(row_sources), device),
    )
