"""The weight gradients of experts, added to their fp32 sums by the kernel that computes them.

A grouped product in bf16 would be written, read again and added by another kernel. For 128 experts of 768 × 2048 and
866 rows each that takes 1.06 ms on an H200, and this kernel 0.93 (docs/benchmarks.md, "30b-a3b"; in no file of
benchmarks/results). Two programs share a multiprocessor, so that one multiplies while the other adds.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, assignment, misc"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from postlude.ops.kernels.launch import Launcher

TILE_OUTPUTS, TILE_INPUTS = 128, 128  # features of a tile of the sum
TILE_ROWS, WARPS, STAGES = 64, 4, 3  # rows that are multiplied at a time


def add_products(total: Tensor, gradient: Tensor, rows: Tensor, ends: Tensor, *, is_empty: bool) -> None:
    """Adds `gradient`ᵀ [out, R] · `rows` [R, in] of each expert's rows to `total` [E, out, in] fp32, dense.

    Rows are sorted by expert, and those of expert e end before row `ends`[e], int32. Columns of the operands are
    adjacent. A `total` that `is_empty` is written without being read, with zeros for experts without rows.
    """
    experts, outputs, inputs = total.shape
    grid = triton.cdiv(outputs, TILE_OUTPUTS) * triton.cdiv(inputs, TILE_INPUTS), experts, 1
    constants = (gradient.stride(0), rows.stride(0), outputs, inputs, is_empty, TILE_OUTPUTS, TILE_INPUTS, TILE_ROWS)
    _add_products(grid, (gradient, rows, ends, total), (), constants, WARPS, num_stages=STAGES)


@triton.jit
def _add_products_kernel(
    gradient, rows, ends, total,
    GRADIENT_STRIDE: tl.constexpr, ROWS_STRIDE: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
    IS_EMPTY: tl.constexpr, TILE_OUTPUTS: tl.constexpr, TILE_INPUTS: tl.constexpr, TILE_ROWS: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(1)
    start = tl.where(expert > 0, tl.load(ends + tl.maximum(expert - 1, 0)), 0)
    stop = tl.load(ends + expert)
    if IS_EMPTY or stop > start:
        input_tiles: tl.constexpr = (INPUTS + TILE_INPUTS - 1) // TILE_INPUTS
        output_feature = tl.program_id(0) // input_tiles * TILE_OUTPUTS + tl.arange(0, TILE_OUTPUTS)
        input_feature = tl.program_id(0) % input_tiles * TILE_INPUTS + tl.arange(0, TILE_INPUTS)
        products = tl.zeros((TILE_OUTPUTS, TILE_INPUTS), tl.float32)
        for first in range(start, stop, TILE_ROWS):
            row = first + tl.arange(0, TILE_ROWS)
            row_mask, row_index = (row < stop)[:, None], row.to(tl.int64)[:, None]  # the next rows are another expert's
            gradient_mask = row_mask & (output_feature < OUTPUTS)[None, :] if OUTPUTS % TILE_OUTPUTS else row_mask
            rows_mask = row_mask & (input_feature < INPUTS)[None, :] if INPUTS % TILE_INPUTS else row_mask
            gradient_at = gradient + row_index * GRADIENT_STRIDE + output_feature[None, :]
            gradient_tile = tl.load(gradient_at, mask=gradient_mask, other=0.0)
            rows_tile = tl.load(rows + row_index * ROWS_STRIDE + input_feature[None, :], mask=rows_mask, other=0.0)
            products = tl.dot(gradient_tile.T, rows_tile, products)
        total_at = total + (expert.to(tl.int64) * OUTPUTS + output_feature[:, None]) * INPUTS + input_feature[None, :]
        if OUTPUTS % TILE_OUTPUTS or INPUTS % TILE_INPUTS:
            mask = (output_feature < OUTPUTS)[:, None] & (input_feature < INPUTS)[None, :]
            if not IS_EMPTY:
                products += tl.load(total_at, mask=mask, other=0.0)
            tl.store(total_at, products, mask=mask)
        else:
            if not IS_EMPTY:
                products += tl.load(total_at)
            tl.store(total_at, products)


_add_products = Launcher(_add_products_kernel)
