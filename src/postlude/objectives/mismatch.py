"""Metrics of the difference between two policies at sampled tokens: the sampler's and the trainer's, or two steps'."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from postlude.objectives.kl import clamp_log_ratio, estimate_kl
from postlude.objectives.loss import Metric, largest, mean

if TYPE_CHECKING:
    from torch import Tensor

USUAL_RATIOS = (0.5, 2.0)


def ratio_metrics(ratio: Tensor, over: str, prefix: str = "") -> dict[str, Metric]:
    """Returns metrics of importance ratios [T]: the largest, the fraction outside `USUAL_RATIOS`, and χ².

    χ² is the mean of ratio² - 1, the χ²-divergence at tokens sampled from the denominator.
    """
    low, high = USUAL_RATIOS
    return {
        f"{prefix}ratio_max": largest(ratio, over),
        f"{prefix}ratio_tail": mean(((ratio < low) | (ratio > high)).float(), over),
        f"{prefix}chi2": mean(ratio.square() - 1.0, over),
    }


def mismatch_metrics(rollout: Tensor, trainer: Tensor, over: str) -> dict[str, Metric]:
    """Returns metrics of the log-probs [T] of the rollout engine and of the trainer at the same weights."""
    gap = (trainer - rollout).abs()
    return {
        "rollout_kl": mean(estimate_kl(rollout, trainer), over),
        "rollout_logprob_diff_mean": mean(gap, over),
        "rollout_logprob_diff_max": largest(gap, over),
        **ratio_metrics(clamp_log_ratio(trainer - rollout).exp(), over, "rollout_"),
    }


def mismatch_of_ratio(metrics: Mapping[str, float]) -> dict[str, float | None]:
    """Returns `mismatch_metrics` of a step whose old log-probs are the rollout engine's, from its first update.

    There the ratio to the old policy is the ratio of trainer and rollout engine. Absolute differences are not reported.
    """
    ratio_names = {"rollout_kl": "kl_old", **{f"rollout_{name}": name for name in ("ratio_max", "ratio_tail", "chi2")}}
    missing: dict[str, float | None] = dict.fromkeys(("rollout_logprob_diff_mean", "rollout_logprob_diff_max"))
    return missing | {name: metrics[other] for name, other in ratio_names.items()}
