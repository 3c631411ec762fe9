"""Collectives with the backward that belongs to them. Without a group there is one rank, and nothing to do."""

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
    """A tensor every rank of `group` holds alike, about to be used in parts: its gradient is the sum of the parts'."""
    return tensor if group is None else _apply(_CopyToGroup, tensor, group)


def gather_from_sequence(tensor: Tensor, group: Group) -> Tensor:
    """Token shards [T / size, ...], one a rank in rank order -> all tokens [T, ...] on every rank.

    The gradient of a shard is the sum of what every rank's use of it gives: a reduce-scatter.
    """
    return tensor if group is None else _apply(_GatherRows, tensor, group, True)


def scatter_to_sequence(tensor: Tensor, group: Group) -> Tensor:
    """Every rank's addend [T, ...] -> this rank's token shard [T / size, ...] of their sum."""
    return tensor if group is None else _apply(_ScatterRows, tensor, group)


def gather_alike(tensor: Tensor, group: Group) -> Tensor:
    """Token shards [T / size, ...] -> all tokens [T, ...], about to be used alike by every rank.

    Every rank then holds the same gradient, and a shard's is its own part of it.
    """
    return tensor if group is None else _apply(_GatherRows, tensor, group, False)


def sum_over_group(tensor: Tensor, group: Group) -> Tensor:
    """Each rank's addend -> their sum, alike on every rank of `group`.

    For losses that every rank computes and that count as their sum over ranks: the gradient of an addend is the sum of
    what every rank's use of the total gives.
    """
    return tensor if group is None else _apply(_SumOverGroup, tensor, group)


def sequence_to_heads(tensor: Tensor, group: Group) -> Tensor:
    """This rank's tokens of all heads [T, heads, ...] -> every rank's tokens, in rank order, of its block of the heads.

    [size * T, heads / size, ...]; `heads_to_sequence` is the way back, and each is the other's gradient.
    """
    return tensor if group is None else _apply(_SwapSequenceAndHeads, tensor, group, True)


def heads_to_sequence(tensor: Tensor, group: Group) -> Tensor:
    """Every rank's tokens, in rank order, of this rank's block of the heads -> this rank's tokens of all heads."""
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
    arrived = torch.empty_like(sent)
    dist.all_to_all_single(arrived, sent, group=group)
    return arrived.flatten(0, 1)


def _to_sequence(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    sent = tensor.unflatten(0, (dist.get_world_size(group), -1)).contiguous()  # [size, T, heads / size, ...]
    arrived = torch.empty_like(sent)
    dist.all_to_all_single(arrived, sent, group=group)
    return arrived.movedim(0, 1).flatten(1, 2)


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
    def forward(ctx: Any, shard: Tensor, group: dist.ProcessGroup, used_in_parts: bool) -> Tensor:
        ctx.group, ctx.used_in_parts, ctx.rows = group, used_in_parts, shard.shape[0]
        return _gather(shard, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        if ctx.used_in_parts:
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
