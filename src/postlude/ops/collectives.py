"""Collectives with their backward. Without a group there is one rank, and they do nothing."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

Group = dist.ProcessGroup | None

# Renamed in torch 2.13.
gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_into = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def copy_to_group(tensor: Tensor, group: Group) -> Tensor:
    """Returns a replicated tensor that ranks use in parts. Its gradient is summed over `group`."""
    return tensor if group is None else _apply(_CopyToGroup, tensor, group)


def gather_from_sequence(tensor: Tensor, group: Group) -> Tensor:
    """Gathers token shards [T / size, ...] to all tokens [T, ...] on every rank, in rank order.

    The gradient of a shard is the sum over ranks: a reduce-scatter.
    """
    return tensor if group is None else _apply(_GatherRows, tensor, group, True)


def scatter_to_sequence(tensor: Tensor, group: Group) -> Tensor:
    """Sums every rank's addend [T, ...], and returns this rank's token shard [T / size, ...] of the sum."""
    return tensor if group is None else _apply(_ScatterRows, tensor, group)


def gather_replicated(tensor: Tensor, group: Group) -> Tensor:
    """Gathers token shards [T / size, ...] to all tokens [T, ...], which every rank uses in the same way.

    Every rank then has the same gradient, and a shard's gradient is its part of it.
    """
    return tensor if group is None else _apply(_GatherRows, tensor, group, False)


def sum_over_group(tensor: Tensor, group: Group) -> Tensor:
    """Returns the sum of each rank's addend, on every rank of `group`.

    The gradient of an addend is the sum over ranks of the gradients of the total.
    """
    return tensor if group is None else _apply(_SumOverGroup, tensor, group)


def sequence_to_heads(tensor: Tensor, group: Group) -> Tensor:
    """This rank's tokens of all heads [T, heads, ...] -> all ranks' tokens of its heads [size · T, heads / size, ...].

    `heads_to_sequence` is the inverse; each is the other's gradient.
    """
    return tensor if group is None else _apply(_SwapSequenceAndHeads, tensor, group, True)


def heads_to_sequence(tensor: Tensor, group: Group) -> Tensor:
    """All ranks' tokens of this rank's heads -> this rank's tokens of all heads."""
    return tensor if group is None else _apply(_SwapSequenceAndHeads, tensor, group, False)


def _apply(function: type[Function], *arguments: Any) -> Tensor:
    result: Tensor = function.apply(*arguments)
    return result


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


class _SwapSequenceAndHeads(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup, to_heads: bool) -> Tensor:
        ctx.group, ctx.to_heads = group, to_heads
        return _to_heads(tensor, group) if to_heads else _to_sequence(tensor, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        back = _to_sequence if ctx.to_heads else _to_heads
        return back(gradients[0], ctx.group), None, None


class _CopyToGroup(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _sum(gradients[0], ctx.group), None


class _GatherRows(Function):
    @staticmethod
    def forward(ctx: Any, shard: Tensor, group: dist.ProcessGroup, sum_gradients: bool) -> Tensor:
        ctx.group, ctx.sum_gradients, ctx.rows = group, sum_gradients, shard.shape[0]
        return _gather(shard, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        if ctx.sum_gradients:
            return _scatter(gradients[0], ctx.group), None, None
        start = dist.get_rank(ctx.group) * ctx.rows
        return gradients[0][start : start + ctx.rows], None, None


class _ScatterRows(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _scatter(tensor, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _gather(gradients[0], ctx.group), None


class _SumOverGroup(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _sum(tensor, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _sum(gradients[0], ctx.group), None
