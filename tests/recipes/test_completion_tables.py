"""`save_completions`: all completions of a run as Parquet, each once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from postlude.recipes.config.load import load
from postlude.recipes.registry import RECIPES
from postlude.recipes.run import completion_tables
from postlude.recipes.run.completion_tables import CompletionRow, CompletionTables, check_completion_tables
from postlude.recipes.run.files import read_metrics
from postlude.recipes.run.start_mode import StartMode
from tests.conftest import Ranks

parquet: Any = pytest.importorskip("pyarrow.parquet")
SETTINGS = ("--budget=128", "--loggers=[]", "--export=false", "--save_every=1")
ENVIRONMENT = ("environment.kind=dataset", "environment.reward=exact", "environment.workers=0")
SAMPLING = ("samples_per_prompt=6", "sampling.max_new_tokens=3", "save_completions=true")
RECIPE_SETTINGS = {
    "grpo": ("--evaluation.every=0", "--prompts_per_step=2", *(f"--{word}" for word in (*ENVIRONMENT, *SAMPLING))),
    "distill": (
        "--teacher=tiny-dense",
        "--batch_size=2",
        *(f"--data.{word}" for word in ("kind=on_policy", *ENVIRONMENT, *SAMPLING)),
    ),
}
RECIPE_SETTINGS["ppo"] = RECIPE_SETTINGS["grpo"]


def run_recipe(group: Any, recipe: str, directory: str, start: int | None) -> None:
    path = "data.environment.path" if recipe == "distill" else "environment.path"
    options = [*SETTINGS, *RECIPE_SETTINGS[recipe], f"--{path}={directory}/sums.jsonl", f"--run={directory}/run"]
    RECIPES[recipe].run(load(RECIPES[recipe].config, None, [*options, "--steps=2"]), "cpu", StartMode(start))


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["grpo", "ppo", "distill"])
def test_all_completions_are_saved_once(ranks: Ranks, tmp_path: Path, recipe: str) -> None:
    sums = [{"prompt": f"{number}+1=", "answer": str(number + 1)} for number in range(8)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in sums))
    ranks(1, run_recipe, recipe, str(tmp_path), None)
    expected = parquet.read_table(tmp_path / "run" / "completions").to_pylist()
    assert [row["step"] for row in expected] == [1] * 12 + [2] * 12, "more than the samples of the report"
    assert {row["prompt"] for row in expected} <= {row["prompt"] for row in sums}
    for line in read_metrics(tmp_path / "run"):
        rows = [row for row in expected if row["step"] == line["step"]]
        assert [row["reward"] for row in rows] == line["rewards"]
        assert [len(row["tokens"]) for row in rows] == [len(row["logprobs"]) for row in rows] == line["lengths"]
        assert [row["group"] for row in rows] == [rows[0]["group"]] * 6 + [rows[6]["group"]] * 6
    ranks(1, run_recipe, recipe, str(tmp_path), 1)
    assert parquet.read_table(tmp_path / "run" / "completions").to_pylist() == expected


def test_later_steps_are_dropped_and_texts_that_are_not_utf8_are_escaped(tmp_path: Path) -> None:
    tables = CompletionTables(tmp_path / "completions")
    for step in (1, 2, 10):
        tables.write(step, [CompletionRow(step, 0, "", "p", "\ud83d", None, {"exact": 1.0}, False, [5], [-0.5])])
    tables.drop_after(1)
    (row,) = parquet.read_table(tmp_path / "completions").to_pylist()
    assert (row["step"], row["completion"], row["reward"]) == (1, "\\ud83d", None)
    assert dict(row["components"]) == {"exact": 1.0}


def test_missing_package_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(completion_tables, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pyarrow is missing\. Run `pip install 'postlude\[parquet\]'`"):
        check_completion_tables()
