"""Work on tokens grouped by expert: sorting them by expert and back, and one matrix product per group."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import FunctionCtx


def expert_order(choice: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sort the slots of `choice` [T, k] by expert.

    Returns `order` [T·k] (slot at each sorted row), its inverse, and `counts` [experts], rows per expert.
    """
    flat = choice.flatten()
    order = flat.argsort(stable=True)
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.numel(), device=order.device)
    return order, inverse, torch.bincount(flat, minlength=experts)


def replicate_rows(tokens: Tensor, order: Tensor, inverse: Tensor, copies: int) -> Tensor:
    """Row order[i] // copies of `tokens` [T, H] at row i, [T·copies, H]. The gradient sums each token's copies."""
    rows: Tensor = _Rows.apply(tokens, order, inverse, copies)
    return rows


def restore_rows(rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    """Undo the sort: [T·k, H] in slot order."""
    restored: Tensor = _Rows.apply(rows, inverse, order, 1)
    return restored


def grouped_linear(rows: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """Each of `rows` [R, in] by its expert's matrix of `weight` [E, out, in]: [R, out].

    Rows are sorted by expert; `counts` [E] says how many each has.
    """
    if _grouped_kernel_fits(rows, weight):
        offsets = counts.cumsum(0).to(torch.int32)
        product = F.grouped_mm(rows, weight.transpose(-2, -1), offs=offsets)
        dense: Tensor = _DenseGradient.apply(product)
        return dense
    pieces = rows.split(counts.tolist())
    return torch.cat([piece @ matrix.T for piece, matrix in zip(pieces, weight, strict=True)])


def _grouped_kernel_fits(rows: Tensor, weight: Tensor) -> bool:
    """The grouped kernel wants rows of whole 16 bytes, and bf16 on CUDA."""
    aligned = all(size * weight.element_size() % 16 == 0 for size in weight.shape[1:])
    dtype_fits = not rows.is_cuda or rows.dtype == torch.bfloat16
    return rows.shape[0] > 0 and aligned and dtype_fits and rows.dtype == weight.dtype


class _Rows(Function):
    """Gather by a permutation; the backward gathers by the inverse, so it needs no atomics and is deterministic."""

    @staticmethod
    def forward(ctx: Any, source: Tensor, order: Tensor, inverse: Tensor, copies: int) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.copies = copies
        return source[order // copies if copies > 1 else order]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (inverse,) = ctx.saved_tensors
        rows = gradients[0][inverse]
        if ctx.copies > 1:
            rows = rows.unflatten(0, (-1, ctx.copies)).sum(1)
        return rows, None, None, None


class _DenseGradient(Function):
    """Identity whose gradient is laid out in memory: the grouped kernel's backward rejects expanded tensors."""

    @staticmethod
    def forward(ctx: FunctionCtx, values: Tensor) -> Tensor:
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0].contiguous()
