"""Supervised fine-tuning: make the tokens that were written likely."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from postlude.checks import NonNegative, check_bounds
from postlude.objectives.checks import per_token
from postlude.objectives.loss import Loss, mean
from postlude.objectives.weights import learned

if TYPE_CHECKING:
    from torch import Tensor

    from postlude.model import OutputInputs


@dataclass(frozen=True, kw_only=True)
class SFT:
    """Negative log-likelihood, averaged by weight over the whole batch:

        Σ wₜ · (-log p(tokenₜ) + z_loss · lseₜ²) / Σ wₜ,   lse = log Σ e^logit

    `over` names the weights w: "tokens" for one each, or a column such as "loss_mask". Where it is zero nothing is
    projected. `z_loss` keeps the logits from drifting: it pulls their normaliser to zero.

    Columns: the one `over` names.
    """

    over: str = "tokens"
    """The weights: "tokens", or a column."""
    z_loss: NonNegative = 0.0
    """Weight of the squared log-normaliser."""

    def __post_init__(self) -> None:
        check_bounds(self)
        per_token(self.over)

    def denominators(self, depths: int) -> tuple[tuple[str, int], ...]:
        """What it is a mean over: the name of weights, and how many tokens further ahead than the next they are."""
        return ((self.over, 0),)

    def __call__(self, inputs: OutputInputs) -> Loss:
        """Evaluate it on one microbatch."""
        targets, weights, count = learned(inputs.microbatch, self.over)
        if self.z_loss == 0.0:
            found = inputs.head.objective(inputs.hidden, targets, _weighted_nll, weights, target_count=count)
            return Loss(found.loss, self.over, metrics={"nll": mean(-found.stats.logprob, self.over)})
        stats = inputs.head.logprobs(inputs.hidden, targets, target_count=count, lse=True)
        assert stats.lse is not None  # asked for
        metrics = {"nll": mean(-stats.logprob, self.over), "lse": mean(stats.lse, self.over)}
        return Loss(self.z_loss * stats.lse.square() - stats.logprob, self.over, metrics)


def _weighted_nll(logprob: Tensor, entropy: Tensor | None, weights: Tensor) -> Tensor:
    return -logprob * weights
