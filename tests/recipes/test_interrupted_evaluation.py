"""An evaluation never holds back a save: whatever ends it, its step is saved, and resuming repeats the evaluation."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from postlude.data import Batch
from postlude.generate import distributed
from postlude.generate.protocol import FinishedCompletion
from postlude.objectives import Objective
from postlude.recipes.grpo import GRPOTrainer
from postlude.recipes.run.directory import RunDirectory, checkpoint_step
from postlude.recipes.run.files import read_metrics
from postlude.recipes.run.outcome import RunOutcome
from postlude.recipes.run.signals import StopRequested
from postlude.recipes.supervised import SFTTrainer
from postlude.recipes.trainer import StepMetrics
from postlude.recipes.training_run import run_training
from postlude.serving.errors import ServerError
from tests.conftest import Ranks
from tests.recipes.test_grpo import config_of as grpo_config
from tests.recipes.test_rollout_engine import SHORT
from tests.recipes.test_supervised import config_of

CONFIG = ("--save_every=0", "--export=false", "--loggers=[]")
ENDS = {
    "signal in the training step": (
        "interrupted",
        "SIGTERM ended the run after step 2, which is saved; resuming evaluates it",
    ),
    "signal": ("interrupted", "after step 2, which is saved; resuming evaluates it"),
    "servers lost": ("failed", "step-000002 is complete"),
    "killed after a save": None,
}


class SamplingTrainer(GRPOTrainer):
    """Gets a signal while it samples, for its second evaluation."""

    signalled = False

    def evaluate(self) -> dict[str, float]:
        engine = self.rollout_sampler.rollout_engine
        if self.signalled and self.step == 2:
            poll = engine.poll

            def poll_with_signal(timeout: float | None = 0.0) -> list[FinishedCompletion]:
                self.signals.received = signal.SIGUSR1
                return poll(timeout)

            engine.poll = poll_with_signal  # type: ignore[method-assign]
        return super().evaluate()


class EndingTrainer(SFTTrainer):
    """Ends in the evaluation after its second step, of four."""

    end = ""

    def train_batch(self, batch: Batch, objective: Objective) -> StepMetrics:
        if self.end == "signal in the training step" and self.step == 1:
            self.signals.received = signal.SIGTERM
        return super().train_batch(batch, objective)

    def evaluate(self) -> dict[str, float]:
        if self.end and self.step == 2:
            if self.end == "signal":
                raise StopRequested(signal.SIGTERM)
            if self.end == "servers lost":
                raise ServerError("no server answers.")
            raise KeyboardInterrupt
        return super().evaluate()


def run(group: Any, directory: str, end: str, *options: str) -> RunOutcome | None:
    trainer = EndingTrainer(config_of("sft", Path(directory), *CONFIG, *options), "cpu")
    trainer.end = end
    try:
        return run_training(trainer)
    except KeyboardInterrupt:
        return None


def rows(directory: Path) -> list[dict[str, Any]]:
    return [
        {key: value for key, value in row.items() if not key.startswith(("time/", "tokens_per_second"))}
        for row in read_metrics(directory / "run")
    ]


@pytest.fixture(scope="module")
def uninterrupted(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    directory = tmp_path_factory.mktemp("uninterrupted")
    ranks(1, run, str(directory), "")
    return rows(directory)


@pytest.mark.parametrize("end", ENDS)
def test_the_step_before_an_evaluation_is_saved_and_the_evaluation_repeated(
    ranks: Ranks, tmp_path: Path, uninterrupted: list[dict[str, Any]], end: str
) -> None:
    options = ("--save_every=2",) if end == "killed after a save" else ()
    (outcome,) = ranks(1, run, str(tmp_path), end, *options)
    if (expected := ENDS[end]) is not None:
        assert outcome is not None
        assert (outcome.status, outcome.step) == (expected[0], 2)
        assert expected[1] in outcome.message
    assert [checkpoint_step(path) for path in RunDirectory(tmp_path / "run").checkpoints()] == [2]
    ranks(1, run, str(tmp_path), "", *options)
    assert rows(tmp_path) == uninterrupted


def test_an_evaluation_after_a_save_is_not_repeated(
    ranks: Ranks, tmp_path: Path, uninterrupted: list[dict[str, Any]]
) -> None:
    ranks(1, run, str(tmp_path), "", "--save_every=2", "--steps=2")
    before = read_metrics(tmp_path / "run")[:3]
    ranks(1, run, str(tmp_path), "", "--save_every=2", "--steps=4")
    assert read_metrics(tmp_path / "run")[:3] == before


def run_sampling(group: Any, directory: str, signalled: bool) -> RunOutcome:
    options = ("--evaluation.tasks=2", "--evaluation.every=2", "--layout=dp_shard=2", "--steps=3")
    trainer = SamplingTrainer(grpo_config(Path(directory), *SHORT, *CONFIG, *options), "cpu")
    trainer.signalled = signalled
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distributed, "POLL_SECONDS", 0.0)  # so an evaluation has several polls
        return run_training(trainer)


@pytest.mark.slow
def test_a_signal_ends_an_evaluation_that_the_ranks_sample(ranks: Ranks, tmp_path: Path) -> None:
    pytest.importorskip("reasoning_gym", reason="the tasks are reasoning-gym's")
    for directory, signalled in (("whole", False), ("parts", True), ("parts", False)):
        (tmp_path / directory).mkdir(exist_ok=True)
        outcome, _ = ranks(2, run_sampling, str(tmp_path / directory), signalled)
        if signalled:
            assert (outcome.status, outcome.step) == ("interrupted", 2)
            assert "SIGUSR1 ended the run after step 2, which is saved; resuming evaluates it" in outcome.message
    assert rows(tmp_path / "parts") == rows(tmp_path / "whole")
