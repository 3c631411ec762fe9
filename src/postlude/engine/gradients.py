"""Whole gradients, in bounded memory: their norm, their clipping, and what blocks count beside them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_

from postlude.model.parallel import held
from postlude.world.mesh import Mesh

CHUNK = 1 << 24  # elements that are looked at in float64 at a time


def squared_norm(gradient: Tensor) -> Tensor:
    """Sum of squares of what this rank holds of a gradient, a float64 scalar; never all of it in float64."""
    chunks = held(gradient).reshape(-1).split(CHUNK)
    return torch.stack([torch.linalg.vector_norm(chunk, dtype=torch.float64) for chunk in chunks]).square().sum()


def clip(parameters: Iterable[Tensor], limit: float, norm: float) -> None:
    """Scale the gradients of this rank, all at once, as a whole gradient of this norm is scaled down to the limit."""
    parts = []
    for parameter in parameters:
        if parameter.grad is not None:
            part = held(parameter)
            part.grad = held(parameter.grad)
            parts.append(part)
    if parts:
        clip_grads_with_norm_(parts, limit, torch.full((), norm, dtype=torch.float32, device=parts[0].device))


@torch.no_grad()
def sum_counted(counted: Sequence[Tensor], mesh: Mesh) -> None:
    """Sum what each rank counted of its own tokens over all ranks of a stage: together, in one go an axis."""
    axes = [axis for axis in (mesh.dp, mesh.cp, mesh.tp) if axis.group is not None]
    if not counted or not axes:
        return
    together = torch.cat([each.flatten() for each in counted])
    for axis in axes:
        dist.all_reduce(together, group=axis.group)
    for each, total in zip(counted, together.split([each.numel() for each in counted]), strict=True):
        each.copy_(total.view_as(each))
