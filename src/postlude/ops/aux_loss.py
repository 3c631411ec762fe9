"""Auxiliary losses inside the model: their gradient joins where they arise, whatever the caller's objective is."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function


def add_aux_loss(values: Tensor, loss: Tensor) -> Tensor:
    """Returns `values` unchanged. Their backward also minimises `loss`, a scalar."""
    result: Tensor = _AuxLoss.apply(values, loss)
    return result


def weighted_sum(values: Tensor, weights: Tensor, rows: Tensor) -> Tensor:
    """Returns Σ values · weights[rows], a scalar: `values` [T, E], `weights` [n, E] without gradient, `rows` [T].

    The backward keeps `weights` and `rows`, nothing of size [T, E].
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


class _AuxLoss(Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, loss: Tensor) -> Tensor:
        ctx.like = loss.dtype, loss.device
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        dtype, device = ctx.like
        return gradients[0], torch.ones((), dtype=dtype, device=device)
