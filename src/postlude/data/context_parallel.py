"""Shards a microbatch for context parallelism: every rank gets two chunks of every sequence, and equal work.

A sequence is padded to 2 · size chunks of equal width, and rank r takes chunks r and 2 · size - 1 - r: an early one,
whose queries see few keys, and a late one, whose queries see many. Targets and columns are aligned to the predicting
position before, so none is needed from another rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import lcm

import torch
from torch import Tensor

from postlude.data.microbatch import IGNORE, CPShard, Microbatch
from postlude.ops.packing import Packing
from postlude.world.mesh import Axis


def shard_context(microbatch: Microbatch, cp: Axis, *, multiple_of: int = 1) -> Microbatch:
    """Returns this rank's chunks `rank` and `2 * size - 1 - rank` of every sequence, adjacent.

    Positions stay those in the whole sequence. Every rank gets the same number of tokens, a multiple of `multiple_of`.
    For that, sequences are padded at their ends to a multiple of 2 · size, and the last one further if needed: token 0,
    target `IGNORE`, columns 0, batch index and routing -1, positions continued. With one rank only the last sequence is
    padded. A microbatch that needs no padding, or is empty, is returned as it is.
    """
    if multiple_of < 1:
        raise ValueError(f"multiple_of is {multiple_of}, but the minimum is 1. Give a positive multiple_of.")
    if microbatch.padding or microbatch.cp_shard is not None:
        raise ValueError(
            f"microbatch {microbatch.index} is padded or sharded already, but only a whole one can be sharded. "
            f"Shard it once, as pack made it."
        )
    shifted = enumerate(microbatch.mtp_microbatches, start=1)
    mtp = tuple(_shard(at_depth, cp, multiple_of, depth) for depth, at_depth in shifted)
    sharded = _shard(microbatch, cp, multiple_of)
    return replace(sharded, mtp_microbatches=mtp) if mtp else sharded


def _shard(microbatch: Microbatch, cp: Axis, multiple_of: int, depth: int = 0) -> Microbatch:
    """Shards a microbatch whose positions predict `depth` tokens further ahead than the next."""
    packing = microbatch.packing
    padded = _padded(packing.lengths, cp.size, multiple_of)
    if not padded or (cp.size == 1 and padded == packing.lengths):
        return microbatch

    device = microbatch.tokens.device
    numbers = (cp.rank, 2 * cp.size - 1 - cp.rank) if cp.size > 1 else (0,)  # this rank's chunks of a sequence
    widths = [length // _chunk_count(cp.size) for length in padded]
    chunks = Packing.from_lengths([width for width in widths for _ in numbers], device)
    starts = [number * width for width in widths for number in numbers]  # of each chunk in its sequence
    stops = [length for length in packing.lengths for _ in numbers]  # where the padding of each chunk's sequence begins

    def before(end: int) -> int:
        """Returns the number of positions here that are at least `end` tokens before their sequence's end."""
        return sum(
            max(0, min(width, stop - end - start))
            for start, width, stop in zip(starts, chunks.lengths, stops, strict=True)
        )

    padding = chunks.total - before(depth)
    chunk = chunks.sequence_index()
    sequence = chunk // len(numbers)
    positions = torch.tensor(starts, device=device)[chunk] + chunks.positions()
    real = positions < packing.cu_seqlens.diff()[sequence]
    rows = (packing.cu_seqlens[sequence] + positions).where(real, 0)

    def take(values: Tensor, fill: int) -> Tensor:
        selected = values[rows]
        return selected.masked_fill(~real.view(-1, *[1] * (values.ndim - 1)), fill) if padding else selected

    return replace(
        microbatch,
        tokens=take(microbatch.tokens, 0),
        packing=Packing.from_lengths([len(numbers) * width for width in widths], device),
        positions=positions,
        targets=take(microbatch.targets, IGNORE),
        columns={name: take(column, 0) for name, column in microbatch.columns.items()},
        batch_indices=take(microbatch.batch_indices, -1),
        routing=None if microbatch.routing is None else take(microbatch.routing, -1),
        target_count=before(depth + 1),
        padding=padding,
        column_stats={},
        cp_shard=_cp_shard(cp, widths, numbers, chunks) if cp.size > 1 else None,
    )


def _chunk_count(size: int) -> int:
    return 2 * size if size > 1 else 1


def _padded(lengths: tuple[int, ...], size: int, multiple_of: int) -> tuple[int, ...]:
    """Returns lengths that divide into chunks, and whose total divides into `size` multiples of `multiple_of`."""
    padded = [length + -length % _chunk_count(size) for length in lengths]
    if padded:
        padded[-1] += -sum(padded) % lcm(_chunk_count(size), size * multiple_of)
    return tuple(padded)


def _cp_shard(cp: Axis, widths: Sequence[int], numbers: Sequence[int], queries: Packing) -> CPShard:
    """Returns the keys before the end of each chunk, and their rows once all ranks' are gathered in rank order."""
    device = queries.cu_seqlens.device
    keys = Packing.from_lengths([(number + 1) * width for width in widths for number in numbers], device)
    full_packing = Packing.from_lengths([_chunk_count(cp.size) * width for width in widths], device)
    chunk = keys.sequence_index()
    key_rows = _rows(cp, queries, chunk - chunk % 2, keys.positions())
    full_rows = _rows(cp, queries, 2 * full_packing.sequence_index(), full_packing.positions())
    return CPShard(cp, queries, keys, key_rows, full_packing, full_rows)


def _rows(cp: Axis, queries: Packing, chunk: Tensor, position: Tensor) -> Tensor:
    """Returns the rows of tokens once all ranks' are gathered in rank order: those at `position` in the sequence whose
    first chunk on every rank is number `chunk`."""
    width = queries.cu_seqlens.diff()[chunk]
    number = position // width
    late = number >= cp.size
    holder = torch.where(late, 2 * cp.size - 1 - number, number)
    return holder * queries.total + queries.cu_seqlens[chunk] + late * width + position % width
