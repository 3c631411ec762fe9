"""A run with top-k and top-p trains on the distribution that it samples from."""

from __future__ import annotations

import math
from pathlib import Path
from unittest.mock import Mock

import pytest

from postlude.recipes.checks.environment import record_checks
from postlude.recipes.rollout_columns import sampling_mask_column
from postlude.rollout.environments import Transcript
from tests.conftest import Ranks
from tests.recipes.test_grpo import MASKS, UNKEPT, VARIED_REWARDS, config_of, run_and_read_metrics

STEPS = ("--warm_start.steps=1", "--steps=2", "--optimizer.lr=1e-3", "--sampling.max_new_tokens=8")
SETTINGS = (*UNKEPT, *VARIED_REWARDS, *STEPS, "--budget=64", *MASKS)


def test_trainer_and_sampler_agree_on_truncated_distributions(ranks: Ranks, tmp_path: Path) -> None:
    """Also the reference, which is the policy at first. Without masks log-probs are those of the vocabulary."""
    (masked,) = ranks(1, run_and_read_metrics, str(tmp_path / "masked"), *SETTINGS)
    (full,) = ranks(1, run_and_read_metrics, str(tmp_path / "full"), *SETTINGS, "--sampling_mask=false")
    for rows in (masked, full):
        assert all(abs(row["rollout_kl"]) < 1e-9 for row in rows[1:])
        assert rows[1]["kl"] == pytest.approx(0.0, abs=1e-9)
    assert masked[1]["rewards"] == full[1]["rewards"], "the completions of the first step are the same"
    assert masked[1]["entropy"] < math.log(20) < full[1]["entropy"]
    assert masked[1]["grad_norm"] != pytest.approx(full[1]["grad_norm"], rel=1e-2)
    assert 1 < masked[1]["sampling_mask_size"] <= 20
    assert "sampling_mask_size" not in full[1]


def test_masks_that_are_too_large_or_batch_invariant_are_refused(tmp_path: Path) -> None:
    config = config_of(tmp_path, "--sampling.top_p=0.9")
    inputs = Mock(config=config, model=(None, Mock(vocab_size=50_000)))
    (check,) = record_checks(inputs)
    with pytest.raises(ValueError, match=r"top_p 0\.9.*Set sampling.top_k to 512 or less, or sampling_mask to false"):
        check.run()
    inputs.config = config_of(tmp_path, "--sampling.top_p=0.9", "--sampling.top_k=64")
    (check,) = record_checks(inputs)
    assert check.run() == "log-probs among the tokens sampled from, about 64 at most"
    inputs.config = config_of(tmp_path, "--sampling.top_k=64", "--rollout.batch_invariant=true")
    (check,) = record_checks(inputs)
    with pytest.raises(
        ValueError, match=r"batch_invariant makes log-probs over the vocabulary.*sampling_mask to false"
    ):
        check.run()
    assert not config_of(tmp_path, "--sampling.top_p=0.9", "--sampling_mask=false").masks_sampling
    assert not config_of(tmp_path).masks_sampling


def test_masks_of_any_sizes_become_one_column() -> None:
    """Tokens that were not sampled have none, nor have those of an unfiltered turn."""
    transcript = Transcript([5, 6])
    transcript.add_completion([7, 8], [-0.5, 0.0], sampling_mask=[[7, 1, 0], [8]])
    transcript.add_observation([9])
    transcript.add_completion([3], [-1.0])
    first, second = sampling_mask_column([transcript, Transcript([1])])
    assert first.tolist() == [[0, 0, 0], [0, 0, 0], [8, 2, 1], [9, 0, 0], [0, 0, 0], [0, 0, 0]]
    assert second.tolist() == [[0, 0, 0]]
    with pytest.raises(ValueError, match="2 tokens come with 1 sampling masks"):
        transcript.add_completion([7, 8], [0.0, 0.0], sampling_mask=[[7]])
