"""Tokens to rows sorted by expert and back, one kernel each, limited by memory bandwidth.

Not measured alone: part of the 30b-a3b update in benchmarks/results/train_step_h200.json.

Both go token by token, so that a token is read or written once however many experts it has.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, assignment, misc"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from postlude.ops.kernels.launch import Launcher

SUMMED = 4096  # numbers a program adds


def spread(tokens: Tensor, inverse: Tensor, copies: int, weights: Tensor | None = None) -> Tensor:
    """`tokens` [T, H] -> [T·copies, H]: token t at rows inverse[t·copies + j], each by weights[t, j] if given."""
    rows = tokens.new_empty(len(tokens) * copies, tokens.shape[1])
    _run(_spread, tokens.contiguous(), rows, inverse, copies, weights, None, None)
    return rows


def collect(rows: Tensor, inverse: Tensor, copies: int, weights: Tensor | None = None) -> Tensor:
    """`rows` [T·copies, H] -> [T, H]: rows inverse[t·copies + j], each by weights[t, j] if given, summed in fp32."""
    tokens = rows.new_empty(len(rows) // copies, rows.shape[1])
    _run(_collect, tokens, rows.contiguous(), inverse, copies, weights)
    return tokens


def spread_and_rate(
    tokens: Tensor, inverse: Tensor, copies: int, weights: Tensor, rows: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns `spread` with weights, and the products [T, copies] of each token with its `rows`, from one read."""
    spreaded, rated = rows.new_empty(rows.shape), torch.empty_like(weights, memory_format=torch.contiguous_format)
    _run(_spread, tokens.contiguous(), spreaded, inverse, copies, weights, rows.contiguous(), rated)
    return spreaded, rated


def add_to(total: Tensor, gradient: Tensor, scale: Tensor | None = None, *, is_empty: bool = False) -> None:
    """Adds `gradient`, times a 0-dim `scale` if given, to `total`, both dense, of any dtypes.

    Writes it to a `total` that `is_empty`.
    """
    size = total.numel()
    if size:
        _add((triton.cdiv(size, SUMMED), 1, 1), (total, gradient, scale), (), (size, is_empty, SUMMED), 4)


def _run(
    launch: Launcher,
    tokens: Tensor,
    rows: Tensor,
    inverse: Tensor,
    copies: int,
    weights: Tensor | None,
    *others: Tensor | None,
) -> None:
    if not len(tokens):
        return
    wide = triton.next_power_of_2(tokens.shape[1])
    weights = None if weights is None else weights.contiguous()
    tensors = (tokens, rows, inverse, weights, *others)
    launch((len(tokens), 1, 1), tensors, (), (copies, tokens.shape[1], wide), min(max(wide // 512, 1), 16))


@triton.jit
def _spread_kernel(
    tokens, rows, inverse, weights, others, rated, COPIES: tl.constexpr, WIDTH: tl.constexpr, WIDE: tl.constexpr
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    feature = tl.arange(0, WIDE)
    held = feature < WIDTH
    value = tl.load(tokens + token * WIDTH + feature, mask=held, other=0.0)
    for copy in tl.static_range(COPIES):
        row = tl.load(inverse + token * COPIES + copy).to(tl.int64)
        if weights is None:
            tl.store(rows + row * WIDTH + feature, value, mask=held)
        else:
            weight = tl.load(weights + token * COPIES + copy).to(tl.float32)
            weighed = (value.to(tl.float32) * weight).to(rows.dtype.element_ty)
            tl.store(rows + row * WIDTH + feature, weighed, mask=held)
        if others is not None:
            other = tl.load(others + row * WIDTH + feature, mask=held, other=0.0)
            product = tl.sum(value.to(tl.float32) * other.to(tl.float32))
            tl.store(rated + token * COPIES + copy, product.to(rated.dtype.element_ty))


@triton.jit
def _collect_kernel(tokens, rows, inverse, weights, COPIES: tl.constexpr, WIDTH: tl.constexpr, WIDE: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    feature = tl.arange(0, WIDE)
    held = feature < WIDTH
    total = tl.zeros((WIDE,), tl.float32)
    for copy in tl.static_range(COPIES):
        row = tl.load(inverse + token * COPIES + copy).to(tl.int64)
        value = tl.load(rows + row * WIDTH + feature, mask=held, other=0.0).to(tl.float32)
        if weights is None:
            total += value
        else:
            total += value * tl.load(weights + token * COPIES + copy).to(tl.float32)
    tl.store(tokens + token * WIDTH + feature, total.to(tokens.dtype.element_ty), mask=held)


@triton.jit
def _add_kernel(total, gradient, scale, SIZE: tl.constexpr, IS_EMPTY: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    held = at < SIZE
    added = tl.load(gradient + at, mask=held).to(total.dtype.element_ty)
    if scale is not None:
        added *= tl.load(scale).to(total.dtype.element_ty)
    if not IS_EMPTY:
        added += tl.load(total + at, mask=held)
    tl.store(total + at, added, mask=held)


_spread, _collect, _add = Launcher(_spread_kernel), Launcher(_collect_kernel), Launcher(_add_kernel)
