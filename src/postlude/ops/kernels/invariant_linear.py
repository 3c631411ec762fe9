"""A matrix product whose rows have the same bits in every batch.

Slower than cuBLAS: with it and `invariant_attention` a 0.6B has 0.78, 0.72 and 0.70 of its ordinary tokens/s with 16,
128 and 512 completions, and 0.91 in an update, on an H200 (benchmarks/results/headline_h200.json).

The tensor core adds 16 features at a time to each number of the product, from the first feature to the last, and
nothing splits that sum. Tiles decide only which numbers a program computes, so they may follow the number of rows:
tests/ops/test_batch_invariant.py compares the bits of all of them. Tiles have at least 64 rows, so that all are
computed by the same instruction.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, assignment, misc"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from postlude.ops.kernels.capabilities import gpu_of
from postlude.ops.kernels.launch import Launcher

ROW_TILE_GROUP = 8  # tiles of rows whose programs run together, so that they share weights in the L2 cache
OTHER_SHARED_MEMORY = 4096  # bytes of shared memory besides the tiles


@dataclass(frozen=True)
class InvariantLinearTile:
    """Rows, columns and features of a tile, and launch options."""

    rows: int
    columns: int
    features: int
    warps: int
    stages: int

    def shared_memory(self, element_size: int) -> int:
        """Returns the bytes that its loads take."""
        return self.stages * (self.rows + self.columns) * self.features * element_size + OTHER_SHARED_MEMORY


NARROW_TILE, SMALL_TILE, MEDIUM_TILE, LARGE_TILE = (
    InvariantLinearTile(64, 16, 128, 4, 4),
    InvariantLinearTile(64, 32, 128, 4, 4),
    InvariantLinearTile(64, 64, 64, 4, 4),
    InvariantLinearTile(128, 128, 64, 8, 3),
)
HALF_TILES = (NARROW_TILE, SMALL_TILE, MEDIUM_TILE, LARGE_TILE)
FP32_TILE = InvariantLinearTile(32, 32, 32, 4, 2)  # without tensor cores, which would round the operands


def tile_for(count: int, columns: int, dtype: torch.dtype, shared_memory: int) -> InvariantLinearTile:
    """Returns the tile for so many rows and columns on a GPU with so much shared memory."""
    if dtype == torch.float32:
        return FP32_TILE
    tile = MEDIUM_TILE if count <= 512 else LARGE_TILE
    if count <= NARROW_TILE.rows:
        tile = NARROW_TILE if columns <= 2048 else SMALL_TILE
    while tile.stages > 1 and tile.shared_memory(dtype.itemsize) > shared_memory:
        tile = InvariantLinearTile(tile.rows, tile.columns, tile.features, tile.warps, tile.stages - 1)
    return tile


def product(
    rows: Tensor, weight: Tensor, bias: Tensor | None, output: Tensor, tile: InvariantLinearTile | None = None
) -> Tensor:
    """Computes `output` [T, out] = `rows` [T, in] · `weight`ᵀ [out, in] + `bias` [out], summed in fp32."""
    (count, width), features = rows.shape, weight.shape[0]
    rows, weight = (tensor if tensor.stride(1) == 1 else tensor.contiguous() for tensor in (rows, weight))
    if tile is None:
        tile = tile_for(count, features, rows.dtype, gpu_of(rows.device).shared_memory)
    if count and features:
        grid = (triton.cdiv(count, tile.rows) * triton.cdiv(features, tile.columns), 1, 1)
        strides = (rows.stride(0), weight.stride(0), output.stride(0))
        sizes = (width, features, tile.rows, tile.columns, tile.features, ROW_TILE_GROUP)
        _product(grid, (rows, weight, bias, output), (count,), (*strides, *sizes), tile.warps, num_stages=tile.stages)
    return output


def grouped_product(rows: Tensor, weight: Tensor, counts: Tensor, tile: InvariantLinearTile | None = None) -> Tensor:
    """Returns each of `rows` [R, in] times its expert's matrix of `weight` [E, out, in]: [R, out].

    Rows are sorted by expert and `counts` [E] has the rows of each. The host does not wait for them.
    """
    (count, width), (experts, features, _) = rows.shape, weight.shape
    rows, weight = (tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in (rows, weight))
    output = torch.empty(count, features, dtype=rows.dtype, device=rows.device)
    if tile is None:
        tile = tile_for(count // experts, features, rows.dtype, gpu_of(rows.device).shared_memory)
    ends = counts.cumsum(0).to(torch.int32)
    tile_ends = ((counts + tile.rows - 1) // tile.rows).cumsum(0).to(torch.int32)
    tiles = min(count, count // tile.rows + experts)  # at most
    strides = (rows.stride(0), weight.stride(0), weight.stride(1), output.stride(0))
    sizes = (width, features, tile.rows, tile.columns, tile.features, triton.next_power_of_2(experts))
    _grouped_product(
        (tiles, triton.cdiv(features, tile.columns), 1),
        (rows, weight, ends, tile_ends, output),
        (experts,),
        (*strides, *sizes),
        tile.warps,
        num_stages=tile.stages,
    )
    return output


def _new_product(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return product(rows, weight, bias, torch.empty(len(rows), len(weight), dtype=rows.dtype, device=rows.device))


# An operator, so that selective recompute keeps its result.
_LIBRARY = torch.library.Library("postlude", "FRAGMENT")
_LIBRARY.define("invariant_linear(Tensor rows, Tensor weight, Tensor? bias) -> Tensor")
_LIBRARY.impl("invariant_linear", _new_product, "CompositeExplicitAutograd")
_LIBRARY.define("invariant_grouped_linear(Tensor rows, Tensor weight, Tensor counts) -> Tensor")
_LIBRARY.impl("invariant_grouped_linear", grouped_product, "CompositeExplicitAutograd")


@triton.jit(do_not_specialize=["count"])
def _product_kernel(
    rows, weight, bias, output, count,
    STRIDE: tl.constexpr, WEIGHT_STRIDE: tl.constexpr, OUTPUT_STRIDE: tl.constexpr, WIDTH: tl.constexpr,
    FEATURES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
    ROW_TILE_GROUP: tl.constexpr,
):  # fmt: skip
    row_tiles, column_tiles = tl.cdiv(count, ROWS), tl.cdiv(FEATURES, COLUMNS)
    first_row_tile = tl.program_id(0) // (ROW_TILE_GROUP * column_tiles) * ROW_TILE_GROUP
    group_size = tl.minimum(row_tiles - first_row_tile, ROW_TILE_GROUP)
    program_in_group = tl.program_id(0) % (ROW_TILE_GROUP * column_tiles)
    row = ((first_row_tile + program_in_group % group_size) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = (program_in_group // group_size * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)
    _product_tile(
        rows, weight, bias, output, row, row < count, column,
        STRIDE, WEIGHT_STRIDE, OUTPUT_STRIDE, WIDTH, FEATURES, ROWS, COLUMNS, BLOCK,
    )  # fmt: skip


@triton.jit(do_not_specialize=["experts"])
def _grouped_product_kernel(
    rows, weight, ends, tile_ends, output, experts,
    STRIDE: tl.constexpr, EXPERT_STRIDE: tl.constexpr, WEIGHT_STRIDE: tl.constexpr, OUTPUT_STRIDE: tl.constexpr,
    WIDTH: tl.constexpr, FEATURES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
    EXPERTS: tl.constexpr,
):  # fmt: skip
    tile, index = tl.program_id(0), tl.arange(0, EXPERTS)
    expert_mask = index < experts
    expert = tl.sum(
        (tl.load(tile_ends + index, mask=expert_mask, other=0) <= tile).to(tl.int32) * expert_mask.to(tl.int32), 0
    )
    if expert < experts:
        previous_expert = tl.maximum(expert - 1, 0)
        first_tile = tl.where(expert > 0, tl.load(tile_ends + previous_expert), 0)
        first_row = tl.where(expert > 0, tl.load(ends + previous_expert), 0)
        row = (first_row + (tile - first_tile) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        column = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)
        _product_tile(
            rows, weight + expert.to(tl.int64) * EXPERT_STRIDE, None, output, row, row < tl.load(ends + expert), column,
            STRIDE, WEIGHT_STRIDE, OUTPUT_STRIDE, WIDTH, FEATURES, ROWS, COLUMNS, BLOCK,
        )  # fmt: skip


@triton.jit
def _product_tile(
    rows, weight, bias, output, row, row_mask, column,
    STRIDE: tl.constexpr, WEIGHT_STRIDE: tl.constexpr, OUTPUT_STRIDE: tl.constexpr, WIDTH: tl.constexpr,
    FEATURES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # Computes the product of the rows in `row_mask` with some columns of the weight, and stores it.
    column_mask = column < FEATURES
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, WIDTH, BLOCK):
        feature = start + tl.arange(0, BLOCK)
        rows_at = rows + row[:, None] * STRIDE + feature[None, :]
        weight_at = weight + column[:, None] * WEIGHT_STRIDE + feature[None, :]
        if WIDTH % BLOCK:
            row_tile = tl.load(rows_at, mask=row_mask[:, None] & (feature < WIDTH)[None, :], other=0.0)
            weight_tile = tl.load(weight_at, mask=column_mask[:, None] & (feature < WIDTH)[None, :], other=0.0)
        else:
            row_tile = tl.load(rows_at, mask=row_mask[:, None], other=0.0)
            weight_tile = tl.load(weight_at, mask=column_mask[:, None], other=0.0)
        total = tl.dot(row_tile, tl.trans(weight_tile), total, input_precision="ieee")
    if bias is not None:
        total += tl.load(bias + column, mask=column_mask, other=0.0).to(tl.float32)[None, :]
    at = output + row[:, None] * OUTPUT_STRIDE + column[None, :]
    tl.store(at, total.to(output.dtype.element_ty), mask=row_mask[:, None] & column_mask[None, :])


_product = Launcher(_product_kernel)
_grouped_product = Launcher(_grouped_product_kernel)
