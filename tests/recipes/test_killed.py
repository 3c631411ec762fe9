"""A GRPO run killed at any point and restarted equals an uninterrupted run bit for bit.

Each kill comes from inside the run, at a moment that `killing.py` waits for; what it left says that it was that moment.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from postlude.recipes.config.load import load
from postlude.recipes.grpo import GRPOConfig
from postlude.recipes.registry import RECIPES
from postlude.recipes.run.outcome import RunOutcome
from tests.commands import run_command
from tests.conftest import PATIENCE, Ranks
from tests.recipes import killing
from tests.rollout import functions

SMALL = """
model: tiny-dense
budget: 256
environment: {{kind: dataset, path: {place}/rows.jsonl, reward: "{functions}:ascii_share", workers: 1}}
warm_start: {{steps: 1, batch_size: 8, optimizer: {{lr: 1e-3}}}}
steps: 4
prompts_per_step: 4
samples_per_prompt: 3
sampling: {{max_new_tokens: 4}}
optimizer: {{lr: 1e-3}}
objective: {{kind: file, file: "{killing}:Killing", settings: {{directory: "{place}"}}}}
reference: true
evaluation: {{every: 3, tasks: 4, samples_per_prompt: 2, temperature: 1.0}}
save_every: 2
keep_checkpoints: 1
"""
# The functions a run is in, the steps it has metrics of, those it has samples of, and its checkpoints. Step 4 is saved
# before it is evaluated and logged.
KILLS = {
    "reference": (("_begin_step", "rename"), [1], [2], []),
    "rollout": (("select_trajectories", "generate"), [1, 2, 3], [2, 3], ["step-000002"]),
    "backward": (("forward_backward", "on_gradient"), [1, 2, 3], [2, 3, 4], ["step-000002"]),
    "save": (
        ("train_and_log_step", "save", "finish"),
        [1, 2, 3],
        [2, 3, 4],
        [".step-000004.partial", "step-000002"],
    ),
    "prune": (("train_and_log_step", "prune"), [1, 2, 3], [2, 3, 4], [".step-000002.deleting", "step-000004"]),
}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A directory with a config and its data."""
    rows = [
        {"prompt": f"{first} + {second} = ", "answer": str(first + second)} for first in range(5) for second in range(4)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = SMALL.format(place=tmp_path, functions=functions.__file__, killing=killing.__file__)
    (tmp_path / "small.yaml").write_text(config)
    return tmp_path


def run_in_process(group: Any, place: str, name: str, *overrides: str) -> RunOutcome:
    return RECIPES["grpo"].run(load(GRPOConfig, Path(place, "small.yaml"), ["--run", f"{place}/{name}", *overrides]))


def run_command_to_end(place: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    """Runs the command. Returns when all its processes have ended, since they hold its pipes."""
    words = ["grpo", "small.yaml", "--run", "parts", *overrides]
    if not overrides:  # a process alone
        return run_command(words, place)
    return subprocess.run(
        [sys.executable, "-m", "postlude", *words],
        cwd=place,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
        timeout=2 * PATIENCE,
    )


def order_kill(place: Path, moment: str, *, victim: str = "rank", step: int = 3, by: str = "SIGKILL") -> None:
    (place / "killed").unlink(missing_ok=True)
    (place / "order").write_text(f"{moment} {victim} {step} {by}")


def lines(path: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
    return [
        {key: value for key, value in row.items() if not key.startswith(("time/", "tokens_per_second"))} for row in rows
    ]


def logged_files(run: Path) -> dict[str, list[dict[str, Any]]]:
    return {name: lines(run / f"{name}.jsonl") for name in ("metrics", "samples")}


def output_files(run: Path) -> dict[str, Any]:
    """Returns every file of the last checkpoint, the reference and the exported model; tensors as bits."""
    files: dict[str, Any] = {}
    for path in (path for name in ("checkpoints", "reference", "model") for path in (run / name).rglob("*")):
        name = str(path.relative_to(run))
        if path.suffix == ".safetensors":
            tensors = load_file(path)
            files |= {f"{name}/{key}": (tensor.dtype, tensor.numpy().tobytes()) for key, tensor in tensors.items()}
        elif path.name == "README.md":
            continue  # the model's card, which says how long it took
        elif path.name == "state.json":
            files[name] = json.loads(path.read_text()) | {"files": None}  # whose headers have no order
            files[name]["extra"].pop("unlogged_step", None)  # has times; its metrics are compared where they are logged
        else:
            files[name] = path.read_bytes() if path.is_file() else None
    return files


def assert_killed(place: Path, moment: str) -> None:
    """Asserts that the kill order was carried out at its moment."""
    functions, *expected = KILLS[moment]
    assert (place / "killed").is_file(), "the moment never came"
    stacks = (place / "killed").read_text()
    assert all(f", in {name}\n" in stacks for name in functions), stacks
    actual = [list(dict.fromkeys(row["step"] for row in rows)) for rows in logged_files(place / "parts").values()]
    assert [*actual, sorted(path.name for path in (place / "parts" / "checkpoints").iterdir())] == expected
    for name, rows in logged_files(place / "parts").items():
        assert rows == logged_files(place / "whole")[name][: len(rows)]


def assert_runs_equal(place: Path) -> None:
    """Asserts that the interrupted run equals the uninterrupted one, which trained on something."""
    whole_run, parts = logged_files(place / "whole"), logged_files(place / "parts")
    assert parts == whole_run
    assert [row["step"] for row in whole_run["metrics"] if row["grad_norm"] > 0.0] == [1, 2, 3, 4, 5]
    expected, actual = output_files(place / "whole"), output_files(place / "parts")
    assert actual.keys() == expected.keys()
    assert [name for name in expected if actual[name] != expected[name]] == []


@pytest.mark.slow
def test_a_run_that_is_killed_repeatedly_resumes(ranks: Ranks, place: Path) -> None:
    ranks(1, run_in_process, str(place), "whole")
    for moment, step in (("reference", 1), ("rollout", 3), ("backward", 2), ("save", 2), ("prune", 2)):
        order_kill(place, moment, step=step)
        with pytest.raises(pytest.fail.Exception, match="rank 0 died"):
            ranks(1, run_in_process, str(place), "parts")
        assert_killed(place, moment)
    ranks(1, run_in_process, str(place), "parts")
    assert_runs_equal(place)


@pytest.mark.thorough  # on one rank above; that all end when one is killed, in tests/engine/test_failure.py
def test_killing_one_rank_or_the_launcher_ends_all_ranks_and_the_run_resumes(ranks: Ranks, place: Path) -> None:
    ranks(2, run_in_process, str(place), "whole", "--layout=pp=2")
    for victim, step, code, words in (
        ("rank", 3, 1, "postlude grpo: rank 1 of 2 was killed by SIGKILL.\n"),
        ("launcher", 2, -signal.SIGKILL, ""),
    ):
        order_kill(place, "backward", victim=victim, step=step)
        ended = run_command_to_end(place, "--layout=pp=2")
        assert time.time() - (place / "killed").stat().st_mtime < killing.HEARING, "ranks went on"
        assert (ended.returncode, ended.stderr[-len(words) :] if words else "") == (code, words), ended.stderr
        assert_killed(place, "backward")
    done = run_command_to_end(place, "--layout=pp=2")
    assert done.returncode == 0, done.stderr
    assert_runs_equal(place)


def signalled_run(place: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    ended = run_command_to_end(place, *overrides)
    assert (place / "killed").is_file(), f"the moment never came: {ended.stderr}"
    assert "Traceback" not in ended.stderr
    return ended


@pytest.mark.slow
@pytest.mark.parametrize(
    "by",
    [
        signal.SIGTERM,
        pytest.param(signal.SIGHUP, marks=pytest.mark.thorough),
        pytest.param(signal.SIGUSR1, marks=pytest.mark.thorough),
    ],
)
def test_a_signalled_run_finishes_its_step_saves_and_resumes(ranks: Ranks, place: Path, by: signal.Signals) -> None:
    ranks(1, run_in_process, str(place), "whole")
    order_kill(place, "backward", step=2, by=by.name)
    ended = signalled_run(place)
    words = f"postlude grpo: {by.name} ended the run after step 3, which is saved; resume with: postlude grpo "
    assert ended.stderr.splitlines()[-1] == f"{words}small.yaml --run parts", ended.stderr
    assert ended.returncode == 128 + by
    assert [path.name for path in (place / "parts" / "checkpoints").iterdir()] == ["step-000003"]
    assert not (place / "parts" / "model").exists()
    (done,) = ranks(1, run_in_process, str(place), "parts")
    assert done.status == "finished"
    assert_runs_equal(place)


@pytest.mark.thorough  # of one rank above; that a launcher hands signals on, in tests/test_launcher.py
@pytest.mark.slow
def test_all_ranks_stop_if_one_rank_or_the_launcher_gets_a_signal(ranks: Ranks, place: Path) -> None:
    ranks(2, run_in_process, str(place), "whole", "--layout=pp=2")
    order_kill(place, "backward", step=2, by="SIGTERM")
    endings = ranks(2, run_in_process, str(place), "parts", "--layout=pp=2")
    assert [(ending.status, ending.step, ending.exit_code) for ending in endings] == [("interrupted", 3, 143)] * 2
    order_kill(place, "backward", victim="launcher", step=1, by="SIGINT")
    ended = signalled_run(place, "--layout=pp=2")
    assert "SIGINT ended the run after step 4, which is saved" in ended.stderr.splitlines()[-1], ended.stderr
    assert ended.returncode == 130
    assert {outcome.status for outcome in ranks(2, run_in_process, str(place), "parts", "--layout=pp=2")} == {
        "finished"
    }
    assert_runs_equal(place)
