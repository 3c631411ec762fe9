"""Collectives with the backward that belongs to them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def copy_to_group(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """A tensor every rank of `group` holds alike, about to be used in parts: its gradient is the sum of the parts'."""
    return _CopyToGroup.apply(tensor, group)  # type: ignore[no-any-return]


def gather_from_sequence(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Token shards [T / size, ...], one a rank in rank order -> all tokens [T, ...] on every rank.

    The gradient of a shard is the sum of what every rank's use of it gives: a reduce-scatter.
    """
    return _GatherFromSequence.apply(tensor, group)  # type: ignore[no-any-return]


class _CopyToGroup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        gradient = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class _GatherFromSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        size = dist.get_world_size(group)
        gathered = tensor.new_empty(size * tensor.shape[0], *tensor.shape[1:])
        dist.all_gather_into_tensor(gathered, tensor.contiguous(), group=group)
        return gathered

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        size = dist.get_world_size(ctx.group)
        shard = gradient.new_empty(gradient.shape[0] // size, *gradient.shape[1:])
        dist.reduce_scatter_tensor(shard, gradient.contiguous(), group=ctx.group)
        return shard, None
