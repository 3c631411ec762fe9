"""The difference between the engine that sampled and the one that trains: importance weights, and metrics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from postlude.checks import check_choice
from postlude.objectives.kl import clamp_log_ratio, estimate_kl
from postlude.objectives.loss import Metric, largest, mean
from postlude.objectives.loss_weights import broadcast_to_tokens, sequence_mean

if TYPE_CHECKING:
    from torch import Tensor

    from postlude.data import Microbatch

Level = Literal["token", "sequence"]
WeightBounds = tuple[float, float]
USUAL_RATIOS = (0.5, 2.0)


@dataclass(frozen=True)
class CorrectionWeights:
    """Importance weights [T] without gradient, and 1.0 where a bound changed the weight or dropped the token [T]."""

    weights: Tensor
    changed: Tensor


@dataclass(frozen=True, kw_only=True)
class RolloutCorrection:
    """w = exp(old - rollout), the ratio of "old_logprobs" to "rollout_logprobs".

    With level="token" it is computed for each token; with "sequence" it is exp Σₜ(old - rollout) for all tokens of a
    sequence. Then, each if given, with bounds (low, high):

        truncate        w clamped to [low, high]                                     TIS; (0, 2) has no lower bound
        mask            w, but 0 outside [low, high]                                 IcePop
        sequence_mask   0 for the sequences whose geometric mean of exp(old - rollout) is outside [low, high]

    Masked tokens still count in the denominator of the mean.
    """

    level: Level = "token"
    """Whether weights belong to tokens or to whole sequences."""
    truncate: WeightBounds | None = (0.0, 2.0)
    """Bounds to which weights are clamped."""
    mask: WeightBounds | None = None
    """Bounds outside which a token has weight 0."""
    sequence_mask: WeightBounds | None = None
    """Bounds outside which a sequence has weight 0."""

    def __post_init__(self) -> None:
        check_choice("level", self.level, get_args(Level))
        for name in ("truncate", "mask", "sequence_mask"):
            _check_interval(name, getattr(self, name))

    def __call__(self, microbatch: Microbatch, old: Tensor, rollout: Tensor, has_weight: Tensor) -> CorrectionWeights:
        """Returns the weights of the tokens [T] of a microbatch. `has_weight` [T]: the tokens trained on."""
        difference = (old - rollout).detach().where(has_weight, 0.0)
        log_weights = difference
        if self.level == "sequence":
            log_weights = broadcast_to_tokens(microbatch, microbatch.sequence_sum(difference))
        raw = clamp_log_ratio(log_weights).exp()
        weights = raw if self.truncate is None else raw.clamp(*self.truncate)
        if self.mask is not None:
            weights = weights.where(_inside(raw, self.mask), 0.0)
        if self.sequence_mask is not None:
            average = clamp_log_ratio(sequence_mean(microbatch, difference, has_weight)).exp()
            weights = weights.where(broadcast_to_tokens(microbatch, _inside(average, self.sequence_mask)), 0.0)
        return CorrectionWeights(weights, (weights != raw).float())


def _check_interval(name: str, bounds: WeightBounds | None) -> None:
    """Refuses bounds of importance weights unless 0 ≤ low < high; high may be infinite."""
    if bounds is None:
        return
    low, high = bounds
    if not 0 <= low < high:
        raise ValueError(f"{name} is ({low:g}, {high:g}), but its bounds are 0 ≤ low < high. Swap or widen them.")


def _inside(values: Tensor, bounds: WeightBounds) -> Tensor:
    low, high = bounds
    return (values >= low) & (values <= high)


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
