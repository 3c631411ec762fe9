"""A loss that belongs to a place inside the model: its gradient joins there, whatever the caller's objective is."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function


def add_aux_loss(values: Tensor, loss: Tensor) -> Tensor:
    """`values` unchanged; when their gradient passes, `loss` (a scalar) is minimised along with the caller's."""
    result: Tensor = _SideLoss.apply(values, loss)
    return result


def weighted_sum(values: Tensor, weights: Tensor, rows: Tensor) -> Tensor:
    """Σ values · weights[rows], a scalar: `values` [T, E], `weights` [n, E] without a gradient, `rows` [T] int64.

    The backward keeps `weights` and `rows`, nothing of [T, E].
    """
    result: Tensor = _WeightedSum.apply(values, weights, rows)
    return result


class _WeightedSum(Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, weights: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(weights, rows)
        return (values * weights[rows]).sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        weights, rows = ctx.saved_tensors
        return (gradients[0] * weights)[rows], None, None


class _SideLoss(Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, loss: Tensor) -> Tensor:
        ctx.like = loss.dtype, loss.device
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        dtype, device = ctx.like
        return gradients[0], torch.ones((), dtype=dtype, device=device)
