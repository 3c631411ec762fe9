"""Which device a rank computes on.

The device is the rank's, not the backend's: ranks tell one another which GPUs each of them sees, and each gets one that
is free. Only GPUs' own names (UUIDs) are compared, so it does not matter whether every process sees all GPUs of its
machine (torchrun) or one alone that it calls `cuda:0` (Ray, `--gpus-per-task=1`).
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]


def default_device() -> str:
    """The kind of device to compute on where nobody chose: "cuda" where there is a GPU, else "cpu"."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def check_device(device: torch.device | str | None) -> None:
    """Refuse a device that this machine does not have. None is whichever it has."""
    if device is None:
        return
    try:
        kind, count = torch.device(device), torch.cuda.device_count()
    except RuntimeError as error:
        raise ValueError(f"device {str(device)!r} is none that torch knows; use cpu, cuda or cuda:0.") from error
    if kind.type == "cuda" and (kind.index or 0) >= count:
        built = "" if torch.backends.cuda.is_built() else ", and this build of torch is for the CPU alone"
        raise ValueError(f"device {str(device)!r} was asked for, but torch sees {count} GPUs here{built}; use cpu.")


def group_device() -> torch.device:
    """The device of this rank, as the process group that it belongs to knows it.

    That is the one bound to the group, as `ranks` binds it; where none is, the current GPU if the group speaks through
    NCCL, which knows nothing else, and the CPU otherwise.
    """
    bound: torch.device | None = getattr(dist.group.WORLD, "bound_device_id", None)
    if bound is not None:
        return bound
    if "nccl" in dist.get_backend_config():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


@dataclass(frozen=True)
class VisibleDevices:
    """What a rank tells of itself: its machine, the GPUs it sees by their own names, and which it would rather have."""

    host: str
    gpus: tuple[str, ...]
    preferred: int | None = None
    """The number of a GPU among those it sees; None is by its place among the ranks of its machine."""
    fixed: bool = False
    """Whether it takes no other."""

    @classmethod
    def here(cls, device: torch.device | None) -> VisibleDevices:
        """As this process sees it, which was asked to use `device`, or a GPU if there is one."""
        names = tuple(str(torch.cuda.get_device_properties(index).uuid) for index in range(torch.cuda.device_count()))
        local = os.environ.get("LOCAL_RANK")
        if device is not None and device.index is not None:
            return cls(socket.gethostname(), names, device.index, fixed=True)
        return cls(socket.gethostname(), names, None if local is None else int(local))


@dataclass(frozen=True)
class DeviceAssignment:
    """Where a rank computes: the number of its GPU among those it sees (None is the CPU), and whether any are shared.

    `refusal` is a sentence instead: these ranks cannot work together.
    """

    gpu: int | None = None
    shared: str = ""
    """Where two ranks have one GPU, which they are, the same on every rank."""
    one_machine: bool = True
    """Whether all ranks run on one machine."""
    refusal: str = ""

    @property
    def device(self) -> torch.device:
        """As torch names it."""
        return torch.device("cpu") if self.gpu is None else torch.device("cuda", self.gpu)

    @property
    def backend(self) -> str:
        """How these ranks communicate unless a backend is chosen: NCCL is made for one rank a GPU."""
        return "gloo" if self.gpu is None or self.shared else "nccl"

    def warning(self, backend: str) -> str:
        """A sentence about ranks that share a GPU, and what that means with this backend; empty where none do."""
        if not self.shared:
            return ""
        if backend == "nccl":
            return (
                f"{self.shared}: NCCL treats each rank as a machine of its own and connects them through sockets, "
                "which is slow and meant for tests; start one rank a GPU to train."
            )
        return (
            f"{self.shared}, so all ranks speak through gloo, by way of host memory; start one rank a GPU to speak "
            "through NCCL."
        )

    def nccl_variables(self, rank: int) -> dict[str, str]:
        """Environment variables that let NCCL accept ranks that share a GPU: it refuses two on one GPU of one host."""
        if not self.shared:
            return {}
        loopback = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"} if self.one_machine else {}
        chosen = {name: os.environ.get(name, value) for name, value in loopback.items()}
        return {"NCCL_HOSTID": f"postlude-rank-{rank}", **chosen}


def assign_devices(seen: Sequence[VisibleDevices]) -> list[DeviceAssignment]:
    """A place for each rank, by what all of them see: a GPU that no rank before it has, as long as there is one."""
    without = [rank for rank, each in enumerate(seen) if not each.gpus]
    if len(without) == len(seen):
        return [DeviceAssignment()] * len(seen)
    if without:
        sighted = next(rank for rank, each in enumerate(seen) if each.gpus)
        refusal = (
            f"rank {_some(without)} of {len(seen)} sees no GPU, but rank {sighted} does; give every rank one, or start "
            "all of them on the CPU (device cpu)."
        )
        return [DeviceAssignment(refusal=refusal)] * len(seen)
    before: dict[str, int] = {}  # ranks of a machine so far
    takers: dict[str, list[int]] = {}
    chosen = []
    for rank, each in enumerate(seen):
        local = before.get(each.host, 0) if each.preferred is None else each.preferred
        before[each.host] = before.get(each.host, 0) + 1
        first = local % len(each.gpus)
        order = [first] if each.fixed else [first, *range(len(each.gpus))]
        gpu = next((index for index in order if each.gpus[index] not in takers), first)
        takers.setdefault(each.gpus[gpu], []).append(rank)
        chosen.append(gpu)
    shared = [ranks for ranks in takers.values() if len(ranks) > 1]
    sentence = f"ranks {_some(shared[0])} of {len(seen)} share a GPU" if shared else ""
    one_machine = len({each.host for each in seen}) == 1
    return [DeviceAssignment(gpu, sentence, one_machine) for gpu in chosen]


def agree_on_device(store: Store, rank: int, size: int, seen: VisibleDevices) -> DeviceAssignment:
    """This rank's place. Every rank says what it sees, the first decides, and each is told its own."""
    store.set(f"seen/{rank}", json.dumps(asdict(seen)))
    if rank == 0:
        told = [json.loads(text) for text in store.multi_get([f"seen/{other}" for other in range(size)])]
        for other, place in enumerate(
            assign_devices([VisibleDevices(**{**each, "gpus": tuple(each["gpus"])}) for each in told])
        ):
            store.set(f"place/{other}", json.dumps(asdict(place)))
    return DeviceAssignment(**json.loads(store.get(f"place/{rank}")))


def _some(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:4])) + (f" and {len(ranks) - 4} more" if len(ranks) > 4 else "")
