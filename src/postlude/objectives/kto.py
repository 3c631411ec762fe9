"""KTO: a loss on single completions, each desirable or not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from postlude.checks import NonNegative, Positive, check_bounds
from postlude.objectives.loss import Loss, mean
from postlude.objectives.loss_weights import MeanOverSequences, check_per_token, masked_logprobs, sequence_value
from postlude.objectives.preference import REFERENCE

if TYPE_CHECKING:
    from postlude.model import OutputInputs

DESIRABLE = "desirable"
"""1 for the tokens of a desirable completion, 0 for those of another."""
BATCH_KL = "batch_kl"
"""z: an estimate of the KL of the policy to the reference, the same for the whole batch."""


@dataclass(frozen=True, kw_only=True)
class KTO(MeanOverSequences):
    """λ_d · (1 - σ(β · (Δ - z)))   for a desirable completion,   λ_u · (1 - σ(β · (z - Δ)))   for another

    averaged over the completions of the batch, with

        Δ = Σₜ (log p(tokenₜ) - log p_ref(tokenₜ))

    and z an estimate of KL(p ‖ p_ref) that has no gradient: the mean Δ of completions after the prompts of others, at
    least 0. A completion without tokens has Δ = 0.

    Columns: "reference_logprobs", "desirable", "batch_kl"; `mask`, 1 for the tokens of the completions ("tokens" for
    all).
    """

    beta: Positive = 0.1
    """β, the scale of differences."""
    desirable_weight: NonNegative = 1.0
    """λ_d, the weight of desirable completions."""
    undesirable_weight: NonNegative = 1.0
    """λ_u, the weight of the others."""
    mask: str = "response_mask"
    """The column that marks completions."""

    def __post_init__(self) -> None:
        check_bounds(self)
        check_per_token(self.mask)
        if not self.desirable_weight + self.undesirable_weight:
            raise ValueError("desirable_weight and undesirable_weight are both 0, which leaves nothing to learn from.")

    def __call__(self, inputs: OutputInputs) -> Loss:
        """Returns the loss of one microbatch."""
        microbatch = inputs.microbatch
        logprob, has_weight = masked_logprobs(inputs, self.mask)
        deltas = microbatch.sequence_sum((logprob - microbatch.column(REFERENCE).float()).where(has_weight, 0.0))
        desirable = sequence_value(microbatch, DESIRABLE, has_weight) > 0.5
        kl = sequence_value(microbatch, BATCH_KL, has_weight)
        sign = desirable.float() * 2 - 1
        weight = (self.desirable_weight * desirable.float()) + self.undesirable_weight * (~desirable).float()
        losses = weight * (-sign * self.beta * (deltas - kl)).sigmoid()  # 1 - σ(x) = σ(-x)
        values = {
            "accuracy": ((sign * (deltas - kl)).sign() + 1) / 2,
            "implied_reward": self.beta * deltas,
            "batch_kl": kl,
        }
        return Loss(losses, "sequences", {name: mean(value, "sequences") for name, value in values.items()})
