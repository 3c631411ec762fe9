"""Whole gradients, in bounded memory: their norm, their clipping, and what blocks count beside them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_

from postlude.model.parallel import local_shard
from postlude.ops.foreach import norms
from postlude.world.mesh import Mesh

CHUNK = 1 << 24  # elements that are looked at in float64 at a time


@torch.no_grad()
def total_norm(tensors: Iterable[tuple[Tensor, int]], device: torch.device) -> Tensor:
    """The norm of all tensors of all ranks together, a float64 scalar; never all of one in float64.

    Each comes with the number of ranks that hold the same part of it.
    """
    chunks, shares = list[Tensor](), list[float]()
    for tensor, alike in tensors:
        part = local_shard(tensor)
        cut = [part] if part.numel() <= CHUNK else part.reshape(-1).split(CHUNK)
        chunks += cut
        shares += [1.0 / alike] * len(cut)
    squares = torch.zeros((), dtype=torch.float64, device=device)
    if chunks:
        weights = (
            shares[0]
            if len(set(shares)) == 1
            else torch.tensor(shares, dtype=torch.float64).to(device, non_blocking=True)
        )
        squares += (norms(chunks, torch.float64).square() * weights).sum()
    dist.all_reduce(squares)
    return squares.sqrt()


def zero_gradient(parameter: Tensor) -> Tensor:
    """Zeros to add gradients to: in fp32, though the parameter be narrower."""
    parameter.grad_dtype = None  # any
    return torch.zeros_like(parameter, dtype=torch.promote_types(parameter.dtype, torch.float32), requires_grad=False)


def replica_count(parameter: Tensor) -> int:
    """How many ranks hold the same part of a parameter."""
    if not isinstance(parameter, DTensor):
        return 1
    count = 1
    for placement, size in zip(parameter.placements, parameter.device_mesh.shape, strict=True):
        count *= size if placement.is_replicate() else 1
    return count


def clip(parameters: Iterable[Tensor], limit: float, norm: float) -> None:
    """Scale the gradients of this rank, all at once, as a whole gradient of this norm is scaled down to the limit."""
    parts = []
    for parameter in parameters:
        if parameter.grad is not None:
            part = local_shard(parameter)
            part.grad = local_shard(parameter.grad)
            parts.append(part)
    if parts:
        clip_grads_with_norm_(parts, limit, torch.full((), norm, dtype=torch.float32, device=parts[0].device))


@torch.no_grad()
def all_reduce_counters(counted: Sequence[Tensor], mesh: Mesh) -> None:
    """Sum what each rank counted of its own tokens over all ranks of a stage: together, in one go an axis."""
    axes = [axis for axis in (mesh.dp, mesh.cp, mesh.tp) if axis.group is not None]
    if not counted or not axes:
        return
    together = torch.cat([each.flatten() for each in counted])
    for axis in axes:
        dist.all_reduce(together, group=axis.group)
    for each, total in zip(counted, together.split([each.numel() for each in counted]), strict=True):
        each.copy_(total.view_as(each))
