"""Copies of tokens in rows sorted by expert, their sums, and gradients of experts and embeddings: one kernel each.

The copies and sums are limited by memory bandwidth. They are 9 times as fast as index_select and index_add, 7 times
with torch.compile: 0.74 ms against 7.0 and 5.3, forward and backward, for 16,384 tokens of 2048 features and 8 experts
a token on an H200 (benchmarks/results/small_kernels_h200.json). A program takes a token, so that a token is read or
written once however many experts it has.

The weight gradients are added to their fp32 sums by the kernel that computes them. A grouped product in bf16 would be
written, read again and added by another kernel. For 128 experts of 768 × 2048 and 866 rows each that takes 1.06 ms on
an H200, and this kernel 0.93 (docs/benchmarks.md, "30b-a3b"; in no file of benchmarks/results). Two programs share a
multiprocessor, so that one multiplies while the other adds.

The gradient of an embedding is added in the same way, to the rows of its fp32 sum that occur: torch's is as large as
the vocabulary. That is 4 times as fast as PyTorch's gradient and its sum: 0.84 ms against 3.7 for 16,384 tokens of 4096
features and 151,936 entries on an H200 (benchmarks/results/small_kernels_h200.json).
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, assignment, misc"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from postlude.ops.kernels.launch import Launcher

ADD_BLOCK = 4096  # numbers a program adds
TILE_OUTPUTS, TILE_INPUTS = 128, 128  # features of a tile of the sum
TILE_ROWS, WARPS, STAGES = 64, 4, 3  # rows that are multiplied at a time


def replicate(tokens: Tensor, inverse: Tensor, copies: int, weights: Tensor | None = None) -> Tensor:
    """`tokens` [T, H] -> [T·copies, H]: token t at rows inverse[t·copies + j], each by weights[t, j] if given."""
    rows = tokens.new_empty(len(tokens) * copies, tokens.shape[1])
    _launch_by_token(_replicate, tokens.contiguous(), rows, inverse, copies, weights, None, None)
    return rows


def merge(rows: Tensor, inverse: Tensor, copies: int, weights: Tensor | None = None) -> Tensor:
    """`rows` [T·copies, H] -> [T, H]: rows inverse[t·copies + j], each by weights[t, j] if given, summed in fp32."""
    tokens = rows.new_empty(len(rows) // copies, rows.shape[1])
    _launch_by_token(_merge, tokens, rows.contiguous(), inverse, copies, weights)
    return tokens


def merge_backward(
    gradient: Tensor, inverse: Tensor, copies: int, weights: Tensor, rows: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns the gradients of the `rows` and `weights` of `merge` from the `gradient` [T, H] of its result.

    They are `replicate` with weights, and the products [T, copies] of each token's gradient with its rows.
    """
    grad_rows, grad_weights = (
        rows.new_empty(rows.shape),
        torch.empty_like(weights, memory_format=torch.contiguous_format),
    )
    _launch_by_token(
        _replicate, gradient.contiguous(), grad_rows, inverse, copies, weights, rows.contiguous(), grad_weights
    )
    return grad_rows, grad_weights


def add_to(total: Tensor, gradient: Tensor, scale: Tensor | None = None, *, is_empty: bool = False) -> None:
    """Adds `gradient`, times a 0-dim `scale` if given, to `total`, both dense, of any dtypes.

    Writes it to a `total` that `is_empty`.
    """
    size = total.numel()
    if size:
        _add((triton.cdiv(size, ADD_BLOCK), 1, 1), (total, gradient, scale), (), (size, is_empty, ADD_BLOCK), 4)


def _launch_by_token(
    launch: Launcher,
    tokens: Tensor,
    rows: Tensor,
    inverse: Tensor,
    copies: int,
    weights: Tensor | None,
    *other_tensors: Tensor | None,
) -> None:
    if not len(tokens):
        return
    block = triton.next_power_of_2(tokens.shape[1])
    weights = None if weights is None else weights.contiguous()
    tensors = (tokens, rows, inverse, weights, *other_tensors)
    launch((len(tokens), 1, 1), tensors, (), (copies, tokens.shape[1], block), min(max(block // 512, 1), 16))


@triton.jit
def _replicate_kernel(
    tokens, rows, inverse, weights, factor_rows, products,
    COPIES: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    # Stores to `products` [T, COPIES] those of a token with its `factor_rows`, if given.
    token = tl.program_id(0).to(tl.int64)
    feature = tl.arange(0, BLOCK)
    mask = feature < WIDTH
    value = tl.load(tokens + token * WIDTH + feature, mask=mask, other=0.0)
    for copy in tl.static_range(COPIES):
        row = tl.load(inverse + token * COPIES + copy).to(tl.int64)
        if weights is None:
            tl.store(rows + row * WIDTH + feature, value, mask=mask)
        else:
            weight = tl.load(weights + token * COPIES + copy).to(tl.float32)
            weighted = (value.to(tl.float32) * weight).to(rows.dtype.element_ty)
            tl.store(rows + row * WIDTH + feature, weighted, mask=mask)
        if factor_rows is not None:
            factor = tl.load(factor_rows + row * WIDTH + feature, mask=mask, other=0.0)
            product = tl.sum(value.to(tl.float32) * factor.to(tl.float32))
            tl.store(products + token * COPIES + copy, product.to(products.dtype.element_ty))


@triton.jit
def _merge_kernel(tokens, rows, inverse, weights, COPIES: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    feature = tl.arange(0, BLOCK)
    mask = feature < WIDTH
    total = tl.zeros((BLOCK,), tl.float32)
    for copy in tl.static_range(COPIES):
        row = tl.load(inverse + token * COPIES + copy).to(tl.int64)
        value = tl.load(rows + row * WIDTH + feature, mask=mask, other=0.0).to(tl.float32)
        if weights is None:
            total += value
        else:
            total += value * tl.load(weights + token * COPIES + copy).to(tl.float32)
    tl.store(tokens + token * WIDTH + feature, total.to(tokens.dtype.element_ty), mask=mask)


@triton.jit
def _add_kernel(total, gradient, scale, SIZE: tl.constexpr, IS_EMPTY: tl.constexpr, BLOCK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = index < SIZE
    added = tl.load(gradient + index, mask=mask).to(total.dtype.element_ty)
    if scale is not None:
        added *= tl.load(scale).to(total.dtype.element_ty)
    if not IS_EMPTY:
        added += tl.load(total + index, mask=mask)
    tl.store(total + index, added, mask=mask)


_replicate, _merge, _add = Launcher(_replicate_kernel), Launcher(_merge_kernel), Launcher(_add_kernel)


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


EMBEDDING_ROWS, EMBEDDING_FEATURES, EMBEDDING_WARPS = 8, 512, 4  # gradients that a program loads at a time


def add_rows(total: Tensor, gradient: Tensor, tokens: Tensor, order: Tensor) -> None:
    """Adds row `order`[i] of `gradient` [T, H] to row `tokens`[i] of `total` [V, H] fp32. `tokens` [T] are sorted.

    All are dense. Each row of the sum is written once, so that its terms are always added in the same order.
    """
    count, width = gradient.shape
    if count:
        grid, constants = (
            (count, triton.cdiv(width, EMBEDDING_FEATURES), 1),
            (width, EMBEDDING_ROWS, EMBEDDING_FEATURES),
        )
        _add_rows(grid, (total, gradient, tokens, order), (count,), constants, EMBEDDING_WARPS)


@triton.jit(do_not_specialize=["count"])
def _add_rows_kernel(
    total, gradient, tokens, order, count, WIDTH: tl.constexpr, ROWS: tl.constexpr, FEATURES: tl.constexpr
):  # fmt: skip
    start = tl.program_id(0)
    token = tl.load(tokens + start).to(tl.int64)
    previous_token = tl.load(tokens + tl.maximum(start - 1, 0))
    if (start == 0) | (previous_token != token):
        feature = tl.program_id(1) * FEATURES + tl.arange(0, FEATURES)
        mask = feature < WIDTH
        row_sum = tl.zeros((FEATURES,), tl.float32)
        continues = 1
        while continues > 0:
            index = start + tl.arange(0, ROWS)
            is_same_token = tl.load(tokens + index, mask=index < count, other=-1) == token
            row = tl.load(order + index, mask=is_same_token, other=0)
            gradient_at = gradient + row[:, None] * WIDTH + feature[None, :]
            row_sum += tl.sum(
                tl.load(gradient_at, mask=is_same_token[:, None] & mask[None, :], other=0.0).to(tl.float32), 0
            )
            start += ROWS
            continues = tl.min(is_same_token.to(tl.int32), 0)
        total_at = total + token * WIDTH + feature
        tl.store(total_at, tl.load(total_at, mask=mask, other=0.0) + row_sum, mask=mask)


_add_rows = Launcher(_add_rows_kernel)
