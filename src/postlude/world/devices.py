"""Assigns a device to each rank.

Ranks exchange which GPUs each of them sees, and each gets a free one. GPUs are compared by UUID, so a process may see
all GPUs of its machine (torchrun) or only one that it calls `cuda:0` (Ray, `--gpus-per-task=1`).
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
    return "cuda" if torch.cuda.is_available() else "cpu"


def check_device(device: torch.device | str | None) -> None:
    """Raises ValueError if this machine does not have the device. None is any."""
    if torch.version.hip and torch.cuda.is_available() and str(device) != "cpu":
        raise ValueError("this torch is built for AMD GPUs, on which Postlude was never run; use device cpu.")
    if device is None:
        return
    try:
        kind, count = torch.device(device), torch.cuda.device_count()
    except RuntimeError as error:
        raise ValueError(f"device {str(device)!r} is unknown to torch; use cpu, cuda or cuda:0.") from error
    if kind.type == "cuda" and (kind.index or 0) >= count:
        built = "" if torch.backends.cuda.is_built() else ", and this build of torch is for the CPU alone"
        raise ValueError(f"device {str(device)!r} was requested, but torch sees {count} GPUs here{built}; use cpu.")


def check_initialized() -> None:
    if not dist.is_initialized():
        raise RuntimeError(
            "torch.distributed is not initialised, and an engine needs it: make the engine inside "
            "`with postlude.ranks():`, in a single process or under torchrun, or in a function given to "
            "`postlude.launch`."
        )


def group_device() -> torch.device:
    """Returns the device of this rank: the one bound to its process group, as `ranks` binds it.

    If none is bound, the current GPU for a group over NCCL, and the CPU otherwise.
    """
    bound: torch.device | None = getattr(dist.group.WORLD, "bound_device_id", None)
    if bound is not None:
        return bound
    if "nccl" in dist.get_backend_config():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


@dataclass(frozen=True)
class VisibleDevices:
    """A rank's machine, the UUIDs of the GPUs it sees, and the one it prefers. Ranks exchange them."""

    host: str
    gpus: tuple[str, ...]
    preferred: int | None = None
    """The index of a GPU among those it sees; None chooses by the rank's number on its machine."""
    fixed: bool = False
    """Whether it takes no other."""

    @classmethod
    def of_this_process(cls, device: torch.device | None) -> VisibleDevices:
        uuids = tuple(str(torch.cuda.get_device_properties(index).uuid) for index in range(torch.cuda.device_count()))
        local = os.environ.get("LOCAL_RANK")
        if device is not None and device.index is not None:
            return cls(socket.gethostname(), uuids, device.index, fixed=True)
        return cls(socket.gethostname(), uuids, None if local is None else int(local))


@dataclass(frozen=True)
class DeviceAssignment:
    """The device of a rank, or `refusal`, a message why these ranks cannot work together."""

    gpu: int | None = None
    """The index of its GPU among those it sees; None is the CPU."""
    shared: str = ""
    """The ranks that share a GPU, if there are any; the same on every rank."""
    one_machine: bool = True
    """Whether all ranks run on one machine."""
    refusal: str = ""

    @property
    def device(self) -> torch.device:
        return torch.device("cpu") if self.gpu is None else torch.device("cuda", self.gpu)

    @property
    def backend(self) -> str:
        """The default backend of these ranks: NCCL supports one rank per GPU."""
        return "gloo" if self.gpu is None or self.shared else "nccl"

    def warning(self, backend: str) -> str:
        """Returns a warning about ranks that share a GPU with this backend; empty if none do."""
        if not self.shared:
            return ""
        if backend == "nccl":
            return (
                f"{self.shared}: NCCL treats each rank as a machine of its own and connects them through sockets, "
                "which is slow and meant for tests; start one rank a GPU to train."
            )
        return (
            f"{self.shared}, so all ranks communicate through gloo, by way of host memory; start one rank a GPU to use "
            "NCCL."
        )

    def nccl_variables(self, rank: int) -> dict[str, str]:
        """Returns environment variables that let NCCL accept ranks that share a GPU of one host."""
        if not self.shared:
            return {}
        loopback = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"} if self.one_machine else {}
        chosen = {name: os.environ.get(name, value) for name, value in loopback.items()}
        return {"NCCL_HOSTID": f"postlude-rank-{rank}", **chosen}


def assign_devices(ranks: Sequence[VisibleDevices]) -> list[DeviceAssignment]:
    """Returns a device for each rank: a GPU that no rank before it has, as long as there is one."""
    without_gpu = [number for number, visible in enumerate(ranks) if not visible.gpus]
    if len(without_gpu) == len(ranks):
        return [DeviceAssignment()] * len(ranks)
    if without_gpu:
        with_gpu = next(number for number, visible in enumerate(ranks) if visible.gpus)
        refusal = (
            f"rank {list_ranks(without_gpu, 4)} of {len(ranks)} sees no GPU, but rank {with_gpu} does; give every rank "
            "one, or start all of them on the CPU (device cpu)."
        )
        return [DeviceAssignment(refusal=refusal)] * len(ranks)
    ranks_of_host: dict[str, int] = {}
    takers: dict[str, list[int]] = {}
    chosen = []
    for number, visible in enumerate(ranks):
        local = ranks_of_host.get(visible.host, 0) if visible.preferred is None else visible.preferred
        ranks_of_host[visible.host] = ranks_of_host.get(visible.host, 0) + 1
        preferred = local % len(visible.gpus)
        order = [preferred] if visible.fixed else [preferred, *range(len(visible.gpus))]
        gpu = next((index for index in order if visible.gpus[index] not in takers), preferred)
        takers.setdefault(visible.gpus[gpu], []).append(number)
        chosen.append(gpu)
    sharing = [numbers for numbers in takers.values() if len(numbers) > 1]
    shared = f"ranks {list_ranks(sharing[0], 4)} of {len(ranks)} share a GPU" if sharing else ""
    one_machine = len({visible.host for visible in ranks}) == 1
    return [DeviceAssignment(gpu, shared, one_machine) for gpu in chosen]


def agree_on_device(store: Store, rank: int, size: int, visible: VisibleDevices) -> DeviceAssignment:
    """Returns this rank's device. Every rank writes what it sees, and rank 0 assigns."""
    store.set(f"visible/{rank}", json.dumps(asdict(visible)))
    if rank == 0:
        entries = [json.loads(text) for text in store.multi_get([f"visible/{other}" for other in range(size)])]
        everyone = [VisibleDevices(**{**entry, "gpus": tuple(entry["gpus"])}) for entry in entries]
        for other, assignment in enumerate(assign_devices(everyone)):
            store.set(f"assignment/{other}", json.dumps(asdict(assignment)))
    return DeviceAssignment(**json.loads(store.get(f"assignment/{rank}")))


def list_ranks(ranks: Sequence[int], limit: int = 8) -> str:
    return ", ".join(map(str, ranks[:limit])) + (f" and {len(ranks) - limit} more" if len(ranks) > limit else "")
