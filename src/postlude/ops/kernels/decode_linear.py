"""A linear layer of few rows with the norm, activation or residual around it, in one kernel.

1.08 times as fast as cuBLAS with a kernel for each part: 88 µs against 95 for the MLP of an 8B and 16 rows on an H200
(benchmarks/results/small_kernels_h200.json). The four products of a layer of a 0.6B take 23.2 µs for 16 rows on an H200
(benchmarks/results/decode_tries_h200.json). With an adapter of rank 32 a step takes 1.37 ms; it took 1.77 where every
program multiplied by the A of its layer (benchmarks/results/decode_step_lora_h200.json).

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

from postlude.ops.kernels.activation import activation_and_slope
from postlude.ops.kernels.capabilities import gpu_of
from postlude.ops.kernels.launch import Launcher
from postlude.ops.low_rank import LowRank
from postlude.ops.norm import Norm

# Measured on an H200: columns and features of a tile, programs to aim at, warps and loads ahead.
COLUMNS, BLOCK, PROGRAMS, WARPS, STAGES = 32, 256, 128, 4, 4
MIN_COLUMNS, MAX_BLOCK = 8, 512  # of a tile where columns are few: programs that share a sum wait for each other
GATED_COLUMNS = 64  # gates and what they multiply
A_FEATURES = 2048  # of a program that multiplies by A; with fewer, there are more programs than multiprocessors
TOKENS, B_COLUMNS = 32, 128  # of a tile that adds the product with B to another product
OTHER_SHARED_MEMORY = 4096  # bytes of shared memory besides the tiles


def product(
    rows: Tensor,
    weight: Tensor,
    max_rows: int,
    *,
    norm: Norm | None = None,
    activation: str | None = None,
    residual: Tensor | None = None,
    counters: Tensor | None = None,
    low_rank: LowRank | None = None,
) -> Tensor:
    """See `ops/decode_linear.py`; the arguments say which function. Tiles have room for `max_rows` rows."""
    count, width = rows.shape
    features = weight.shape[0] // (2 if activation else 1)
    columns, max_block = (GATED_COLUMNS // 2 if activation else COLUMNS), BLOCK
    while norm is None and low_rank is None and columns > MIN_COLUMNS and features // columns < PROGRAMS:
        columns, max_block = columns // 2, min(2 * max_block, MAX_BLOCK)
    tiles = triton.cdiv(features, columns)
    rank_constants = (16, 16, features, features, features) if low_rank is None else low_rank_constants(low_rank)
    loaded_rows = max_rows + max(columns * (2 if activation else 1), rank_constants[1])  # of each feature
    block = _divisor(width, max_block)
    row_bytes, available = loaded_rows * rows.element_size(), gpu_of(rows.device).shared_memory - OTHER_SHARED_MEMORY
    while (STAGES - 1) * block * row_bytes > available:
        block //= 2
    splits, shares_sums = 1, counters is not None and norm is None
    while shares_sums and tiles * splits * 2 <= PROGRAMS and width % (splits * 2 * block) == 0:
        splits *= 2
    output = torch.empty(count, features, dtype=rows.dtype, device=rows.device)
    parts = None if splits == 1 else torch.empty(splits, count, features, dtype=torch.float32, device=rows.device)
    a = b = a_products = None
    a_splits = a_programs = 0
    if low_rank is not None:
        a, b = low_rank.a, low_rank.b
        a_splits = max(1, width // _divisor(width, A_FEATURES))
        a_programs = a_splits * len(low_rank.sizes)
        a_products = torch.empty(a_programs, max_rows, rank_constants[1], dtype=torch.float32, device=rows.device)
        if counters is None:
            counters = torch.zeros(1, dtype=torch.int32, device=rows.device)
    if splits > 1 and counters is not None and tiles >= len(counters):
        raise ValueError(f"{tiles} tiles need {tiles + 1} counters, but there are {len(counters)}.")
    tensors = (rows, weight, None if norm is None else norm.weight, residual, output, parts, counters, a, b, a_products)
    numbers = (count, 0.0 if norm is None else norm.eps, 0.0 if norm is None else norm.offset)
    strides = (rows.stride(0), 0 if residual is None else residual.stride(0))
    sizes = (width, features, max_rows, columns, block, tiles, splits, 0 if counters is None else len(counters) - 1)
    constants = (*strides, *sizes, activation, STAGES, WARPS, a_splits, a_programs, *rank_constants)
    _product((a_programs + tiles * splits, 1, 1), tensors, numbers, constants, WARPS)
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
    rows, weight, norm, residual, output, parts, counters, a, b, a_products, count, eps, offset,
    STRIDE: tl.constexpr, RESIDUAL_STRIDE: tl.constexpr, WIDTH: tl.constexpr, FEATURES: tl.constexpr,
    TOKENS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, TILES: tl.constexpr, SPLITS: tl.constexpr,
    A_COUNTER: tl.constexpr, ACTIVATION: tl.constexpr, STAGES: tl.constexpr, WARPS: tl.constexpr,
    A_SPLITS: tl.constexpr, A_PROGRAMS: tl.constexpr, RANK: tl.constexpr, RANK_BLOCK: tl.constexpr,
    SECOND_LAYER: tl.constexpr, THIRD_LAYER: tl.constexpr, FOURTH_LAYER: tl.constexpr,
):  # fmt: skip
    # Programs start in the order of their numbers, so those that others wait for are the first.
    program = tl.program_id(0)
    if program < A_PROGRAMS:
        if a is not None:
            _product_with_a(
                program, rows, norm, counters + A_COUNTER, a, a_products, count, offset,
                STRIDE, WIDTH, TOKENS, BLOCK, STAGES, WARPS, A_SPLITS, RANK, RANK_BLOCK,
            )  # fmt: skip
    else:
        _product_tile(
            program - A_PROGRAMS, rows, weight, norm, residual, output, parts, counters, b, a_products, count, eps,
            offset, STRIDE, RESIDUAL_STRIDE, WIDTH, FEATURES, TOKENS, COLUMNS, BLOCK, TILES, SPLITS, A_COUNTER,
            ACTIVATION, STAGES, WARPS, A_SPLITS, A_PROGRAMS, RANK, RANK_BLOCK, SECOND_LAYER, THIRD_LAYER, FOURTH_LAYER,
        )  # fmt: skip


@triton.jit
def _product_with_a(
    program, rows, norm, counter, a, a_products, count, offset,
    STRIDE: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
    WARPS: tl.constexpr, A_SPLITS: tl.constexpr, RANK: tl.constexpr, RANK_BLOCK: tl.constexpr,
):  # fmt: skip
    # Writes some features' part of rows · Aᵀ of one layer, before the division by the norm, to `a_products` [programs,
    # TOKENS, RANK_BLOCK].
    token, rank = tl.arange(0, TOKENS), tl.arange(0, RANK_BLOCK)
    layer, split = program // A_SPLITS, program % A_SPLITS
    partial = _partial_product_with_a(
        rows, norm, a + layer * RANK * WIDTH, token, token < count, rank < RANK, split, offset,
        STRIDE, WIDTH, RANK_BLOCK, WIDTH // A_SPLITS, BLOCK, STAGES, WARPS,
    )  # fmt: skip
    tl.store(a_products + (program * TOKENS + token[:, None]) * RANK_BLOCK + rank[None, :], partial)
    tl.debug_barrier()  # all threads have stored before one counts
    tl.atomic_add(counter, 1, sem="acq_rel")


@triton.jit
def _partial_product_with_a(
    rows, norm, a, token, token_mask, rank_mask, split, offset,
    STRIDE: tl.constexpr, WIDTH: tl.constexpr, RANK_BLOCK: tl.constexpr, FEATURES: tl.constexpr, BLOCK: tl.constexpr,
    STAGES: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Returns [tokens, RANK_BLOCK]: tokens' rows times the first rows of A, of FEATURES features."""
    warp_features: tl.constexpr = BLOCK // WARPS
    first_feature = split * FEATURES + tl.arange(0, WARPS)[:, None] * warp_features
    first_feature += tl.arange(0, warp_features)[None, :]
    product = tl.zeros((WARPS, token.shape[0], RANK_BLOCK), tl.float32)
    for start in tl.range(0, FEATURES, BLOCK, num_stages=STAGES):
        feature = first_feature + start
        rows_at = rows + token[None, :, None] * STRIDE + feature[:, None, :]
        row_tile = tl.load(rows_at, mask=token_mask[None, :, None], other=0.0)
        a_at = a + tl.arange(0, RANK_BLOCK)[None, None, :] * WIDTH + feature[:, :, None]
        a_tile = tl.load(a_at, mask=rank_mask[None, None, :], other=0.0)
        if norm is not None:
            norm_weight = tl.load(norm + feature).to(tl.float32) + offset
            row_tile = (row_tile.to(tl.float32) * norm_weight[:, None, :]).to(row_tile.dtype)
        product = tl.dot(row_tile, a_tile, product)
    return tl.sum(product, 0)


@triton.jit
def _sum_products_with_a(a_products, layer, TOKENS: tl.constexpr, A_SPLITS: tl.constexpr, RANK_BLOCK: tl.constexpr):
    """Returns rows · Aᵀ of a layer, [TOKENS, RANK_BLOCK]: the sum of its parts in their order."""
    at = a_products + tl.arange(0, TOKENS)[:, None] * RANK_BLOCK + tl.arange(0, RANK_BLOCK)[None, :]
    total = tl.zeros((TOKENS, RANK_BLOCK), tl.float32)
    for split in tl.static_range(A_SPLITS):
        total += tl.load(at + (layer * A_SPLITS + split) * TOKENS * RANK_BLOCK, cache_modifier=".cg")
    return total


@triton.jit
def _product_tile(  # noqa: PLR0912, PLR0915
    program, rows, weight, norm, residual, output, parts, counters, b, a_products, count, eps, offset,
    STRIDE: tl.constexpr, RESIDUAL_STRIDE: tl.constexpr, WIDTH: tl.constexpr, FEATURES: tl.constexpr,
    TOKENS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, TILES: tl.constexpr, SPLITS: tl.constexpr,
    A_COUNTER: tl.constexpr, ACTIVATION: tl.constexpr, STAGES: tl.constexpr, WARPS: tl.constexpr,
    A_SPLITS: tl.constexpr, A_PROGRAMS: tl.constexpr, RANK: tl.constexpr, RANK_BLOCK: tl.constexpr,
    SECOND_LAYER: tl.constexpr, THIRD_LAYER: tl.constexpr, FOURTH_LAYER: tl.constexpr,
):  # fmt: skip
    # Each warp takes its own features of a block, [WARPS, ...], and their sums are added at the end.
    tile, split = program % TILES, program // TILES
    token, column = tl.arange(0, TOKENS), tile * COLUMNS + tl.arange(0, COLUMNS)
    token_mask, column_mask = (token < count)[:, None], (column < FEATURES)[None, :]
    split_features: tl.constexpr = WIDTH // SPLITS
    warp_features: tl.constexpr = BLOCK // WARPS
    first_feature = split * split_features + tl.arange(0, WARPS)[:, None] * warp_features
    first_feature += tl.arange(0, warp_features)[None, :]
    total = tl.zeros((WARPS, TOKENS, COLUMNS), tl.float32)
    up = tl.zeros((WARPS, TOKENS, COLUMNS), tl.float32)
    squares = tl.zeros((WARPS, TOKENS, warp_features), tl.float32)  # summed up once, at the end
    if b is not None:  # loaded early, needed last
        rank = tl.arange(0, RANK_BLOCK)
        b_mask, b_at = column_mask & (rank < RANK)[:, None], b + column[None, :] * RANK + rank[:, None]
        b_tile = tl.load(b_at, mask=b_mask, other=0.0)
        if ACTIVATION is not None:
            up_b_tile = tl.load(b_at + FEATURES * RANK, mask=b_mask, other=0.0)
    for start in tl.range(0, split_features, BLOCK, num_stages=STAGES):
        feature = first_feature + start
        weight_at = weight + column[None, None, :].to(tl.int64) * WIDTH + feature[:, :, None]
        row_tile = tl.load(rows + token[None, :, None] * STRIDE + feature[:, None, :], mask=token_mask[None], other=0.0)
        weight_tile = tl.load(weight_at, mask=column_mask[None], other=0.0)  # the gate's, where there is one
        if norm is not None:
            row_fp32 = row_tile.to(tl.float32)
            squares += row_fp32 * row_fp32
            row_tile = (row_fp32 * (tl.load(norm + feature).to(tl.float32) + offset)[:, None, :]).to(row_tile.dtype)
        total = tl.dot(row_tile, weight_tile, total)
        if ACTIVATION is not None:
            weight_tile = tl.load(weight_at + FEATURES * WIDTH, mask=column_mask[None], other=0.0)
            up = tl.dot(row_tile, weight_tile, up)
    total, up = tl.sum(total, 0), tl.sum(up, 0)
    inverse_rms = tl.full((TOKENS, 1), 1.0, tl.float32)
    if norm is not None:
        inverse_rms = tl.rsqrt(tl.sum(tl.sum(squares, 2), 0) / WIDTH + eps)[:, None]
        total, up = total * inverse_rms, up * inverse_rms
    at = token[:, None] * FEATURES + column[None, :]
    is_last = True
    if SPLITS > 1:
        tl.store(parts + split * count * FEATURES + at, total, mask=token_mask & column_mask)
        tl.debug_barrier()  # all threads have stored before one counts
        is_last = tl.atomic_add(counters + tile, 1, sem="acq_rel") == SPLITS - 1
    if is_last:
        if SPLITS > 1:
            tl.debug_barrier()
            tl.store(counters + tile, 0)
            total = tl.zeros((TOKENS, COLUMNS), tl.float32)
            for part in tl.static_range(SPLITS):
                part_at = parts + part * count * FEATURES + at
                total += tl.load(part_at, mask=token_mask & column_mask, other=0.0, cache_modifier=".cg")
        if b is not None:
            counter = counters + A_COUNTER
            while tl.atomic_add(counter, 0, sem="acquire") < A_PROGRAMS:
                pass
            count_before = tl.atomic_add(counter, 1, sem="relaxed")  # one program of each tile counts itself
            dtype: tl.constexpr = rows.dtype.element_ty
            layer = _layer_of(tile * COLUMNS, SECOND_LAYER, THIRD_LAYER, FOURTH_LAYER) if ACTIVATION is None else 0
            a_product = (_sum_products_with_a(a_products, layer, TOKENS, A_SPLITS, RANK_BLOCK) * inverse_rms).to(dtype)
            total = tl.dot(a_product, b_tile, total)
            if ACTIVATION is not None:
                a_product = (_sum_products_with_a(a_products, 1, TOKENS, A_SPLITS, RANK_BLOCK) * inverse_rms).to(dtype)
                up = tl.dot(a_product, up_b_tile, up)
            if count_before == A_PROGRAMS + TILES - 1:  # no program waits any more
                tl.store(counter, 0)
        if ACTIVATION is not None:
            activation, _ = activation_and_slope(total, ACTIVATION)
            total = activation * up
        _store_output(total, residual, output, token, column, token_mask & column_mask, RESIDUAL_STRIDE, FEATURES)


@triton.jit
def _store_output(total, residual, output, token, column, mask, RESIDUAL_STRIDE: tl.constexpr, FEATURES: tl.constexpr):
    if residual is not None:
        at = residual + token[:, None] * RESIDUAL_STRIDE + column[None, :]
        total += tl.load(at, mask=mask, other=0.0).to(tl.float32)
    at = output + token[:, None] * FEATURES + column[None, :]
    tl.store(at, total.to(output.dtype.element_ty), mask=mask)


@triton.jit
def _layer_of(column, SECOND_LAYER: tl.constexpr, THIRD_LAYER: tl.constexpr, FOURTH_LAYER: tl.constexpr):
    """Returns which of up to four adjacent layers a column of the product belongs to."""
    layer = (column >= SECOND_LAYER).to(tl.int32)
    return layer + (column >= THIRD_LAYER).to(tl.int32) + (column >= FOURTH_LAYER).to(tl.int32)


def add_low_rank(product: Tensor, a_products: Tensor, low_rank: LowRank, *, activation: str | None = None) -> Tensor:
    """Adds B times the sum of `a_products` [parts, T, layers · rank], the products with A.

    Returns the sum, or activation(gate) · up of it. See `ops/decode_linear.py`.
    """
    count, features = product.shape[0], product.shape[1] // (2 if activation else 1)
    output = product if activation is None else torch.empty(count, features, dtype=product.dtype, device=product.device)
    rank, rank_block, *layer_starts = low_rank_constants(low_rank)
    columns = gcd(B_COLUMNS // (2 if activation else 1), *low_rank.sizes)
    strides = (a_products.shape[2], product.stride(0), output.stride(0))
    constants = (*strides, features, TOKENS, columns, len(a_products), activation, rank, rank_block, *layer_starts)
    grid = triton.cdiv(count, TOKENS), triton.cdiv(features, columns), 1
    _add_low_rank(grid, (a_products, product, output, low_rank.b), (count,), constants, WARPS)
    return output


@triton.jit(do_not_specialize=["count"])
def _add_low_rank_kernel(
    a_products, product, output, b, count,
    STRIDE: tl.constexpr, PRODUCT_STRIDE: tl.constexpr, OUTPUT_STRIDE: tl.constexpr, FEATURES: tl.constexpr,
    TOKENS: tl.constexpr, COLUMNS: tl.constexpr, SPLITS: tl.constexpr, ACTIVATION: tl.constexpr, RANK: tl.constexpr,
    RANK_BLOCK: tl.constexpr, SECOND_LAYER: tl.constexpr, THIRD_LAYER: tl.constexpr, FOURTH_LAYER: tl.constexpr,
):  # fmt: skip
    # A tile's columns are all of one layer.
    token, rank = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64), tl.arange(0, RANK_BLOCK)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    token_mask, rank_mask, column_mask = (token < count)[:, None], rank < RANK, (column < FEATURES)[None, :]
    layer = _layer_of(tl.program_id(1) * COLUMNS, SECOND_LAYER, THIRD_LAYER, FOURTH_LAYER) if ACTIVATION is None else 0
    a_products_at = a_products + token[:, None] * STRIDE + layer * RANK + rank[None, :]
    b_at = b + column[None, :] * RANK + rank[:, None]
    at = product + token[:, None] * PRODUCT_STRIDE + column[None, :]
    dtype: tl.constexpr = b.dtype.element_ty
    b_tile = tl.load(b_at, mask=column_mask & rank_mask[:, None], other=0.0)
    total = tl.load(at, mask=token_mask & column_mask, other=0.0).to(tl.float32)
    a_product = _sum_parts(a_products_at, count * STRIDE, token_mask & rank_mask[None, :], SPLITS)
    total = tl.dot(a_product.to(dtype), b_tile, total)
    if ACTIVATION is not None:
        up = tl.load(at + FEATURES, mask=token_mask & column_mask, other=0.0).to(tl.float32)
        b_tile = tl.load(b_at + FEATURES * RANK, mask=column_mask & rank_mask[:, None], other=0.0)
        a_product = _sum_parts(a_products_at + RANK, count * STRIDE, token_mask & rank_mask[None, :], SPLITS)
        up = tl.dot(a_product.to(dtype), b_tile, up)
        activation, _ = activation_and_slope(total, ACTIVATION)
        total = activation * up
    at = output + token[:, None] * OUTPUT_STRIDE + column[None, :]
    tl.store(at, total.to(output.dtype.element_ty), mask=token_mask & column_mask)


@triton.jit
def _sum_parts(at, stride, mask, SPLITS: tl.constexpr):
    total = tl.load(at, mask=mask, other=0.0)
    for split in tl.static_range(1, SPLITS):
        total += tl.load(at + split * stride, mask=mask, other=0.0)
    return total


_product = Launcher(_product_kernel)
_add_low_rank = Launcher(_add_low_rank_kernel)
