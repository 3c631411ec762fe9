"""Mesh: the process groups of a layout over the running ranks. Axis: one rank's position along one axis."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from postlude.layout import Layout


@dataclass(frozen=True)
class Axis:
    """One rank's position along one axis: `rank` of `size`. `group` is None if the axis has one rank."""

    size: int = 1
    rank: int = 0
    group: dist.ProcessGroup | None = None
    mesh: DeviceMesh | None = None
    """The one-dimensional mesh of parameters that are sharded along this axis."""

    def block(self, total: int) -> tuple[int, int]:
        """Returns `(start, stop)` of this rank's block of `total` items, divided as `torch.chunk` does."""
        width = -(-total // self.size)
        return min(self.rank * width, total), min((self.rank + 1) * width, total)


SINGLE_RANK = Axis()
ChannelKey = tuple[str, int]


class Mesh:
    """A layout over the running ranks: this rank's position along every axis, and the meshes of its parameters.

    Ranks are ordered pp, dp_replicate, dp_shard, cp, tp; tp varies fastest. Experts use the same ranks in another
    grid: inside a pipeline stage and a replica, dp_shard · cp · tp is divided into `ep`, fastest, and the rest.
    """

    def __init__(self, layout: Layout, device_type: str = "cpu") -> None:
        world = dist.get_world_size() if dist.is_initialized() else 1
        if layout.world_size != world:
            raise ValueError(
                f"{layout} runs on {layout.world_size} rank(s), but {world} {'is' if world == 1 else 'are'} running. "
                f"Start {layout.world_size}, or choose degrees whose product pp·dp_replicate·dp_shard·cp·tp is {world}."
            )
        self.layout = layout
        self.device_type = device_type
        self.pp = self.dp = self.cp = self.tp = self.ep = self.first_and_last_stage = SINGLE_RANK
        self.fsdp_mesh: DeviceMesh | None = None
        self.expert_fsdp_mesh: DeviceMesh | None = None
        self.channels: Mapping[ChannelKey, dist.ProcessGroup] = {}
        if not dist.is_initialized():
            return
        pp, replicate, shard, cp, tp, ep = (
            getattr(layout, name) for name in ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")
        )
        ranks = torch.arange(world)
        dense = ranks.view(pp, replicate, shard * cp, tp)
        batches = ranks.view(pp, replicate * shard, cp, tp)
        experts = ranks.view(pp, replicate, shard * cp * tp // ep, ep)
        # A group runs one collective at a time, so what overlaps in a step has its own groups, even of the same ranks:
        # gathers of weights, tokens of tensor and context parallelism, tokens that go to experts. What communicates
        # only between steps shares the groups of weights. The world's group, which exists already, is one of them.
        weights: _Groups = {(tuple(range(world)),): dist.group.WORLD}
        tokens: _Groups = {}
        self.pp, self.dp = _axis(dense, 0, weights), _axis(batches, 1, weights)
        self.cp, tp_axis = _axis(batches, 2, tokens), _axis(dense, 3, tokens)
        ep_axis = _axis(experts, 3, {}, high_priority_options())
        self.fsdp_mesh, self.tp = _fsdp_mesh(dense, self.pp.rank, device_type, weights, tp_axis)
        self.expert_fsdp_mesh, self.ep = _fsdp_mesh(experts, self.pp.rank, device_type, weights, ep_axis)
        if pp > 1:
            self.first_and_last_stage = _axis(dense[[0, -1]], 0, weights)
            self.channels = self._channels(dense.flatten(1).T.tolist())

    @classmethod
    def single_rank(cls) -> Mesh:
        """Returns the mesh of one rank, whether or not this process belongs to a group."""
        return cls.without_processes(Layout())

    @classmethod
    def without_processes(cls, layout: Layout) -> Mesh:
        """Returns rank 0's mesh without process groups: modules built on it have the sizes of one rank's shards."""
        mesh = cls.__new__(cls)
        mesh.layout, mesh.device_type = layout, "cpu"
        mesh.pp, mesh.dp, mesh.cp, mesh.tp, mesh.ep = (
            Axis(size) for size in (layout.pp, layout.dp, layout.cp, layout.tp, layout.ep)
        )
        mesh.first_and_last_stage = SINGLE_RANK
        mesh.fsdp_mesh = mesh.expert_fsdp_mesh = None
        mesh.channels = {}
        return mesh

    def _channels(self, pipelines: list[list[int]]) -> Mapping[ChannelKey, dist.ProcessGroup]:
        """Returns a group for each direction of activations ("F", to the next rank) and gradients ("B", back).

        Each group is first in, first out. Over one group they would have to be received in the order in which they
        were sent, which both ends would have to know. Only virtual stages connect the last rank with the first.

        Each group is used once here, in one order: NCCL connects the two ends on first use. In the middle of a
        schedule, with each end busy with another neighbour, they could deadlock.
        """
        pp, channels = self.layout.pp, dict[ChannelKey, dist.ProcessGroup]()
        hops = range(pp if self.layout.vpp > 1 else pp - 1)
        for pipeline in pipelines:
            for hop in hops:
                rank, next_rank = hop, (hop + 1) % pp
                for channel in (("F", rank), ("B", next_rank)):
                    ends = [pipeline[rank], pipeline[next_rank]]
                    group = dist.new_group(ends)
                    if dist.get_rank() in ends:
                        channels[channel] = group
                        self._connect(group, sender=pipeline[channel[1]])
        return channels

    def _connect(self, group: dist.ProcessGroup, sender: int) -> None:
        """Sends one number from one end of a channel to the other."""
        number = torch.zeros(1, device="cpu" if dist.get_backend(group) == "gloo" else self.device_type)
        point_to_point(dist.isend if dist.get_rank() == sender else dist.irecv, number, group).wait()


def point_to_point(operation: Callable[..., Any], tensor: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Launches `dist.isend` to, or `dist.irecv` from, the other rank of a group of two.

    It is a batch of one, so that NCCL uses the group's communicator and does not make a second one with a warning.
    """
    peer = 1 - dist.get_rank(group)
    return dist.batch_isend_irecv([dist.P2POp(operation, tensor, group=group, group_peer=peer)])[0]


_Groups = dict[tuple[tuple[int, ...], ...], dist.ProcessGroup | None]
"""This rank's group, by the rank lists of all groups that were made together."""


def _fsdp_mesh(
    grid: Tensor, stage: int, device_type: str, groups_by_ranks: _Groups, inner: Axis
) -> tuple[DeviceMesh, Axis]:
    """Returns the FSDP mesh of a `grid` [pp, replicate, shard, inner] of ranks, and `inner` with its own mesh.

    Both are submeshes of one mesh, as FSDP requires. Axes of one rank are left out of it, except the shards'.
    """
    groups = {"replicate": _group(grid, 1, groups_by_ranks) if grid.shape[1] > 1 else None}
    groups |= {"shard": _group(grid, 2, groups_by_ranks), "inner": inner.group}
    mesh_groups = {name: group for name, group in groups.items() if group is not None}
    sizes = dict(zip(groups, grid.shape[1:], strict=True))
    mesh = DeviceMesh.from_group(
        list(mesh_groups.values()),
        device_type,
        mesh=grid[stage].reshape([sizes[name] for name in mesh_groups]),
        mesh_dim_names=tuple(mesh_groups),
    )
    shards = mesh["replicate", "shard"] if "replicate" in mesh_groups else mesh["shard"]
    return shards, replace(inner, mesh=mesh["inner"]) if "inner" in mesh_groups else inner


def high_priority_options() -> Any:
    """Returns options of a group whose kernels start before others that wait for the GPU; None without NCCL.

    An exchange that hides behind compute must start in the middle of it, not after a matmul of a millisecond.
    """
    if dist.get_backend() != "nccl":
        return None
    return dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)


def _axis(grid: Tensor, dimension: int, groups_by_ranks: _Groups, options: Any = None) -> Axis:
    """Returns this rank's position along one dimension of a grid of ranks; SINGLE_RANK if the grid lacks it."""
    if grid.shape[dimension] == 1:
        return SINGLE_RANK
    group = _group(grid, dimension, groups_by_ranks, options)
    return SINGLE_RANK if group is None else Axis(grid.shape[dimension], dist.get_rank(group), group)


def _group(grid: Tensor, dimension: int, groups_by_ranks: _Groups, options: Any = None) -> dist.ProcessGroup | None:
    """Returns this rank's group along one dimension of a grid of ranks; None if the grid lacks the rank.

    Every rank makes the same calls in the same order.
    """
    rows = grid.movedim(dimension, -1).flatten(0, -2).tolist()
    key = tuple(map(tuple, rows))
    if key not in groups_by_ranks:
        groups_by_ranks[key] = _make_groups(rows, options)
    return groups_by_ranks[key]


@functools.cache
def _single_rank_group(world: dist.ProcessGroup) -> dist.ProcessGroup:
    """Returns the group of this rank alone, one for all meshes of a world.

    torch names a group that is made without the other ranks by the number of groups there are. When one was destroyed,
    that name may be in use.
    """
    group: dist.ProcessGroup = dist.new_group([dist.get_rank(world)], use_local_synchronization=True)
    return group


def _make_groups(rows: list[list[int]], options: Any) -> dist.ProcessGroup | None:
    rank = dist.get_rank()
    if len(rows[0]) == 1:
        return _single_rank_group(dist.group.WORLD)
    joined: dist.ProcessGroup | None = None
    for row in rows:
        group = dist.new_group(row, pg_options=options)
        if rank in row:
            joined = group
    return joined
