"""A GRPO run: the same in every layout, the same after it was interrupted, and every setting is heard."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from postlude.recipes.config import ConfigError, load, undocumented
from postlude.recipes.grpo import GRPOConfig, GRPOTrainer, run
from postlude.recipes.rollouts import SHOWN
from postlude.recipes.trainer import train
from tests.conftest import Ranks

pytest.importorskip("reasoning_gym", reason="the tasks are reasoning-gym's")

SMALL = """
model: tiny-dense
budget: 256
environment:
  kind: reasoning_gym
  task: chain_sum
  settings: {min_terms: 2, max_terms: 2, min_digits: 1, max_digits: 1}
  template: "{metadata[expression]} = "
  size: 64
warm_start: {steps: 2, examples: 8, optimizer: {lr: 1e-3}}
steps: 3
prompts: 4
samples: 3
answers: {max_new_tokens: 3}
optimizer: {lr: 1e-4}
evaluation: {every: 3, tasks: 4, samples: 2, temperature: 1.0}
save_every: 2
"""


def config_of(directory: Path, *overrides: str) -> GRPOConfig:
    file = directory / "small.yaml"
    file.write_text(SMALL)
    return load(GRPOConfig, file, ["--run", str(directory / "run"), *overrides])


def trained(group: Any, directory: str, *overrides: str) -> list[dict[str, Any]]:
    config = config_of(Path(directory), *overrides)
    run(config)
    return [json.loads(line) for line in (config.run / "metrics.jsonl").read_text().splitlines()]


def without_times(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {key: value for key, value in row.items() if not key.startswith(("time/", "tokens_per_second"))} for row in rows
    ]


def test_a_run_leaves_metrics_samples_checkpoints_and_a_report(ranks: Ranks, tmp_path: Path) -> None:
    (rows,) = ranks(1, trained, str(tmp_path))
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    assert [row["phase"] for row in rows] == ["sft", "sft", "grpo", "grpo", "grpo"]
    assert all(0.0 <= row["reward_mean"] <= 1.0 and len(row["rewards"]) == 12 for row in rows[2:])
    assert rows[2]["rollout_kl"] < 1e-6, "the sampler and the trainer agree"
    assert {"eval/reward_mean", "eval/pass@1", "eval/pass@2"} <= rows[-1].keys()
    assert (tmp_path / "run" / "report.html").stat().st_size > 10_000
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir()) == ["step-000004", "step-000005"]
    assert (tmp_path / "run" / "samples.jsonl").read_text().count("\n") == 3 * SHOWN


@pytest.mark.parametrize("layout", ["pp=2", "tp=2", "cp=2"])
def test_every_layout_gives_the_same_losses(ranks: Ranks, tmp_path: Path, layout: str) -> None:
    for name in ("one", "many"):
        (tmp_path / name).mkdir()
    (alone,) = ranks(1, trained, str(tmp_path / "one"))
    spread, _ = ranks(2, trained, str(tmp_path / "many"), "--layout", layout)
    for expected, found in zip(alone, spread, strict=True):
        assert found["loss"] == pytest.approx(expected["loss"], abs=1e-4, rel=1e-4)
        assert found.get("rewards") == expected.get("rewards")


def interrupted(group: Any, directory: str, at: int, *overrides: str) -> None:
    """Stop as a kill would: in the middle of step `at`, after its rollout."""

    class Stopped(GRPOTrainer):
        def rollout(self) -> Any:
            found = super().rollout()
            if self.step == at:
                raise KeyboardInterrupt
            return found

    with suppress(KeyboardInterrupt):
        train(Stopped(config_of(Path(directory), *overrides), "cpu"))


@pytest.mark.parametrize(
    "settings", [(), ("--objective.kl.coefficient=0.1", "--warm_start.optimizer=sgd", "--save_every=1")], ids=["", "kl"]
)
def test_a_continued_run_is_the_run_that_was_not_interrupted(
    ranks: Ranks, tmp_path: Path, settings: tuple[str, ...]
) -> None:
    for name in ("whole", "parts"):
        (tmp_path / name).mkdir()
    (expected,) = ranks(1, trained, str(tmp_path / "whole"), *settings)
    for at in (3, 4):
        ranks(1, interrupted, str(tmp_path / "parts"), at, *settings)
    (found,) = ranks(1, trained, str(tmp_path / "parts"), *settings)
    assert without_times(found) == without_times(expected)


HEARD = (
    "--advantages=rloo",
    "--advantages=dr_grpo",
    "--advantages=grpo_loo",
    "--objective.entropy=0.1",
    "--minibatches=2",
    "--answers.temperature=0.5",
    "--overlong_penalty=0.5",
    "--seed=1",
    "--dynamic_sampling=2",
)


@pytest.mark.slow
def test_every_setting_is_heard(ranks: Ranks, tmp_path: Path) -> None:
    """Changing one changes the last step."""
    warm = ["--warm_start.steps=30", "--warm_start.optimizer.lr=2e-3", "--samples=8"]  # so that some answers are right
    lasts = {}
    for name in ("", *HEARD):
        directory = tmp_path / (name or "plain")
        directory.mkdir()
        (rows,) = ranks(1, trained, str(directory), *warm, *([name] if name else []))
        lasts[name] = without_times(rows)[-1]
    assert [name for name in HEARD if lasts[name] == lasts[""]] == []


def test_what_cannot_be_is_said(tmp_path: Path) -> None:
    for override, sentence in (
        ("--optimzer.lr=1", 'did you mean "optimizer.lr"'),
        ("--answers.temperature=0", "nothing to compare"),
        ("--objective.temperature=0.5", "answers are drawn at 1"),
        ("--samples=1", "a group needs at least 2 answers"),
        ("--minibatches=3", "does not divide prompts=4"),
        ("--environment.template=5", None),
    ):
        if sentence is None:
            assert config_of(tmp_path, override).environment.template == "5"  # type: ignore[union-attr]
            continue
        with pytest.raises(ConfigError, match=sentence):
            config_of(tmp_path, override)


def test_every_field_is_documented() -> None:
    assert not undocumented(GRPOConfig)
