"""Products of tokens and weights in FP8: scales of 1 × 128 for tokens and 128 × 128 for weights.

`quantize` rounds tokens, after a norm if one is given. `product` multiplies on FP8 tensor cores, 128 features at a
time, and adds each part to an fp32 sum with both scales. A program takes some columns of the product, of up to 128
tokens. Where there are too few columns for all multiprocessors, several programs share them, as in
`kernels/decode_linear.py`.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, assignment, misc"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from postlude.ops.kernels.fp8_device import power_of_two, scale_exponent, to_fp8
from postlude.ops.kernels.launch import Launcher
from postlude.ops.norm import Norm

BLOCK = tl.constexpr(128)  # features of a scale
PROGRAMS = 264  # to have at most where programs share sums: two for each multiprocessor of an H200
CHUNK = 2048  # features that a program of `quantize` takes where there is no norm
STAGES = 4


def quantize(rows: Tensor, norm: Norm | None = None) -> tuple[Tensor, Tensor]:
    """Returns `rows` [T, in], or their norm, in FP8, and their scales [in / 128, T] fp32."""
    count, width = rows.shape
    values = torch.empty(count, width, dtype=torch.float8_e4m3fn, device=rows.device)
    scales = torch.empty(width // BLOCK.value, count, dtype=torch.float32, device=rows.device)
    span = triton.next_power_of_2(width) if norm is not None else min(CHUNK, triton.next_power_of_2(width))
    numbers = (count, 0.0 if norm is None else norm.eps, 0.0 if norm is None else norm.offset)
    tensors = (rows, None if norm is None else norm.weight, values, scales)
    _quantize((count, triton.cdiv(width, span), 1), tensors, numbers, (rows.stride(0), width, span), 4)
    return values, scales


def product(
    values: Tensor,
    scales: Tensor,
    weight: Tensor,
    weight_scales: Tensor,
    dtype: torch.dtype,
    *,
    residual: Tensor | None = None,
    counters: Tensor | None = None,
) -> Tensor:
    """Returns the product of `quantize`d rows with `weight` [out, in], plus the residual if given: [T, out].

    `weight_scales` are [out / 128, in / 128]. `counters` are those of `decode_linear.linear_add`.
    """
    count, width = values.shape
    features = weight.shape[0]
    tokens, columns, stages, warps, splits = tile_for(count, features, width, counters is not None)
    assert splits == 1 or count <= tokens, "a counter is of a tile of columns, so one tile of rows can share its sums"
    tiles = triton.cdiv(features, columns)
    output = torch.empty(count, features, dtype=dtype, device=values.device)
    parts = None if splits == 1 else torch.empty(splits, count, features, dtype=torch.float32, device=values.device)
    tensors = (values, scales, weight, weight_scales, residual, output, parts, counters)
    stride = 0 if residual is None else residual.stride(0)
    constants = (stride, width, features, tokens, columns, splits, stages)
    _product((tiles, splits, triton.cdiv(count, tokens)), tensors, (count,), constants, warps)
    return output


def tile_for(count: int, features: int, width: int, shares_sums: bool) -> tuple[int, int, int, int, int]:
    """Returns tokens and columns of a tile, loads ahead, warps, and programs that share a column's sum."""
    if count > 128:  # a prefill: rather read tokens less often than have many programs
        return 128, 128, STAGES, 8, 1
    columns, splits = 64, 1
    tiles = triton.cdiv(features, columns)
    while shares_sums and tiles * splits * 2 <= PROGRAMS and width % (splits * 2 * BLOCK.value) == 0:
        splits *= 2
    return 64 if count <= 64 else 128, columns, STAGES, 4, splits


@triton.jit(do_not_specialize=["count", "eps", "offset"])
def _quantize_kernel(
    rows, norm, values, scales, count, eps, offset, STRIDE: tl.constexpr, WIDTH: tl.constexpr, SPAN: tl.constexpr
):
    row, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * SPAN
    place = first + tl.arange(0, SPAN)
    inside = place < WIDTH
    given = tl.load(rows + row * STRIDE + place, mask=inside, other=0.0)
    wide = given.to(tl.float32)
    if norm is not None:
        wide *= tl.rsqrt(tl.sum(wide * wide, 0) / WIDTH + eps)
        wide *= tl.load(norm + place, mask=inside, other=0.0).to(tl.float32) + offset
        wide = wide.to(given.dtype).to(tl.float32)
    blocks = tl.reshape(wide, (SPAN // BLOCK, BLOCK))
    exponents = scale_exponent(tl.max(tl.abs(blocks), 1))
    rounded = to_fp8(blocks * power_of_two(-exponents)[:, None])
    tl.store(values + row * WIDTH + place, tl.reshape(rounded, (SPAN,)), mask=inside)
    block = first // BLOCK + tl.arange(0, SPAN // BLOCK)
    tl.store(scales + block * count + row, power_of_two(exponents), mask=block < WIDTH // BLOCK)


@triton.jit(do_not_specialize=["count"])
def _product_kernel(
    values, scales, weight, weight_scales, residual, output, parts, counters, count,
    RESIDUAL_STRIDE: tl.constexpr, WIDTH: tl.constexpr, FEATURES: tl.constexpr, TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr, SPLITS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    tile, split = tl.program_id(0), tl.program_id(1)
    token = tl.program_id(2) * TOKENS + tl.arange(0, TOKENS)
    column = tile * COLUMNS + tl.arange(0, COLUMNS)
    live, inside = token < count, column < FEATURES
    total = tl.zeros((TOKENS, COLUMNS), tl.float32)
    each: tl.constexpr = WIDTH // SPLITS
    rows_at = values + token[:, None].to(tl.int64) * WIDTH + split * each + tl.arange(0, BLOCK)[None, :]
    weight_at = weight + column[None, :].to(tl.int64) * WIDTH + split * each + tl.arange(0, BLOCK)[:, None]
    scales_at = scales + split * (each // BLOCK) * count + token
    weight_scales_at = weight_scales + (tile * COLUMNS // BLOCK) * (WIDTH // BLOCK) + split * (each // BLOCK)
    if COLUMNS > BLOCK:
        weight_scales_at = weight_scales + (column // BLOCK) * (WIDTH // BLOCK) + split * (each // BLOCK)
    for block in tl.range(0, each // BLOCK, num_stages=STAGES):
        given = tl.load(rows_at + block * BLOCK, mask=live[:, None], other=0.0)
        weights = tl.load(weight_at + block * BLOCK, mask=inside[None, :], other=0.0)
        scale = tl.load(scales_at + block * count, mask=live, other=0.0)
        if COLUMNS > BLOCK:
            total += tl.dot(given, weights) * scale[:, None] * tl.load(weight_scales_at + block)[None, :]
        else:
            total += tl.dot(given, weights) * (scale * tl.load(weight_scales_at + block))[:, None]
    held = live[:, None] & inside[None, :]
    if SPLITS == 1:
        _finish(total, residual, output, token, column, held, RESIDUAL_STRIDE, FEATURES)
    else:
        at = token[:, None] * FEATURES + column[None, :]
        tl.store(parts + split * count * FEATURES + at, total, mask=held)
        tl.debug_barrier()  # all threads have stored before one counts
        if tl.atomic_add(counters + tile, 1, sem="acq_rel") == SPLITS - 1:
            tl.debug_barrier()
            total = tl.zeros((TOKENS, COLUMNS), tl.float32)
            for part in tl.static_range(SPLITS):
                there = parts + part * count * FEATURES + at
                total += tl.load(there, mask=held, other=0.0, cache_modifier=".cg")
            _finish(total, residual, output, token, column, held, RESIDUAL_STRIDE, FEATURES)
            tl.store(counters + tile, 0)


@triton.jit
def _finish(total, residual, output, token, column, held, RESIDUAL_STRIDE: tl.constexpr, FEATURES: tl.constexpr):
    if residual is not None:
        at = residual + token[:, None].to(tl.int64) * RESIDUAL_STRIDE + column[None, :]
        total += tl.load(at, mask=held, other=0.0).to(tl.float32)
    at = output + token[:, None].to(tl.int64) * FEATURES + column[None, :]
    tl.store(at, total.to(output.dtype.element_ty), mask=held)


_quantize = Launcher(_quantize_kernel)
_product = Launcher(_product_kernel)
