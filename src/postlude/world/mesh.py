"""A layout laid over running ranks: `Mesh` has the groups they speak in, `Axis` is one rank's place along one."""

from __future__ import annotations

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
    """One rank's place along one axis: number `rank` of `size`. `group` joins them; None where there is only one."""

    size: int = 1
    rank: int = 0
    group: dist.ProcessGroup | None = None
    mesh: DeviceMesh | None = None
    """The one-dimensional mesh that parameters cut along this axis are stored on."""

    def block(self, total: int) -> tuple[int, int]:
        """`(start, stop)` of this rank's block of `total` things, even but for the last ones, as in `chunk`."""
        width = -(-total // self.size)
        return min(self.rank * width, total), min((self.rank + 1) * width, total)


SINGLE_RANK = Axis()
Channel = tuple[str, int]


class Mesh:
    """A layout laid over the running ranks: this rank's place along every axis, and the meshes its parameters live on.

    Ranks are ordered pp, dp_replicate, dp_shard, cp, tp, the last one fastest. Experts see the same ranks in another
    grid: inside a pipeline stage and a replica, dp_shard · cp · tp is cut anew into `ep`, fastest, and the rest.

    `Mesh.single_rank()` is one rank without a process group, on the same code path.
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
        self.channels: Mapping[Channel, dist.ProcessGroup] = {}
        if not dist.is_initialized():
            return
        pp, replicate, shard, cp, tp, ep = (
            getattr(layout, name) for name in ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")
        )
        ranks = torch.arange(world)
        dense = ranks.view(pp, replicate, shard * cp, tp)
        batches = ranks.view(pp, replicate * shard, cp, tp)
        experts = ranks.view(pp, replicate, shard * cp * tp // ep, ep)
        # A group does one thing at a time, so what overlaps in a step has groups of its own, though ranks be the same:
        # gathers of weights, tokens that are shared, tokens that go to experts. Between steps there is no hurry, and
        # what speaks only then shares the weights' groups, as everyone's group, which is there already, also does.
        weights: _Known = {(tuple(range(world)),): dist.group.WORLD}
        tokens: _Known = {}
        self.pp, self.dp = _axis(dense, 0, weights), _axis(batches, 1, weights)
        self.cp, tp_axis = _axis(batches, 2, tokens), _axis(dense, 3, tokens)
        ep_axis = _axis(experts, 3, {}, high_priority_options())
        self.fsdp_mesh, self.tp = _stored_on(dense, self.pp.rank, device_type, weights, tp_axis)
        self.expert_fsdp_mesh, self.ep = _stored_on(experts, self.pp.rank, device_type, weights, ep_axis)
        if pp > 1:
            self.first_and_last_stage = _axis(dense[[0, -1]], 0, weights)
            self.channels = self._channels(dense.flatten(1).T.tolist())

    @classmethod
    def single_rank(cls) -> Mesh:
        """One rank, whether or not this process belongs to a group."""
        return cls.without_processes(Layout())

    @classmethod
    def without_processes(cls, layout: Layout) -> Mesh:
        """The first rank of a layout without the others: what is built on it has a rank's sizes, and cannot run."""
        mesh = cls.__new__(cls)
        mesh.layout, mesh.device_type = layout, "cpu"
        mesh.pp, mesh.dp, mesh.cp, mesh.tp, mesh.ep = (
            Axis(size) for size in (layout.pp, layout.dp, layout.cp, layout.tp, layout.ep)
        )
        mesh.first_and_last_stage = SINGLE_RANK
        mesh.fsdp_mesh = mesh.expert_fsdp_mesh = None
        mesh.channels = {}
        return mesh

    def _channels(self, pipelines: list[list[int]]) -> Mapping[Channel, dist.ProcessGroup]:
        """A group for each way that activations ("F") go to the next rank of this pipeline and gradients ("B") back.

        Each is first in, first out by itself. Over one group they would have to be received in the order in which they
        were sent, which the two ends of a pipeline do not share. Only virtual stages lead from the last rank on to the
        first.

        Each is used once, here and in one order: NCCL connects its two ends on first use, and in the midst of a
        schedule, each end busy with another neighbour, they might wait for each other for ever.
        """
        pp, found = self.layout.pp, dict[Channel, dist.ProcessGroup]()
        hops = range(pp if self.layout.vpp > 1 else pp - 1)
        for pipeline in pipelines:
            for hop in hops:
                one, next_one = hop, (hop + 1) % pp
                for channel in (("F", one), ("B", next_one)):
                    ends = [pipeline[one], pipeline[next_one]]
                    group = dist.new_group(ends)
                    if dist.get_rank() in ends:
                        found[channel] = group
                        self._touch(group, sender=pipeline[channel[1]])
        return found

    def _touch(self, group: dist.ProcessGroup, sender: int) -> None:
        """Pass one number from one end of a channel to the other."""
        number = torch.zeros(1, device="cpu" if dist.get_backend(group) == "gloo" else self.device_type)
        point_to_point(dist.isend if dist.get_rank() == sender else dist.irecv, number, group).wait()


def point_to_point(operation: Callable[..., Any], tensor: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Launch `dist.isend` to, or `dist.irecv` from, the other rank of a group of two.

    As a batch of one: NCCL then uses the group's own communicator and does not make a second one with a warning.
    """
    other = 1 - dist.get_rank(group)
    return dist.batch_isend_irecv([dist.P2POp(operation, tensor, group=group, group_peer=other)])[0]


_Known = dict[tuple[tuple[int, ...], ...], dist.ProcessGroup | None]
"""This rank's group, by the ranks that it and its like on other ranks join."""


def _stored_on(grid: Tensor, stage: int, device_type: str, known: _Known, inner: Axis) -> tuple[DeviceMesh, Axis]:
    """`grid` [pp, replicate, shard, inner] of ranks -> the mesh that shards are spread over, and `inner` with its own.

    Both are parts of one mesh, as FSDP wants it. Axes of one rank are left out of it, but for the shards'.
    """
    groups = {"replicate": _group(grid, 1, known) if grid.shape[1] > 1 else None}
    groups |= {"shard": _group(grid, 2, known), "inner": inner.group}
    kept = {name: group for name, group in groups.items() if group is not None}
    sizes = dict(zip(groups, grid.shape[1:], strict=True))
    mesh = DeviceMesh.from_group(
        list(kept.values()),
        device_type,
        mesh=grid[stage].reshape([sizes[name] for name in kept]),
        mesh_dim_names=tuple(kept),
    )
    shards = mesh["replicate", "shard"] if "replicate" in kept else mesh["shard"]
    return shards, replace(inner, mesh=mesh["inner"]) if "inner" in kept else inner


def high_priority_options() -> Any:
    """Options of a group whose kernels begin before others that wait for the GPU; None where it speaks not by NCCL.

    What hides behind compute must begin in its midst, and not when a product that takes a millisecond has ended.
    """
    if dist.get_backend() != "nccl":
        return None
    return dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)


def _axis(grid: Tensor, dimension: int, known: _Known, options: Any = None) -> Axis:
    """This rank's place along one dimension of a grid of ranks. Alone where the grid does not hold it."""
    if grid.shape[dimension] == 1:
        return SINGLE_RANK
    group = _group(grid, dimension, known, options)
    return SINGLE_RANK if group is None else Axis(grid.shape[dimension], dist.get_rank(group), group)


def _group(grid: Tensor, dimension: int, known: _Known, options: Any = None) -> dist.ProcessGroup | None:
    """The group that joins this rank to those beside it; None where the grid does not hold it.

    Every rank asks for the same, in the same order.
    """
    rows = grid.movedim(dimension, -1).flatten(0, -2).tolist()
    key = tuple(map(tuple, rows))
    if key not in known:
        known[key] = _join(rows, options)
    return known[key]


def _join(rows: list[list[int]], options: Any) -> dist.ProcessGroup | None:
    rank = dist.get_rank()
    if len(rows[0]) == 1:
        alone: dist.ProcessGroup = dist.new_group([rank], use_local_synchronization=True)
        return alone
    own: dist.ProcessGroup | None = None
    for row in rows:
        group = dist.new_group(row, pg_options=options)
        if rank in row:
            own = group
    return own
