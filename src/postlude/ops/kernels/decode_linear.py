"""A linear layer of few rows with the norm, activation or residual around it, in one kernel.

A decode step of 16 rows gives 12,124 tokens/s with it and 10,136 with a kernel for each part, 0.6B on an H200
(docs/benchmarks.md, "The generator").

A program takes some columns of the product, of all rows. Where there are too few columns for all multiprocessors,
several programs share them, each with some of the features. The last one to finish adds all parts in their order, so
that the sum is the same every time. With adapters each program also multiplies all rows by the A of its columns' layer,
which is small and in the L2 cache, so that no kernel is added.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, assignment, misc"

from __future__ import annotations

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
ADAPTED_BLOCK = 128  # with adapters: tiles of A take shared memory too
MOST_SUMS = 2048  # of products with A: if there are more, warps share them in place of having their own features
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
    columns = COLUMNS // 2 if activation else COLUMNS
    tiles = triton.cdiv(features, columns)
    ranks = (16, 16, features, features, features) if low_rank is None else low_rank_constants(low_rank)
    loaded = most + COLUMNS + (0 if low_rank is None else ranks[1] * (2 if activation else 1))  # of each feature
    block = _divisor(width, BLOCK if low_rank is None else ADAPTED_BLOCK)
    while (STAGES - 1) * block * loaded * rows.element_size() + SPARE > gpu_of(rows.device).shared_memory:
        block //= 2
    splits = 1
    while counters is not None and tiles * splits * 2 <= PROGRAMS and width % (splits * 2 * block) == 0:
        splits *= 2
    output = torch.empty(count, features, dtype=rows.dtype, device=rows.device)
    parts = None if splits == 1 else torch.empty(splits, count, features, dtype=torch.float32, device=rows.device)
    if splits > 1 and (counters is None or tiles > len(counters)):
        raise ValueError(
            f"{tiles} tiles need as many counters, but there are {0 if counters is None else len(counters)}."
        )
    a, b = (None, None) if low_rank is None else (low_rank.a, low_rank.b)
    tensors = (rows, weight, None if norm is None else norm.weight, residual, output, parts, counters, a, b)
    numbers = (count, 0.0 if norm is None else norm.eps, 0.0 if norm is None else norm.offset)
    strides = (rows.stride(0), 0 if residual is None else residual.stride(0))
    constants = (*strides, width, features, most, columns, block, splits, activation, STAGES, WARPS, *ranks)
    _product((tiles, splits, 1), tensors, numbers, constants, WARPS)
    return output


def low_rank_constants(low_rank: LowRank) -> tuple[int, ...]:
    """Returns the rank, the next power of two, and the first column of the second, third and fourth layer."""
    ends = [sum(low_rank.sizes[: count + 1]) for count in range(3)]
    return low_rank.rank, triton.next_power_of_2(low_rank.rank), *ends


def _divisor(width: int, most: int) -> int:
    """Returns the largest power of two that divides the width, at most `most`."""
    return min(most, width & -width)


@triton.jit(do_not_specialize=["count", "eps", "offset"])
def _product_kernel(  # noqa: PLR0912, PLR0915
    rows, weight, norm, residual, output, parts, counters, a, b, count, eps, offset,
    STRIDE: tl.constexpr, RESIDUAL_STRIDE: tl.constexpr, WIDTH: tl.constexpr, FEATURES: tl.constexpr,
    TOKENS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr, ACTIVATION: tl.constexpr,
    STAGES: tl.constexpr, WARPS: tl.constexpr, RANK: tl.constexpr, RANKS: tl.constexpr,
    SECOND: tl.constexpr, THIRD: tl.constexpr, FOURTH: tl.constexpr,
):  # fmt: skip
    # Each warp takes its own features of a block, [WARPS, ...], and their sums are added at the end.
    tile, split = tl.program_id(0), tl.program_id(1)
    token, column = tl.arange(0, TOKENS), tile * COLUMNS + tl.arange(0, COLUMNS)
    live, inside = (token < count)[:, None], (column < FEATURES)[None, :]
    each: tl.constexpr = WIDTH // SPLITS
    of_warp: tl.constexpr = BLOCK // WARPS
    first_feature = split * each + tl.arange(0, WARPS)[:, None] * of_warp + tl.arange(0, of_warp)[None, :]
    total = tl.zeros((WARPS, TOKENS, COLUMNS), tl.float32)
    up = tl.zeros((WARPS, TOKENS, COLUMNS), tl.float32)
    squares = tl.zeros((WARPS, TOKENS, of_warp), tl.float32)  # summed up once, at the end
    rank = tl.arange(0, RANKS)
    known = rank < RANK
    low = tl.zeros((WARPS, TOKENS, RANKS), tl.float32)
    low_up = tl.zeros((WARPS, TOKENS, RANKS), tl.float32)
    first_row = _layer(tile * COLUMNS, SECOND, THIRD, FOURTH) * RANK if ACTIVATION is None else 0
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
        if a is not None:
            a_at = a + (first_row + rank)[None, None, :] * WIDTH + place[:, :, None]
            low = tl.dot(values, tl.load(a_at, mask=known[None, None, :], other=0.0), low)
            if ACTIVATION is not None:
                low_up = tl.dot(values, tl.load(a_at + RANK * WIDTH, mask=known[None, None, :], other=0.0), low_up)
    total, up, low, low_up = tl.sum(total, 0), tl.sum(up, 0), tl.sum(low, 0), tl.sum(low_up, 0)
    if norm is not None:
        inverse = tl.rsqrt(tl.sum(tl.sum(squares, 2), 0) / WIDTH + eps)[:, None]
        total, up, low, low_up = total * inverse, up * inverse, low * inverse, low_up * inverse
    if a is not None:
        held, b_at = inside & known[:, None], b + column[None, :] * RANK + rank[:, None]
        total = tl.dot(low.to(rows.dtype.element_ty), tl.load(b_at, mask=held, other=0.0), total)
        if ACTIVATION is not None:
            weights = tl.load(b_at + FEATURES * RANK, mask=held, other=0.0)
            up = tl.dot(low_up.to(rows.dtype.element_ty), weights, up)
    if ACTIVATION is not None:
        opened, _ = activated(total, ACTIVATION)
        total = opened * up
    at = token[:, None] * FEATURES + column[None, :]
    if SPLITS == 1:
        _finish(total, residual, output, token, column, live & inside, RESIDUAL_STRIDE, FEATURES)
    else:
        tl.store(parts + split * count * FEATURES + at, total, mask=live & inside)
        tl.debug_barrier()  # all threads have stored before one counts
        if tl.atomic_add(counters + tile, 1, sem="acq_rel") == SPLITS - 1:
            tl.debug_barrier()
            total = tl.zeros((TOKENS, COLUMNS), tl.float32)
            for part in tl.static_range(SPLITS):
                there = parts + part * count * FEATURES + at
                total += tl.load(there, mask=live & inside, other=0.0, cache_modifier=".cg")
            _finish(total, residual, output, token, column, live & inside, RESIDUAL_STRIDE, FEATURES)
            tl.store(counters + tile, 0)


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


def add_low_rank(
    product: Tensor, rows: Tensor, low_rank: LowRank, span: int, *, activation: str | None = None
) -> Tensor:
    """See `ops/low_rank.py`. A program takes `span` columns, all of one layer."""
    count, width = rows.shape
    features = product.shape[1] // (2 if activation else 1)
    output = product if activation is None else torch.empty(count, features, dtype=rows.dtype, device=rows.device)
    rank, ranks, *firsts = low_rank_constants(low_rank)
    room = gpu_of(rows.device).shared_memory // rows.element_size()
    tokens, columns, block = low_rank_tile(count, width, span, ranks, 2 if activation else 1, room)
    strides = (rows.stride(0), product.stride(0), output.stride(0))
    parts = WARPS if tokens * ranks * (2 if activation else 1) <= MOST_SUMS and block >= 16 * WARPS else 1
    constants = (
        *strides,
        width,
        features,
        tokens,
        span,
        columns,
        block,
        parts,
        activation,
        rank,
        ranks,
        *firsts,
    )
    grid, tensors = (triton.cdiv(count, tokens), triton.cdiv(features, span), 1), (rows, product, output)
    _low_rank(grid, (*tensors, low_rank.a, low_rank.b), (count,), constants, WARPS)
    return output


def low_rank_tile(count: int, width: int, span: int, ranks: int, layers: int, room: int) -> tuple[int, int, int]:
    """Returns tokens, columns and features of a tile whose numbers fit in `room`."""
    tokens = 16 if count <= 64 else 32 if count <= 256 or ranks * layers <= 64 else 64
    while tokens > 16 and ranks <= 64 and tokens * ranks * layers > MOST_SUMS:
        tokens //= 2
    columns, block = min(span, 128 // layers), _divisor(width, 64 if ranks > 64 else BLOCK)
    while 2 * block * (tokens + layers * ranks) > room:  # rows and A, loaded one block ahead
        block //= 2
    while layers * ranks * (tokens + columns) > room:  # what A gives, and B
        columns //= 2
    return tokens, columns, block


@triton.jit(do_not_specialize=["count"])
def _low_rank_kernel(
    rows, product, output, a, b, count,
    STRIDE: tl.constexpr, PRODUCT_STRIDE: tl.constexpr, OUTPUT_STRIDE: tl.constexpr, WIDTH: tl.constexpr,
    FEATURES: tl.constexpr, TOKENS: tl.constexpr, SPAN: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
    PARTS: tl.constexpr, ACTIVATION: tl.constexpr, RANK: tl.constexpr, RANKS: tl.constexpr,
    SECOND: tl.constexpr, THIRD: tl.constexpr, FOURTH: tl.constexpr,
):  # fmt: skip
    token, rank = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64), tl.arange(0, RANKS)
    first_column = tl.program_id(1) * SPAN
    live, known = (token < count)[:, None], (rank < RANK)
    first_row = _layer(first_column, SECOND, THIRD, FOURTH) * RANK if ACTIVATION is None else 0
    if PARTS == 1:
        low = tl.zeros((TOKENS, RANKS), tl.float32)
        low_up = tl.zeros((TOKENS, RANKS), tl.float32)
        for start in tl.range(0, WIDTH, BLOCK, num_stages=3):
            place = start + tl.arange(0, BLOCK)
            values = tl.load(rows + token[:, None] * STRIDE + place[None, :], mask=live, other=0.0)
            a_at = a + (first_row + rank)[None, :] * WIDTH + place[:, None]
            low = tl.dot(values, tl.load(a_at, mask=known[None, :], other=0.0), low)
            if ACTIVATION is not None:
                low_up = tl.dot(values, tl.load(a_at + RANK * WIDTH, mask=known[None, :], other=0.0), low_up)
    else:  # each warp takes its own features
        of_part: tl.constexpr = BLOCK // PARTS
        feature = tl.arange(0, PARTS)[:, None] * of_part + tl.arange(0, of_part)[None, :]
        low = tl.zeros((PARTS, TOKENS, RANKS), tl.float32)
        low_up = tl.zeros((PARTS, TOKENS, RANKS), tl.float32)
        for start in tl.range(0, WIDTH, BLOCK, num_stages=3):
            place = start + feature
            values = tl.load(rows + token[None, :, None] * STRIDE + place[:, None, :], mask=live[None], other=0.0)
            a_at = a + (first_row + rank)[None, None, :] * WIDTH + place[:, :, None]
            low = tl.dot(values, tl.load(a_at, mask=known[None, None, :], other=0.0), low)
            if ACTIVATION is not None:
                low_up = tl.dot(values, tl.load(a_at + RANK * WIDTH, mask=known[None, None, :], other=0.0), low_up)
        low, low_up = tl.sum(low, 0), tl.sum(low_up, 0)
    dtype = rows.dtype.element_ty
    low, low_up = low.to(dtype), low_up.to(dtype)
    for start in tl.static_range(0, SPAN, COLUMNS):
        column = first_column + start + tl.arange(0, COLUMNS)
        inside = (column < FEATURES)[None, :]
        b_at = b + column[None, :] * RANK + rank[:, None]
        at = product + token[:, None] * PRODUCT_STRIDE + column[None, :]
        total = tl.load(at, mask=live & inside, other=0.0).to(tl.float32)
        total = tl.dot(low, tl.load(b_at, mask=inside & known[:, None], other=0.0), total)
        if ACTIVATION is not None:
            up = tl.load(at + FEATURES, mask=live & inside, other=0.0).to(tl.float32)
            up = tl.dot(low_up, tl.load(b_at + FEATURES * RANK, mask=inside & known[:, None], other=0.0), up)
            opened, _ = activated(total, ACTIVATION)
            total = opened * up
        at = output + token[:, None] * OUTPUT_STRIDE + column[None, :]
        tl.store(at, total.to(output.dtype.element_ty), mask=live & inside)


_product = Launcher(_product_kernel)
_low_rank = Launcher(_low_rank_kernel)
