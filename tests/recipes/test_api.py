"""Recipes started from Python: the same config, checks and run as the command's."""

from __future__ import annotations

import importlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from postlude import recipes
from postlude.cli import main
from postlude.recipes import RunResult, evaluate, sft
from postlude.recipes import api as start
from postlude.recipes.config.raw import ConfigError
from postlude.recipes.registry import RECIPES
from postlude.recipes.run.files import read_config, read_metrics
from tests.recipes import keyword_types
from tests.test_start import imported

SMALL: dict[str, Any] = {"budget": 128, "batch_size": 4, "steps": 2, "save_every": 0, "loggers": []}


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text(
        "".join(json.dumps({"prompt": f"{number}+1=", "completion": str(number + 1)}) + "\n" for number in range(9))
    )
    return path


def test_call_equals_the_command_and_returns_a_typed_result(tmp_path: Path, rows: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("data: {path: rows.jsonl}\noptimizer: {lr: 1e-3, betas: [0.9, 0.95]}\n")
    result = sft(file, run=tmp_path / "call", optimizer={"lr": 2e-3}, held_out={"rows": 2}, **SMALL)
    assert isinstance(result, RunResult)
    assert (result.run, result.outcome.status, result.outcome.step) == (tmp_path / "call", "finished", 2)
    assert result.model == tmp_path / "call" / "model"
    assert result.summary.score is not None
    assert result.metrics == read_metrics(result.run)
    words = [f"--{name}={json.dumps(value)}" for name, value in SMALL.items()]
    words += [f"--run={tmp_path / 'command'}", "--optimizer.lr=2e-3", "--held_out.rows=2"]
    assert main(["sft", str(file), *words]) == 0
    assert read_config(tmp_path / "command") | {"run": ""} == read_config(result.run) | {"run": ""}
    losses = [[row.get("loss") for row in read_metrics(tmp_path / name)] for name in ("call", "command")]
    assert losses[0] == losses[1]


def test_user_errors_are_raised_before_anything_is_written(tmp_path: Path, rows: Path) -> None:
    run = tmp_path / "run"
    with pytest.raises(
        ConfigError, match=r'config key "optimzer.lr" is unknown in the call; did you mean "optimizer.lr"'
    ):
        sft({"data": {"path": rows}}, run=run, optimzer={"lr": 1.0})
    with pytest.raises(ConfigError, match=r'config key "steps" is a object in the call; give a number'):
        sft({"data": {"path": rows}}, run=run, steps=object())
    with pytest.raises(ValueError, match="8 heads"):
        sft({"data": {"path": rows}, "layout": "tp=3"}, run=run, **SMALL)
    with pytest.raises(ConfigError, match=r'config key "environment" in the call: it has neither reward nor rewards'):
        evaluate(environment={"kind": "dataset", "path": rows}, run=run)
    assert not run.exists()


def test_settings_from_python_keep_their_types() -> None:
    fields = {
        "environment": {"kind": "reasoning_gym", "settings": {"text": "2", "number": 2, "none": None, "list": [1]}}
    }
    config = RECIPES["grpo"].read(None, (), [fields | {"dtype": None, "replay_routing": False}])
    assert config.environment.settings == {"text": "2", "number": 2, "none": None, "list": [1]}


def exact(completion: str, answer: str) -> float:
    return float(completion == answer)


@dataclass
class Game:
    row: dict[str, Any]

    async def step(self, text: str) -> float:
        return 1.0


def test_functions_and_classes_from_python_are_named_by_their_file() -> None:
    rewards = {"right": exact, "again": {"kind": "function", "function": exact}}
    config = RECIPES["grpo"].read(None, (), [{"environment": {"kind": "dataset", "path": "x", "rewards": rewards}}])
    expected = f"{Path(__file__).resolve()}:exact"
    assert [str(reward.function) for reward in config.environment.rewards.values()] == [expected] * 2
    tools = {"kind": "tools", "path": "x", "tools": [exact], "reward": exact, "format": "hermes", "max_turns": 2}
    assert RECIPES["grpo"].read(None, (), [{"environment": tools}]).environment.tools == (expected,)
    episodes = {"kind": "episodes", "path": "x", "episode": Game, "max_turns": 2}
    assert RECIPES["grpo"].read(None, (), [{"environment": episodes}]).environment.episode == f"{__file__}:Game"


def test_importing_a_recipe_module_does_not_shadow_its_function() -> None:
    for name in ("kto", "ppo", "grpo", "distill"):
        module = importlib.import_module(f"postlude.recipes.{name}")
        assert hasattr(module, "Check")
        assert getattr(recipes, name) is getattr(start, name)


def test_types_of_the_keywords_are_those_of_the_configs() -> None:
    command = "write them by `python -m tests.recipes.keyword_types`"
    assert keyword_types.FILE.read_text() == keyword_types.source(), command


def test_importing_recipes_needs_no_torch() -> None:
    assert not imported("from postlude.recipes import grpo") & {"torch", "transformers", "numpy"}


def test_a_result_is_one_line_of_text_and_a_picture_of_its_curves(tmp_path: Path, rows: Path) -> None:
    result = sft(data={"path": rows}, run=tmp_path / "<run>", held_out={"rows": 2}, **SMALL | {"steps": 3})
    assert repr(result) == f"{tmp_path / '<run>'}: finished after 3 steps"
    picture = ElementTree.fromstring(result._repr_svg_())
    texts = [element.text for element in picture.iter("{http://www.w3.org/2000/svg}text")]
    assert texts[0] == repr(result)
    assert "Loss" in texts
    curves = [element.get("points", "").split() for element in picture.iter("{http://www.w3.org/2000/svg}polyline")]
    assert 1 < len(curves) <= 6
    assert {len(points) for points in curves} == {2, 3}, "held-out values before and after, others of each step"
