"""--overwrite deletes a run and starts afresh, and refuses what is no run, is in use, or is read by the new run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from postlude.cli import main
from postlude.recipes import sft
from postlude.recipes.run.lock import RunLock
from postlude.recipes.run.start_mode import resume_command


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"{n}+1=", "completion": str(n + 1)}) + "\n" for n in range(6)))
    options = {"data.path": rows, "run": tmp_path / "run", "budget": 128, "batch_size": 2, "steps": 1, "loggers": "[]"}
    return ["sft", *(f"--{name}={value}" for name, value in options.items()), "--save_every=0", "--export=false"]


def test_run_is_replaced_once_the_new_config_is_checked(
    tmp_path: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert main(words) == 0
    (run / "notes.txt").write_text("of the old run")
    assert main([*words, "--seed=1"]) == 2
    assert "belongs to another run: seed is 0 there and 1 here" in capsys.readouterr().err
    assert main([*words, "--seed=1", "--layout=tp=3", "--overwrite"]) == 2
    assert (run / "notes.txt").exists()
    assert main([*words, "--seed=1", "--overwrite"]) == 0
    assert not (run / "notes.txt").exists()
    assert len(json.loads((run / "run.json").read_text())["starts"]) == 1


def test_real_mistake_is_reported_before_the_other_run(
    tmp_path: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 0
    capsys.readouterr()
    assert main([*words, "--seed=1", "--layout=tp=3"]) == 2
    first, *_, last = capsys.readouterr().err.strip().splitlines()
    assert "tp=3" in first
    assert "belongs to another run" not in first
    assert "belongs to another run" in last


@pytest.mark.parametrize(
    ("more", "refusal"),
    [
        ([], "is no run directory"),
        (["--resume-from=1"], "Give one of them"),
    ],
)
def test_what_is_no_run_is_not_deleted(
    tmp_path: Path, words: list[str], capsys: pytest.CaptureFixture[str], more: list[str], refusal: str
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.tex").write_text("")
    assert main([*words, "--overwrite", *more]) == 2
    assert refusal in capsys.readouterr().err
    assert (tmp_path / "run" / "thesis.tex").exists()


def test_live_run_and_one_that_is_read_are_not_deleted(
    tmp_path: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert main(words) == 0
    inside = run / "rows.jsonl"
    inside.write_bytes((tmp_path / "rows.jsonl").read_bytes())
    assert main([*words, f"--data.path={inside}", "--overwrite"]) == 2
    assert f"data.path is {inside}, in the run that --overwrite would delete" in capsys.readouterr().err
    lock = RunLock(run)
    assert main([*words, "--overwrite"]) == 2
    assert "is in use by process" in capsys.readouterr().err
    lock.release()
    assert (run / "config.yaml").exists()


def test_command_that_resumes_does_not_overwrite() -> None:
    assert resume_command(["sft", "my.yaml", "--overwrite", "--steps=2"]) == "postlude sft my.yaml --steps=2"


def test_call_overwrites_too(tmp_path: Path) -> None:
    options: dict[str, Any] = {"budget": 128, "batch_size": 2, "steps": 1, "loggers": [], "save_every": 0}
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "1+1=", "completion": "2"}) + "\n")
    options |= {"run": tmp_path / "run", "data": {"path": rows}, "export": False}
    sft(**options)
    assert sft(**options, seed=1, overwrite=True).outcome.status == "finished"
