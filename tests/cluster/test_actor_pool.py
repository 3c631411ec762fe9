"""Ray actors as workers and servers: same results as local processes; work of a lost actor is redone by another."""

import time
import urllib.request
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from postlude.cluster.actor_pool import TRIES, ActorPool
from postlude.cluster.server_actors import RayLauncher
from postlude.generate.protocol import Request, VersionSpan
from postlude.pool.process_pool import open_pool
from postlude.pool.worker_pool import CallResult, PoolFactory, WorkerError, WorkerPool
from postlude.serving.clients.server_weights import WeightsVersion
from postlude.serving.launch.supervisor import ServerSupervisor, SupervisedClient
from tests.conftest import PATIENCE
from tests.rollout import functions
from tests.rollout.reward_pool import RewardPool
from tests.serving.test_server_pool import PROMPTS, THREE, check
from tests.serving.test_supervisor import FAKE as HERES
from tests.serving.test_supervisor import QUICK, wait_until

pytestmark = pytest.mark.slow
TIMEOUT = 4.0
FAKE = replace(HERES, command=(*HERES.command, "{host}"))


def wait_for_running_workers(pool: WorkerPool, count: int) -> list[Any]:
    """Waits until `count` workers run a call, and returns them."""
    assert isinstance(pool, ActorPool)
    until = time.monotonic() + 300
    while time.monotonic() < until:
        with pool.changed:
            running = [worker for worker in pool.workers if worker.running]
        if len(running) >= count:
            return running[:count]
        time.sleep(0.01)
    raise AssertionError("no worker was given anything")


def call_results(pool_factory: PoolFactory | None) -> list[CallResult]:
    results = []
    for timeout, completions in (
        (PATIENCE, ("good", "raise", "object", "part", "die", "killed", "exit", "good")),
        (TIMEOUT, ("hang",)),
    ):
        with closing(open_pool(functions.misbehave, count=2, timeout=timeout, pool_factory=pool_factory)) as workers:
            results += workers.call_all([("", completion, {}) for completion in completions])
    return results


def test_actor_pool_results_equal_process_pool_results(local_ray: None) -> None:
    actor_results, process_results = call_results(partial(ActorPool, cpus=0.5)), call_results(None)
    assert str(actor_results) == str(process_results)  # as text, since NaN does not equal itself


def test_calls_of_killed_worker_are_retried_on_another(local_ray: None) -> None:
    import ray

    with closing(RewardPool(functions.slow_length, workers=2, timeout=30.0, pool_factory=ActorPool)) as pool:
        call_ids = [pool.submit(("", "x" * size, {})) for size in range(12)]
        (victim,) = wait_for_running_workers(pool.pool, 1)
        ray.kill(victim.actor)
        scores: dict[int, Any] = {}
        while len(scores) < len(call_ids):
            scores |= pool.poll(None)
        assert [scores[call_id].reward for call_id in call_ids] == [float(size) for size in range(12)]
        assert pool.pool.lost == 1
        assert not pool.failures.total()


@pytest.mark.thorough
def test_function_that_cannot_be_loaded_raises_worker_error(local_ray: None) -> None:
    with (
        closing(open_pool("no/such/file.py:reward", count=1, timeout=TIMEOUT, pool_factory=ActorPool)) as workers,
        pytest.raises(WorkerError, match=r"no/such/file.py:reward cannot be loaded: .*no/such/file.py"),
    ):
        workers.call_all([("", "", {})])


@pytest.mark.thorough
def test_call_fails_after_losing_max_number_of_workers(local_ray: None) -> None:
    with closing(open_pool(functions.end_parent, count=2, timeout=30.0, pool_factory=ActorPool)) as workers:
        good, bad, second_good = workers.call_all([("stay",), ("go",), ("stay",)])
        assert (good.value, second_good.value) == ("stay", "stay")
        assert (bad.failure, bad.error) == ("died", f"end_parent was lost with its worker {TRIES} times.")
        assert workers.lost == TRIES


def await_completions(engine: SupervisedClient, request_ids: set[int]) -> None:
    """Polls until every request has its completion, and checks that it used the sent weights."""
    while request_ids:
        for done in engine.poll(None):
            assert done.completion is not None, done.error
            assert done.completion.versions == (VersionSpan("start.1", 0, 3),)
            request_ids.remove(done.request_id)


@pytest.mark.thorough
def test_server_is_restarted_after_its_actor_is_killed(
    local_ray: None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """No completion is lost, and the server process ends with its actor."""
    import ray

    with closing(
        SupervisedClient(ServerSupervisor(FAKE, 2, RayLauncher(tmp_path, single_machine=True)), **QUICK)
    ) as engine:
        assert {server.url.rpartition(":")[0] for server in engine.pool.servers} == {"http://127.0.0.1"}
        engine.connect()
        engine.reload(WeightsVersion("/weights/1", "start.1"))
        request_ids = {engine.submit(Request(tuple(prompt), THREE)) for prompt in PROMPTS}
        running: Any = engine.supervisor._slots[0].process
        ray.kill(running.actor)
        await_completions(engine, request_ids)
        check(engine)
        wait_until(lambda: engine.pool.count_up() == 2)
        wait_until(lambda: not is_reachable(running.url))
        assert engine.supervisor.restarted == 1
        assert f"{running.url} was lost with its actor: it was killed by `ray.kill`. It is restarted" in caplog.text
        urls = [server.url for server in engine.pool.servers]
    assert not any(is_reachable(url) for url in urls), "they end with the engine"


def is_reachable(url: str) -> bool:
    try:
        urllib.request.urlopen(f"{url}/health", timeout=1.0)
    except OSError:
        return False
    return True
