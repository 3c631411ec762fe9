"""Cluster resources of a run: fractional GPUs, and waiting for nodes to join. All tests but one use a fake cluster."""

import logging
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from postlude.cluster import rank_actors
from postlude.cluster.actor_pool import ActorPool
from postlude.cluster.driver import RayJob
from postlude.cluster.rank_actors import RankActors
from postlude.cluster.ray_cluster import LOCAL, ResourceNeeds, check_capacity, missing_capacity
from postlude.cluster.server_actors import RayLauncher
from postlude.pool.worker_pool import WorkerError
from postlude.recipes.config.load import ConfigError, load
from postlude.recipes.config.policy_configs import GRPOConfig
from postlude.recipes.registry import RECIPES
from postlude.recipes.run.start_mode import RESUME_NEWEST
from postlude.serving.errors import ServerError
from postlude.serving.launch import supervisor
from postlude.serving.launch.launcher import ServerCommand
from postlude.serving.launch.supervisor import ServerSupervisor
from tests.cluster.conftest import QUIET
from tests.serving.test_supervisor import server_command, wait_until


class FakeRay:
    """Fake of the parts of the ray module used here: nodes, and actors that are never scheduled."""

    exceptions = SimpleNamespace(RayError=RuntimeError)

    def __init__(self, *nodes: dict[str, float]) -> None:
        self.nodes_resources, self.requests, self.killed = list(nodes), list[dict[str, Any]](), list[Any]()

    def nodes(self) -> list[dict[str, Any]]:
        return [{"Alive": True, "Resources": resources} for resources in self.nodes_resources]

    def remote(self, kind: type) -> Any:
        return self

    def options(self, **requested: Any) -> Any:
        self.requests.append(requested)
        method = SimpleNamespace(remote=lambda *arguments: None)
        return SimpleNamespace(remote=lambda: SimpleNamespace(start=method, stop=method, wait=method))

    def wait(self, results: list[Any], timeout: float) -> tuple[list[Any], list[Any]]:
        return [], results

    def kill(self, actor: Any) -> None:
        self.killed.append(actor)


@pytest.fixture
def fake_ray(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    """Two nodes with four CPUs and two GPUs each."""
    ray = FakeRay({"CPU": 4.0, "GPU": 2.0}, {"CPU": 4.0, "GPU": 2.0})
    monkeypatch.setitem(sys.modules, "ray", ray)
    return ray


@pytest.mark.parametrize(
    ("ranks", "share", "servers", "gpus", "room"),
    [
        (4, 1.0, 0, 0.0, True),
        (5, 0.6, 0, 0.0, False),  # no two ranks on one GPU
        (4, 0.6, 4, 0.4, True),  # each beside a rank
        (4, 0.6, 5, 0.4, False),
        (4, 0.6, 8, 0.2, True),
        (4, 0.7, 1, 0.4, False),  # what is left of two GPUs is no share of one
        (2, 0.6, 6, 0.4, True),  # two beside ranks, and two on each of the others
        (2, 1.0, 2, 1.0, True),
        (2, 0.6, 3, 1.0, False),
        (1, 1.0, 1, 4.0, False),
    ],
)
def test_fractional_gpus_are_counted_per_gpu(
    fake_ray: FakeRay, ranks: int, share: float, servers: int, gpus: float, room: bool
) -> None:
    assert (missing_capacity(ResourceNeeds(ranks, 1.0, share, 0.0, servers, gpus)) == "") is room


def test_resource_needs_of_a_config(fake_ray: FakeRay, tmp_path: Path) -> None:
    def needs(*words: str) -> ResourceNeeds:
        config = load(GRPOConfig, None, [f"--run={tmp_path}", "--environment.workers=2", *words])
        return RayJob(RECIPES["grpo"], config, "cuda", RESUME_NEWEST, 2, 60.0).needs(LOCAL)

    shared = needs("--rollout=generators", "--rollout.count=2", "--rollout.gpus=0.4", "--cluster.gpus_per_rank=0.6")
    assert shared == ResourceNeeds(2, 1, 0.6, 4.0, 2, 0.4)
    assert str(shared) == "2 rank(s) of 1 CPU(s) and 0.6 GPU(s)"
    assert needs("--rollout=vllm") == ResourceNeeds(2, 1, 1.0, 3.0, 1, 1.0)
    assert needs("--rollout=vllm", "--cluster.cpus_per_worker=0.25") == ResourceNeeds(2, 1, 1.0, 1.5, 1, 1.0)
    for wrong, sentence in (
        ("--cluster.gpus_per_rank=0.5", "cluster.gpus_per_rank"),
        ("--rollout.gpus=1.5", "are not a whole number"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            needs("--rollout=vllm", wrong)


def test_server_that_no_node_can_host_times_out_with_clear_error(
    fake_ray: FakeRay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr(supervisor, "time", SimpleNamespace(monotonic=lambda: now, sleep=sleep))
    monkeypatch.setattr(supervisor, "WARN_SECONDS", 0.05)
    monkeypatch.setattr(supervisor, "POLL_SECONDS", 0.01)
    started = ServerSupervisor(
        ServerCommand(("serve",), cpus=2.0, gpus=0.4, start_timeout=0.2), 2, RayLauncher(tmp_path)
    )
    with caplog.at_level(logging.WARNING, "postlude"), pytest.raises(ServerError) as refused:
        started.start()
    assert str(refused.value) == (
        "a server that was to be started was not ready within 0.2 s: it found no node with 2 free CPU(s) and "
        "0.4 GPU(s). Add nodes, or lower rollout.count, cpus or gpus."
    )
    assert [(request["num_cpus"], request["num_gpus"]) for request in fake_ray.requests] == [(2.0, 0.4)] * 2, (
        "both at once"
    )
    assert "2 server(s) wait for a machine with 2 CPU(s) and 0.4 GPU(s) each." in caplog.text
    assert len(fake_ray.killed) >= 2


def test_ranks_wait_for_nodes_and_report_missing_resources(
    fake_ray: FakeRay, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = [0.0]

    def wait(seconds: float) -> None:
        clock[0] += 10.0

    monkeypatch.setattr(rank_actors, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(rank_actors, "FIRST_WARNING", 20.0)
    monkeypatch.setattr(rank_actors, "WARN_SECONDS", 50.0)
    needs = ResourceNeeds(3, 4.0, 0.0)
    full = SimpleNamespace(needs=needs, group=SimpleNamespace(wait=wait))
    lacks = "3 rank(s) of 4 CPU(s) are needed, but the cluster has room for 2: 8 CPU(s)"
    with pytest.raises(ValueError, match="has room for 2"):
        check_capacity(needs)
    with pytest.raises(ValueError, match="has room for 2"):
        RankActors._wait(full, lambda: None, 200.0)  # type: ignore[arg-type]
    assert clock[0] == 210.0
    error_lines = capsys.readouterr().err.splitlines()
    assert [line.split(":")[0] for line in error_lines] == [
        f"waiting for room, {left} s more at most (--timeout)" for left in (170, 110, 50)
    ]
    assert lacks in error_lines[0]

    def add_node(seconds: float) -> bool:
        fake_ray.nodes_resources.append({"CPU": 4.0})
        return len(fake_ray.nodes_resources) > 4

    RankActors._wait(SimpleNamespace(needs=needs, group=SimpleNamespace(wait=add_node)), lambda: None, 10.0)  # type: ignore[arg-type]


def test_workers_wait_for_resources_with_warning_then_error(caplog: pytest.LogCaptureFixture) -> None:
    with (
        closing(ActorPool(b"", "judge", 1, timeout=1.0, cpus=0.5, start_timeout=100.0)) as pool,
        caplog.at_level(logging.WARNING, "postlude"),
    ):
        pool._wait_seconds()
        pool.idle_since = time.monotonic() - 70
        assert 0 < (pool._wait_seconds() or 0) < 31, "then it is said, or given up"
        assert "no worker of judge has a node yet; each takes 0.5 CPU(s) of the cluster." in caplog.text
        pool.idle_since = time.monotonic() - 101
        with pytest.raises(WorkerError, match="no room for a worker of judge for 100 s; each takes"):
            pool._wait_seconds()


@pytest.mark.slow
@pytest.mark.thorough
def test_server_shares_gpu_with_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Uses a Ray instance that is configured with one GPU; no real GPU is needed."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    ray = pytest.importorskip("ray", reason="needs ray: pip install 'postlude[ray]'")
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as place:
        ray.init("local", num_cpus=4, num_gpus=1, _temp_dir=place, **QUIET)
        try:
            ranks = RankActors(ResourceNeeds(1, 1.0, 0.6), lambda: None, 300.0)
            nodes = RayLauncher(tmp_path)
            program = "import os, time; print(os.environ['CUDA_VISIBLE_DEVICES'], flush=True); time.sleep(900)"
            beside = nodes.start(server_command(program, gpus=0.4))
            wait_until(lambda: beside.exit_reason() is None and beside.url, 300.0)
            another = nodes.start(server_command(program, gpus=0.4))
            wait_until(lambda: (tmp_path / "0" / "0.log").read_text() == "0\n")
            time.sleep(1.0)
            assert (another.exit_reason(), another.url) == (None, ""), "no room for a third share"
            ranks.stop()
            wait_until(lambda: another.exit_reason() is None and another.url, 300.0)
            beside.stop()
            another.stop()
        finally:
            ray.shutdown()
