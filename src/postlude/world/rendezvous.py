"""The stores through which ranks find each other, and the addresses that they listen on.

On one machine everything listens on loopback, and the group is formed through a file that only the user can read.
Across machines the store listens on MASTER_ADDR alone. Postlude unpickles nothing that it reads from a store.
"""

from __future__ import annotations

import errno
import os
import socket
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import FileStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from postlude.world.failure_report import RankError, agent_hosts_store
from postlude.world.ports import is_loopback

GROUP_FILE = "POSTLUDE_GROUP_FILE"
"""The variable with the file through which the ranks that `launch` started form their group."""
BACKLOG = 4096  # connections that wait to be accepted


@dataclass(frozen=True)
class RendezvousStores:
    """The stores of one rank: for failure reports, for its listener, to form the group, and to assign devices."""

    reports: Store
    listener: Store
    group: Store
    devices: Store
    hosted: bool
    """Whether this rank hosts the store of the others."""

    @classmethod
    def connect(cls, rank: int, size: int, timeout: float) -> RendezvousStores:
        """Connects to MASTER_ADDR and MASTER_PORT, where rank 0 hosts the store unless the launcher does."""
        hosted = rank == 0 and not agent_hosts_store()
        base = _connect(rank, size, timeout, hosted)
        # The launcher's store outlives its ranks. One of rank 0 is as new as they are, and a node that was replaced has
        # another count of restarts than the others.
        restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if agent_hosts_store() else "0"
        prefix = f"postlude/{restarts}/{base.add(f'postlude/{restarts}/uses/{rank}', 1)}"  # the same on every rank
        group = FileStore(os.environ[GROUP_FILE], size) if GROUP_FILE in os.environ else base
        return cls(
            PrefixStore(f"{prefix}/reports", base),
            PrefixStore(f"{prefix}/reports", _connect(rank, size, timeout, False)),
            PrefixStore(f"{prefix}/group", group),
            PrefixStore(f"{prefix}/devices", base),
            hosted,
        )


def loopback_variables(size: int) -> dict[str, str]:
    """Returns environment variables with which gloo and NCCL listen on loopback, if all ranks are on this machine.

    An interface that the user chose stays.
    """
    name = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    one_machine = os.environ.get("LOCAL_WORLD_SIZE") == str(size) or is_loopback(os.environ["MASTER_ADDR"])
    if not one_machine or name is None:
        return {}
    variables = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    return {variable: name for variable in variables if variable not in os.environ}


def host_store(address: str, port: int, timeout: float) -> TCPStore:
    """Returns a new store, or this process's own of that port, that listens on one address of this machine.

    It listens on all addresses only where `address` is none of this machine's own, as that of a forwarding proxy.
    """
    listening = _listening_socket(address, port)
    return TCPStore(
        address,
        port if listening is None else listening.getsockname()[1],
        None,
        True,
        timedelta(seconds=timeout),
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=None if listening is None else listening.detach(),
    )


def _listening_socket(address: str, port: int) -> socket.socket | None:
    """Returns a socket that listens on `address`.

    None where that is not possible, and the store may listen elsewhere: the address is not of this machine, is a
    loopback alias of a name that other machines resolve to another address, or has this process's own store already.
    """
    family, _, _, _, resolved = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    if is_loopback(address) and not is_one_name_of_loopback(address):
        return None
    listening = socket.socket(family)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind(resolved)
        listening.listen(BACKLOG)
    except OSError as error:
        listening.close()
        if error.errno in (errno.EADDRNOTAVAIL, errno.EADDRINUSE):
            return None
        raise
    return listening


def is_one_name_of_loopback(address: str) -> bool:
    """Returns whether an address means loopback on every machine: 127.*, ::1 or localhost.

    Some systems resolve a machine's own name to 127.0.1.1, while other machines resolve it to its address.
    """
    return address == "localhost" or address[:1].isdigit() or ":" in address


def _connect(rank: int, size: int, timeout: float, host: bool) -> TCPStore:
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if host:
        return host_store(address, port, timeout)
    try:
        return TCPStore(address, port, None, False, timedelta(seconds=timeout), wait_for_workers=False)
    except dist.DistError as error:
        raise RankError(
            f"rank {rank} of {size} found no store at {address}:{port} within {timeout:g} s: rank 0, or the launcher, "
            "was not started or is gone."
        ) from error
