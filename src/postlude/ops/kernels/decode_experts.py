"""Experts of few rows: routing, the products of each expert with its rows, and the sum of a token's experts.

The three products of an MLP take 180, 287 and 304 µs for 16, 128 and 512 tokens, each with 8 of 128 experts of 2048 ×
768, on an H200. torch's grouped products take 294, 416 and 408, after rows were sorted, and reading the weights at the
full bandwidth 161, 252 and 252. A decode step of 12 such layers takes 2.94, 4.41 and 5.82 ms; with sorted rows it takes
5.02, 6.89 and 8.09 (benchmarks/results/decode_experts_h200.json).

A program takes some columns of one expert's product, and reads their weights once, or again from the cache where its
rows are more than a tile's. Programs of experts without rows end at once, so that one CUDA graph serves every routing.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, assignment, misc"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from postlude.ops.kernels.activation import activation_and_slope
from postlude.ops.kernels.launch import Launcher

MERGE_COLUMNS, MERGE_WARPS = 1024, 4
FEW, SOME = 4, 16  # rows of an expert on average, for which tiles of 16 and 32 rows are chosen


@dataclass(frozen=True)
class ExpertTile:
    """Rows, columns and features of a tile, warps, and loads ahead.

    Weights are the first operand of a product, since tensor cores of Hopper take at least 64 rows of it.
    """

    rows: int
    columns: int
    block: int
    warps: int
    stages: int


def tile_for(rows: float, gated: bool) -> ExpertTile:
    """Returns the fastest tile on an H200 where experts have so many rows on average."""
    if rows <= FEW:
        return ExpertTile(16, 64, 128, 4, 3)
    if rows <= SOME:
        return ExpertTile(32, 64, 64, 4, 3) if gated else ExpertTile(32, 64, 128, 4, 3)
    return ExpertTile(64, 64, 64, 4, 3 if gated else 4)


def route(
    logits: Tensor,
    bias: Tensor | None,
    counts: Tensor,
    top_k: int,
    *,
    softmax: bool,
    normalise: bool,
    scale: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """Chooses experts by `logits` [T, E] and a `bias` [E] of the choice alone.

    Returns `choice` and `weights` [T, top_k], and `slots` [E, T]: the slots of each expert, as many as are added to its
    count.
    """
    tokens, experts = logits.shape
    choice = torch.empty(tokens, top_k, dtype=torch.int64, device=logits.device)
    weights = torch.empty(tokens, top_k, dtype=dtype, device=logits.device)
    slots = torch.empty(experts, tokens, dtype=torch.int32, device=logits.device)
    constants = (
        *(logits.stride(0), experts, top_k, triton.next_power_of_2(experts), triton.next_power_of_2(top_k)),
        *(softmax, normalise, scale),
    )
    tensors = (logits, bias, counts, choice, weights, slots)
    _route((tokens, 1, 1), tensors, (tokens,), constants, 1)
    return choice, weights, slots


@triton.jit(do_not_specialize=["tokens"])
def _route_kernel(
    logits, bias, counts, choice, weights, slots, tokens,
    STRIDE: tl.constexpr, EXPERTS: tl.constexpr, TOP_K: tl.constexpr, EXPERTS_BLOCK: tl.constexpr,
    SLOTS_BLOCK: tl.constexpr, SOFTMAX: tl.constexpr, NORMALISE: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    expert, slot = tl.arange(0, EXPERTS_BLOCK), tl.arange(0, SLOTS_BLOCK)
    mask = expert < EXPERTS
    logit = tl.load(logits + token * STRIDE + expert, mask=mask, other=float("-inf")).to(tl.float32)
    if SOFTMAX:
        score = tl.exp(logit - tl.max(logit, 0))
        score = score / tl.sum(score, 0)
    else:
        score = tl.sigmoid(logit)
    ranking = score
    if bias is not None:
        ranking += tl.load(bias + expert, mask=mask, other=0.0)
    # Integers in the order of the ranking, of equal ones the first expert first. Those of NaN are the largest.
    bits = ranking.to(tl.int32, bitcast=True)
    lowest: tl.constexpr = -(2**63)
    key = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) * 2**32 + (EXPERTS_BLOCK - 1 - expert)
    key = tl.where(mask, key, lowest)
    chosen, weight = tl.zeros((SLOTS_BLOCK,), tl.int32), tl.zeros((SLOTS_BLOCK,), tl.float32)
    for index in tl.static_range(TOP_K):
        best = tl.max(key, 0)
        best_expert = tl.minimum(EXPERTS_BLOCK - 1 - (best & 0xFFFFFFFF).to(tl.int32), EXPERTS - 1)
        best_score = tl.sum(tl.where(expert == best_expert, score, 0.0), 0)
        chosen = tl.where(slot == index, best_expert, chosen)
        weight = tl.where(slot == index, best_score, weight)
        key = tl.where(expert == best_expert, lowest, key)
    if NORMALISE:
        weight = weight / tl.maximum(tl.sum(weight, 0), 1e-20)
    slot_mask, at = slot < TOP_K, token * TOP_K + slot
    tl.store(choice + at, chosen.to(tl.int64), mask=slot_mask)
    tl.store(weights + at, (weight * SCALE).to(weights.dtype.element_ty), mask=slot_mask)
    # The order of an expert's rows differs between runs, but no row's result depends on its place.
    position = tl.atomic_add(counts + chosen, 1, mask=slot_mask, sem="relaxed")
    tl.store(slots + chosen.to(tl.int64) * tokens + position, at, mask=slot_mask & (position < tokens))


def products(
    rows: Tensor,
    counts: Tensor,
    slots: Tensor,
    gate: tuple[Tensor, Tensor | None] | None,
    up: tuple[Tensor, Tensor | None],
    copies: int,
    tile: ExpertTile,
    *,
    activation: str | None = None,
    alpha: float = 1.0,
    limit: float | None = None,
    up_offset: float = 0.0,
) -> Tensor:
    """Applies each slot's expert to row slot // `copies` of `rows`: the product with `up`, [slots, out].

    An `activation` follows, of the product with `gate` if there is one. Both are given as weights [E, out, in] and
    biases [E, out]. See `route` for `counts` and `slots`, and `GatedConfig` for the numbers.
    """
    experts, features, width = up[0].shape
    output = torch.empty(len(rows) * copies, features, dtype=rows.dtype, device=rows.device)
    (gate_weight, gate_bias), (up_weight, up_bias) = gate or (None, None), up
    shape = ([experts * features, width], [width, 1], [tile.columns, tile.block])
    weights = [None if weight is None else TensorDescriptor(weight, *shape) for weight in (gate_weight, up_weight)]
    tensors = (rows, counts, slots, *weights, gate_bias, up_bias, output)
    constants = (
        *(copies, features, width, tile.rows, tile.columns, tile.block, tile.stages),
        *(activation, alpha, limit, up_offset),
    )
    grid = (triton.cdiv(features, tile.columns), experts, 1)
    _products(grid, tensors, (slots.shape[1],), constants, tile.warps)
    return output


@triton.jit(do_not_specialize=["tokens"])
def _products_kernel(
    rows, counts, slots, gate, up, gate_bias, up_bias, output, tokens,
    COPIES: tl.constexpr, FEATURES: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr, STAGES: tl.constexpr, ACTIVATION: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr,
    UP_OFFSET: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(1)
    count = tl.minimum(tl.load(counts + expert), tokens)
    first_column = tl.program_id(0) * COLUMNS
    first_weight = expert * FEATURES + first_column
    column = first_column + tl.arange(0, COLUMNS)
    column_mask = column < FEATURES
    for start in range(0, count, ROWS):
        position = start + tl.arange(0, ROWS)
        row_mask = position < count
        slot = tl.load(slots + expert.to(tl.int64) * tokens + position, mask=row_mask, other=0).to(tl.int64)
        gate_total, total = tl.zeros((COLUMNS, ROWS), tl.float32), tl.zeros((COLUMNS, ROWS), tl.float32)
        for start_feature in tl.range(0, WIDTH, BLOCK, num_stages=STAGES):
            feature = start_feature + tl.arange(0, BLOCK)
            mask = row_mask[:, None] & (feature < WIDTH)[None, :] if WIDTH % BLOCK else row_mask[:, None]
            tile = tl.load(rows + (slot // COPIES)[:, None] * WIDTH + feature[None, :], mask=mask, other=0.0)
            if gate is not None:
                gate_total = tl.dot(gate.load([first_weight, start_feature]), tile.T, gate_total)
            total = tl.dot(up.load([first_weight, start_feature]), tile.T, total)
        total = _add_bias(total, up_bias, expert, column, column_mask, FEATURES)
        if gate is not None:
            gate_total = _add_bias(gate_total, gate_bias, expert, column, column_mask, FEATURES)
            if LIMIT is not None:
                gate_total = tl.minimum(gate_total, LIMIT)
                total = tl.minimum(tl.maximum(total, -LIMIT), LIMIT)
            total = _activated(gate_total, ACTIVATION, ALPHA) * (total + UP_OFFSET)
        elif ACTIVATION is not None:
            total = _activated(total, ACTIVATION, ALPHA)
        output_at = output + slot[:, None] * FEATURES + column[None, :]
        tl.store(output_at, total.T.to(output.dtype.element_ty), mask=row_mask[:, None] & column_mask[None, :])


@triton.jit
def _add_bias(total, bias, expert, column, mask, FEATURES: tl.constexpr):
    if bias is not None:
        total += tl.load(bias + expert * FEATURES + column, mask=mask, other=0.0).to(tl.float32)[:, None]
    return total


@triton.jit
def _activated(value, ACTIVATION: tl.constexpr, ALPHA: tl.constexpr):
    if ALPHA == 1.0:
        result, _ = activation_and_slope(value, ACTIVATION)
    else:
        result = value * tl.sigmoid(ALPHA * value)
    return result


def merge(residual: Tensor, rows: Tensor, weights: Tensor, shared: Tensor | None, counts: Tensor) -> Tensor:
    """Returns `residual` [T, H] plus each token's `rows` [T·k, H] by its `weights` [T, k], plus `shared` if given.

    Makes the `counts` zero.
    """
    output = torch.empty_like(residual, memory_format=torch.contiguous_format)
    width, strides = residual.shape[1], (residual.stride(0), 0 if shared is None else shared.stride(0))
    grid = (len(residual), triton.cdiv(width, MERGE_COLUMNS), 1)
    experts = counts.shape[0]
    constants = (*strides, weights.shape[1], width, MERGE_COLUMNS, experts, triton.next_power_of_2(experts))
    tensors = (residual, rows, weights, shared, counts, output)
    _merge(grid, tensors, (), constants, MERGE_WARPS)
    return output


@triton.jit
def _merge_kernel(
    residual, rows, weights, shared, counts, output,
    RESIDUAL_STRIDE: tl.constexpr, SHARED_STRIDE: tl.constexpr, COPIES: tl.constexpr, WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr, EXPERTS: tl.constexpr, EXPERTS_BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = column < WIDTH
    total = tl.zeros((COLUMNS,), tl.float32)
    for copy in tl.static_range(COPIES):
        weight = tl.load(weights + token * COPIES + copy).to(tl.float32)
        total += weight * tl.load(rows + (token * COPIES + copy) * WIDTH + column, mask=mask, other=0.0).to(tl.float32)
    if shared is not None:
        total += tl.load(shared + token * SHARED_STRIDE + column, mask=mask, other=0.0).to(tl.float32)
    total += tl.load(residual + token * RESIDUAL_STRIDE + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(output + token * WIDTH + column, total.to(output.dtype.element_ty), mask=mask)
    if tl.program_id(0) == 0 and tl.program_id(1) == 0:
        expert = tl.arange(0, EXPERTS_BLOCK)
        tl.store(counts + expert, tl.zeros((EXPERTS_BLOCK,), tl.int32), mask=expert < EXPERTS)


_route, _products, _merge = Launcher(_route_kernel), Launcher(_products_kernel), Launcher(_merge_kernel)
