"""The slab planner: how much of the [tokens, vocabulary] logits exists at a time, and along which axis it moves.

Pure arithmetic on sizes, no tensors. A slab is a set of columns (all tokens) or a set of rows (the whole vocabulary):

- over the **vocabulary**, `weight`'s gradient is complete slab by slab and `hidden`'s is summed over the slabs;
- over the **tokens**, `hidden`'s gradient is complete slab by slab and `weight`'s is summed over the slabs.

A summed gradient needs an accumulator in the compute dtype, which every slab reads and writes: a plan minimises that
cost. A gradient that is not needed has no accumulator, so a frozen operand decides the axis.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

SlabAxis = Literal["vocabulary", "token"]

KIB, MIB, GIB = 2**10, 2**20, 2**30

# GEMM kernels work in tiles; slabs of whole tiles waste nothing.
COLUMN_TILE, ROW_TILE = 256, 128

# The cost of one more slab besides its accumulator, as memory traffic: launches and the GEMMs' ramp up and down.
SLAB_OVERHEAD = 64 * MIB

# One sweep with 16-bit logits: the slab's size relative to the gradients of weight and hidden in half precision. More
# would mean fewer slabs that rewrite and round the weight's sum; this stays near the leanest peer's peak memory.
QUANTIZED_OF_WEIGHT, QUANTIZED_OF_HIDDEN = 0.2, 1.4
HALF_BYTES = 2


@dataclass(frozen=True)
class Scratch:
    """Default sizes of a logits slab in bytes: per token, at least `min_bytes` and at most `max_bytes` in all.

    In one sweep (`linear_objective`) a slab holds the whole vocabulary of its tokens, and each of several slabs
    rewrites the weight's accumulator. So large slabs pay: slab and accumulator share `sweep_max_bytes`, of which the
    slab has at least `sweep_min_bytes`. With 16-bit logits a slab has at least `quantized_rows`, up to
    `quantized_rows_max_bytes`, and the weight's accumulator is in the compute dtype up to `quantized_sum_max_bytes`.
    A training step, which holds the weight's fp32 gradient anyway, has slabs of at least `training_rows`, up to
    `training_rows_max_bytes`.
    """

    min_bytes: int
    max_bytes: int
    sweep_min_bytes: int
    sweep_max_bytes: int
    partial: int = 2 * KIB  # per token, where only partial statistics are kept
    # 4096 fp32 logits: GEMMs wide enough for full speed on a GPU, in no more memory than the leanest peer.
    forward: int = 16 * KIB  # per token
    backward: int = 16 * KIB  # per token
    quantized_rows: int = 1024
    quantized_rows_max_bytes: int = 512 * MIB
    training_rows: int = 2048
    training_rows_max_bytes: int = GIB
    quantized_sum_max_bytes: int = 256 * MIB


# On a CPU a fraction of the GPU's, for a laptop's memory.
SCRATCH = {
    "cuda": Scratch(
        min_bytes=176 * MIB,
        max_bytes=4 * GIB,
        sweep_min_bytes=2 * GIB,
        sweep_max_bytes=4 * GIB,
    ),
    "cpu": Scratch(
        min_bytes=32 * MIB,
        max_bytes=256 * MIB,
        sweep_min_bytes=64 * MIB,
        sweep_max_bytes=256 * MIB,
    ),
}


@dataclass(frozen=True)
class Shape:
    """One call's sizes: `rows` projected tokens, `columns` real vocabulary entries, `hidden` features.

    `logit_bytes` counts everything that a backend holds per logit of a slab. `accumulator_bytes` is the size of one
    element of a summed gradient.
    """

    rows: int
    columns: int
    hidden: int
    logit_bytes: float = 4
    accumulator_bytes: int = 4
    device: str = "cuda"

    @property
    def scratch(self) -> Scratch:
        return SCRATCH["cpu" if self.device == "cpu" else "cuda"]

    def slab_bytes(self, per_token: int) -> int:
        return min(max(self.rows * per_token, self.scratch.min_bytes), self.scratch.max_bytes)


@dataclass(frozen=True)
class Plan:
    """Processes the logits along `axis`, `size` columns or rows at a time."""

    axis: SlabAxis
    size: int

    def slabs(self, shape: Shape) -> Iterator[tuple[slice, slice]]:
        """Yields (rows, columns) of every slab in order."""
        if self.axis == "vocabulary":
            yield from ((slice(0, shape.rows), part) for part in runs(shape.columns, self.size))
        else:
            yield from ((part, slice(0, shape.columns)) for part in runs(shape.rows, self.size))

    def largest(self, shape: Shape) -> tuple[int, int]:
        if self.axis == "vocabulary":
            return shape.rows, min(self.size, shape.columns)
        return min(self.size, shape.rows), shape.columns

    def count(self, shape: Shape) -> int:
        return -(-(shape.columns if self.axis == "vocabulary" else shape.rows) // self.size)


def runs(total: int, size: int) -> Iterator[slice]:
    """Yields consecutive slices of at most `size` that cover `total`."""
    for start in range(0, total, size):
        yield slice(start, min(start + size, total))


def plan_statistics(shape: Shape, memory_budget: int | None = None) -> Plan:
    """Plans the forward over the vocabulary: a running maximum and sum cost nothing between slabs."""
    room = shape.slab_bytes(shape.scratch.forward) if memory_budget is None else memory_budget
    return _plan("vocabulary", shape, room)


def plan_rows(shape: Shape, memory_budget: int | None = None) -> Plan:
    """Plans the forward over tokens, with the whole vocabulary of each. On a CPU each is a slab.

    There the order of a sum may depend on how many sums are computed at once.
    """
    if shape.device == "cpu":
        return Plan("token", 1)
    return _plan("token", shape, shape.scratch.sweep_min_bytes if memory_budget is None else memory_budget)


def plan_tiles(shape: Shape, columns: int, row_bytes: int, memory_budget: int | None = None) -> Plan:
    """Plans the forward of the fused kernel over the vocabulary, in tiles of `columns`.

    Each tile of a launch holds `row_bytes` of partial statistics per row until they are merged, so memory limits it.
    """
    room = shape.slab_bytes(shape.scratch.partial) if memory_budget is None else memory_budget
    tiles = max(1, room // max(1, shape.rows * row_bytes))
    return Plan("vocabulary", max(1, min(tiles * columns, shape.columns)))


def plan_gradients(
    shape: Shape,
    *,
    hidden_gradient: bool,
    weight_gradient: bool,
    weight_cast: bool = False,
    memory_budget: int | None = None,
) -> Plan:
    """Plans the backward along the axis that moves the fewest bytes. `memory_budget` covers slab and accumulator.

    With `weight_cast` the GEMMs need the weight in another dtype: over tokens, a whole copy of it.
    """
    row = shape.hidden * shape.accumulator_bytes
    needs: dict[SlabAxis, int] = {
        "vocabulary": hidden_gradient * shape.rows * row,
        "token": (weight_gradient + weight_cast) * shape.columns * row,
    }
    ranked = []
    for axis, need in needs.items():
        room = shape.slab_bytes(shape.scratch.backward) if memory_budget is None else memory_budget - need
        plan = _plan(axis, shape, room)
        ranked.append((room <= 0, plan.count(shape) * (2 * need + SLAB_OVERHEAD), plan))
    return min(ranked, key=lambda entry: entry[:2])[2]


def plan_sweep(
    shape: Shape, *, weight_gradient: bool, weight_cast: bool = False, memory_budget: int | None = None
) -> Plan:
    """Plans forward and backward in one sweep (`linear_objective`) over tokens: a softmax needs its whole row."""
    budget = shape.scratch.sweep_max_bytes if memory_budget is None else memory_budget
    row = shape.hidden * shape.accumulator_bytes
    cast = weight_cast * shape.columns * row
    if shape.rows * shape.columns * shape.logit_bytes + cast <= budget:
        return Plan("token", max(1, shape.rows))  # one slab: nothing is summed, so nothing else is needed
    room = budget - cast - weight_gradient * shape.columns * row
    if memory_budget is None:
        room = max(room, shape.scratch.sweep_min_bytes)
    return _plan("token", shape, room)


def plan_quantized_sweep(
    shape: Shape, *, weight_gradient: bool, in_training: bool = False, memory_budget: int | None = None
) -> tuple[Plan, bool]:
    """Plans one sweep with 16-bit logits. Also returns whether the weight's gradient is summed in the compute dtype.

    That takes twice the memory of the gradient itself; where it is large, the gradient itself is the sum. `in_training`
    an fp32 gradient exists besides, so larger slabs are small beside it.
    """
    summed = weight_gradient * shape.columns * shape.hidden * shape.accumulator_bytes
    room, max_sum_bytes = memory_budget, shape.scratch.quantized_sum_max_bytes
    if room is None:
        # A fifth of the weight's gradient is large enough for the GEMMs, and small beside it.
        scratch = shape.scratch
        rows, max_bytes = scratch.quantized_rows, scratch.quantized_rows_max_bytes
        if in_training:
            rows, max_bytes = scratch.training_rows, scratch.training_rows_max_bytes
        gradients = QUANTIZED_OF_WEIGHT * shape.columns + QUANTIZED_OF_HIDDEN * shape.rows
        bytes_of_rows = int(rows * shape.columns * shape.logit_bytes) + 1
        room = max(int(gradients * shape.hidden * HALF_BYTES), min(bytes_of_rows, max_bytes))
    else:
        max_sum_bytes = room // 2
    if shape.rows * shape.columns * shape.logit_bytes <= room:
        return Plan("token", max(1, shape.rows)), True
    exact = summed <= max_sum_bytes
    if memory_budget is not None and exact:
        room -= summed
    return _plan("token", shape, room), exact


def _plan(axis: SlabAxis, shape: Shape, room: int) -> Plan:
    """Returns the fewest slabs of at most `room` bytes, or of one row or column where that is more."""
    length, width, tile = (
        (shape.columns, shape.rows, COLUMN_TILE) if axis == "vocabulary" else (shape.rows, shape.columns, ROW_TILE)
    )
    largest = max(1, int(room // max(1, width * shape.logit_bytes)))
    if largest >= length:
        return Plan(axis, max(1, length))
    if largest >= tile:
        largest -= largest % tile
    size = -(-length // -(-length // largest))  # equal shares, as far as whole tiles allow
    return Plan(axis, min(largest, -(-size // tile) * tile))
