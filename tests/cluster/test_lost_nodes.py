"""Killed nodes: their work is redone on other nodes. The nodes are processes on this machine."""

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
from postlude.cluster.agent_actors import RayWorkers
from postlude.cluster.server_actors import RayLauncher
from postlude.generate.protocol import Request
from postlude.pool.process_pool import open_pool
from postlude.pool.worker_pool import CallResult
from postlude.serving.clients.server_weights import WeightsVersion
from postlude.serving.launch.supervisor import ServerSupervisor, SupervisedClient
from tests.cluster.conftest import QUIET
from tests.cluster.test_actor_pool import FAKE, await_completions, wait_for_running_workers
from tests.cluster.test_agent_actors import echo, function
from tests.cluster.test_rank_actors import run_grpo
from tests.recipes.test_killed import logged_files, place
from tests.rollout import functions
from tests.rollout.agent_runs import RecordingEngine, run_agents
from tests.serving.test_server_pool import PROMPTS, THREE, check
from tests.serving.test_supervisor import QUICK, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.thorough]
__all__ = ["place"]  # a fixture


@pytest.fixture
def two_nodes() -> Iterator[Any]:
    """A cluster of two nodes with two CPUs each; `other` is the node without this process."""
    with start_cluster(2, 2) as cluster:
        yield cluster


@contextmanager
def start_cluster(*cpus: int) -> Iterator[Any]:
    """Starts a cluster with one node per CPU count. This process is on the first node; `other` is the last."""
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


def test_killed_node_only_affects_its_own_calls(two_nodes: Any) -> None:
    with closing(open_pool(functions.slow_length, count=4, timeout=30.0, pool_factory=ActorPool)) as workers:
        call_ids = [workers.submit(("", "x" * size, {})) for size in range(60)]
        wait_for_running_workers(workers, 4)
        two_nodes.remove_node(two_nodes.other, allow_graceful=False)
        results: dict[int, CallResult] = {}
        while len(results) < len(call_ids):
            results |= workers.poll(None)
        assert [results[call_id].value for call_id in call_ids] == list(range(60))
        assert workers.lost == 2, "half of them were there"


def test_killed_node_costs_its_own_episodes(two_nodes: Any, tmp_path: Path) -> None:
    """The model is reached at the node's address, through loopback of the other one."""
    workers = RayWorkers(1.0, 200.0, single_machine=False)
    agent = workers.open_agent(function(tmp_path, "waits_for_order"), "agent", 2, 8)

    def kill_node() -> None:
        wait_until(lambda: len(list(tmp_path.glob("mark-*"))) == 8, 100.0)
        two_nodes.remove_node(two_nodes.other, allow_graceful=False)
        wait_until(lambda: bool(agent.lost_workers), 100.0)
        (tmp_path / "mark").write_text("")

    thread = threading.Thread(target=kill_node)
    thread.start()
    engine = RecordingEngine(echo)
    results = run_agents(agent, engine, groups=2, samples=4, seconds=200.0, limits={"seconds": 180.0})
    thread.join()
    lost = [trajectory for trajectory in results if trajectory.excluded]
    assert (len(lost), agent.lost_workers) == (4, 1), "half of them were there"
    assert all(
        "agent was lost with its worker" in str(trajectory.score and trajectory.score.error) for trajectory in lost
    )
    assert [trajectory.reward for trajectory in results if not trajectory.excluded] == [1.0] * 4


def node_with_actor(cluster: Any, actor: bytes) -> Any:
    """Returns a node other than this process's that runs such an actor."""

    def runs_actor(node: Any) -> bool:
        raylet = node.all_processes["raylet"][0].process.pid
        workers = Path(f"/proc/{raylet}/task/{raylet}/children").read_text().split()
        return any(actor in Path(f"/proc/{worker}/cmdline").read_bytes() for worker in workers)

    return next(filter(runs_actor, cluster.worker_nodes))


def test_server_on_killed_node_restarts_on_another_node(tmp_path: Path) -> None:
    with (
        start_cluster(1, 1, 1) as cluster,
        closing(SupervisedClient(ServerSupervisor(FAKE, 2, RayLauncher(tmp_path)), **QUICK)) as engine,
    ):
        engine.connect()
        engine.reload(WeightsVersion("/weights/1", "start.1"))
        request_ids = {engine.submit(Request(tuple(prompt), THREE)) for prompt in PROMPTS}
        cluster.remove_node(node_with_actor(cluster, b"ServerActor"), allow_graceful=False)
        await_completions(engine, request_ids)
        wait_until(lambda: engine.supervisor.restarted and engine.pool.count_up() == 2, 120.0)
        check(engine)


def test_ranks_on_killed_node_restart_on_another_node(place: Path, caplog: pytest.LogCaptureFixture) -> None:
    words = ("--steps=16", "--layout=dp_shard=2", "--timeout=120")
    assert run_grpo(place, "whole", *words) == 0
    with start_cluster(0, 1, 1, 1) as cluster:

        def kill_node() -> None:
            wait_until(lambda: len(logged_files(place / "parts")["metrics"]) >= 6, 100.0)
            cluster.remove_node(node_with_actor(cluster, b"RankActor"), allow_graceful=False)

        thread = threading.Thread(target=kill_node)
        thread.start()
        ray_words = ("--ray", "--cluster.cpus_per_rank=1", "--cluster.cpus_per_worker=0")
        assert run_grpo(place, "parts", *ray_words, *words) == 0
        thread.join()
    logged = logged_files(place / "parts")
    for row in logged["metrics"]:
        row.pop("workers/lost", None)
    assert logged == logged_files(place / "whole")
    assert caplog.text.count("All ranks start again from step-") == 1
