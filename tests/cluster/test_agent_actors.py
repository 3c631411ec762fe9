"""Agents in Ray actors: the same episodes as in this process; an actor is lost with its episodes, not with the run."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from postlude.cluster import agent_actors
from postlude.cluster.agent_actors import ActorAgent, RayWorkers
from postlude.generate.protocol import Request
from postlude.rollout.agent_programs import Agent, AgentLimits, CommandAgent, FunctionAgent
from postlude.rollout.conversations import Trajectory
from postlude.rollout.sandboxes.bubblewrap import Bubblewrap
from postlude.rollout.sandboxes.isolation import Isolation
from postlude.rollout.sandboxes.process import SandboxError
from tests.rollout.agent_runs import RecordingEngine, check_tokens, run_agents, trained_parts

pytestmark = pytest.mark.slow  # starts Ray
AGENTS = """
import asyncio
import json
import os
import time
import urllib.request
from pathlib import Path


def post(client, text):
    body = json.dumps({{"model": "any", "messages": [{{"role": "user", "content": text}}]}}).encode()
    headers = {{"Authorization": f"Bearer {{client.api_key}}", "Content-Type": "application/json"}}
    request = urllib.request.Request(f"{{client.url}}/v1/chat/completions", body, headers)
    with urllib.request.urlopen(request) as reply:
        return json.load(reply)["choices"][0]["message"]["content"]


async def ask(client, text):
    return await asyncio.to_thread(post, client, text)


async def answers(task, client):
    Path(client.workdir, "note").write_text(task["prompt"])
    reply = await ask(client, task["prompt"])
    return {{"reward": float(len(reply)), "files": float(len(list(client.workdir.iterdir())))}}


async def first_ends_its_process(task, client):
    await ask(client, task["prompt"])
    try:
        os.mkdir({mark!r})
    except FileExistsError:
        await asyncio.sleep(3.0)
        return 1.0
    os._exit(3)


async def blocks(task, client):
    await ask(client, task["prompt"])
    if task["prompt"] == "0+1?":
        time.sleep(600)
    return 1.0


async def strange(task, client):
    await ask(client, task["prompt"])
    return object()


async def waits_for_order(task, client):
    await ask(client, task["prompt"])
    Path({mark!r} + "-" + client.workdir.name).write_text("")
    while not os.path.exists({mark!r}):
        await asyncio.sleep(0.05)
    return 1.0


async def waits(task, client):
    await ask(client, task["prompt"])
    try:
        await asyncio.sleep(600)
    finally:
        Path({mark!r} + task["prompt"][0]).write_text(str(client.workdir))
"""
PROGRAM = """
import json, os, urllib.request
task = json.load(open("task.json"))
body = json.dumps({"model": "gpt", "messages": [{"role": "user", "content": task["prompt"]}]}).encode()
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
reply = json.load(urllib.request.urlopen(urllib.request.Request(url, body, headers)))
print(len(reply["choices"][0]["message"]["content"]))
"""
WORKERS = RayWorkers(0.5, 200.0, single_machine=True)


def echo(prompt: str, request: Request) -> str:
    return prompt[-8:]


def function(directory: Path, name: str) -> Callable[[], Agent]:
    """Returns what makes an agent of `AGENTS`, here or elsewhere."""
    path = directory / "functions.py"
    path.write_text(AGENTS.format(mark=str(directory / "mark")))
    return partial(FunctionAgent.load, f"{path}:{name}")


def command(directory: Path, isolation: Isolation | None = None) -> Callable[[], Agent]:
    path = directory / "program.py"
    path.write_text(PROGRAM)
    return partial(CommandAgent.open, [sys.executable, str(path)], isolation)


def outcomes(trajectories: list[Trajectory]) -> list[Any]:
    return [
        (trajectory.reward, trajectory.components, None if trajectory.score is None else trajectory.score.error)
        for trajectory in trajectories
    ]


@pytest.mark.parametrize("kind", ["function", pytest.param("command", marks=pytest.mark.thorough)])
def test_episodes_in_actors_equal_those_in_this_process(local_ray: None, tmp_path: Path, kind: str) -> None:
    make = function(tmp_path, "answers") if kind == "function" else command(tmp_path)
    engines = RecordingEngine(echo), RecordingEngine(echo)
    agents = make(), WORKERS.open_agent(make, make().name, 2, 8)
    here, there = (
        run_agents(agent, engine, groups=3, samples=4, seconds=120.0, limits={"seconds": 100.0})
        for agent, engine in zip(agents, engines, strict=True)
    )
    assert outcomes(there) == outcomes(here)
    assert trained_parts(there) == trained_parts(here)
    assert [trajectory.trainable for trajectory in there] == [True] * 12
    check_tokens(there, engines[1])


def test_an_actor_is_lost_with_its_episodes_alone(local_ray: None, tmp_path: Path) -> None:
    agent = WORKERS.open_agent(function(tmp_path, "first_ends_its_process"), "agent", 2, 8)
    results = run_agents(agent, RecordingEngine(echo), groups=2, samples=4, seconds=120.0, limits={"seconds": 100.0})
    lost = [trajectory for trajectory in results if trajectory.excluded]
    assert agent.lost_workers == 1
    assert len(lost) == 4, "half of the episodes were there"
    for trajectory in lost:
        assert trajectory.score is not None
        assert "agent was lost with its worker: its worker process has died" in str(trajectory.score.error)
    assert [trajectory.reward for trajectory in results if not trajectory.excluded] == [1.0] * 4


@pytest.mark.thorough
def test_an_actor_that_hangs_is_replaced(local_ray: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_actors, "HUNG_SECONDS", 3.0)
    agent = WORKERS.open_agent(function(tmp_path, "blocks"), "agent", 1, 1)
    first, second = run_agents(
        agent, RecordingEngine(echo), groups=2, seconds=120.0, limits={"seconds": 5.0}, options={"concurrency": 1}
    )
    assert first.score is not None
    assert first.score.error is not None
    assert "agent blocked its worker for more than 8 s" in first.score.error
    assert (second.reward, agent.lost_workers) == (1.0, 1)


@pytest.mark.thorough
def test_a_value_that_is_no_reward_fails_its_episode(local_ray: None, tmp_path: Path) -> None:
    agent = WORKERS.open_agent(function(tmp_path, "strange"), "agent", 1, 1)
    (trajectory,) = run_agents(agent, RecordingEngine(echo), seconds=120.0, limits={"seconds": 100.0})
    assert trajectory.score is not None
    assert "returned object, which cannot be sent as JSON" in str(trajectory.score.error)


@pytest.mark.thorough
def test_an_agent_that_cannot_be_made_fails_its_episodes(local_ray: None, tmp_path: Path) -> None:
    make = partial(FunctionAgent.load, f"{tmp_path}/none.py:run")
    agent = WORKERS.open_agent(make, "agent", 1, 1)
    (trajectory,) = run_agents(agent, RecordingEngine(echo), seconds=120.0, limits={"seconds": 100.0})
    assert trajectory.score is not None
    assert "there is no file" in str(trajectory.score.error)


@pytest.mark.thorough
def test_episodes_that_nobody_waits_for_end_in_their_actor(local_ray: None, tmp_path: Path) -> None:
    agent = WORKERS.open_agent(function(tmp_path, "waits"), "agent", 1, 8)
    run_agents(agent, RecordingEngine(echo), groups=3, seconds=20.0, limits={"seconds": 300.0})
    workdirs = [Path((tmp_path / f"mark{number}").read_text()) for number in range(3)]
    assert [workdir.exists() for workdir in workdirs] == [False] * 3


@pytest.mark.thorough
def test_agents_on_other_nodes_reach_their_model_through_loopback(local_ray: None, tmp_path: Path) -> None:
    """Also in a sandbox, whose network has nothing else."""
    isolation: Isolation | None = Bubblewrap(mounts=(str(tmp_path),))
    try:
        isolation.check()
    except SandboxError:
        isolation = None
    agent = RayWorkers(0.5, 120.0, single_machine=False).open_agent(command(tmp_path, isolation), "agent", 1, 8)
    assert isinstance(agent, ActorAgent)
    agent.host = "127.0.0.2"  # as a node's address, which is not the one that sandboxes connect to
    engine = RecordingEngine(echo)
    results = run_agents(agent, engine, groups=2, samples=2, seconds=120.0, limits={"seconds": 100.0})
    assert [trajectory.reward for trajectory in results] == [8.0] * 4
    check_tokens(results, engine)


@pytest.mark.thorough
def test_too_few_nodes_are_named(local_ray: None, tmp_path: Path) -> None:
    agent = RayWorkers(99.0, 3.0, single_machine=True).open_agent(function(tmp_path, "answers"), "agent", 1, 8)
    with suppress(AssertionError):
        (trajectory,) = run_agents(agent, RecordingEngine(echo), seconds=60.0, limits=AgentLimits(20.0).__dict__)
    assert trajectory.score is not None
    assert "no room for a worker of agent for 3 s; each takes 99 CPU(s)" in str(trajectory.score.error)
