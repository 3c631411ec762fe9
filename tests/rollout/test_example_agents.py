"""The agents of examples/agents earn their reward by the right tool, and a small model learns which that is."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest

from postlude.generate.protocol import Request
from postlude.pool.worker_pool import CallResult
from postlude.recipes.config.load import load
from postlude.recipes.registry import RECIPES
from postlude.rollout.agent_programs import Agent, AgentClient, AgentLimits, CommandAgent, FunctionAgent
from postlude.rollout.sandbox import open_sandbox
from postlude.user_code import load_callable
from tests.rollout.agent_runs import RecordingEngine, check_tokens, run_agents

AGENTS = Path(__file__).parents[2] / "examples" / "agents"
SDK_PYTHON = os.environ.get("AGENTS_SDK_PYTHON", sys.executable)
ROW = json.loads((AGENTS / "data" / "weather.jsonl").read_text().splitlines()[0])


class WithTask(Agent):
    """An agent that gets this task."""

    def __init__(self, agent: Agent, task: Mapping[str, Any]) -> None:
        self.agent, self.task, self.name = agent, task, agent.name

    async def run(self, task: Mapping[str, Any], client: AgentClient, limits: AgentLimits) -> CallResult:
        return await self.agent.run(self.task, client, limits)

    def close(self) -> None:
        self.agent.close()


def calls_the_tool(prompt: str, request: Request) -> str:
    return f'<tool_call>{{"name": "{ROW["prompt"].split()[0]}", "arguments": {{}}}}</tool_call>'


@pytest.mark.parametrize(("package", "name"), [("openai", "openai_agent.py"), ("anthropic", "anthropic_agent.py")])
def test_an_example_agent_earns_its_reward_by_calling_its_tool(package: str, name: str) -> None:
    pytest.importorskip(package)
    agent: Agent = CommandAgent([sys.executable, str(AGENTS / name), "{task_file}"], open_sandbox())
    if package == "anthropic":
        agent = FunctionAgent(load_callable(f"{AGENTS / name}:run"), "run")
    engine = RecordingEngine(calls_the_tool)
    (trajectory,) = run_agents(WithTask(agent, ROW), engine, limits={"seconds": 100.0}, seconds=110.0)
    assert (trajectory.reward, len(trajectory.completions)) == (1.0, 1)
    check_tokens([trajectory], engine)


@pytest.mark.parametrize("name", ["sft", "openai", "anthropic", "sdk"])
def test_an_example_config_is_valid(name: str) -> None:
    load(RECIPES["sft" if name == "sft" else "grpo"].config, AGENTS / f"{name}.yaml", [])


def train(words: list[str], directory: Path) -> None:
    """Runs `postlude *words`, as long as that takes."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])  # of `python` in a command
    command = [sys.executable, "-m", "postlude", *words, "--device=cpu"]
    done = subprocess.run(
        command, cwd=directory, env=os.environ | {"PATH": path}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def sft_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a directory with the model that calls tools, at the place that the examples' configs name."""
    directory = tmp_path_factory.mktemp("agents")
    train(["sft", str(AGENTS / "sft.yaml")], directory)
    return directory


@contextmanager
def sdk_service() -> Iterator[list[str]]:
    """Starts the service of the agents' SDK, and yields the words that name it."""
    if subprocess.run([SDK_PYTHON, "-c", "import agents"], capture_output=True, check=False).returncode:
        pytest.skip(f"needs openai-agents in {SDK_PYTHON}, or in the interpreter that AGENTS_SDK_PYTHON names")
    port = free_port()
    with subprocess.Popen([SDK_PYTHON, str(AGENTS / "sdk_agent.py"), str(port)]) as process:
        try:
            for _ in range(1200):
                with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                    break
                time.sleep(0.1)
            yield [f"--environment.url=http://127.0.0.1:{port}"]
        finally:
            process.kill()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


@pytest.mark.slow
@pytest.mark.thorough  # trains a model, one to six minutes for each agent
@pytest.mark.parametrize(("name", "package"), [("anthropic", "anthropic"), ("openai", "openai"), ("sdk", "postlude")])
def test_an_example_agent_doubles_its_reward_on_held_out_tasks(sft_model: Path, name: str, package: str) -> None:
    pytest.importorskip(package)
    with sdk_service() if name == "sdk" else nullcontext([]) as words:
        train(["grpo", str(AGENTS / f"{name}.yaml"), *words], sft_model)
    lines = (sft_model / "runs" / "agents" / name / "metrics.jsonl").read_text().splitlines()
    rewards = [row["eval/reward_mean"] for row in map(json.loads, lines) if "eval/reward_mean" in row]
    assert len(rewards) == 2
    assert rewards[1] >= max(2 * rewards[0], 0.6)
