"""Head norms and rotary embedding of queries and keys, and their gradients, one kernel each.

Not measured alone: part of the updates in benchmarks/results/train_step_h200.json.

A program takes some heads of some tokens, all of queries or all of keys. A head is three tiles: the first and the
second features of its pairs, and the rest, which is not rotated.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, assignment, misc"

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from postlude.ops.kernels.launch import Grid, Launcher, contiguous_like
from postlude.ops.kernels.norm import multiprocessors, sum_partial

TILE, WARPS = 2048, 4  # features of one token that a program takes
BACK_PROGRAMS = 2  # programs of the backward on each multiprocessor; measured, like the tile

Table = tuple[Tensor, Tensor]
Weights = tuple[Tensor, Tensor]


def forward(
    query: Tensor, key: Tensor, table: Table, weights: Weights | None, eps: float, offset: float
) -> tuple[Tensor, Tensor]:
    """See `rotate_heads`."""
    query, key = _laid_out(query), _laid_out(key)
    outputs = contiguous_like(query), contiguous_like(key)
    (query_programs, key_programs), sizes = _tiles(query.shape[1], key.shape[1], query.shape[2], table[0].shape[-1])
    tensors = (query, key, *table, *(weights or (None, None)), *outputs)
    constants = (*_strides(query), *_strides(key), query_programs, *sizes)
    grid = query.shape[0], query_programs + key_programs, 1
    _forward(grid, tensors, (eps, offset), constants, WARPS)
    return outputs


def backward(
    query: Tensor | None,
    key: Tensor | None,
    table: Table,
    weights: Weights | None,
    eps: float,
    offset: float,
    gradients: tuple[Tensor, Tensor],
    totals: tuple[Tensor | None, Tensor | None],
    output: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Returns the gradients of query, key and both weights. Without weights, query and key are not needed.

    The gradients of query and key are columns of one tensor: of `output` if given, dense [T, enough heads, width]. With
    `totals` the weights' gradients are added to them instead of being returned.
    """
    grads = _laid_out(gradients[0]), _laid_out(gradients[1])
    (tokens, heads, width), total_heads = grads[0].shape, grads[0].shape[1] + grads[1].shape[1]
    output = grads[0].new_empty(tokens, total_heads, width) if output is None else output
    outputs = output[:, :heads], output[:, heads:total_heads]
    query, key = grads if query is None or key is None else (_laid_out(query), _laid_out(key))
    (query_programs, key_programs), sizes = _tiles(query.shape[1], key.shape[1], query.shape[2], table[0].shape[-1])
    programs = min(tokens, BACK_PROGRAMS * multiprocessors(query.device))
    grid: Grid = (programs, query_programs + key_programs, 1)
    partial = None
    if weights is not None:
        partial = torch.empty((grid[0] * grid[1], width), dtype=torch.float32, device=query.device)
    tensors = (query, key, *grads, *table, *(weights or (None, None)), *outputs, partial)
    strides = (*_strides(query), *_strides(key), *_strides(grads[0]), *_strides(grads[1]), output.stride(0))
    _backward(grid, tensors, (tokens, eps, offset), (*strides, query_programs, *sizes), WARPS)
    if weights is None or partial is None:
        return *outputs, None, None
    grad_weights = sum_partial(partial, (programs * query_programs, programs * key_programs), weights, totals)
    return *outputs, grad_weights[0], grad_weights[1]


def _laid_out(heads: Tensor) -> Tensor:
    return heads if heads.stride(2) == 1 else heads.contiguous()


def _strides(heads: Tensor) -> tuple[int, int]:
    """Returns the strides of tokens and heads."""
    return heads.stride(0), heads.stride(1)


@functools.cache
def _tiles(heads: int, kv_heads: int, width: int, rotated: int) -> tuple[tuple[int, int], tuple[int, ...]]:
    """Returns how many programs share a token's queries and its keys, and the kernels' constants from HEADS on."""
    half, unrotated = triton.next_power_of_2(rotated // 2), width - rotated
    block = triton.next_power_of_2(unrotated) if unrotated else 0
    heads_per_tile = max(1, min(TILE // (2 * half + block), triton.next_power_of_2(max(heads, kv_heads))))
    sizes = (heads, kv_heads, width, rotated // 2, heads_per_tile, half, block)
    return (-(-heads // heads_per_tile), -(-kv_heads // heads_per_tile)), sizes


@triton.jit
def _head(
    vectors, row_at, row_mask,
    HALF: tl.constexpr, WIDTH: tl.constexpr, HALF_BLOCK: tl.constexpr, REST_BLOCK: tl.constexpr,
):  # fmt: skip
    # The tiles of heads at `row_at` [AT_ONCE, 1]. The last is unused where all features are rotated.
    pair = tl.arange(0, HALF_BLOCK)[None, :]
    mask = row_mask & (pair < HALF)
    first = tl.load(vectors + row_at + pair, mask=mask, other=0.0)
    second = tl.load(vectors + row_at + HALF + pair, mask=mask, other=0.0)
    unrotated = first
    if REST_BLOCK:
        other = 2 * HALF + tl.arange(0, REST_BLOCK)[None, :]
        unrotated = tl.load(vectors + row_at + other, mask=row_mask & (other < WIDTH), other=0.0)
    return first, second, unrotated


@triton.jit
def _wide(first, second, unrotated):
    return first.to(tl.float32), second.to(tl.float32), unrotated.to(tl.float32)


@triton.jit
def _weights(
    weight, offset, HALF: tl.constexpr, WIDTH: tl.constexpr, HALF_BLOCK: tl.constexpr, REST_BLOCK: tl.constexpr
):
    # A norm's weight as the tiles of one head.
    row = tl.arange(0, 1)[:, None]
    first, second, unrotated = _head(weight, row, row == 0, HALF, WIDTH, HALF_BLOCK, REST_BLOCK)
    first, second, unrotated = _wide(first, second, unrotated)
    return first + offset, second + offset, unrotated + offset


@triton.jit
def _store_head(
    vectors, row_at, row_mask, first, second, unrotated,
    HALF: tl.constexpr, WIDTH: tl.constexpr, HALF_BLOCK: tl.constexpr, REST_BLOCK: tl.constexpr,
):  # fmt: skip
    pair = tl.arange(0, HALF_BLOCK)[None, :]
    mask = row_mask & (pair < HALF)
    tl.store(vectors + row_at + pair, first.to(vectors.dtype.element_ty), mask=mask)
    tl.store(vectors + row_at + HALF + pair, second.to(vectors.dtype.element_ty), mask=mask)
    if REST_BLOCK:
        other = 2 * HALF + tl.arange(0, REST_BLOCK)[None, :]
        tl.store(vectors + row_at + other, unrotated.to(vectors.dtype.element_ty), mask=row_mask & (other < WIDTH))


@triton.jit
def _summed(first, second, unrotated, REST_BLOCK: tl.constexpr):
    total = tl.sum(first + second, 1)
    if REST_BLOCK:
        total += tl.sum(unrotated, 1)
    return total[:, None]


@triton.jit
def _rotate(
    vectors,
    token_stride: tl.constexpr, head_stride: tl.constexpr, cos, sin, weight, output, token, block,
    heads: tl.constexpr, eps, offset, WIDTH: tl.constexpr, HALF: tl.constexpr, AT_ONCE: tl.constexpr,
    HALF_BLOCK: tl.constexpr, REST_BLOCK: tl.constexpr,
):  # fmt: skip
    head = block * AT_ONCE + tl.arange(0, AT_ONCE)[:, None]
    mask = head < heads
    at = token * token_stride + head * head_stride
    first, second, unrotated = _head(vectors, at, mask, HALF, WIDTH, HALF_BLOCK, REST_BLOCK)
    first, second, unrotated = _wide(first, second, unrotated)
    if weight is not None:
        squares = _summed(first * first, second * second, unrotated * unrotated, REST_BLOCK)
        inverse = tl.rsqrt(squares / WIDTH + eps)
        by_first, by_second, by_unrotated = _weights(weight, offset, HALF, WIDTH, HALF_BLOCK, REST_BLOCK)
        first *= inverse * by_first
        second *= inverse * by_second
        unrotated *= inverse * by_unrotated
    pair = tl.arange(0, HALF_BLOCK)[None, :]
    c = tl.load(cos + token * 2 * HALF + pair, mask=pair < HALF, other=0.0)
    s = tl.load(sin + token * 2 * HALF + pair, mask=pair < HALF, other=0.0)
    to = (token * heads + head) * WIDTH
    rotated_first, rotated_second = first * c - second * s, second * c + first * s
    _store_head(output, to, mask, rotated_first, rotated_second, unrotated, HALF, WIDTH, HALF_BLOCK, REST_BLOCK)


@triton.jit(do_not_specialize=["eps", "offset"])
def _forward_kernel(
    query, key, cos, sin, query_weight, key_weight, query_output, key_output, eps, offset,
    QUERY_TOKEN: tl.constexpr, QUERY_HEAD: tl.constexpr, KEY_TOKEN: tl.constexpr, KEY_HEAD: tl.constexpr,
    QUERY_BLOCKS: tl.constexpr, HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, WIDTH: tl.constexpr,
    HALF: tl.constexpr, AT_ONCE: tl.constexpr, HALF_BLOCK: tl.constexpr, REST_BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    if block < QUERY_BLOCKS:
        _rotate(
            query, QUERY_TOKEN, QUERY_HEAD, cos, sin, query_weight, query_output, token, block, HEADS, eps, offset,
            WIDTH, HALF, AT_ONCE, HALF_BLOCK, REST_BLOCK,
        )  # fmt: skip
    else:
        _rotate(
            key, KEY_TOKEN, KEY_HEAD, cos, sin, key_weight, key_output, token, block - QUERY_BLOCKS, KEY_HEADS, eps,
            offset, WIDTH, HALF, AT_ONCE, HALF_BLOCK, REST_BLOCK,
        )  # fmt: skip


@triton.jit
def _rotate_back(
    vectors,
    token_stride: tl.constexpr, head_stride: tl.constexpr, gradient, gradient_token: tl.constexpr,
    gradient_head: tl.constexpr, cos, sin, weight, output, partial, tokens, block, heads: tl.constexpr,
    output_token: tl.constexpr, eps, offset, WIDTH: tl.constexpr, HALF: tl.constexpr, AT_ONCE: tl.constexpr,
    HALF_BLOCK: tl.constexpr, REST_BLOCK: tl.constexpr,
):  # fmt: skip
    # `partial` [WIDTH] belongs to this program.
    head = block * AT_ONCE + tl.arange(0, AT_ONCE)[:, None]
    mask = head < heads
    pair = tl.arange(0, HALF_BLOCK)[None, :]
    of_first = tl.zeros((AT_ONCE, HALF_BLOCK), tl.float32)
    of_second = tl.zeros((AT_ONCE, HALF_BLOCK), tl.float32)
    of_rest = of_first
    if REST_BLOCK:
        of_rest = tl.zeros((AT_ONCE, REST_BLOCK), tl.float32)
    if weight is not None:
        by_first, by_second, by_rest = _weights(weight, offset, HALF, WIDTH, HALF_BLOCK, REST_BLOCK)
    # The next token is loaded while one is processed.
    step = tl.num_programs(0)
    token = tl.program_id(0).to(tl.int64)
    arriving, also_arriving, rest_arriving = _head(
        gradient, token * gradient_token + head * gradient_head, mask, HALF, WIDTH, HALF_BLOCK, REST_BLOCK
    )
    coming, also_coming, rest_coming = arriving, also_arriving, rest_arriving
    if weight is not None:
        coming, also_coming, rest_coming = _head(
            vectors, token * token_stride + head * head_stride, mask, HALF, WIDTH, HALF_BLOCK, REST_BLOCK
        )
    for _ in range(tl.program_id(0), tokens, step):
        c = tl.load(cos + token * 2 * HALF + pair, mask=pair < HALF, other=0.0)
        s = tl.load(sin + token * 2 * HALF + pair, mask=pair < HALF, other=0.0)
        arrived, also, rest = _wide(arriving, also_arriving, rest_arriving)
        value, second_value, rest_value = _wide(coming, also_coming, rest_coming)
        after = token + step
        there = head < tl.where(after < tokens, heads, 0)
        at = after * gradient_token + head * gradient_head
        arriving, also_arriving, rest_arriving = _head(gradient, at, there, HALF, WIDTH, HALF_BLOCK, REST_BLOCK)
        first, second = arrived * c + also * s, also * c - arrived * s
        if weight is not None:
            at = after * token_stride + head * head_stride
            coming, also_coming, rest_coming = _head(vectors, at, there, HALF, WIDTH, HALF_BLOCK, REST_BLOCK)
            # Two independent sums.
            squares = _summed(value * value, second_value * second_value, rest_value * rest_value, REST_BLOCK)
            scaled, second_scaled, rest_scaled = first * by_first, second * by_second, rest * by_rest
            along = _summed(scaled * value, second_scaled * second_value, rest_scaled * rest_value, REST_BLOCK)
            inverse = tl.rsqrt(squares / WIDTH + eps)
            along *= inverse * inverse / WIDTH
            of_first += first * value * inverse
            of_second += second * second_value * inverse
            of_rest += rest * rest_value * inverse
            first = inverse * (scaled - value * along)
            second = inverse * (second_scaled - second_value * along)
            rest = inverse * (rest_scaled - rest_value * along)
        to = token * output_token + head * WIDTH
        _store_head(output, to, mask, first, second, rest, HALF, WIDTH, HALF_BLOCK, REST_BLOCK)
        token = after
    if weight is not None:
        pair = tl.arange(0, HALF_BLOCK)
        tl.store(partial + pair, tl.sum(of_first, 0), mask=pair < HALF)
        tl.store(partial + HALF + pair, tl.sum(of_second, 0), mask=pair < HALF)
        if REST_BLOCK:
            other = 2 * HALF + tl.arange(0, REST_BLOCK)
            tl.store(partial + other, tl.sum(of_rest, 0), mask=other < WIDTH)


@triton.jit(do_not_specialize=["tokens", "eps", "offset"])
def _backward_kernel(
    query, key, of_query, of_key, cos, sin, query_weight, key_weight, query_output, key_output, partial, tokens, eps,
    offset,
    QUERY_TOKEN: tl.constexpr, QUERY_HEAD: tl.constexpr, KEY_TOKEN: tl.constexpr, KEY_HEAD: tl.constexpr,
    OF_QUERY_TOKEN: tl.constexpr, OF_QUERY_HEAD: tl.constexpr, OF_KEY_TOKEN: tl.constexpr, OF_KEY_HEAD: tl.constexpr,
    RESULT_TOKEN: tl.constexpr, QUERY_BLOCKS: tl.constexpr, HEADS: tl.constexpr, KEY_HEADS: tl.constexpr,
    WIDTH: tl.constexpr, HALF: tl.constexpr, AT_ONCE: tl.constexpr, HALF_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(1)
    if partial is not None:
        partial += (block * tl.num_programs(0) + tl.program_id(0)).to(tl.int64) * WIDTH
    if block < QUERY_BLOCKS:
        _rotate_back(
            query, QUERY_TOKEN, QUERY_HEAD, of_query, OF_QUERY_TOKEN, OF_QUERY_HEAD, cos, sin, query_weight,
            query_output, partial, tokens, block, HEADS, RESULT_TOKEN, eps, offset, WIDTH, HALF, AT_ONCE, HALF_BLOCK,
            REST_BLOCK,
        )  # fmt: skip
    else:
        _rotate_back(
            key, KEY_TOKEN, KEY_HEAD, of_key, OF_KEY_TOKEN, OF_KEY_HEAD, cos, sin, key_weight, key_output, partial,
            tokens, block - QUERY_BLOCKS, KEY_HEADS, RESULT_TOKEN, eps, offset, WIDTH, HALF, AT_ONCE, HALF_BLOCK,
            REST_BLOCK,
        )  # fmt: skip


_forward, _backward = Launcher(_forward_kernel), Launcher(_backward_kernel)
