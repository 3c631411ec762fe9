"""A run that cannot train ends with exit code 1 and a reason; a run that hardly trains logs a warning."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable
from pathlib import Path

import pytest

from postlude.cli import main
from postlude.recipes.config.settings import RunLimits
from postlude.recipes.run.health import CRITIC, Health, UnhealthyRun
from postlude.recipes.run.outcome import read_outcome
from postlude.rollout.conversations import Trajectory
from postlude.rollout.environments import Transcript
from postlude.rollout.rewards import Score
from postlude.rollout.tasks import Task

LIMITS = RunLimits(failed_rewards=0.5, weight_growth=10.0, entropy=0.1, patience=2)

JUDGE = """
def judge(prompt, completion, example):
    if example["answer"] == "1":  # so that a trial call goes through
        return 1.0
    raise KeyError("gone")
"""


def health(*, verbose: bool = True) -> Health:
    watched = Health(LIMITS, max_skipped_steps=1, verbose=verbose)
    watched.set_initial_weights(2.0, "model")
    return watched


def results(*rewards: float | str, samples: int = 2) -> list[Trajectory]:
    """Returns completions in groups of two; a text is the error of a failed reward."""
    scores = [Score(0.0, {}, reward) if isinstance(reward, str) else Score(reward) for reward in rewards]
    return [
        Trajectory(Task("p", {}, "task"), place // samples, (Transcript([1]),), score=score)
        for place, score in enumerate(scores)
    ]


@pytest.mark.parametrize(
    ("steps", "sentence"),
    [
        (
            [results("broken", "broken")],
            "all 2 rewards of step 1 failed, and none before succeeded; the last error: broken. Fix the",
        ),
        (
            [results(1.0, "odd"), *[results(1.0, "broken", "broken", "broken")] * 2],
            r"75% of the rewards of step 3 failed, and more than limits.failed_rewards=0.5 in 2 steps in a row; "
            r"the last error: broken\. Fix the reward function, or raise that limit",
        ),
    ],
)
def test_failing_rewards_end_a_run(steps: list[list[Trajectory]], sentence: str) -> None:
    watched = health()
    for number, drawn in enumerate(steps[:-1], start=1):
        watched.check_rewards(drawn, number)
    with pytest.raises(UnhealthyRun, match=sentence):
        watched.check_rewards(steps[-1], len(steps))


def test_occasional_reward_failures_do_not_end_a_run() -> None:
    watched = health()
    for number, drawn in enumerate([results(1.0, 0.0), results("x", "x"), results(1.0, "x"), results("x", "x")]):
        watched.check_rewards(drawn, number)


@pytest.mark.parametrize(
    ("check", "sentence"),
    [
        (
            lambda watched: watched.check_update(math.nan, False, 7),
            "not finite in 2 optimizer steps in a row, up to step 7",
        ),
        (lambda watched: watched.check_update(1.0, True, 7), "max_skipped_steps is 1. Lower optimizer.lr"),
        (lambda watched: watched.check_weights(math.nan, 7), "the weights are not finite after step 7"),
        (
            lambda watched: watched.check_weights(21.0, 7),
            "10.5 times as large as at the start; limits.weight_growth is",
        ),
    ],
)
def test_exploding_metrics_end_a_run(check: Callable[[Health], None], sentence: str) -> None:
    watched = health()
    watched.check_update(1.0, True, 1)
    watched.check_update(1.0, False, 2)
    watched.check_update(math.inf, False, 6)
    watched.check_weights(19.0, 6)
    with pytest.raises(UnhealthyRun, match=sentence):
        check(watched)


def test_skipped_steps_of_a_critic_are_counted_beside_those_of_the_policy() -> None:
    watched = health()
    watched.check_update(math.nan, True, 1, CRITIC)
    watched.check_update(1.0, False, 1)
    with pytest.raises(UnhealthyRun, match="of the critic was not finite in the last optimizer step"):
        watched.check_last_update(1)
    with pytest.raises(UnhealthyRun, match="of the critic was not finite in 2 optimizer steps in a row"):
        watched.check_update(math.nan, True, 2, CRITIC)


def test_a_checkpoint_restores_the_initial_weight_norm_and_skipped_steps() -> None:
    watched, resumed = health(), health()
    watched.check_update(math.nan, True, 1)
    resumed.restore(watched.state())
    with pytest.raises(UnhealthyRun, match="2 optimizer steps in a row"):
        resumed.check_update(math.nan, True, 2)
    with pytest.raises(UnhealthyRun, match=r"10\.5 times as large"):
        resumed.check_weights(21.0, 2)


def test_a_resumed_run_knows_that_rewards_succeeded_before() -> None:
    watched, resumed = health(), health()
    watched.check_rewards(results(1.0, 0.0), 1)
    resumed.restore(watched.state())
    resumed.check_rewards(results("broken", "broken"), 2)
    with pytest.raises(UnhealthyRun, match="in 2 steps in a row"):
        resumed.check_rewards(results("broken", "broken"), 3)


@pytest.mark.parametrize("norm", [math.nan, math.inf])
def test_a_model_whose_weights_are_not_finite_is_refused(norm: float) -> None:
    with pytest.raises(ValueError, match=rf"the weights of model are not finite: their norm is {norm:g}"):
        health().set_initial_weights(norm, "model")


def test_zero_entropy_and_equal_rewards_give_warnings(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING, "postlude")
    watched, silent = health(), health(verbose=False)
    for step, entropy in enumerate([0.05, 0.2, 0.05, 0.05, 0.05], start=1):
        for checked in (watched, silent):
            checked.check_step({"entropy": entropy}, step)
            checked.check_step({"loss": 1.0}, step) if step < 3 else None
            checked.check_rewards(results(1.0, 1.0, 0.0, float(step == 1)), step)
    messages = [record.getMessage() for record in caplog.records]
    assert [words.split(":")[0] for words in messages] == [
        "for 2 steps, up to 3, all completions of a prompt had the same reward, and nothing was learned",
        "the policy's entropy is 0.05 at step 4, below limits.entropy=0.1",
    ]


def test_excluded_completions_do_not_hide_equal_rewards(caplog: pytest.LogCaptureFixture) -> None:
    watched, excluded = health(), Score(0.0, excluded=True)
    lost = Trajectory(Task("p", {}, "task"), 0, (Transcript([1]),), score=excluded)
    for step in (1, 2):
        watched.check_rewards([*results(1.0, 1.0), lost], step)
    assert "all completions of a prompt had the same reward" in caplog.text


def test_mostly_truncated_completions_give_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "postlude")
    watched, silent = health(), health(verbose=False)
    for step, truncated in enumerate([0.5, 0.75, 1.0], start=1):
        for checked in (watched, silent):
            checked.check_step({"truncated": truncated}, step)
    (message,) = caplog.messages
    assert message.startswith("75% of the completions of step 2 were cut off at sampling.max_new_tokens: raise it")


def rows(directory: Path) -> str:
    path = directory / "rows.jsonl"
    path.write_text(
        "".join(json.dumps({"prompt": f"{number}+1=", "completion": str(number + 1)}) + "\n" for number in range(8))
    )
    return f"--data.path={path}"


@pytest.mark.slow
def test_exploding_weights_end_a_run_and_the_last_checkpoint_is_checked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    run = tmp_path / "run"
    words = ["sft", "--run", str(run), rows(tmp_path), "--budget=64", "--batch_size=4", "--save_every=1"]
    assert main([*words, "--steps=2", "--export=false"]) == 0
    assert main([*words, "--steps=9", "--optimizer.lr=100"]) == 1
    message = capsys.readouterr().err.splitlines()[-1]
    assert (
        "times as large as at the start; limits.weight_growth is 100. Lower optimizer.lr. step-000002 is complete"
        in message
    )
    assert message.endswith("--steps=9 --optimizer.lr=100. Nothing was exported.")
    assert not (run / "model").exists()
    ending = read_outcome(run)
    assert ending is not None
    assert (ending.status, ending.step, ending.exit_code) == ("failed", 3, 1)
    assert [path.name for path in (run / "checkpoints").iterdir() if path.name > "step-000002"] == []

    newest = run / "checkpoints" / "step-000002"
    part = next(newest.glob("*.safetensors"))
    part.write_bytes(part.read_bytes()[:-1])
    assert main([*words, "--steps=2", "--export=false"]) == 0
    (message,) = [record.getMessage() for record in caplog.records if "damaged" in record.getMessage()]
    assert "step-000002 is damaged: part-00000.safetensors is not what was saved there." in message
    assert message.endswith("The checkpoint before it is loaded, and later steps are repeated.")
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == [
        "step-000001",
        "step-000002",
        "step-000002.damaged",
    ]


@pytest.mark.slow
def test_a_reward_that_always_fails_ends_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "judge.py").write_text(JUDGE)
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps({"prompt": f"{number}=", "answer": str(number)}) + "\n" for number in (1, 2, 3, 4, 5))
    )
    words = ["grpo", "--run", str(tmp_path / "run"), "--environment=dataset", "--environment.workers=0"]
    words += [f"--environment.path={tmp_path / 'rows.jsonl'}", f"--environment.reward={tmp_path / 'judge.py'}:judge"]
    words += ["--budget=64", "--prompts_per_step=2", "--samples_per_prompt=2", "--steps=9"]
    words += ["--sampling.max_new_tokens=2"]
    assert main([*words, "--evaluation.every=0", "--limits.patience=2", "--limits.failed_rewards=0.4"]) == 1
    message = capsys.readouterr().err.splitlines()[-1]
    assert "rewards" in message
    assert "KeyError: 'gone'" in message
    assert message.endswith("No checkpoint was saved, and nothing was exported.")
