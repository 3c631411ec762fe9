"""A rank that raises, is killed or hangs under NCCL is named in one error line, and nothing else is printed."""

import os
import signal
import time

import pytest

from postlude import AdamW, Engine, Layout, Loss, OutputInputs
from postlude.world.failure_report import RankError
from postlude.world.launcher import launch
from tests.engine.training import batch, config


def fail_in_second_step(fault: str, failing_rank: int, layout: str) -> None:
    """Runs two steps; in the second, `failing_rank` raises, is killed or hangs."""
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
        ("is late", "pp=2", "rank 1 of 2 did not come: it is in fail_in_second_step "),
    ],
)
def test_error_names_failing_rank_and_all_ranks_exit(
    fault: str, sentence: str, layout: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(RankError) as failure:
        launch(fail_in_second_step, fault, 1, layout, nproc=2, timeout=20.0, backend="nccl", device="cuda")
    assert str(failure.value).startswith(sentence)
    _assert_only_gpu_sharing_warning(capfd)


def run_two_passes(layout: str) -> float:
    engine = Engine(config("tiny-moe"), layout=Layout.parse(layout), optimizer=AdamW(lr=1e-3), budget=32)
    losses = [engine.forward_backward(batch(seed), _nll).loss for seed in range(2)]
    engine.optimizer_step()
    return sum(losses)


def _nll(inputs: OutputInputs) -> Loss:
    return Loss(-inputs.head.logprobs(inputs.hidden, inputs.microbatch.targets).logprob)


def test_run_without_failure_prints_at_most_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    launch(run_two_passes, "pp=2,dp_shard=2,ep=2", nproc=4, timeout=100.0, backend="nccl", device="cuda")
    _assert_only_gpu_sharing_warning(capfd)


def _assert_only_gpu_sharing_warning(capfd: pytest.CaptureFixture[str]) -> None:
    """Allows one warning that ranks share a GPU, and no other line."""
    printed = capfd.readouterr()
    lines = [line for line in (printed.out + printed.err).splitlines() if line.strip()]
    assert len(lines) <= 1, "\n".join(lines)
    assert all("share a GPU" in line for line in lines)
