"""Connects to a Ray cluster, or starts a local one, and checks that it has the resources of a run."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from postlude.world.signals import SIGNALS

LOCAL = "local"
INSTALL = "pip install 'postlude[ray]'"
HIDDEN_LOG = "A worker died or was killed while executing"  # the beginning of a long message that we replace by a line
MAX_TEMP_PATH = 40  # characters of the temporary folder with which Ray's socket paths are short enough


def check_ray() -> None:
    if importlib.util.find_spec("ray") is None:
        raise ImportError(f"--ray needs Ray, which is not installed. Install it: {INSTALL}")


@dataclass(frozen=True)
class ResourceNeeds:
    """The resources of a run: ranks, reward workers and servers."""

    ranks: int
    cpus: float
    """CPUs of a rank."""
    gpus: float
    """GPUs of a rank: 0, 1, or a share of one above a half."""
    other_cpus: float = 0.0
    """CPUs of all workers and servers together."""
    servers: int = 0
    server_gpus: float = 0.0
    """GPUs of a server: a whole number, or a share of one."""

    def __str__(self) -> str:
        resources = f"{self.cpus:g} CPU(s)" + (f" and {self.gpus:g} GPU(s)" if self.gpus else "")
        return f"{self.ranks} rank(s) of {resources}"


@contextmanager
def connected_to_ray(address: str, needs: ResourceNeeds) -> Iterator[None]:
    """Connects this process to Ray inside the block. A local cluster has CPUs for all needs.

    A process that is connected already keeps its connection.
    """
    check_ray()
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", HIDDEN_LOG)
    import ray

    if ray.is_initialized():
        yield
        return
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    if address == LOCAL:
        cpus = max(os.cpu_count() or 1, int(needs.ranks * needs.cpus + needs.other_cpus + 0.99))
        short = None if len(tempfile.gettempdir()) <= MAX_TEMP_PATH else "/tmp"
        with tempfile.TemporaryDirectory(prefix="ray-", dir=short, ignore_cleanup_errors=True) as folder:
            # Ray's processes stay in this process group, whose signals must not end them before the ranks have saved.
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
            try:
                ray.init(LOCAL, num_cpus=cpus, include_dashboard=False, _temp_dir=folder, **quiet)
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            try:
                yield
            finally:
                ray.shutdown()
        return
    if address.startswith("ray://"):
        raise ValueError(f"--ray {address} is Ray's client, which cannot watch ranks. Use `ray job submit`.")
    try:
        ray.init(address, **quiet)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConnectionError(
            f"no Ray cluster was found at {address!r}: {' '.join(str(error).split()).rstrip('.')}. Start one with "
            "`ray start --head`, or leave the address out for a local one. A cluster that wants a token, as Ray's do "
            "by default, wants RAY_AUTH_MODE=token here."
        ) from error
    try:
        yield
    finally:
        ray.shutdown()


def leave_process_group() -> None:
    """Takes an actor out of the driver's process group, and no longer blocks the signals that local Ray blocks."""
    with suppress(PermissionError):  # it leads a session
        os.setpgrp()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def check_capacity(needs: ResourceNeeds) -> None:
    """Raises a ValueError if the cluster is too small, even with no other load."""
    if sentence := missing_capacity(needs):
        raise ValueError(sentence)


def missing_capacity(needs: ResourceNeeds) -> str:
    """Returns a sentence about what the cluster lacks, even with no other load; empty if it lacks nothing."""
    import ray

    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    room = sum(_ranks_on(node, needs) for node in nodes)
    total = {name: sum(node.get(name, 0.0) for node in nodes) for name in ("CPU", "GPU")}
    if room < needs.ranks:
        return (
            f"{needs} are needed, but the cluster has room for {room}: {total['CPU']:g} CPU(s) and {total['GPU']:g} "
            f"GPU(s) on {len(nodes)} node(s). Add nodes, lower the layout or cluster.cpus_per_rank"
            + (", or use --device cpu." if needs.gpus else ".")
        )
    if needs.server_gpus and _servers_on(int(total["GPU"]), needs) < needs.servers:
        return (
            f"{needs} and {needs.servers} server(s) of {needs.server_gpus:g} GPU(s) are needed, but the cluster has "
            f"{total['GPU']:g} GPU(s) on {len(nodes)} node(s). Add nodes, or lower the layout, rollout.count or "
            "rollout.gpus."
        )
    return ""


def _ranks_on(node: dict[str, float], needs: ResourceNeeds) -> int:
    """Returns how many ranks a node has room for. No two share a GPU."""
    by_cpu = node.get("CPU", 0.0) // needs.cpus
    return int(min(by_cpu, node.get("GPU", 0.0)) if needs.gpus else by_cpu)


def _servers_on(gpus: int, needs: ResourceNeeds) -> int:
    """Returns how many servers have room besides the ranks. A share is of one GPU: two rests make no whole."""
    used = needs.ranks if needs.gpus else 0
    if needs.server_gpus >= 1:
        return int((gpus - used) // needs.server_gpus)
    per_shared_gpu, per_free_gpu = (int(share / needs.server_gpus + 1e-6) for share in (1.0 - needs.gpus, 1.0))
    return used * per_shared_gpu + (gpus - used) * per_free_gpu


def death_reason(error: BaseException) -> str:
    """Returns Ray's reason for the end of an actor, without its advice."""
    text = str(error)
    if "is unavailable" in text:
        return "its node does not reply any more."
    match = re.search(r"because (.*?)(?:\. |\.?\n|\.?$)", text)
    return f"{match[1] if match else text.splitlines()[0].rstrip('.')}."
