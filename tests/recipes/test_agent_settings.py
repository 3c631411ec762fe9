"""Agents in a config: what is refused before a run, and what a run trains on."""

from __future__ import annotations

import json
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from postlude.cli import main
from postlude.recipes.checks.environment import try_agent
from postlude.recipes.config.environments import AgentSettings
from postlude.recipes.config.load import ConfigError, load
from postlude.recipes.config.policy_configs import GRPOConfig
from postlude.recipes.config.settings import SamplingSettings
from postlude.recipes.rollouts.prompts import PromptEncoding
from postlude.recipes.sequence_limit import SequenceLimit
from postlude.rollout.agents import AgentEnvironment
from postlude.rollout.episode import AssistantTurn
from tests.conftest import Ranks
from tests.recipes.test_grpo import run_and_read_metrics
from tests.rollout.agent_runs import BUDGET, tokenizer

AGENTS = """
from postlude.rollout.agent_programs import AgentClient
from tests.rollout.model_calls import post
import asyncio
from pathlib import Path

async def ask(client, text):
    body = {"model": "any", "messages": [{"role": "user", "content": text}]}
    return (await asyncio.to_thread(post, client.url, client.api_key, body))[1]["choices"][0]["message"]["content"]

async def answers(task, client):
    return float(await ask(client, task["prompt"]) == task["answer"])

async def letters(task, client):
    return {"reward": len(set(await ask(client, task["prompt"]))) / 10, "asked": 1.0}

async def writes(task, client):
    (client.workdir / "solution").write_text(await ask(client, task["prompt"]))

def reads(completion, workdir):
    return float(Path(workdir, "solution").read_text())

def reads_nothing(completion, workdir):
    return float(Path(workdir, "nothing").read_text())

async def needs_json(task, client):
    raise ValueError("no JSON: " + await ask(client, task["prompt"]))

async def silent(task, client):
    return 1.0

async def broken(task, client):
    raise RuntimeError("no such thing")

def blocking(task, client): ...
"""
CONFIG = "model: tiny-dense\nenvironment:\n  kind: agent\n  path: rows.jsonl\n"


def settings_of(directory: Path, *lines: str) -> AgentSettings:
    """Returns the settings of an agent whose files are next to the config."""
    rows = [{"prompt": f"{number}+1?", "answer": str(number + 1)} for number in range(8)]
    (directory / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (directory / "agents.py").write_text(AGENTS)
    path = directory / "agent.yaml"
    path.write_text(CONFIG + "".join(f"  {line}\n" for line in lines))
    settings = load(GRPOConfig, path, ["--run", str(directory / "run")]).environment
    assert isinstance(settings, AgentSettings)
    return settings


def trial(directory: Path, *lines: str) -> str:
    with closing(settings_of(directory, *lines).build(0)) as environment:
        assert isinstance(environment, AgentEnvironment)
        turn = AssistantTurn("1", tokenizer().encode("1", add_special_tokens=False))
        limit = SequenceLimit(BUDGET, None, None)
        outcome = try_agent(environment, turn, PromptEncoding(tokenizer(), SamplingSettings(max_new_tokens=8), limit))
        environment.trial_call(environment.tasks[0], turn)
        return outcome


def test_an_agent_that_asks_for_completions_passes_the_trial(tmp_path: Path) -> None:
    passed, failed = (trial(tmp_path, f"function: agents.py:{name}") for name in ("answers", "needs_json"))
    assert passed == "an agent that made 1 model call(s) on line 1 of rows.jsonl, and has reward 1"
    assert failed.startswith("an agent that made 1 model call(s) on line 1 of rows.jsonl and failed on its reply: ")
    assert "agents.py:needs_json failed on line 1 of rows.jsonl: ValueError: no JSON: 1" in failed


def test_a_reward_of_the_work_directory_passes_the_trial(tmp_path: Path) -> None:
    lines = "function: agents.py:writes", "workers: 1"
    passed = trial(tmp_path, *lines, "reward: agents.py:reads")
    assert passed == "an agent that made 1 model call(s) on line 1 of rows.jsonl, and has reward 1"
    with pytest.raises(ValueError, match=r"No such file .* That was a trial on line 1 of rows.jsonl"):
        trial(tmp_path, *lines, "reward: agents.py:reads_nothing")


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["function: agents.py:silent"], "the agent made no model call on .*: ended. It gets the address of its model"),
        (["function: agents.py:broken"], "the agent made no model call on .*: .*RuntimeError: no such thing"),
        ([f"command: [{sys.executable}, -c, 'import nothing']"], "No module named 'nothing'"),
        (["command: [no-such-program]"], "no-such-program cannot be started"),
        (["function: agents.py:blocking"], "is no coroutine function, .*Write it as async def"),
        (["url: localhost:9000"], "environment.url is 'localhost:9000'; give the address of a service"),
        (["command: [a]", "url: http://a"], "but command and url is given. Give one."),
        ([], "but none of them is given. Give one."),
        (["function: a.py:b", "limits: {tokens: 0}"], "tokens is 0, but an agent needs more than 0"),
    ],
)
def test_an_agent_that_cannot_work_is_refused(tmp_path: Path, lines: list[str], message: str) -> None:
    with pytest.raises((ValueError, ConfigError), match=message):
        trial(tmp_path, *lines)


def test_more_held_out_tasks_than_there_are_is_found_before_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings_of(tmp_path, "function: agents.py:answers")
    assert main(["grpo", str(tmp_path / "agent.yaml"), f"--run={tmp_path}/run", "--dry-run"]) == 2
    assert "64 tasks are to be held out, but 8 tasks have 8 different prompts" in capsys.readouterr().err


def test_words_of_a_command_that_are_files_next_to_the_config_are_found(tmp_path: Path) -> None:
    (tmp_path / "solve.py").write_text("")
    with closing(settings_of(tmp_path, "command: [python, solve.py, --task, '{task_file}']").build(0)) as environment:
        assert isinstance(environment, AgentEnvironment)
        agent: Any = environment.agent
        assert agent.command == ("python", str(tmp_path / "solve.py"), "--task", "{task_file}")


@pytest.mark.slow
def test_a_run_trains_on_what_an_agent_sampled(ranks: Ranks, tmp_path: Path) -> None:
    """The trainer's log-probs of the tokens are those that they were sampled with."""
    settings_of(tmp_path, "function: agents.py:letters")
    environment = f"{{kind: agent, path: {tmp_path}/rows.jsonl, function: {tmp_path}/agents.py:letters}}"
    overrides = [
        "--environment",
        environment,
        "--steps",
        "2",
        "--evaluation",
        "{every: 0, tasks: 0}",
        "--layout",
        "dp_shard=2",
    ]
    for rows in ranks(2, run_and_read_metrics, str(tmp_path), *overrides):
        assert [(row["reward/asked"], row["rollout_kl"] < 1e-6) for row in rows[-2:]] == [(1.0, True)] * 2
