"""The parallel layout: how many ways the work is divided along each axis, as one value that is passed down.

`Layout` is the numbers, `Mesh` the running ranks they are laid over, `Axis` one rank's place along one of them.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


@dataclass(frozen=True)
class Stage:
    """One contiguous part of the model: number `index` of `count`, counted from the embedding to the head."""

    index: int = 0
    count: int = 1

    def __post_init__(self) -> None:
        if self.count < 1 or not 0 <= self.index < self.count:
            raise ValueError(f"stage {self.index} of {self.count} does not exist; stages count from 0 to count - 1.")

    @property
    def first(self) -> bool:
        """Whether this stage embeds the tokens."""
        return self.index == 0

    @property
    def last(self) -> bool:
        """Whether this stage holds the final norm and the output head."""
        return self.index == self.count - 1


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Degrees of parallelism. One rank is the layout of ones, on the same code path as any other.

    `pp` pipeline ranks, each holding `vpp` stages; `dp_replicate` · `dp_shard` data-parallel ranks; `cp` ranks share
    every sequence; `tp` ranks share every matrix. Experts are spread over `ep` ranks *within* a pipeline stage:
    `ep` divides dp_shard · cp · tp and adds no ranks of its own.
    """

    pp: int = 1
    """Pipeline ranks."""
    vpp: int = 1
    """Stages a pipeline rank holds."""
    dp_replicate: int = 1
    """Data-parallel replicas."""
    dp_shard: int = 1
    """Data-parallel ranks that shard the parameters."""
    cp: int = 1
    """Ranks that share every sequence."""
    tp: int = 1
    """Ranks that share every matrix."""
    ep: int = 1
    """Ranks that share the experts, among those there are."""

    def __post_init__(self) -> None:
        for axis in fields(self):
            degree = getattr(self, axis.name)
            if not isinstance(degree, int) or isinstance(degree, bool) or degree < 1:
                raise ValueError(f"Layout({axis.name}={degree!r}): a degree is a whole number of at least 1.")
        if self.vpp > 1 and self.pp == 1:
            raise ValueError(
                f"Layout(pp=1, vpp={self.vpp}): virtual stages interleave pipeline ranks, so they need pp of at least "
                "2. Use vpp=1, or raise pp."
            )
        if (self.dp_shard * self.cp * self.tp) % self.ep:
            raise ValueError(
                f"{self}: ep={self.ep} does not divide dp_shard·cp·tp = {self.dp_shard}·{self.cp}·{self.tp} = "
                f"{self.dp_shard * self.cp * self.tp}. Experts are folded into these ranks; use an ep that divides it."
            )

    @classmethod
    def parse(cls, text: str) -> Layout:
        """Read a layout as it is written on the command line: `"pp=2,cp=2"`. The empty string is one rank."""
        names = [axis.name for axis in fields(cls)]
        degrees: dict[str, int] = {}
        for part in filter(None, (part.strip() for part in text.split(","))):
            name, equals, degree = (piece.strip() for piece in part.partition("="))
            if name not in names:
                near = difflib.get_close_matches(name, names, 1)
                hint = f"did you mean {near[0]!r}?" if near else f"the axes are {', '.join(names)}."
                raise ValueError(f"layout {text!r}: {name!r} is no axis; {hint}")
            if not equals or not (degree.isascii() and degree.isdigit()):
                raise ValueError(f"layout {text!r}: {part!r} is not of the form {name}=N with N a whole number.")
            if name in degrees:
                raise ValueError(f"layout {text!r}: {name!r} is given twice.")
            degrees[name] = int(degree)
        return cls(**degrees)

    @property
    def world_size(self) -> int:
        """Ranks this layout runs on."""
        return self.pp * self.dp_replicate * self.dp_shard * self.cp * self.tp

    @property
    def dp(self) -> int:
        """Data-parallel ranks, replicated and sharded: each of them gets microbatches of its own."""
        return self.dp_replicate * self.dp_shard

    @property
    def stages(self) -> int:
        """Pipeline stages, virtual ones included."""
        return self.pp * self.vpp

    def __str__(self) -> str:
        degrees = ", ".join(
            f"{axis.name}={getattr(self, axis.name)}" for axis in fields(self) if getattr(self, axis.name) > 1
        )
        return f"Layout({degrees})"


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


ALONE = Axis()
Channel = tuple[str, int]


class Mesh:
    """A layout laid over the running ranks: this rank's place along every axis, and the meshes its parameters live on.

    Ranks are ordered pp, dp_replicate, dp_shard, cp, tp, the last one fastest. Experts see the same ranks in another
    grid: inside a pipeline stage and a replica, dp_shard · cp · tp is cut anew into `ep`, fastest, and the rest.

    `Mesh.alone()` is one rank without a process group, on the same code path.
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
        self.pp = self.dp = self.cp = self.tp = self.ep = self.ends = ALONE
        self.shards: DeviceMesh | None = None
        self.expert_shards: DeviceMesh | None = None
        self.channels: Mapping[Channel, dist.ProcessGroup] = {}
        if not dist.is_initialized():
            return
        pp, replicate, shard, cp, tp, ep = (
            getattr(layout, name) for name in ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")
        )
        dense = init_device_mesh(
            device_type, (pp, replicate, shard * cp, tp), mesh_dim_names=("pp", "replicate", "shard", "tp")
        )
        batches = init_device_mesh(
            device_type, (pp, replicate * shard, cp, tp), mesh_dim_names=("pp", "dp", "cp", "tp")
        )
        experts = init_device_mesh(
            device_type,
            (pp, replicate, shard * cp * tp // ep, ep),
            mesh_dim_names=("pp", "replicate", "shard", "ep"),
        )
        self.pp, self.tp, self.ep = _axis(dense["pp"]), _axis(dense["tp"]), _axis(experts["ep"])
        self.dp, self.cp = _axis(batches["dp"]), _axis(batches["cp"])
        self.shards = dense["replicate", "shard"] if replicate > 1 else dense["shard"]
        self.expert_shards = experts["replicate", "shard"] if replicate > 1 else experts["shard"]
        self.ends, self.channels = self._ends(dense), self._channels(dense)

    @classmethod
    def alone(cls) -> Mesh:
        """One rank, whether or not this process belongs to a group."""
        mesh = cls.__new__(cls)
        mesh.layout, mesh.device_type = Layout(), "cpu"
        mesh.pp = mesh.dp = mesh.cp = mesh.tp = mesh.ep = mesh.ends = ALONE
        mesh.shards = mesh.expert_shards = None
        mesh.channels = {}
        return mesh

    def _channels(self, dense: DeviceMesh) -> Mapping[Channel, dist.ProcessGroup]:
        """A group for each way that activations ("F") go to the next rank of this pipeline and gradients ("B") back.

        Each is first in, first out by itself. Over one group they would have to be received in the order in which they
        were sent, which the two ends of a pipeline do not share.
        """
        pp, found = self.layout.pp, dict[Channel, dist.ProcessGroup]()
        if pp == 1:
            return found
        for pipeline in dense.mesh.flatten(1).T.tolist():
            for source in range(pp):
                for kind, destination in (("F", (source + 1) % pp), ("B", (source - 1) % pp)):
                    ends = [pipeline[source], pipeline[destination]]
                    group = dist.new_group(ends)
                    if dist.get_rank() in ends:
                        found[kind, source] = group
        return found

    def _ends(self, dense: DeviceMesh) -> Axis:
        """The first and the last rank of this pipeline, which share a tied embedding. Alone on any other rank."""
        if self.layout.pp == 1:
            return ALONE
        found = ALONE
        for first, last in zip(dense.mesh[0].flatten().tolist(), dense.mesh[-1].flatten().tolist(), strict=True):
            group = dist.new_group([first, last])
            if dist.get_rank() in (first, last):
                found = Axis(2, int(dist.get_rank() == last), group)
        return found


def _axis(mesh: DeviceMesh) -> Axis:
    if mesh.size() == 1:
        return ALONE
    return Axis(mesh.size(), mesh.get_local_rank(), mesh.get_group(), mesh)
