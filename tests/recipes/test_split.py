"""A run stores which tasks it holds out; resumed runs and evaluations of its model keep to it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from postlude.cli import main
from postlude.data.datasets import Rows
from postlude.recipes.run.files import read_samples
from postlude.recipes.run.split import FILE, Split
from postlude.rollout.tasks import DatasetTasks, Task, Tasks, hold_out

SMALL = ("--budget=64", "--sampling.max_new_tokens=2", "--loggers=[]", "--environment.kind=dataset")
TRAIN = (*SMALL, "--prompts_per_step=4", "--samples_per_prompt=2", "--save_every=2", "--environment.workers=0")


def sums(path: Path, numbers: Any) -> Path:
    path.write_text("".join(json.dumps({"prompt": f"{n}+1=", "answer": str(n + 1)}) + "\n" for n in numbers))
    return path


def prompts(run: Path, *, after: int = -1) -> set[str]:
    return {sample["prompt"] for sample in read_samples(run) if sample["step"] > after}


def test_held_out_tasks_stay_held_out_whenever_they_are_evaluated(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    run, held_out = tmp_path / "run", {f"{n}+1=" for n in range(10, 14)}
    data = (f"--environment.path={sums(tmp_path / 'p.jsonl', range(14))}", "--environment.reward=exact")
    words = ["grpo", f"--run={run}", *TRAIN, *data, "--evaluation.tasks=4"]
    assert main([*words, "--steps=4", "--evaluation.every=0", "--export=false"]) == 0
    stored = (run / FILE).read_bytes()
    assert main([*words, "--steps=6", "--evaluation.every=2"]) == 0
    assert (run / FILE).read_bytes() == stored
    assert not prompts(run) & held_out, "of 10 others, 24 were trained on"

    backwards = (f"--environment.path={sums(tmp_path / 'b.jsonl', reversed(range(14)))}", "--environment.chat=true")
    measured = ["eval", f"--model={run}/model", *SMALL, *backwards, "--environment.reward=exact", "--tasks=9"]
    assert main([*measured, f"--run={tmp_path}/eval"]) == 0
    assert {prompt for prompt in held_out if any(prompt in text for text in prompts(tmp_path / "eval"))} == held_out
    assert len(prompts(tmp_path / "eval")) == 4
    assert "4 tasks are evaluated" in caplog.text
    capsys.readouterr()
    assert main([*measured, f"--run={tmp_path}/other", "--split_by=row"]) == 2
    assert "has held out tasks by prompt. Set split_by to prompt." in capsys.readouterr().err


def tasks_of(numbers: Any, *, answers: bool = False) -> Tasks:
    rows = [{"prompt": "play" if answers else f"{n}", "answer": n} for n in numbers]
    return DatasetTasks(Rows("p.jsonl", rows, [f"line {place}" for place in range(len(rows))]))


def numbers_of(tasks: Any) -> list[int]:
    return [task.example["answer"] for task in tasks]


def test_an_evaluation_leaves_out_what_the_run_trained_on(tmp_path: Path) -> None:
    tasks = tasks_of(range(10))
    Split.of_tasks(tasks, hold_out(tasks, 3).tasks.identities).write(tmp_path)
    split = Split.read(tmp_path)
    assert split is not None
    assert numbers_of(split.untrained(tasks, 2, "m")) == [8, 9]
    assert numbers_of(split.untrained(tasks_of(reversed(range(10))), 9, "m")) == [9, 8, 7]
    assert numbers_of(split.untrained(tasks_of(range(5, 20)), 99, "m")) == list(range(7, 20)), "other data is new"
    with pytest.raises(ValueError, match="m was trained on all of the 4 tasks, so that none is left to evaluate"):
        split.untrained(tasks_of(range(4)), 9, "m")


def test_rows_of_one_prompt_are_split_by_row(tmp_path: Path) -> None:
    tasks = tasks_of(range(6), answers=True)
    split = Split.of_tasks(tasks, hold_out(tasks, 2, "row").tasks.identities, "row")
    split.write(tmp_path)
    assert Split.read(tmp_path) == split
    assert numbers_of(split.untrained(tasks, 9, "m")) == [4, 5]


class Generated(list[Task]):
    """Tasks that are named by what generates them."""

    source = "sums 0 1000"


def test_generated_tasks_are_known_by_what_generates_them() -> None:
    tasks = Generated(Task(f"{n}", {"answer": n}) for n in range(1000))
    split = Split.of_tasks(tasks, hold_out(tasks, 5).tasks.identities)
    assert not split.tasks, "they are not generated for it"
    assert numbers_of(split.untrained(tasks, 99, "m")) == list(range(995, 1000))
    assert len(split.untrained([Task(f"{n}+1") for n in range(9)], 99, "m")) == 9


def test_a_run_that_would_hold_out_other_tasks_is_refused(tmp_path: Path) -> None:
    before, after = tasks_of(range(10)), tasks_of(reversed(range(10)))
    splits = [Split.of_tasks(tasks, hold_out(tasks, 3).tasks.identities) for tasks in (before, after)]
    splits[0].write(tmp_path)
    splits[0].check_same(tmp_path)
    with pytest.raises(
        ValueError, match="holds out 3 tasks, but this start would hold out 3, of which 3 may have been"
    ):
        splits[1].check_same(tmp_path)
    splits[1].check_same(tmp_path / "new")
