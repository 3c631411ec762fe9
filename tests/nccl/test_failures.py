"""A rank that raises, is killed or is late over NCCL is named in one sentence, and no other line is printed."""

from __future__ import annotations

import os
import signal
import time

import pytest

from postlude import AdamW, Engine, Layout, Loss, OutputInputs
from postlude.world.failure_report import RankError
from postlude.world.launcher import launch
from tests.engine.training import batch, config


def fail(fault: str, failing_rank: int, layout: str) -> None:
    """Two steps; in the second, rank `who` does not do what the others wait for."""
    engine = Engine(config("tiny-dense"), layout=Layout.parse(layout), optimizer=AdamW(lr=1e-3), budget=32)
    rank = int(os.environ["RANK"])

    def objective(inputs: OutputInputs) -> Loss:
        return Loss(-inputs.head.logprobs(inputs.hidden, inputs.microbatch.targets).logprob)

    engine.forward_backward(batch(0), objective)
    engine.optimizer_step()
    if rank == failing_rank:
        if fault == "raises":
            raise ValueError("no such column")
        if fault == "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)
    engine.forward_backward(batch(1), objective)
    engine.optimizer_step()


@pytest.mark.parametrize(
    ("fault", "layout", "sentence"),
    [
        ("raises", "pp=2", "rank 1 of 2 failed: ValueError: no such column"),
        ("is killed", "dp_shard=2", "rank 1 of 2 was killed by SIGKILL."),
        ("is late", "pp=2", "rank 1 of 2 did not come: it is in fail "),
    ],
)
def test_it_is_named_and_all_end(fault: str, sentence: str, layout: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RankError) as failure:
        launch(fail, fault, 1, layout, nproc=2, timeout=20.0, backend="nccl", device="cuda")
    assert str(failure.value).startswith(sentence)
    _assert_quiet(capfd)


def steps(layout: str) -> float:
    engine = Engine(config("tiny-moe"), layout=Layout.parse(layout), optimizer=AdamW(lr=1e-3), budget=32)
    losses = [engine.forward_backward(batch(seed), _nll).loss for seed in range(2)]
    engine.optimizer_step()
    return sum(losses)


def _nll(inputs: OutputInputs) -> Loss:
    return Loss(-inputs.head.logprobs(inputs.hidden, inputs.microbatch.targets).logprob)


def test_a_run_without_a_failure_prints_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    launch(steps, "pp=2,dp_shard=2,ep=2", nproc=4, timeout=100.0, backend="nccl", device="cuda")
    _assert_quiet(capfd)


def _assert_quiet(capfd: pytest.CaptureFixture[str]) -> None:
    """One warning that ranks share a GPU, and no other line."""
    printed = capfd.readouterr()
    lines = [line for line in (printed.out + printed.err).splitlines() if line.strip()]
    assert len(lines) <= 1, "\n".join(lines)
    assert all("share a GPU" in line for line in lines)
