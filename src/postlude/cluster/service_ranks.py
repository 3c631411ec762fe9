"""run_service_on_ray: one function on ranks that are Ray actors, until all return: ranks that serve, not a recipe."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

from postlude.cluster.driver import DriverSignals, start_relay
from postlude.cluster.forwarded_view import DriverDisplay
from postlude.cluster.rank_actors import RankActors, failure_of
from postlude.cluster.ray_cluster import LOCAL, ResourceNeeds, connected_to_ray
from postlude.world.devices import default_device


def node_address() -> str:
    """Returns the address of this machine for the nodes of the cluster."""
    from ray.util import get_node_ip_address

    return str(get_node_ip_address())


def run_service_on_ray(
    function: Callable[..., Any], *args: Any, address: str, ranks: int, timeout: float, device: str | None
) -> None:
    """Runs function(*args) on ranks of a cluster, and prints their output. Raises the error of the first that fails.

    It waits `timeout` seconds for resources: a GPU for each rank on "cuda", and a CPU. A signal is forwarded to the
    ranks. When one is lost, the others are ended.
    """
    device = device or default_device()
    cpus = max(1, (os.cpu_count() or 1) // ranks) if address == LOCAL and device == "cpu" else 1
    needs = ResourceNeeds(ranks, cpus, 1.0 if device == "cuda" else 0.0)
    with connected_to_ray(address, needs), DriverSignals() as signals:
        import ray

        actors = RankActors(needs, signals.check_before_start, timeout, wait_for_nodes=address != LOCAL)
        relay, display, forwarded = start_relay(ranks), DriverDisplay(), False
        try:
            options = {"nproc": ranks, "timeout": timeout, "device": device}
            actors.start(partial(function, *args), relay, options)
            while not actors.poll():
                display.show(ray.get(relay.take.remote(0.2)))
                signals.check()
                if signals.first and not forwarded:
                    forwarded = True
                    relay.send_signal.remote(signals.first)
            display.show(ray.get(relay.take.remote(0.0)))
        finally:
            actors.stop()
            ray.kill(relay)
        if actors.failed:
            raise failure_of(actors.results, ranks).error
