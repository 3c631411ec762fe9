"""ORPO: the likelihood of the preferred completion plus a preference loss on odds. It needs no reference model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from postlude.checks import NonNegative, Positive, check_bounds
from postlude.objectives.loss import Loss
from postlude.objectives.loss_weights import MeanOverSequences, check_per_token, masked_logprobs, sequence_mean
from postlude.objectives.preference import check_pairs, pair_loss, pairs, rewards_of

if TYPE_CHECKING:
    from torch import Tensor

    from postlude.model import OutputInputs

LARGEST = -1e-6
"""Mean log-probs are at most this in odds, which are infinite at 0."""


@dataclass(frozen=True, kw_only=True)
class ORPO(MeanOverSequences):
    """nll · (-log p_c) - β · log σ(log odds_c - log odds_r),   odds = p / (1 - p)

    averaged over the pairs of the batch. log p is the mean log-prob of the completion's tokens, for the chosen
    completion c and the rejected one r.

    Columns: `mask`, 1 for the tokens of the completions ("tokens" for all).
    """

    reference: ClassVar[bool] = False
    """It reads no reference model."""
    beta: Positive = 0.1
    """β, the weight of the odds ratio."""
    nll: NonNegative = 1.0
    """Weight of the chosen completions' negative log-likelihood."""
    mask: str = "response_mask"
    """The column that marks completions."""

    def __post_init__(self) -> None:
        check_bounds(self)
        check_per_token(self.mask)

    def __call__(self, inputs: OutputInputs) -> Loss:
        """Returns the loss of one microbatch."""
        from torch.nn.functional import logsigmoid

        check_pairs(inputs.microbatch)
        chosen, rejected = pairs(sequence_mean(inputs.microbatch, *masked_logprobs(inputs, self.mask)))
        difference = log_odds(chosen) - log_odds(rejected)
        losses = -self.nll * chosen - self.beta * logsigmoid(difference)
        return pair_loss(losses, rewards_of(chosen, rejected, self.beta) | {"log_odds_ratio": difference})


def log_odds(logprob: Tensor) -> Tensor:
    """Returns log(p / (1 - p)), given log p < 0."""
    bounded = logprob.clamp(max=LARGEST)
    return bounded - (-bounded.expm1()).log()
