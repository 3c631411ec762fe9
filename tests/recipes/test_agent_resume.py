"""A run of agents that is killed in the middle of episodes and started again has the episodes of one that was not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.commands import run_command

AGENT = """
import os, signal
from pathlib import Path
from openai import AsyncOpenAI

ORDER = Path(__file__).with_name("order")

async def talk(task, client):
    model, chat = AsyncOpenAI(**client.openai), [{"role": "user", "content": task["prompt"]}]
    for turn in range(2):
        reply = await model.chat.completions.create(model="any", messages=chat)
        text = reply.choices[0].message.content or ""
        chat += [{"role": "assistant", "content": text}, {"role": "user", "content": "and?"}]
        if ORDER.exists() and task["prompt"] == ORDER.read_text() and turn == 1:
            ORDER.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
    return len(set(text)) / 10
"""
CONFIG = """
model: tiny-dense
budget: 512
environment: {kind: agent, path: rows.jsonl, function: "agent.py:talk", concurrency: 1}
warm_start: {steps: 0}
steps: 4
prompts_per_step: 2
samples_per_prompt: 2
sampling: {max_new_tokens: 6}
optimizer: {lr: 1e-3}
evaluation: {every: 0, tasks: 0}
save_every: 1
export: false
loggers: []
"""


def episodes(run: Path) -> dict[tuple[int, str], list[tuple[list[int], float]]]:
    """Returns the tokens and the rewards of the logged episodes, by step and prompt."""
    found: dict[tuple[int, str], list[Any]] = {}
    for line in (run / "samples.jsonl").read_text().splitlines():
        sample = json.loads(line)
        found.setdefault((sample["step"], sample["prompt"]), []).append((sample["tokens"], sample["reward"]))
    return found


@pytest.mark.slow  # three starts of a command
def test_a_killed_run_of_agents_continues_with_the_episodes_of_one_that_was_not(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"prompt": f"say {n}"}) + "\n" for n in range(8)))
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "agents.yaml").write_text(CONFIG)
    whole = run_command(["grpo", "agents.yaml", "--run", "whole"], tmp_path)
    assert whole.returncode == 0, whole.stderr
    expected = episodes(tmp_path / "whole")
    assert len(expected) == 8
    (tmp_path / "order").write_text(next(prompt for step, prompt in expected if step == 3))
    assert run_command(["grpo", "agents.yaml", "--run", "parts"], tmp_path).returncode == -9
    assert not (tmp_path / "order").exists()
    assert {step for step, _ in episodes(tmp_path / "parts")} <= {1, 2}
    continued = run_command(["grpo", "agents.yaml", "--run", "parts"], tmp_path)
    assert continued.returncode == 0, continued.stderr
    assert episodes(tmp_path / "parts") == expected
