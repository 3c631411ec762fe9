"""FP8 rollouts: the mismatch is measured and limited; a run above its limit saves its state and ends."""

from __future__ import annotations

from pathlib import Path

import pytest

from postlude.plan.memory import generator_bytes
from postlude.recipes.config.load import ConfigError
from postlude.recipes.config.settings import RolloutLimits
from postlude.recipes.run.health import Health
from tests.conftest import Ranks
from tests.model.small import small_model
from tests.recipes.test_grpo import VARIED_REWARDS, config_of, run_and_read_metrics
from tests.recipes.test_rollout_engine import SHORT, run_losing_server

FP8 = ("--rollout.quantization=fp8", "--rollout.kv_cache_dtype=fp8")
SETTINGS = (*SHORT, *VARIED_REWARDS, "--steps=2", "--old_logprobs=recompute")


def test_mismatch_above_its_limit_gives_clear_error() -> None:
    health = Health(RolloutLimits(rollout_kl=0.01, rollout_chi2=0.1), 1, verbose=False)
    assert health.mismatch({"rollout_kl": 0.01, "rollout_chi2": 0.1}, 3) == ""
    assert health.mismatch({"rollout_kl": 0.02}, 3).startswith(
        "rollout_kl is 0.02 at step 3, and limits.rollout_kl is 0.01: the generator samples from another policy than"
    )
    assert health.mismatch({"rollout_chi2": float("nan")}, 3).startswith("rollout_chi2 is nan at step 3")
    assert Health(RolloutLimits(), 1, verbose=False).mismatch({"rollout_kl": 9.0}, 3) == ""


@pytest.mark.slow  # two runs
def test_a_run_above_its_limit_saves_its_state_and_ends(ranks: Ranks, tmp_path: Path) -> None:
    ((outcome, sentence),) = ranks(1, run_losing_server, str(tmp_path), *SETTINGS, *FP8, "--limits.rollout_kl=1e-9")
    assert outcome == "failed"
    assert sentence.startswith("rollout_kl is ")
    assert "at step 1, and limits.rollout_kl is 1e-09" in sentence
    assert "step-000001 is complete" in sentence
    (rows,) = ranks(1, run_and_read_metrics, str(tmp_path), *SETTINGS, *FP8)
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:
        assert row["sync/logprob_diff"] < 1e-5 < row["sync/fp8_logprob_diff"]
        assert 1e-9 < row["rollout_kl"] < 1e-2
        assert 0.0 < row["rollout_logprob_diff_mean"] < row["rollout_logprob_diff_max"]
        assert row["rollout_ratio_max"] > 1.0
        assert row["rollout_ratio_tail"] == 0.0
        assert abs(row["rollout_chi2"]) < 0.1


def test_limits_of_metrics_that_an_objective_does_not_report_are_refused(tmp_path: Path) -> None:
    objective = Path(__file__).parent / "scaled_objective.py"
    with pytest.raises(ConfigError, match="the objective is yours"):
        config_of(tmp_path, f"--objective={objective}:Scaled", "--limits.rollout_kl=0.1")


def test_memory_of_fp8_weights_is_estimated() -> None:
    config = small_model("[*-]{2}").config
    plain, fp8 = (generator_bytes(config, 2, fp8=fp8) for fp8 in (False, True))
    linear = sum(
        parameter.numel()
        for name, parameter in small_model("[*-]{2}").named_parameters()
        if name.endswith("_proj.weight")
    )
    assert plain + linear < fp8 < plain + 1.5 * linear
