"""Supervised fine-tuning."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from postlude.checks import NonNegative, check_bounds
from postlude.objectives.loss import Loss, mean
from postlude.objectives.loss_weights import MeanOverTokens, check_per_token, weighted_nll, weighted_targets

if TYPE_CHECKING:
    from postlude.model import OutputInputs


@dataclass(frozen=True, kw_only=True)
class SFT(MeanOverTokens):
    """Σ wₜ · (-log p(tokenₜ) + z_loss · lseₜ²) / Σ wₜ,   lse = log Σ e^logit

    `over` names the weights w: "tokens" for 1 each, or a column such as "loss_mask". Positions of weight zero are not
    projected. `z_loss` pulls the normaliser of the logits to zero.

    Columns: the one `over` names.
    """

    over: str = "tokens"
    """The weights: "tokens", or a column."""
    z_loss: NonNegative = 0.0
    """Weight of the squared log-normaliser."""

    def __post_init__(self) -> None:
        check_bounds(self)
        check_per_token(self.over)

    def __call__(self, inputs: OutputInputs) -> Loss:
        targets, weights, count = weighted_targets(inputs.microbatch, self.over)
        if self.z_loss == 0.0:
            result = inputs.head.objective(inputs.hidden, targets, weighted_nll, weights, target_count=count)
            return Loss(result.loss, self.over, metrics={"nll": mean(-result.stats.logprob, self.over)})
        stats = inputs.head.logprobs(inputs.hidden, targets, target_count=count, lse=True)
        assert stats.lse is not None
        metrics = {"nll": mean(-stats.logprob, self.over), "lse": mean(stats.lse, self.over)}
        return Loss(self.z_loss * stats.lse.square() - stats.logprob, self.over, metrics)
