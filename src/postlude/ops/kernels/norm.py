"""RMSNorm and its gradients: each kernel reads and writes every number once.

Forward and backward with a residual take 0.20 ms for 16,384 tokens of 4096 features in bf16 on an H200: 4.0 TB/s of the
4.8 that its memory has. PyTorch's rms_norm takes 0.53 ms, with copies of the residual
(benchmarks/results/small_kernels_h200.json).

A weight's gradient is a sum over all rows. Each program of the backward sums its rows, and a second kernel sums the
programs' results, so the order of summation is fixed.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, assignment, misc"

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from postlude.ops.kernels.launch import Launcher, contiguous_like

# Measured on an H200, at widths of 1024 and 4096.
TILE = 2048  # numbers a program takes at once where rows are short
PER_WARP = 512
MAX_WARPS = 16
BACKWARD_PROGRAMS = 3  # programs of the backward on each multiprocessor
SUM_ROWS, SUM_COLUMNS, SUM_WARPS = 256, 16, 4


def forward(vectors: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
    rows = as_rows(vectors)
    output = contiguous_like(rows)
    count, width = rows.shape
    tile_rows, block, warps = _tile(width)
    constants = (rows.stride(0), width, tile_rows, block)
    grid = -(-count // tile_rows), 1, 1
    _forward(grid, (rows, weight, output), (count, eps, offset), constants, warps)
    return output if vectors.ndim == 2 else output.view(vectors.shape)


def backward(
    vectors: Tensor,
    weight: Tensor,
    eps: float,
    offset: float,
    gradient: Tensor,
    residual_gradient: Tensor | None,
    total: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """Returns the gradients of vectors and weight. `residual_gradient`, if given, is added to the first.

    With `total` the weight's gradient is added to it instead of being returned.
    """
    rows, grad_rows = as_rows(vectors), as_rows(gradient)
    residual_rows = None if residual_gradient is None else as_rows(residual_gradient)
    output = contiguous_like(rows)
    count, width = rows.shape
    tile_rows, block, warps = _tile(width)
    programs = min(-(-count // tile_rows), BACKWARD_PROGRAMS * multiprocessors(vectors.device))
    partial = torch.empty((programs, width), dtype=torch.float32, device=vectors.device)
    strides = (rows.stride(0), grad_rows.stride(0), 0 if residual_rows is None else residual_rows.stride(0))
    tensors = (rows, weight, grad_rows, residual_rows, output, partial)
    _backward((programs, 1, 1), tensors, (count, eps, offset), (*strides, width, tile_rows, block), warps)
    (grad_weight,) = sum_partial(partial, (programs,), (weight,), (total,))
    return output if vectors.ndim == 2 else output.view(vectors.shape), grad_weight


def sum_partial(
    partial: Tensor, counts: tuple[int, ...], weights: tuple[Tensor, ...], totals: tuple[Tensor | None, ...]
) -> tuple[Tensor | None, ...]:
    """Sums the first counts[0] rows of `partial` [programs, width] for one weight, and the rest for a second.

    Each sum is added to its weight's total, or returned if there is none.
    """
    rows, width = partial.shape
    accumulate = all(total is not None for total in totals)
    sums = totals if accumulate else tuple(torch.empty_like(weight) for weight in weights)
    grid = (-(-width // SUM_COLUMNS), len(counts), 1)
    _sum(grid, (partial, sums[0], sums[-1]), (counts[0], rows), (accumulate, width, SUM_ROWS, SUM_COLUMNS), SUM_WARPS)
    return (None,) * len(weights) if accumulate else sums


def as_rows(tensor: Tensor) -> Tensor:
    """[..., width] -> [rows, width] with a dense last dimension, without a copy where possible."""
    rows = tensor if tensor.ndim == 2 else tensor.reshape(-1, tensor.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Returns the number of multiprocessors; 1 in the interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@functools.cache
def _tile(width: int) -> tuple[int, int, int]:
    """Returns rows at once, columns and warps."""
    block = triton.next_power_of_2(width)
    tile_rows = max(1, TILE // block)
    return tile_rows, block, max(1, min(MAX_WARPS, tile_rows * block // PER_WARP))


@triton.jit(do_not_specialize=["rows", "eps", "offset"])
def _forward_kernel(
    vectors, weight, output, rows, eps, offset,
    STRIDE: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    mask = (row < rows) & (column < WIDTH)
    scale = tl.load(weight + column, mask=column < WIDTH, other=0.0).to(tl.float32) + offset
    value = tl.load(vectors + row * STRIDE + column, mask=mask, other=0.0).to(tl.float32)
    inverse_rms = tl.rsqrt(tl.sum(value * value, 1) / WIDTH + eps)[:, None]
    tl.store(output + row * WIDTH + column, (value * inverse_rms * scale).to(output.dtype.element_ty), mask=mask)


@triton.jit
def _load_rows(tensor, first, rows, STRIDE: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.arange(0, ROWS)[:, None].to(tl.int64) + first
    column = tl.arange(0, BLOCK)[None, :]
    return tl.load(tensor + row * STRIDE + column, mask=(row < rows) & (column < WIDTH), other=0.0)


@triton.jit(do_not_specialize=["rows", "eps", "offset"])
def _backward_kernel(
    vectors, weight, gradient, residual_gradient, output, partial, rows, eps, offset,
    STRIDE: tl.constexpr, GRADIENT_STRIDE: tl.constexpr, RESIDUAL_STRIDE: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    column = tl.arange(0, BLOCK)[None, :]
    scale = tl.load(weight + column, mask=column < WIDTH, other=0.0).to(tl.float32) + offset
    grad_weight = tl.zeros((ROWS, BLOCK), tl.float32)
    step = tl.num_programs(0) * ROWS
    # The next rows are loaded while these are processed.
    next_value = _load_rows(vectors, program * ROWS, rows, STRIDE, WIDTH, ROWS, BLOCK)
    next_grad = _load_rows(gradient, program * ROWS, rows, GRADIENT_STRIDE, WIDTH, ROWS, BLOCK)
    next_residual = next_grad
    if residual_gradient is not None:
        next_residual = _load_rows(residual_gradient, program * ROWS, rows, RESIDUAL_STRIDE, WIDTH, ROWS, BLOCK)
    for first in range(program * ROWS, rows, step):
        value, grad, residual_grad = next_value.to(tl.float32), next_grad.to(tl.float32), next_residual
        next_value = _load_rows(vectors, first + step, rows, STRIDE, WIDTH, ROWS, BLOCK)
        next_grad = _load_rows(gradient, first + step, rows, GRADIENT_STRIDE, WIDTH, ROWS, BLOCK)
        if residual_gradient is not None:
            next_residual = _load_rows(residual_gradient, first + step, rows, RESIDUAL_STRIDE, WIDTH, ROWS, BLOCK)
        scaled_grad = grad * scale
        inverse_rms = tl.rsqrt(tl.sum(value * value, 1) / WIDTH + eps)[:, None]
        mean_product = tl.sum(scaled_grad * value, 1)[:, None] * inverse_rms / WIDTH
        normed = value * inverse_rms
        result = inverse_rms * (scaled_grad - normed * mean_product)
        if residual_gradient is not None:
            result += residual_grad.to(tl.float32)
        row = tl.arange(0, ROWS)[:, None].to(tl.int64) + first
        mask = (row < rows) & (column < WIDTH)
        tl.store(output + row * WIDTH + column, result.to(output.dtype.element_ty), mask=mask)
        grad_weight += grad * normed
    at = partial + program.to(tl.int64) * WIDTH + tl.arange(0, BLOCK)
    tl.store(at, tl.sum(grad_weight, 0), mask=tl.arange(0, BLOCK) < WIDTH)


@triton.jit(do_not_specialize=["first_count", "rows"])
def _sum_kernel(
    partial, sums, second_sums, first_count, rows,
    ACCUMULATE: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    # The first rows, or the rest.
    start, stop = 0, first_count
    if tl.program_id(1) == 1:
        start, stop, sums = first_count, rows, second_sums
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for tile_start in range(start, stop, ROWS):
        row = tile_start + tl.arange(0, ROWS)[:, None]
        mask = (row < stop) & (column < WIDTH)[None, :]
        total += tl.load(partial + row * WIDTH + column[None, :], mask=mask, other=0.0)
    column_sum = tl.sum(total, 0)
    if ACCUMULATE:
        column_sum += tl.load(sums + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    tl.store(sums + column, column_sum.to(sums.dtype.element_ty), mask=column < WIDTH)


_forward, _backward, _sum = Launcher(_forward_kernel), Launcher(_backward_kernel), Launcher(_sum_kernel)
