"""Agents are evaluated as other environments are, and each episode is readable in the report."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from postlude.recipes.config.load import load
from postlude.recipes.registry import RECIPES
from postlude.recipes.run.files import read_metrics, read_samples
from postlude.rollout.agent_programs import AgentClient
from tests.conftest import Ranks
from tests.rollout.model_calls import post

SAMPLES, TASKS = 4, 3


async def forgetful(task: Mapping[str, Any], client: AgentClient) -> dict[str, float]:
    """Asks twice in a chat and once in another. It is right in the first half of a task's episodes, and may fail."""
    chat: list[dict[str, Any]] = [{"role": "user", "content": f"<b>{task['prompt']}</b>"}]
    for text in ("And?", "Sure?"):
        _, reply = await asyncio.to_thread(post, client.url, client.api_key, {"messages": chat})
        chat += [reply["choices"][0]["message"], {"role": "user", "content": text}]
    await asyncio.to_thread(post, client.url, client.api_key, {"messages": [{"role": "user", "content": "summary"}]})
    if task["prompt"] == "fails":
        raise RuntimeError("the tool is <gone>")
    return {"reward": float(task["prompt"] == "right"), "tool_calls": 2.0}


def evaluate(group: Any, directory: str, *settings: str) -> None:
    options = [
        "--model=tiny-dense",
        f"--run={directory}/run",
        "--budget=512",
        "--loggers=[]",
        "--environment.kind=agent",
        f"--environment.path={directory}/tasks.jsonl",
        f"--environment.function={__file__}:forgetful",
        f"--tasks={TASKS}",
        f"--samples_per_prompt={SAMPLES}",
        "--sampling.max_new_tokens=6",
        "--sampling.temperature=1.0",
        *settings,
    ]
    RECIPES["eval"].run(load(RECIPES["eval"].config, None, options), "cpu")


@pytest.fixture(scope="module")
def evaluated(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("evaluated")
    (directory / "tasks.jsonl").write_text(
        "".join(json.dumps({"prompt": prompt}) + "\n" for prompt in ("right", "wrong", "fails"))
    )
    ranks(1, evaluate, str(directory), "--save_completions=true")
    return directory / "run"


def test_pass_at_k_and_failures_are_counted(evaluated: Path) -> None:
    (metrics,) = read_metrics(evaluated)
    assert [metrics[f"eval/pass@{k}"] for k in (1, 2, 4)] == pytest.approx([1 / 3] * 3)
    assert (metrics["reward_mean"], metrics["turns_mean"], metrics["branches_mean"]) == (0.5, 3.0, 2.0)
    assert metrics["reward/failed"] == pytest.approx(1 / 3)


def test_each_episode_is_readable_in_the_report(evaluated: Path) -> None:
    samples = read_samples(evaluated)
    assert len(samples) == 8
    for sample in samples:
        assert [turn["sequence"] for turn in sample["turns"]] == [0, 0, 1]
        prompt = sample["prompt"]
        assert f"<|im_start|>user\n<b>{prompt}</b><|im_end|>" in sample["turns"][0]["read"]
        assert "And?" in sample["turns"][1]["read"]
        assert sum(turn["tokens"] for turn in sample["turns"]) == len(sample["tokens"]) == len(sample["logprobs"])
        assert all(math.isfinite(logprob) for logprob in sample["logprobs"])
        assert (sample["error"] is not None) == (prompt == "fails")
    page = (evaluated / "report.html").read_text()
    for text in ("&lt;b&gt;right&lt;/b&gt;", "And?", "Sequence 2", "tool_calls 2", "the tool is &lt;gone&gt;"):
        assert text in page
    assert "<b>right</b>" not in page


def test_the_table_has_every_episode(evaluated: Path) -> None:
    parquet: Any = pytest.importorskip("pyarrow.parquet")
    rows = parquet.read_table(evaluated / "completions").to_pylist()
    assert len(rows) == SAMPLES * TASKS
    assert [row["error"] is None for row in rows] == [row["prompt"] != "fails" for row in rows]
    assert all(sum(turn["tokens"] for turn in row["turns"]) == len(row["tokens"]) for row in rows)
