"""Gradients over all ranks: norm and clipping, and all-reduces of shared parameters' gradients and of counters."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_

from postlude.model.parallel import local_shard
from postlude.ops.foreach import norms
from postlude.world.mesh import Mesh

CHUNK = 1 << 24  # elements converted to float64 at a time


@torch.no_grad()
def total_norm(tensors: Iterable[tuple[Tensor, int]], device: torch.device) -> Tensor:
    """Returns the norm of all tensors of all ranks, a float64 scalar, without a float64 copy of a large tensor.

    Each tensor comes with the number of ranks that hold the same shard of it.
    """
    chunks, fractions = list[Tensor](), list[float]()
    for tensor, replicas in tensors:
        shard = local_shard(tensor)
        pieces = [shard] if shard.numel() <= CHUNK else shard.reshape(-1).split(CHUNK)
        chunks += pieces
        fractions += [1.0 / replicas] * len(pieces)
    square_sum = torch.zeros((), dtype=torch.float64, device=device)
    if chunks:
        weights = (
            fractions[0]
            if len(set(fractions)) == 1
            else torch.tensor(fractions, dtype=torch.float64).to(device, non_blocking=True)
        )
        square_sum += (norms(chunks, torch.float64).square() * weights).sum()
    dist.all_reduce(square_sum)
    return square_sum.sqrt()


def zero_gradient(parameter: Tensor) -> Tensor:
    """Returns zeros to add gradients to: in fp32, even if the parameter has fewer bits."""
    parameter.grad_dtype = None  # allows a dtype other than the parameter's
    return torch.zeros_like(parameter, dtype=torch.promote_types(parameter.dtype, torch.float32), requires_grad=False)


def replica_count(parameter: Tensor) -> int:
    """Returns how many ranks hold the same shard of a parameter."""
    if not isinstance(parameter, DTensor):
        return 1
    count = 1
    for placement, size in zip(parameter.placements, parameter.device_mesh.shape, strict=True):
        count *= size if placement.is_replicate() else 1
    return count


def clip(parameters: Iterable[Tensor], limit: float, norm: float) -> None:
    shards = []
    for parameter in parameters:
        if parameter.grad is not None:
            shard = local_shard(parameter)
            shard.grad = local_shard(parameter.grad)
            shards.append(shard)
    if shards:
        clip_grads_with_norm_(shards, limit, torch.full((), norm, dtype=torch.float32, device=shards[0].device))


def fill_and_reduce_shared(parameters: Mapping[str, Tensor], shared: Collection[str], mesh: Mesh) -> None:
    """Gives every parameter a gradient, and sums those of `shared` ones over the first and the last stage.

    A parameter that the loss did not depend on gets zeros, so that every parameter has optimizer state to save.
    """
    for parameter in parameters.values():
        if parameter.grad is None:
            parameter.grad = zero_gradient(parameter)
    for name in sorted(parameters.keys() & shared):
        gradient = parameters[name].grad
        assert gradient is not None
        all_reduce_shared(gradient, mesh)


def all_reduce_shared(gradient: Tensor, mesh: Mesh) -> None:
    """Sums the gradient of a shared parameter over the first and the last stage, which both hold it."""
    if mesh.first_and_last_stage.group is not None:
        dist.all_reduce(local_shard(gradient), group=mesh.first_and_last_stage.group)


@torch.no_grad()
def all_reduce_counters(counters: Sequence[Tensor], mesh: Mesh) -> None:
    """Sums what each rank counted of its own tokens over all ranks of a stage: one all-reduce per axis."""
    groups = [axis.group for axis in (mesh.dp, mesh.cp, mesh.tp) if axis.group is not None]
    if counters and groups:
        all_reduce_together(counters, groups)


def all_reduce_together(tensors: Sequence[Tensor], groups: Iterable[dist.ProcessGroup]) -> None:
    """Sums several tensors in place over the groups, one after the other, as one flat tensor."""
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    for group in groups:
        dist.all_reduce(flat, group=group)
    for tensor, total in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(total.view_as(tensor))
