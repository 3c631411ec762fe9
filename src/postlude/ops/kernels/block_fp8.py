"""Products of tokens and weights in FP8: scales of 1 × 128 for tokens and 128 × 128 for weights.

1.55, 1.63 and 1.45 times as fast as products in bf16 for 16, 64 and 128 rows: 74 against 114, 71 against 116 and 86
against 124 µs for the four products of an 8B layer on an H200 (benchmarks/results/fp8_products_h200.json).

`quantize` rounds tokens, after a norm or a gate if one is given. `product` multiplies on FP8 tensor cores, 128 features
at a time, and adds each part to an fp32 sum with both scales.

A program takes some columns of the product, of up to 128 tokens. Where there are too few columns for all
multiprocessors, several programs share them, each with some of the features. The last one to finish adds all parts in
their order, so that the sum is the same every time. With many tokens cuBLAS's product, which torch calls, is faster on
a Hopper, and taken.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, assignment, misc"

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from postlude.ops.kernels.activation import activation_and_slope
from postlude.ops.kernels.capabilities import GPU, HOPPER, KIB, gpu_of
from postlude.ops.kernels.fp8 import power_of_two, scale_exponent, to_fp8
from postlude.ops.kernels.launch import Launcher
from postlude.ops.norm import Norm

BLOCK = tl.constexpr(128)  # features with one scale
PADDING = tl.constexpr(16)  # of which the tokens are made a multiple, as torch's product needs
PROGRAMS = 132  # to have at most where programs share sums: one for each multiprocessor of an H200
CHUNK = 2048  # features that a program of `quantize` takes where there is no norm
LARGE_SHARED_MEMORY = 160 * KIB  # shared memory of GPUs that get the tiles of an H200
PARTS_PER_THREAD = 128  # numbers of all parts that a thread loads at once to add them
CUBLAS_SINCE = (12, 9)  # CUDA, whose cuBLAS multiplies in this format


class QuantizedRows(NamedTuple):
    """Tokens in FP8, [padded, in], and their scales, [in / 128, padded] fp32. The first `count` are tokens."""

    values: Tensor
    scales: Tensor
    count: int


@dataclass(frozen=True)
class BlockFP8Tile:
    """Tokens and columns of a program, its pipeline stages and warps, and the programs that share a column's sum."""

    tokens: int
    columns: int
    stages: int
    warps: int
    splits: int = 1


def quantize(rows: Tensor, norm: Norm | None = None, activation: str | None = None) -> QuantizedRows:
    """Rounds `rows` [T, in], or their norm, or activation(gate) · up where they are gate and up, [T, 2 · in]."""
    count, width = len(rows), rows.shape[1] // (1 if activation is None else 2)
    padded = triton.cdiv(count, PADDING.value) * PADDING.value
    values = torch.empty(padded, width, dtype=torch.float8_e4m3fn, device=rows.device)
    scales = torch.empty(width // BLOCK.value, padded, dtype=torch.float32, device=rows.device)
    span = triton.next_power_of_2(width) if norm is not None else min(CHUNK, triton.next_power_of_2(width))
    numbers = (padded, 0.0 if norm is None else norm.eps, 0.0 if norm is None else norm.offset)
    tensors = (rows, None if norm is None else norm.weight, values, scales)
    constants = (rows.stride(0), width, span, activation)
    _quantize((count, triton.cdiv(width, span), 1), tensors, numbers, constants, 4)
    return QuantizedRows(values, scales, count)


def product(
    rows: QuantizedRows,
    weight: Tensor,
    weight_scales: Tensor,
    dtype: torch.dtype,
    *,
    residual: Tensor | None = None,
    counters: Tensor | None = None,
) -> Tensor:
    """Returns the product of `rows` with `weight` [out, in], plus the residual if given: [T, out].

    `weight_scales` are [out / 128, in / 128]. `counters` are those of `decode_linear.linear_add`.
    """
    values, scales, count = rows
    (features, width), gpu = weight.shape, gpu_of(values.device)
    tile = tile_for(gpu, count, features, width, 0 if counters is None else len(counters))
    if values.is_cuda and dtype == torch.bfloat16 and prefers_cublas(gpu, count, width, tile):
        return _cublas_product(rows, weight, weight_scales, dtype, residual)
    output = torch.empty(count, features, dtype=dtype, device=values.device)
    parts = None
    if tile.splits > 1:
        parts = torch.empty(tile.splits, count, features, dtype=torch.float32, device=values.device)
    block, stride = BLOCK.value, 0 if residual is None else residual.stride(0)
    rows_operand = TensorDescriptor.from_tensor(values, [tile.tokens, block]) if gpu.tma else values
    weight_operand = TensorDescriptor.from_tensor(weight, [tile.columns, block]) if gpu.tma else weight
    tensors = (rows_operand, weight_operand, scales, weight_scales, residual, output, parts, counters)
    sum_tokens = min(tile.tokens, PARTS_PER_THREAD * 32 * tile.warps // (tile.columns * tile.splits))
    sizes = (tile.tokens, tile.columns, tile.splits, sum_tokens, tile.stages)
    grid = (triton.cdiv(count, tile.tokens), triton.cdiv(features, tile.columns), tile.splits)
    _product(grid, tensors, (count,), (stride, width, features, *sizes, gpu.tma), tile.warps)
    return output


def tile_for(gpu: GPU, count: int, features: int, width: int, counters: int) -> BlockFP8Tile:
    """Returns the fastest tile of those measured. Programs share sums if there are `counters` for all tiles."""
    blocks = features // BLOCK.value
    if gpu.shared_memory < LARGE_SHARED_MEMORY:
        tile = BlockFP8Tile(64 if count <= 64 else 128, 64, 4, 4)
    elif count > 128:
        tile = BlockFP8Tile(128, 128, 5, 8)
    elif count > 64:
        shares = counters > 0 and 4 * blocks <= PROGRAMS
        tile = BlockFP8Tile(64, 128, 6, 4) if shares else BlockFP8Tile(128, 64, 6 if 2 * blocks <= PROGRAMS else 4, 4)
    elif blocks > PROGRAMS:
        tile = BlockFP8Tile(64, 128, 4, 4)  # two programs on each multiprocessor
    else:
        tile = BlockFP8Tile(64, 128, 6, 4) if count <= 32 else BlockFP8Tile(64, 64, 8, 4)
    tiles, splits = triton.cdiv(features, tile.columns) * triton.cdiv(count, tile.tokens), 1
    while tiles <= counters and 2 * splits * tiles <= PROGRAMS and width % (2 * splits * BLOCK.value) == 0:
        splits *= 2
    return replace(tile, splits=splits)


def prefers_cublas(gpu: GPU, count: int, width: int, tile: BlockFP8Tile) -> bool:
    """Whether torch's product of this format, which cuBLAS has for Hopper GPUs, is there and faster than this tile."""
    is_faster = count > 128 or (count > 64 and tile.splits == 1)
    if not is_faster or gpu.capability[0] != HOPPER or width // BLOCK.value % 4:
        return False
    return tuple(int(part) for part in (torch.version.cuda or "0").split(".")) >= CUBLAS_SINCE


def _cublas_product(
    rows: QuantizedRows, weight: Tensor, weight_scales: Tensor, dtype: torch.dtype, residual: Tensor | None
) -> Tensor:
    output = F.scaled_mm(
        rows.values,
        weight.t(),
        rows.scales.t(),
        F.ScalingType.BlockWise1x128,
        weight_scales.t(),
        F.ScalingType.BlockWise128x128,
        output_dtype=dtype,
    )[: rows.count]
    return output if residual is None else output.add_(residual)


@triton.jit(do_not_specialize=["padded", "eps", "offset"])
def _quantize_kernel(
    rows, norm, values, scales, padded, eps, offset,
    STRIDE: tl.constexpr, WIDTH: tl.constexpr, SPAN: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    row, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * SPAN
    feature = first + tl.arange(0, SPAN)
    mask = feature < WIDTH
    loaded = tl.load(rows + row * STRIDE + feature, mask=mask, other=0.0)
    values_fp32 = loaded.to(tl.float32)
    if norm is not None:
        values_fp32 *= tl.rsqrt(tl.sum(values_fp32 * values_fp32, 0) / WIDTH + eps)
        values_fp32 *= tl.load(norm + feature, mask=mask, other=0.0).to(tl.float32) + offset
        values_fp32 = values_fp32.to(loaded.dtype).to(tl.float32)
    if ACTIVATION is not None:
        values_fp32, _ = activation_and_slope(values_fp32, ACTIVATION)
        values_fp32 *= tl.load(rows + row * STRIDE + WIDTH + feature, mask=mask, other=0.0).to(tl.float32)
        values_fp32 = values_fp32.to(loaded.dtype).to(tl.float32)
    blocks = tl.reshape(values_fp32, (SPAN // BLOCK, BLOCK))
    exponents = scale_exponent(tl.max(tl.abs(blocks), 1))
    rounded = to_fp8(blocks * power_of_two(-exponents)[:, None])
    tl.store(values + row * WIDTH + feature, tl.reshape(rounded, (SPAN,)), mask=mask)
    block = first // BLOCK + tl.arange(0, SPAN // BLOCK)
    tl.store(scales + block * padded + row, power_of_two(exponents), mask=block < WIDTH // BLOCK)


@triton.jit
def _load_tile(tensor, first, feature, count, ROWS: tl.constexpr, WIDTH: tl.constexpr, TMA: tl.constexpr):
    """Loads [ROWS, BLOCK] of a tensor [count, WIDTH], or through its descriptor with TMA."""
    if TMA:
        loaded = tensor.load([first, feature])
    else:
        row = first + tl.arange(0, ROWS)
        at = tensor + row[:, None].to(tl.int64) * WIDTH + feature + tl.arange(0, BLOCK)[None, :]
        loaded = tl.load(at, mask=(row < count)[:, None], other=0.0)
    return loaded


@triton.jit(do_not_specialize=["count"])
def _product_kernel(
    values, weight, scales, weight_scales, residual, output, parts, counters, count,
    RESIDUAL_STRIDE: tl.constexpr, WIDTH: tl.constexpr, FEATURES: tl.constexpr, TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr, SPLITS: tl.constexpr, SUM_TOKENS: tl.constexpr, STAGES: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    token_tile, column_tile, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    blocks: tl.constexpr = WIDTH // BLOCK // SPLITS
    token, column = token_tile * TOKENS + tl.arange(0, TOKENS), column_tile * COLUMNS + tl.arange(0, COLUMNS)
    token_mask, padded = token < count, (count + PADDING - 1) // PADDING * PADDING
    scales_at = scales + split * blocks * padded + token
    weight_scales_at = weight_scales + column_tile * COLUMNS // BLOCK * (WIDTH // BLOCK) + split * blocks
    total = tl.zeros((TOKENS, COLUMNS), tl.float32)
    for block in tl.range(0, blocks, num_stages=STAGES):
        feature = (split * blocks + block) * BLOCK
        row_tile = _load_tile(values, token_tile * TOKENS, feature, count, TOKENS, WIDTH, TMA)
        weight_tile = _load_tile(weight, column_tile * COLUMNS, feature, FEATURES, COLUMNS, WIDTH, TMA)
        scale = tl.load(scales_at + block * padded, mask=token_mask, other=0.0)
        total += tl.dot(row_tile, weight_tile.T) * (scale * tl.load(weight_scales_at + block))[:, None]
    if SPLITS == 1:
        _store_output(total, residual, output, token, column, count, RESIDUAL_STRIDE, FEATURES)
    else:
        size = count.to(tl.int64) * FEATURES
        at = parts + split * size + token[:, None].to(tl.int64) * FEATURES + column[None, :]
        tl.store(at, total, mask=token_mask[:, None] & (column < FEATURES)[None, :])
        tl.debug_barrier()  # all threads have stored before one counts
        counter = counters + column_tile * tl.num_programs(0) + token_tile
        if tl.atomic_add(counter, 1, sem="acq_rel") == SPLITS - 1:
            tl.debug_barrier()
            for first in tl.range(token_tile * TOKENS, token_tile * TOKENS + TOKENS, SUM_TOKENS, num_stages=1):
                sum_token = first + tl.arange(0, SUM_TOKENS)
                mask = (sum_token < count)[:, None] & (column < FEATURES)[None, :]
                parts_at = parts + sum_token[:, None].to(tl.int64) * FEATURES + column[None, :]
                sums = tl.load(parts_at, mask=mask, other=0.0, cache_modifier=".cg")
                for part in tl.static_range(1, SPLITS):
                    sums += tl.load(parts_at + part * size, mask=mask, other=0.0, cache_modifier=".cg")
                _store_output(sums, residual, output, sum_token, column, count, RESIDUAL_STRIDE, FEATURES)
            tl.store(counter, 0)


@triton.jit
def _store_output(total, residual, output, token, column, count, RESIDUAL_STRIDE: tl.constexpr, FEATURES: tl.constexpr):
    mask = (token < count)[:, None] & (column < FEATURES)[None, :]
    if residual is not None:
        at = residual + token[:, None].to(tl.int64) * RESIDUAL_STRIDE + column[None, :]
        total += tl.load(at, mask=mask, other=0.0).to(tl.float32)
    at = output + token[:, None].to(tl.int64) * FEATURES + column[None, :]
    tl.store(at, total.to(output.dtype.element_ty), mask=mask)


_quantize = Launcher(_quantize_kernel)
_product = Launcher(_product_kernel)
