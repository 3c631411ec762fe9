"""`export: best`: the checkpoint with the best held-out score is kept and exported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from postlude.hf.load import load_model
from postlude.recipes.config.load import ConfigError, load
from postlude.recipes.export import BestCheckpoint
from postlude.recipes.registry import RECIPES
from postlude.recipes.report.summary import read_summary, summary_lines
from postlude.recipes.run.directory import open_run
from postlude.recipes.run.files import read_record
from postlude.recipes.run.start_mode import StartMode
from tests.conftest import Ranks

SETTINGS = ("--budget=128", "--batch_size=4", "--held_out.rows=3", "--held_out.every=1", "--save_every=0")
BEST = (*SETTINGS, "--keep_checkpoints=1", "--loggers=[]", "--export=best")


def run_sft(group: Any, run: str, start: int | None, *overrides: str) -> None:
    RECIPES["sft"].run(load(RECIPES["sft"].config, None, [*BEST, "--run", run, *overrides]), "cpu", StartMode(start))


def weights(path: Path) -> dict[str, torch.Tensor]:
    return dict(load_model(path).named_parameters())


@pytest.mark.slow
def test_best_checkpoint_is_kept_and_exported(ranks: Ranks, tmp_path: Path) -> None:
    rows = [{"prompt": f"{number}+1=", "completion": str(number + 1)} for number in range(16)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data, run = f"--data.path={tmp_path}/rows.jsonl", tmp_path / "run"
    ranks(2, run_sft, str(run), None, data, "--steps=2", "--optimizer.lr=1e-3", "--layout=dp_shard=2")
    assert (read_record(run)["best"]["step"], read_record(run)["exported_step"]) == (2, 2)
    ranks(1, run_sft, str(run), None, data, "--steps=4", "--optimizer.lr=0.3")  # which undoes what was learned
    score = read_summary(run).score
    assert score is not None
    assert (score.best_step, score.last_step) == (2, 4)
    assert read_record(run)["best"] == {"step": 2, "metric": "eval/loss", "value": score.best}
    assert read_record(run)["exported_step"] == 2
    saved = {path.name: weights(path) for path in (run / "checkpoints").iterdir()}
    assert sorted(saved) == ["step-000002", "step-000004"]
    for name, tensor in weights(run / "model").items():
        assert torch.equal(tensor, saved["step-000002"][name])
        assert not torch.equal(tensor, saved["step-000004"][name])
    assert "for 2 steps" in (run / "model" / "README.md").read_text()
    (line,) = (line for line in summary_lines(read_summary(run)) if line.label == "Exported")
    assert (line.text, line.note) == ("step 2", "the best on held-out data")

    ranks(1, run_sft, str(run), 2, data, "--steps=3", "--optimizer.lr=1e-3")  # the better later step replaces it
    assert read_record(run)["best"]["step"] == read_record(run)["exported_step"] == 3
    assert not [line for line in summary_lines(read_summary(run)) if line.label == "Exported"]


def test_best_is_the_first_of_equal_scores_after_the_recipes_first_step(ranks: Ranks, tmp_path: Path) -> None:
    ranks(1, choose, str(tmp_path))


def choose(group: Any, directory: str) -> None:
    with open_run(directory, {"model": "m"}, loggers=()) as run:
        best = BestCheckpoint(kept=True, after=2)
        for step, reward, expected in (
            (2, 9.0, None),
            (4, 0.5, 4),
            (5, 0.5, 4),
            (6, 0.75, 6),
            (7, 0.25, 6),
        ):
            best.update(run, step, {"eval/reward_mean": reward, "eval/loss": 1.0})
            assert best.step == expected


@pytest.mark.parametrize(
    ("command", "override", "sentence"),
    [
        ("sft", "--held_out.rows=0", r"export is best, but held_out\.rows is 0, so no step has a score\. Raise it"),
        ("dpo", "--held_out.every=0", r"held_out\.every is 0"),
        ("grpo", "--evaluation.every=0", r"evaluation\.every is 0"),
    ],
)
def test_best_without_scores_is_refused(command: str, override: str, sentence: str) -> None:
    data = ["--data.path=rows.jsonl", "--held_out.rows=3"] if command != "grpo" else []
    with pytest.raises(ConfigError, match=sentence):
        load(RECIPES[command].config, None, ["--export=best", *data, override])
