"""A linear layer of few rows with the norm, activation or residual around it, in one kernel.

A decode step of 16 rows gives 12,124 tokens/s with it and 10,136 with a kernel for each part, 0.6B on an H200
(docs/benchmarks.md, "The generator").

A program takes some columns of the product, of all rows. Where there are too few columns for all multiprocessors,
several programs share them, each with some of the features. The last one to finish adds all parts in their order, so
that the sum is the same every time.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, assignment, misc"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from postlude.ops.kernels.activation import activated
from postlude.ops.kernels.launch import Launcher
from postlude.ops.norm import Norm

# Measured on an H200: columns and features of a tile, programs to aim at, warps and loads ahead.
COLUMNS, BLOCK, PROGRAMS, WARPS, STAGES = 32, 256, 128, 4, 4


def product(
    rows: Tensor,
    weight: Tensor,
    most: int,
    *,
    norm: Norm | None = None,
    activation: str | None = None,
    residual: Tensor | None = None,
    counters: Tensor | None = None,
) -> Tensor:
    """See `ops/decode_linear.py`; the arguments say which function. Tiles have room for `most` rows."""
    count, width = rows.shape
    features = weight.shape[0] // (2 if activation else 1)
    columns = COLUMNS // 2 if activation else COLUMNS
    tiles = triton.cdiv(features, columns)
    block = _divisor(width, BLOCK)
    splits = 1
    while counters is not None and tiles * splits * 2 <= PROGRAMS and width % (splits * 2 * block) == 0:
        splits *= 2
    output = torch.empty(count, features, dtype=rows.dtype, device=rows.device)
    parts = None if splits == 1 else torch.empty(splits, count, features, dtype=torch.float32, device=rows.device)
    if splits > 1 and (counters is None or tiles > len(counters)):
        raise ValueError(
            f"{tiles} tiles need as many counters, but there are {0 if counters is None else len(counters)}."
        )
    tensors = (rows, weight, None if norm is None else norm.weight, residual, output, parts, counters)
    numbers = (count, 0.0 if norm is None else norm.eps, 0.0 if norm is None else norm.offset)
    strides = (rows.stride(0), 0 if residual is None else residual.stride(0))
    constants = (*strides, width, features, most, columns, block, splits, activation, STAGES)
    _product((tiles, splits, 1), tensors, numbers, constants, WARPS)
    return output


def _divisor(width: int, most: int) -> int:
    """Returns the largest power of two that divides the width, at most `most`."""
    return min(most, width & -width)


@triton.jit(do_not_specialize=["count", "eps", "offset"])
def _product_kernel(
    rows, weight, norm, residual, output, parts, counters, count, eps, offset,
    STRIDE: tl.constexpr, RESIDUAL_STRIDE: tl.constexpr, WIDTH: tl.constexpr, FEATURES: tl.constexpr,
    TOKENS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr, ACTIVATION: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    tile, split = tl.program_id(0), tl.program_id(1)
    token, column = tl.arange(0, TOKENS), tile * COLUMNS + tl.arange(0, COLUMNS)
    live, inside = (token < count)[:, None], (column < FEATURES)[None, :]
    total = tl.zeros((TOKENS, COLUMNS), tl.float32)
    up = tl.zeros((TOKENS, COLUMNS), tl.float32)
    squares = tl.zeros((TOKENS, BLOCK), tl.float32)  # summed up once, at the end
    each: tl.constexpr = WIDTH // SPLITS
    for start in tl.range(0, each, BLOCK, num_stages=STAGES):
        place = split * each + start + tl.arange(0, BLOCK)
        weight_at = weight + column[None, :].to(tl.int64) * WIDTH + place[:, None]
        values = tl.load(rows + token[:, None] * STRIDE + place[None, :], mask=live, other=0.0)
        weights = tl.load(weight_at, mask=inside, other=0.0)  # the gate's, where there is one
        if norm is not None:
            wide = values.to(tl.float32)
            squares += wide * wide
            values = (wide * (tl.load(norm + place).to(tl.float32) + offset)[None, :]).to(values.dtype)
        total = tl.dot(values, weights, total)
        if ACTIVATION is not None:
            weights = tl.load(weight_at + FEATURES * WIDTH, mask=inside, other=0.0)
            up = tl.dot(values, weights, up)
    if norm is not None:
        inverse = tl.rsqrt(tl.sum(squares, 1) / WIDTH + eps)[:, None]
        total *= inverse
        up *= inverse
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


_product = Launcher(_product_kernel)
