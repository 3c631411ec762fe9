"""Calls take functions and rows themselves, of a notebook or a closure too, and continue when they are repeated."""

from __future__ import annotations

import functools
import json
import linecache
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from postlude.cli import main
from postlude.recipes import evaluate, grpo, sft
from postlude.recipes.config.raw import ConfigError
from postlude.recipes.run.files import read_config, read_metrics
from postlude.rollout.function_reward import FunctionReward
from postlude.user_code import CallFunction, UserCodeError

ROWS = [{"prompt": f"{number}+1=", "completion": str(number + 1), "answer": str(number + 1)} for number in range(6)]
SMALL: dict[str, Any] = {"budget": 128, "batch_size": 2, "steps": 2, "save_every": 1, "loggers": [], "export": False}


def length_reward(target: int) -> Callable[[str], float]:
    def reward(completion: str) -> float:
        return 1.0 - abs(len(completion) - target)

    return reward


def policy(run: Path, reward: Any, **settings: Any) -> dict[str, Any]:
    return {
        "run": run, "budget": 64, "steps": 1, "prompts_per_step": 2, "samples_per_prompt": 2, "loggers": [],
        "export": False, "evaluation": {"every": 0}, "sampling": {"max_new_tokens": 4},
        "environment": {"kind": "dataset", "path": ROWS, "workers": 1, "rewards": {"long": reward}},
    } | settings  # fmt: skip


def test_closure_is_a_reward_and_the_same_call_continues_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert grpo(**policy(run, length_reward(3))).outcome.step == 1
    config = read_config(run)
    assert config["environment"]["rewards"]["long"]["function"] == "call:reward"
    assert Path(config["environment"]["path"]).parent == run / "rows"
    assert grpo(**policy(run, length_reward(3), steps=2)).outcome.step == 2
    changed = (
        r'the function reward \(environment.rewards.long.function\) changed since .* pass file_changes="allow" to '
    )
    with pytest.raises(ValueError, match=changed) as refused:
        grpo(**policy(run, length_reward(4), steps=3))
    assert "--" not in str(refused.value)
    assert "file " not in str(refused.value)
    capsys.readouterr()
    assert main(["grpo", str(run / "config.yaml"), "--steps=3"]) == 2
    error = capsys.readouterr().err
    assert "call:reward is a function that a call from Python was given" in error
    assert error.count("\n") == 1


def test_environments_of_a_list_take_functions_and_rows(tmp_path: Path) -> None:
    short = {"kind": "function", "function": length_reward(1)}
    environments = [
        {"kind": "dataset", "path": ROWS[:4], "reward": length_reward(3), "workers": 0},
        {"kind": "dataset", "path": ROWS[4:], "rewards": {"short": short}, "workers": 0},
    ]
    assert grpo(**policy(tmp_path / "run", None, environment=environments)).outcome.step == 1
    first, second = read_config(tmp_path / "run")["environment"]["environments"]
    assert [first["reward"], second["rewards"]["short"]["function"]] == ["call:reward"] * 2
    lines = [Path(part["path"]).read_text().splitlines() for part in (first, second)]
    assert [[json.loads(line) for line in part] for part in lines] == [ROWS[:4], ROWS[4:]]


def test_rows_of_any_kind_are_those_of_a_file(tmp_path: Path) -> None:
    class Dataset:  # as datasets.Dataset
        def __iter__(self) -> Any:
            return iter(ROWS)

    class Table:  # as polars.DataFrame
        def __iter__(self) -> Any:
            raise AssertionError("its iterator gives columns")

        def to_dicts(self) -> Any:
            return ROWS

    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    expected = [row["loss"] for row in read_metrics(sft(data={"path": file}, run=tmp_path / "file", **SMALL).run)]
    for name, data in {
        "list": ROWS,
        "generator": (row for row in ROWS),
        "path": {"path": tuple(ROWS)},
        "text": str(file),
        "path of a file": file,
        "dataset": Dataset(),
        "table": Table(),
    }.items():
        result = sft(data=data, run=tmp_path / name, **SMALL)
        assert [row["loss"] for row in result.metrics] == expected
    assert sft(data=ROWS, run=tmp_path / "list", **SMALL).outcome.step == 2
    with pytest.raises(ValueError, match=r"belongs to another run: data\.path is"):
        sft(data=ROWS[1:], run=tmp_path / "list", **SMALL)
    assert len(list((tmp_path / "list" / "rows").iterdir())) == 1


def test_rows_that_cannot_be_written_and_mistakes_leave_nothing(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "run"
    with pytest.raises(TypeError, match="row 1 of data is a str, but a row is a mapping"):
        sft(data=[*ROWS[:1], "text"], run=run, **SMALL)
    with pytest.raises(TypeError, match=r"row 0 of evaluation.sets.a.environment.path cannot be written as JSON"):
        grpo(evaluation={"sets": {"a": {"environment": {"path": [{"prompt": object()}]}}}}, run=run)
    with pytest.raises(ValueError, match=r"^data is given no rows\. Give at least one"):
        sft(data=[], run=run, **SMALL)
    with pytest.raises(TypeError, match="on_step is 3, but it is a function"):
        sft(data=ROWS, run=run, on_step=3, **SMALL)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match='has no column "messages"'):
        sft(data=[{"question": "1+1"}], run=run, **SMALL)
    with pytest.raises(ValueError, match="an evaluation has none"):
        evaluate(on_step=print, run=run)
    with pytest.raises(ConfigError, match='config key "steps" is a object in the call'):
        sft(data=ROWS, run=run, steps=object())
    assert not run.parent.exists()


def test_on_step_sees_every_step_and_ends_the_run(tmp_path: Path) -> None:
    losses: list[float] = []

    def on_step(step: int, metrics: Any) -> bool:
        losses.append(metrics["loss"])
        return step == 1

    result = sft(data=ROWS, run=tmp_path / "run", on_step=on_step, **SMALL | {"steps": 3, "save_every": 0})
    assert (result.outcome.status, result.outcome.step) == ("finished", 1)
    result = sft(data=ROWS, run=tmp_path / "run", on_step=on_step, **SMALL | {"steps": 3, "save_every": 0})
    assert (result.outcome.step, losses) == (3, [row["loss"] for row in result.metrics])


def test_functions_reach_other_processes(tmp_path: Path) -> None:
    sent = pickle.loads(pickle.dumps(CallFunction(length_reward(2))))
    assert (str(sent), sent.function("abc")) == ("call:reward", 0.0)
    assert sent.digest == CallFunction(length_reward(2)).digest != CallFunction(length_reward(3)).digest
    lock = threading.Lock()
    with pytest.raises(ValueError, match="cannot be sent to another process, because of what it uses: TypeError"):
        FunctionReward(lambda completion: float(lock.locked()), workers=1)
    with pytest.raises(UserCodeError, match="put the function at the top of a file"):
        pickle.dumps(CallFunction(lambda completion: float(lock.locked())))


def cell(source: str) -> dict[str, Any]:
    """Runs the source of a notebook's cell."""
    name = f"<cell {hash(source)}>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(source, name, "exec"), namespace)
    return namespace


def test_digest_follows_what_a_cell_defines() -> None:
    source = "BONUS = 1\ndef helper(text):\n    return len(text)\n"
    source += "def reward(completion):\n    return helper(completion) + BONUS\n"
    digest = CallFunction(cell(source)["reward"]).digest
    assert CallFunction(cell(source)["reward"]).digest == digest
    changed = [source.replace("BONUS = 1", "BONUS = 2"), source.replace("len(text)", "len(text) + 1")]
    assert digest not in [CallFunction(cell(text)["reward"]).digest for text in changed]
    digests = {CallFunction(functools.partial(pow, 2, mod=mod)).digest for mod in (5, 6)}
    assert len(digests) == 2
