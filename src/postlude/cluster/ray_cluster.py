"""A Ray to run on: one that is started here and ends with the command, or a cluster that is there already."""

from __future__ import annotations

import importlib.util
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

LOCAL = "local"
INSTALL = "pip install 'postlude[ray]'"
SAID_ALREADY = "A worker died or was killed while executing"  # how Ray begins a paragraph about what we say in a line
LONGEST = 40  # characters of a temporary folder below which Ray's sockets still have names that the system allows


def check_ray() -> None:
    """Refuse to go on without Ray."""
    if importlib.util.find_spec("ray") is None:
        raise ImportError(f"--ray needs Ray, which is not installed. Install it: {INSTALL}")


@dataclass(frozen=True)
class ResourceNeeds:
    """What ranks, and those who work for them, take of a cluster."""

    ranks: int
    cpus: float
    """Of a rank."""
    gpus: float
    """Of a rank: 0, or 1, or a share of one that is more than a half."""
    other_cpus: float = 0.0
    """Of all workers and servers together."""
    servers: int = 0
    server_gpus: float = 0.0
    """Of a server: a whole number, or a share of one."""

    def __str__(self) -> str:
        each = f"{self.cpus:g} CPU(s)" + (f" and {self.gpus:g} GPU(s)" if self.gpus else "")
        return f"{self.ranks} rank(s) of {each}"


@contextmanager
def connected_to_ray(address: str, needs: ResourceNeeds) -> Iterator[None]:
    """Be the driver of a cluster for the length of the block. A local one has CPUs for all that is needed.

    A process that has joined one already stays with it.
    """
    check_ray()
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", SAID_ALREADY)
    import ray

    if ray.is_initialized():
        yield
        return
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    if address == LOCAL:
        cpus = max(os.cpu_count() or 1, int(needs.ranks * needs.cpus + needs.other_cpus + 0.99))
        short = None if len(tempfile.gettempdir()) <= LONGEST else "/tmp"
        with tempfile.TemporaryDirectory(prefix="ray-", dir=short, ignore_cleanup_errors=True) as place:
            ray.init(LOCAL, num_cpus=cpus, include_dashboard=False, _temp_dir=place, **quiet)
            try:
                yield
            finally:
                ray.shutdown()
        return
    if address.startswith("ray://"):
        raise ValueError(
            f"--ray {address} is Ray's client, behind which ranks cannot be watched. Use `ray job submit`."
        )
    try:
        ray.init(address, **quiet)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConnectionError(
            f"no Ray cluster was joined at {address!r}: {' '.join(str(error).split()).rstrip('.')}. Start one with "
            "`ray start --head`, or leave the address out for a local one. A cluster that wants a token, as Ray's do "
            "by default, wants RAY_AUTH_MODE=token here."
        ) from error
    try:
        yield
    finally:
        ray.shutdown()


def check_capacity(needs: ResourceNeeds) -> None:
    """Refuse what the cluster could not place even if nobody else used it."""
    if sentence := missing_capacity(needs):
        raise ValueError(sentence)


def missing_capacity(needs: ResourceNeeds) -> str:
    """What the cluster could not place even if nobody else used it, in a sentence with the mend; empty if it could."""
    import ray

    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    places = sum(_places(node, needs) for node in nodes)
    have = {name: sum(node.get(name, 0.0) for node in nodes) for name in ("CPU", "GPU")}
    if places < needs.ranks:
        return (
            f"{needs} are asked for, but the cluster has room for {places}: {have['CPU']:g} CPU(s) and {have['GPU']:g} "
            f"GPU(s) on {len(nodes)} node(s). Add nodes, lower the layout or cluster.cpus_per_rank"
            + (", or use --device cpu." if needs.gpus else ".")
        )
    if needs.server_gpus and _servers(int(have["GPU"]), needs) < needs.servers:
        return (
            f"{needs} and {needs.servers} server(s) of {needs.server_gpus:g} GPU(s) are asked for, but the cluster has "
            f"{have['GPU']:g} GPU(s) on {len(nodes)} node(s). Add nodes, or lower the layout, rollout.count or "
            "rollout.gpus."
        )
    return ""


def _places(node: dict[str, float], needs: ResourceNeeds) -> int:
    """How many ranks a node has room for. No two have the same GPU."""
    by_cpu = node.get("CPU", 0.0) // needs.cpus
    return int(min(by_cpu, node.get("GPU", 0.0)) if needs.gpus else by_cpu)


def _servers(gpus: int, needs: ResourceNeeds) -> int:
    """How many servers have room on GPUs besides the ranks. A share is of one GPU: what is left of two is no whole."""
    taken = needs.ranks if needs.gpus else 0
    if needs.server_gpus >= 1:
        return int((gpus - taken) // needs.server_gpus)
    left, whole = (int(share / needs.server_gpus + 1e-6) for share in (1.0 - needs.gpus, 1.0))
    return taken * left + (gpus - taken) * whole


def death_reason(error: BaseException) -> str:
    """Ray's reason for the end of an actor, without its advice."""
    text = str(error)
    if "is unavailable" in text:
        return "its node does not answer any more."
    found = re.search(r"because (.*?)(?:\. |\.?\n|\.?$)", text)
    return f"{found[1] if found else text.splitlines()[0].rstrip('.')}."
