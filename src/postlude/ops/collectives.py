"""Collectives with their backward. Without a group there is one rank, and they do nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

Group = dist.ProcessGroup | None
Communicate = Callable[[Tensor, dist.ProcessGroup], Tensor]

# Renamed in torch 2.13.
gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_into = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def copy_to_group(tensor: Tensor, group: Group) -> Tensor:
    """Returns a replicated tensor that ranks use in parts. Its gradient is summed over `group`."""
    return _apply(tensor, group, _same, _sum)


def gather_from_sequence(tensor: Tensor, group: Group) -> Tensor:
    """Gathers token shards [T / size, ...] to all tokens [T, ...] on every rank, in rank order.

    The gradient of a shard is the sum over ranks: a reduce-scatter.
    """
    return _apply(tensor, group, _gather, _scatter)


def scatter_to_sequence(tensor: Tensor, group: Group) -> Tensor:
    """Sums every rank's addend [T, ...], and returns this rank's token shard [T / size, ...] of the sum."""
    return _apply(tensor, group, _scatter, _gather)


def gather_replicated(tensor: Tensor, group: Group) -> Tensor:
    """Gathers token shards [T / size, ...] to all tokens [T, ...], which every rank uses in the same way.

    Every rank then has the same gradient, and a shard's gradient is its part of it.
    """
    return _apply(tensor, group, _gather, _part)


def sum_over_group(tensor: Tensor, group: Group) -> Tensor:
    """Returns the sum of each rank's addend, on every rank of `group`.

    The gradient of an addend is the sum over ranks of the gradients of the total.
    """
    return _apply(tensor, group, _sum, _sum)


def sequence_to_heads(tensor: Tensor, group: Group) -> Tensor:
    """This rank's tokens of all heads [T, heads, ...] -> all ranks' tokens of its heads [size · T, heads / size, ...].

    `heads_to_sequence` is the inverse; each is the other's gradient.
    """
    return _apply(tensor, group, _to_heads, _to_sequence)


def heads_to_sequence(tensor: Tensor, group: Group) -> Tensor:
    """All ranks' tokens of this rank's heads -> this rank's tokens of all heads."""
    return _apply(tensor, group, _to_sequence, _to_heads)


def _apply(tensor: Tensor, group: Group, run: Communicate, run_back: Communicate) -> Tensor:
    if group is None:
        return tensor
    result: Tensor = _Collective.apply(tensor, group, run, run_back)
    return result


class _Collective(Function):
    """`run` of a tensor; its gradient is `run_back` of the result's."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup, run: Communicate, run_back: Communicate) -> Tensor:
        ctx.group, ctx.run_back = group, run_back
        return run(tensor, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        gradient: Tensor = ctx.run_back(gradients[0], ctx.group)
        return gradient, None, None, None


def _same(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    return tensor.view_as(tensor)


def _part(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    rows = len(tensor) // dist.get_world_size(group)
    start = dist.get_rank(group) * rows
    return tensor[start : start + rows]


def _sum(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    total = tensor.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def _gather(shard: Tensor, group: dist.ProcessGroup) -> Tensor:
    gathered = shard.new_empty(dist.get_world_size(group) * shard.shape[0], *shard.shape[1:])
    gather_into(gathered, shard.contiguous(), group=group)
    return gathered


def _scatter(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    size = dist.get_world_size(group)
    if tensor.shape[0] % size:
        raise ValueError(
            f"{tensor.shape[0]} rows do not divide over {size} ranks. Pad the microbatch to a multiple of {size}."
        )
    shard = tensor.new_empty(tensor.shape[0] // size, *tensor.shape[1:])
    reduce_scatter_into(shard, tensor.contiguous(), group=group)
    return shard


def _to_heads(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    size = dist.get_world_size(group)
    if tensor.shape[1] % size:
        raise ValueError(f"{tensor.shape[1]} heads do not divide over {size} ranks. Use a cp that divides them.")
    sent = tensor.unflatten(1, (size, -1)).movedim(1, 0).contiguous()  # [size, T, heads / size, ...]
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return received.flatten(0, 1)


def _to_sequence(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    sent = tensor.unflatten(0, (dist.get_world_size(group), -1)).contiguous()  # [size, T, heads / size, ...]
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return received.movedim(0, 1).flatten(1, 2)
