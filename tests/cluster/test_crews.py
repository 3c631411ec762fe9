"""Workers that are actors: the outcomes of processes here, and calls whose worker is lost are made by another."""

from __future__ import annotations

import time
from contextlib import closing
from typing import Any

import pytest

from postlude.cluster.crews import TRIES, ActorCrew, Actors
from postlude.rollout.rewards import RewardPool
from postlude.rollout.workers import Hire, Outcome, WorkerError, Workers
from tests.rollout import functions

pytestmark = pytest.mark.slow
TIMEOUT = 1.0


def crew_of(workers: Workers) -> ActorCrew:
    assert isinstance(workers._crew, ActorCrew)
    return workers._crew


def busy(crew: ActorCrew, count: int) -> list[Any]:
    """Some workers, once they are at work."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        with crew.changed:
            found = [each for each in crew.hired if each.at_work]
        if len(found) >= count:
            return found[:count]
        time.sleep(0.01)
    raise AssertionError("no worker was given anything")


def outcomes(hire: Hire | None) -> list[Outcome]:
    calls = [("", said, {}) for said in ("good", "raise", "object", "part", "die", "killed", "exit", "hang", "good")]
    with closing(Workers(functions.misbehave, count=2, timeout=TIMEOUT, hire=hire)) as workers:
        return workers.call_all(calls)


def test_outcomes_are_those_of_processes_here(local_ray: None) -> None:
    assert str(outcomes(Actors(cpus=0.5))) == str(outcomes(None))  # as text: not every number equals itself


def test_what_a_lost_worker_was_at_is_done_by_another(local_ray: None) -> None:
    import ray

    with RewardPool(functions.slow_length, workers=2, timeout=30.0, hire=Actors()) as pool:
        tickets = [pool.submit(("", "x" * size, {})) for size in range(12)]
        (victim,) = busy(crew_of(pool._workers), 1)
        ray.kill(victim.actor)
        scores: dict[int, Any] = {}
        while len(scores) < len(tickets):
            scores |= pool.poll(None)
        assert [scores[ticket].reward for ticket in tickets] == [float(size) for size in range(12)]
        assert pool.lost == 1
        assert not pool.failures.total()


@pytest.mark.thorough
def test_a_function_that_cannot_be_loaded_is_a_sentence(local_ray: None) -> None:
    with (
        closing(Workers("no/such/file.py:reward", count=1, timeout=TIMEOUT, hire=Actors())) as workers,
        pytest.raises(WorkerError, match=r"no/such/file.py:reward cannot be loaded: .*no/such/file.py"),
    ):
        workers.call_all([("", "", {})])


@pytest.mark.thorough
def test_a_call_over_which_workers_are_lost_again_and_again_is_given_up(local_ray: None) -> None:
    with closing(Workers(functions.end_parent, count=2, timeout=30.0, hire=Actors())) as workers:
        good, bad, other = workers.call_all([("stay",), ("go",), ("stay",)])
        assert (good.value, other.value) == ("stay", "stay")
        assert (bad.failure, bad.error) == ("died", f"end_parent was lost with its worker {TRIES} times.")
        assert workers.lost == TRIES
