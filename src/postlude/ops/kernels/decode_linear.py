"""A linear layer of few rows with the norm, activation or residual around it, in one kernel.

A decode step of 16 rows gives 12,124 tokens/s with it and 10,136 with a kernel for each part, 0.6B on an H200
(docs/benchmarks.md, "The generator"). With an adapter of rank 32 a step takes 1.37 ms; 1.77 where every program
multiplied by the A of its layer (docs/benchmarks.md, "LoRA").

A program takes some columns of the product, of all rows. Where there are too few columns for all multiprocessors,
several programs share them, each with some of the features. The last one to finish adds all parts in their order, so
that the sum is the same every time. With adapters the first programs multiply all rows by A, each by some features of
one layer; the others wait for them at the end, when they usually have finished, and add the product with B.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, assignment, misc"

from __future__ import annotations

from math import gcd

import torch
import triton
import triton.language as tl
from torch import Tensor

from postlude.ops.kernels.activation import activated
from postlude.ops.kernels.capabilities import gpu_of
from postlude.ops.kernels.launch import Launcher
from postlude.ops.low_rank import LowRank
from postlude.ops.norm import Norm

# Measured on an H200: columns and features of a tile, programs to aim at, warps and loads ahead.
COLUMNS, BLOCK, PROGRAMS, WARPS, STAGES = 32, 256, 128, 4, 4
LEAST_COLUMNS, MOST_BLOCK = 8, 512  # of a product with few columns: programs that share a sum wait for each other
GATED_COLUMNS = 64  # gates and what they multiply
LOW_FEATURES = 2048  # of a program that multiplies by A; with fewer, there are more programs than multiprocessors
TOKENS, B_COLUMNS = 32, 128  # of a tile that adds the product with B to another product
SPARE = 4096  # bytes of shared memory besides the tiles


def product(
    rows: Tensor,
    weight: Tensor,
    most: int,
    *,
    norm: Norm | None = None,
    activation: str | None = None,
    residual: Tensor | None = None,
    counters: Tensor | None = None,
    low_rank: LowRank | None = None,
) -> Tensor:
    """See `ops/decode_linear.py`; the arguments say which function. Tiles have room for `most` rows."""
    count, width = rows.shape
    features = weight.shape[0] // (2 if activation else 1)
    columns, most_block = (GATED_COLUMNS // 2 if activation else COLUMNS), BLOCK
    while norm is None and low_rank is None and columns > LEAST_COLUMNS and features // columns < PROGRAMS:
        columns, most_block = columns // 2, min(2 * most_block, MOST_BLOCK)
    tiles = triton.cdiv(features, columns)
    ranks = (16, 16, features, features, features) if low_rank is None else low_rank_constants(low_rank)
    loaded = most + max(columns * (2 if activation else 1), ranks[1])  # of each feature
    block = _divisor(width, most_block)
    while (STAGES - 1) * block * loaded * rows.element_size() + SPARE > gpu_of(rows.device).shared_memory:
        block //= 2
    splits, shares = 1, counters is not None and norm is None
    while shares and tiles * splits * 2 <= PROGRAMS and width % (splits * 2 * block) == 0:
        splits *= 2
    output = torch.empty(count, features, dtype=rows.dtype, device=rows.device)
    parts = None if splits == 1 else torch.empty(splits, count, features, dtype=torch.float32, device=rows.device)
    a = b = lows = None
    low_splits = low_programs = 0
    if low_rank is not None:
        a, b = low_rank.a, low_rank.b
        low_splits = max(1, width // _divisor(width, LOW_FEATURES))
        low_programs = low_splits * len(low_rank.sizes)
        lows = torch.empty(low_programs, most, ranks[1], dtype=torch.float32, device=rows.device)
        if counters is None:
            counters = torch.zeros(1, dtype=torch.int32, device=rows.device)
    if splits > 1 and counters is not None and tiles >= len(counters):
        raise ValueError(f"{tiles} tiles need {tiles + 1} counters, but there are {len(counters)}.")
    tensors = (rows, weight, None if norm is None else norm.weight, residual, output, parts, counters, a, b, lows)
    numbers = (count, 0.0 if norm is None else norm.eps, 0.0 if norm is None else norm.offset)
    strides = (rows.stride(0), 0 if residual is None else residual.stride(0))
    sizes = (width, features, most, columns, block, tiles, splits, 0 if counters is None else len(counters) - 1)
    constants = (*strides, *sizes, activation, STAGES, WARPS, low_splits, low_programs, *ranks)
    _product((low_programs + tiles * splits, 1, 1), tensors, numbers, constants, WARPS)
    return output


def low_rank_constants(low_rank: LowRank) -> tuple[int, ...]:
    """Returns the rank, the next power of two, and the first column of the second, third and fourth layer."""
    ends = [sum(low_rank.sizes[: count + 1]) for count in range(3)]
    return low_rank.rank, triton.next_power_of_2(low_rank.rank), *ends


def _divisor(width: int, most: int) -> int:
    """Returns the largest power of two that divides the width, at most `most`."""
    return min(most, width & -width)


@triton.jit(do_not_specialize=["count", "eps", "offset"])
def _product_kernel(
    rows, weight, norm, residual, output, parts, counters, a, b, lows, count, eps, offset,
    STRIDE: tl.constexpr, RESIDUAL_STRIDE: tl.constexpr, WIDTH: tl.constexpr, FEATURES: tl.constexpr,
    TOKENS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, TILES: tl.constexpr, SPLITS: tl.constexpr,
    LOW_COUNTER: tl.constexpr, ACTIVATION: tl.constexpr, STAGES: tl.constexpr, WARPS: tl.constexpr,
    LOW_SPLITS: tl.constexpr, LOW_PROGRAMS: tl.constexpr, RANK: tl.constexpr, RANKS: tl.constexpr,
    SECOND: tl.constexpr, THIRD: tl.constexpr, FOURTH: tl.constexpr,
):  # fmt: skip
    # Programs start in the order of their numbers, so those that others wait for are the first.
    program = tl.program_id(0)
    if program < LOW_PROGRAMS:
        if a is not None:
            _multiply_a(
                program, rows, norm, counters + LOW_COUNTER, a, lows, count, offset,
                STRIDE, WIDTH, TOKENS, BLOCK, STAGES, WARPS, LOW_SPLITS, RANK, RANKS,
            )  # fmt: skip
    else:
        _multiply(
            program - LOW_PROGRAMS, rows, weight, norm, residual, output, parts, counters, b, lows, count, eps, offset,
            STRIDE, RESIDUAL_STRIDE, WIDTH, FEATURES, TOKENS, COLUMNS, BLOCK, TILES, SPLITS, LOW_COUNTER, ACTIVATION,
            STAGES, WARPS, LOW_SPLITS, LOW_PROGRAMS, RANK, RANKS, SECOND, THIRD, FOURTH,
        )  # fmt: skip


@triton.jit
def _multiply_a(
    program, rows, norm, counter, a, lows, count, offset,
    STRIDE: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
    WARPS: tl.constexpr, LOW_SPLITS: tl.constexpr, RANK: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    # Some features of rows · Aᵀ of one layer, before the division by the norm, to `lows` [programs, TOKENS, RANKS].
    token, rank = tl.arange(0, TOKENS), tl.arange(0, RANKS)
    layer, split = program // LOW_SPLITS, program % LOW_SPLITS
    low = _times_a(
        rows, norm, a + layer * RANK * WIDTH, token, token < count, rank < RANK, split, offset,
        STRIDE, WIDTH, RANKS, WIDTH // LOW_SPLITS, BLOCK, STAGES, WARPS,
    )  # fmt: skip
    tl.store(lows + (program * TOKENS + token[:, None]) * RANKS + rank[None, :], low)
    tl.debug_barrier()  # all threads have stored before one counts
    tl.atomic_add(counter, 1, sem="acq_rel")


@triton.jit
def _times_a(
    rows, norm, a, token, live, known, split, offset,
    STRIDE: tl.constexpr, WIDTH: tl.constexpr, RANKS: tl.constexpr, FEATURES: tl.constexpr, BLOCK: tl.constexpr,
    STAGES: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Returns [tokens, RANKS]: tokens' rows times the first rows of A, of FEATURES features."""
    of_warp: tl.constexpr = BLOCK // WARPS
    first_feature = split * FEATURES + tl.arange(0, WARPS)[:, None] * of_warp + tl.arange(0, of_warp)[None, :]
    low = tl.zeros((WARPS, token.shape[0], RANKS), tl.float32)
    for start in tl.range(0, FEATURES, BLOCK, num_stages=STAGES):
        place = first_feature + start
        values = tl.load(rows + token[None, :, None] * STRIDE + place[:, None, :], mask=live[None, :, None], other=0.0)
        a_at = a + tl.arange(0, RANKS)[None, None, :] * WIDTH + place[:, :, None]
        matrix = tl.load(a_at, mask=known[None, None, :], other=0.0)
        if norm is not None:
            by = tl.load(norm + place).to(tl.float32) + offset
            values = (values.to(tl.float32) * by[:, None, :]).to(values.dtype)
        low = tl.dot(values, matrix, low)
    return tl.sum(low, 0)


@triton.jit
def _low(lows, layer, TOKENS: tl.constexpr, LOW_SPLITS: tl.constexpr, RANKS: tl.constexpr):
    """Returns rows · Aᵀ of a layer, [TOKENS, RANKS]: the sum of its parts in their order."""
    at = lows + tl.arange(0, TOKENS)[:, None] * RANKS + tl.arange(0, RANKS)[None, :]
    total = tl.zeros((TOKENS, RANKS), tl.float32)
    for split in tl.static_range(LOW_SPLITS):
        total += tl.load(at + (layer * LOW_SPLITS + split) * TOKENS * RANKS, cache_modifier=".cg")
    return total


@triton.jit
def _multiply(  # noqa: PLR0912, PLR0915
    program, rows, weight, norm, residual, output, parts, counters, b, lows, count, eps, offset,
    STRIDE: tl.constexpr, RESIDUAL_STRIDE: tl.constexpr, WIDTH: tl.constexpr, FEATURES: tl.constexpr,
    TOKENS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, TILES: tl.constexpr, SPLITS: tl.constexpr,
    LOW_COUNTER: tl.constexpr, ACTIVATION: tl.constexpr, STAGES: tl.constexpr, WARPS: tl.constexpr,
    LOW_SPLITS: tl.constexpr, LOW_PROGRAMS: tl.constexpr, RANK: tl.constexpr, RANKS: tl.constexpr,
    SECOND: tl.constexpr, THIRD: tl.constexpr, FOURTH: tl.constexpr,
):  # fmt: skip
    # Each warp takes its own features of a block, [WARPS, ...], and their sums are added at the end.
    tile, split = program % TILES, program // TILES
    token, column = tl.arange(0, TOKENS), tile * COLUMNS + tl.arange(0, COLUMNS)
    live, inside = (token < count)[:, None], (column < FEATURES)[None, :]
    each: tl.constexpr = WIDTH // SPLITS
    of_warp: tl.constexpr = BLOCK // WARPS
    first_feature = split * each + tl.arange(0, WARPS)[:, None] * of_warp + tl.arange(0, of_warp)[None, :]
    total = tl.zeros((WARPS, TOKENS, COLUMNS), tl.float32)
    up = tl.zeros((WARPS, TOKENS, COLUMNS), tl.float32)
    squares = tl.zeros((WARPS, TOKENS, of_warp), tl.float32)  # summed up once, at the end
    if b is not None:  # loaded early, needed last
        rank = tl.arange(0, RANKS)
        held, b_at = inside & (rank < RANK)[:, None], b + column[None, :] * RANK + rank[:, None]
        by_b = tl.load(b_at, mask=held, other=0.0)
        if ACTIVATION is not None:
            up_by_b = tl.load(b_at + FEATURES * RANK, mask=held, other=0.0)
    for start in tl.range(0, each, BLOCK, num_stages=STAGES):
        place = first_feature + start
        weight_at = weight + column[None, None, :].to(tl.int64) * WIDTH + place[:, :, None]
        values = tl.load(rows + token[None, :, None] * STRIDE + place[:, None, :], mask=live[None], other=0.0)
        weights = tl.load(weight_at, mask=inside[None], other=0.0)  # the gate's, where there is one
        if norm is not None:
            wide = values.to(tl.float32)
            squares += wide * wide
            values = (wide * (tl.load(norm + place).to(tl.float32) + offset)[:, None, :]).to(values.dtype)
        total = tl.dot(values, weights, total)
        if ACTIVATION is not None:
            weights = tl.load(weight_at + FEATURES * WIDTH, mask=inside[None], other=0.0)
            up = tl.dot(values, weights, up)
    total, up = tl.sum(total, 0), tl.sum(up, 0)
    inverse = tl.full((TOKENS, 1), 1.0, tl.float32)
    if norm is not None:
        inverse = tl.rsqrt(tl.sum(tl.sum(squares, 2), 0) / WIDTH + eps)[:, None]
        total, up = total * inverse, up * inverse
    at = token[:, None] * FEATURES + column[None, :]
    finishes = True
    if SPLITS > 1:
        tl.store(parts + split * count * FEATURES + at, total, mask=live & inside)
        tl.debug_barrier()  # all threads have stored before one counts
        finishes = tl.atomic_add(counters + tile, 1, sem="acq_rel") == SPLITS - 1
    if finishes:
        if SPLITS > 1:
            tl.debug_barrier()
            tl.store(counters + tile, 0)
            total = tl.zeros((TOKENS, COLUMNS), tl.float32)
            for part in tl.static_range(SPLITS):
                there = parts + part * count * FEATURES + at
                total += tl.load(there, mask=live & inside, other=0.0, cache_modifier=".cg")
        if b is not None:
            counter = counters + LOW_COUNTER
            while tl.atomic_add(counter, 0, sem="acquire") < LOW_PROGRAMS:
                pass
            waited = tl.atomic_add(counter, 1, sem="relaxed")  # one of each tile does
            dtype: tl.constexpr = rows.dtype.element_ty
            layer = _layer(tile * COLUMNS, SECOND, THIRD, FOURTH) if ACTIVATION is None else 0
            low = (_low(lows, layer, TOKENS, LOW_SPLITS, RANKS) * inverse).to(dtype)
            total = tl.dot(low, by_b, total)
            if ACTIVATION is not None:
                low = (_low(lows, 1, TOKENS, LOW_SPLITS, RANKS) * inverse).to(dtype)
                up = tl.dot(low, up_by_b, up)
            if waited == LOW_PROGRAMS + TILES - 1:  # none waits any more
                tl.store(counter, 0)
        if ACTIVATION is not None:
            opened, _ = activated(total, ACTIVATION)
            total = opened * up
        _finish(total, residual, output, token, column, live & inside, RESIDUAL_STRIDE, FEATURES)


@triton.jit
def _finish(total, residual, output, token, column, held, RESIDUAL_STRIDE: tl.constexpr, FEATURES: tl.constexpr):
    if residual is not None:
        at = residual + token[:, None] * RESIDUAL_STRIDE + column[None, :]
        total += tl.load(at, mask=held, other=0.0).to(tl.float32)
    at = output + token[:, None] * FEATURES + column[None, :]
    tl.store(at, total.to(output.dtype.element_ty), mask=held)


@triton.jit
def _layer(column, SECOND: tl.constexpr, THIRD: tl.constexpr, FOURTH: tl.constexpr):
    """Returns which of up to four adjacent layers a column of the product belongs to."""
    return (column >= SECOND).to(tl.int32) + (column >= THIRD).to(tl.int32) + (column >= FOURTH).to(tl.int32)


def add_low_rank(product: Tensor, parts: Tensor, low_rank: LowRank, *, activation: str | None = None) -> Tensor:
    """Adds B times the sum of `parts` [parts, T, layers · rank], the products with A. See `ops/decode_linear.py`."""
    count, features = product.shape[0], product.shape[1] // (2 if activation else 1)
    output = product if activation is None else torch.empty(count, features, dtype=product.dtype, device=product.device)
    rank, ranks, *firsts = low_rank_constants(low_rank)
    columns = gcd(B_COLUMNS // (2 if activation else 1), *low_rank.sizes)
    strides = (parts.shape[2], product.stride(0), output.stride(0))
    constants = (*strides, features, TOKENS, columns, len(parts), activation, rank, ranks, *firsts)
    grid = triton.cdiv(count, TOKENS), triton.cdiv(features, columns), 1
    _low_rank(grid, (parts, product, output, low_rank.b), (count,), constants, WARPS)
    return output


@triton.jit(do_not_specialize=["count"])
def _low_rank_kernel(
    parts, product, output, b, count,
    STRIDE: tl.constexpr, PRODUCT_STRIDE: tl.constexpr, OUTPUT_STRIDE: tl.constexpr, FEATURES: tl.constexpr,
    TOKENS: tl.constexpr, COLUMNS: tl.constexpr, SPLITS: tl.constexpr, ACTIVATION: tl.constexpr, RANK: tl.constexpr,
    RANKS: tl.constexpr, SECOND: tl.constexpr, THIRD: tl.constexpr, FOURTH: tl.constexpr,
):  # fmt: skip
    # A tile's columns are all of one layer.
    token, rank = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64), tl.arange(0, RANKS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    live, known, inside = (token < count)[:, None], rank < RANK, (column < FEATURES)[None, :]
    first = _layer(tl.program_id(1) * COLUMNS, SECOND, THIRD, FOURTH) * RANK if ACTIVATION is None else 0
    parts_at = parts + token[:, None] * STRIDE + first + rank[None, :]
    b_at = b + column[None, :] * RANK + rank[:, None]
    at = product + token[:, None] * PRODUCT_STRIDE + column[None, :]
    dtype: tl.constexpr = b.dtype.element_ty
    by_b = tl.load(b_at, mask=inside & known[:, None], other=0.0)
    total = tl.load(at, mask=live & inside, other=0.0).to(tl.float32)
    low = _sum_parts(parts_at, count * STRIDE, live & known[None, :], SPLITS)
    total = tl.dot(low.to(dtype), by_b, total)
    if ACTIVATION is not None:
        up = tl.load(at + FEATURES, mask=live & inside, other=0.0).to(tl.float32)
        by_b = tl.load(b_at + FEATURES * RANK, mask=inside & known[:, None], other=0.0)
        low = _sum_parts(parts_at + RANK, count * STRIDE, live & known[None, :], SPLITS)
        up = tl.dot(low.to(dtype), by_b, up)
        opened, _ = activated(total, ACTIVATION)
        total = opened * up
    at = output + token[:, None] * OUTPUT_STRIDE + column[None, :]
    tl.store(at, total.to(output.dtype.element_ty), mask=live & inside)


@triton.jit
def _sum_parts(at, stride, held, SPLITS: tl.constexpr):
    total = tl.load(at, mask=held, other=0.0)
    for split in tl.static_range(1, SPLITS):
        total += tl.load(at + split * stride, mask=held, other=0.0)
    return total


_product = Launcher(_product_kernel)
_low_rank = Launcher(_low_rank_kernel)
