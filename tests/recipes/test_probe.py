"""A run whose generator has other weights than the trainer ends in that step, and can be resumed."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from postlude.generate.distributed import SyncedGenerator
from postlude.generate.probe import WeightsDiffer
from tests.conftest import Ranks
from tests.recipes.test_grpo import VARIED_REWARDS, run_and_read_metrics
from tests.recipes.test_rollout_engine import SHORT, TinyReceiver, TinyVLLM, run_losing_server

pytest.importorskip("reasoning_gym", reason="the tasks are reasoning-gym's")
SETTINGS = (*SHORT, *VARIED_REWARDS, "--steps=2")
QUICK = (*SETTINGS, "--rollout.backoff=0.01")


def load_weights_once(server: TinyVLLM) -> None:
    """Reports every version, but reads only the first weights."""
    read, reads_left = server.read, iter(range(1))
    server.read = lambda directory: None if next(reads_left, None) is None else read(directory)


@pytest.mark.slow
@pytest.mark.parametrize("sync", ["disk", pytest.param("network", marks=pytest.mark.thorough)])
def test_a_server_that_keeps_old_weights_ends_the_run_in_that_step(ranks: Ranks, tmp_path: Path, sync: str) -> None:
    with closing(TinyReceiver(tmp_path / "server")) as server:
        load_weights_once(server)
        chosen = (*QUICK, f"--rollout={server.url}", f"--rollout.sync={sync}")
        ((outcome, sentence),) = ranks(1, run_losing_server, str(tmp_path), *chosen)
    assert outcome == "failed"
    problem = "has the weights of optimizer step 0 after it was given those of step 1: its log-probs differ by"
    assert sentence.startswith(f"the only server cannot be used any more: {server.url} {problem}")
    assert "step-000001 is complete" in sentence
    with closing(TinyVLLM()) as another:
        (rows,) = ranks(1, run_and_read_metrics, str(tmp_path), *QUICK, f"--rollout={another.url}")
    assert [row["step"] for row in rows] == [1, 2]
    assert all(row["sync/logprob_diff"] < 1e-5 for row in rows)


def run_without_sync(group: Any, directory: str, *overrides: str) -> tuple[str, str]:
    """Like `run_losing_server`, with a native generator that keeps its first weights."""
    sync_weights = SyncedGenerator.sync_weights

    def keep(self: SyncedGenerator) -> None:
        old_weights = (
            [parameter.detach().clone() for parameter in self.model.parameters()] if self.copied_step >= 0 else []
        )
        sync_weights(self)
        for parameter, old in zip(self.model.parameters(), old_weights, strict=False):
            parameter.data.copy_(old)

    SyncedGenerator.sync_weights = keep  # type: ignore[method-assign]
    try:
        return run_losing_server(group, directory, *overrides)
    finally:
        SyncedGenerator.sync_weights = sync_weights  # type: ignore[method-assign]


@pytest.mark.slow
def test_a_native_generator_that_keeps_old_weights_ends_the_run_in_that_step(ranks: Ranks, tmp_path: Path) -> None:
    ((outcome, sentence),) = ranks(1, run_without_sync, str(tmp_path), *SETTINGS)
    assert outcome == "failed"
    assert sentence.startswith("the native generator of rank 0 has the weights of optimizer step 0 after it was given")
    assert "step-000001 is complete" in sentence
    (rows,) = ranks(1, run_and_read_metrics, str(tmp_path), *SETTINGS)
    assert [row["step"] for row in rows] == [1, 2]
    assert all(row["sync/logprob_diff"] < 1e-5 for row in rows)


def refused(group: Any, directory: str, *overrides: str) -> str:
    with pytest.raises(WeightsDiffer) as raised:
        run_and_read_metrics(group, directory, *overrides)
    return str(raised.value)


@pytest.mark.slow
def test_probe_limit_is_set_and_disabled_in_a_config(ranks: Ranks, tmp_path: Path) -> None:
    with closing(TinyVLLM()) as server:
        load_weights_once(server)
        chosen = (*QUICK, f"--rollout={server.url}")
        (rows,) = ranks(1, run_and_read_metrics, str(tmp_path), *chosen, "--rollout.probe_limit=0")
        assert len(rows) == 2
        assert not any("sync/logprob_diff" in row for row in rows)
    (tmp_path / "narrow").mkdir()
    (sentence,) = ranks(1, refused, str(tmp_path / "narrow"), *SETTINGS, "--rollout.probe_limit=1e-12")
    assert "and rounding explains 1e-12 (set rollout.probe_limit if" in sentence
