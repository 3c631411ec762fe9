"""A node that is killed: what was there is done elsewhere. The nodes are processes of this machine."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from postlude.cluster.actor_pool import ActorPool
from postlude.cluster.server_actors import RayLauncher
from postlude.generate.protocol import Request
from postlude.pool.open_pool import open_pool
from postlude.pool.worker_pool import CallResult
from postlude.serving.clients.remote_server import Weights
from postlude.serving.launch.supervisor import ServerSupervisor, SupervisedClient
from tests.cluster.conftest import QUIET
from tests.cluster.test_actor_pool import FAKE, answered, busy
from tests.cluster.test_rank_actors import grpo
from tests.recipes.test_killed import logged_files, place
from tests.rollout import functions
from tests.serving.test_server_pool import PROMPTS, THREE, check
from tests.serving.test_supervisor import QUICK, until

pytestmark = [pytest.mark.slow, pytest.mark.thorough]
__all__ = ["place"]  # a fixture


@pytest.fixture
def two_nodes() -> Iterator[Any]:
    """A cluster of two nodes of two CPUs; `other` is the one that this process is not on."""
    with nodes(2, 2) as cluster:
        yield cluster


@contextmanager
def nodes(*cpus: int) -> Iterator[Any]:
    """A cluster of nodes of so many CPUs; `other` is the last. This process is on the first."""
    ray = pytest.importorskip("ray", reason="needs ray: pip install 'postlude[ray]'")
    from ray.cluster_utils import Cluster

    with (
        tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as place,
        patch.dict(os.environ, RAY_TMPDIR=place),
    ):
        Path(place, "ray").mkdir()  # where the cluster's address is left, for others to find
        first, *later_nodes = ({"num_cpus": count, "temp_dir": place} for count in cpus)
        cluster = Cluster(initialize_head=True, head_node_args=first | {"include_dashboard": False})
        for node in later_nodes:
            cluster.other = cluster.add_node(**node)
        ray.init(cluster.address, **{name: QUIET[name] for name in ("log_to_driver", "logging_level")})
        try:
            yield cluster
        finally:
            ray.shutdown()
            cluster.shutdown()


def test_a_lost_node_costs_its_own_calls_alone(two_nodes: Any) -> None:
    with closing(open_pool(functions.slow_length, count=4, timeout=30.0, pool_factory=ActorPool)) as workers:
        call_ids = [workers.submit(("", "x" * size, {})) for size in range(60)]
        busy(workers, 4)
        two_nodes.remove_node(two_nodes.other, allow_graceful=False)
        results: dict[int, CallResult] = {}
        while len(results) < len(call_ids):
            results |= workers.poll(None)
        assert [results[call_id].value for call_id in call_ids] == list(range(60))
        assert workers.lost == 2, "half of them were there"


def one_with(cluster: Any, actor: bytes) -> Any:
    """A node, and not the one that this process is on, with such an actor."""

    def has(node: Any) -> bool:
        raylet = node.all_processes["raylet"][0].process.pid
        workers = Path(f"/proc/{raylet}/task/{raylet}/children").read_text().split()
        return any(actor in Path(f"/proc/{worker}/cmdline").read_bytes() for worker in workers)

    return next(filter(has, cluster.worker_nodes))


def test_a_server_on_a_lost_node_is_started_on_another(tmp_path: Path) -> None:
    with (
        nodes(1, 1, 1) as cluster,
        closing(SupervisedClient(ServerSupervisor(FAKE, 2, RayLauncher(tmp_path)), **QUICK)) as engine,
    ):
        engine.connect()
        engine.reload(Weights("/weights/1", "start.1"))
        request_ids = {engine.submit(Request(tuple(prompt), THREE)) for prompt in PROMPTS}
        cluster.remove_node(one_with(cluster, b"ServerActor"), allow_graceful=False)
        answered(engine, request_ids)
        until(lambda: engine.supervisor.restarted and engine.pool.count_up() == 2, 120.0)
        check(engine)


def test_ranks_that_lose_a_node_restart_on_another(place: Path, caplog: pytest.LogCaptureFixture) -> None:
    words = ("--steps=16", "--layout=dp_shard=2", "--timeout=120")
    assert grpo(place, "whole", *words) == 0
    with nodes(0, 1, 1, 1) as cluster:

        def lose() -> None:
            until(lambda: len(logged_files(place / "parts")["metrics"]) >= 6, 100.0)
            cluster.remove_node(one_with(cluster, b"RankActor"), allow_graceful=False)

        thread = threading.Thread(target=lose)
        thread.start()
        assert grpo(place, "parts", "--ray", "--cluster.cpus_per_rank=1", "--cluster.cpus_per_worker=0", *words) == 0
        thread.join()
    logged = logged_files(place / "parts")
    for row in logged["metrics"]:
        row.pop("workers/lost", None)
    assert logged == logged_files(place / "whole")
    assert caplog.text.count("All ranks start again from step-") == 1
