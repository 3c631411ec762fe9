"""Losses on preferred completions: of pairs (DPO, IPO, SimPO, ORPO, Bradley-Terry), and one by one (KTO).

Sequence 2i of a batch of pairs is the chosen completion, sequence 2i + 1 the rejected one. Both must be in one
microbatch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, get_args

from postlude.checks import NonNegative, Positive, check_bounds, check_choice
from postlude.objectives.loss import Loss, mean
from postlude.objectives.loss_weights import (
    MeanOverSequences,
    check_per_token,
    masked_logprobs,
    sequence_mean,
    sequence_value,
)
from postlude.options import Common

if TYPE_CHECKING:
    from torch import Tensor

    from postlude.data import Microbatch
    from postlude.model import OutputInputs

REFERENCE = "reference_logprobs"
"""Log-prob of each token under the reference model. Read with `reference`."""

MARGINS = "margins"
"""The margin of each pair, for both of its sequences. Read with `margins`."""

LossType = Literal["sigmoid", "ipo"]
LARGEST_LOGPROB = -1e-6
"""Mean log-probs are at most this in odds, which are infinite at 0."""
DESIRABLE = "desirable"
"""1 for the tokens of a desirable completion, 0 for those of another."""
BATCH_KL = "batch_kl"
"""z: an estimate of the KL of the policy to the reference, the same for the whole batch."""


@dataclass(frozen=True, kw_only=True)
class Preference(MeanOverSequences):
    """-(1 - ε) · log σ(m) - ε · log σ(-m),   m = β · (Δ_c - Δ_r) - margin          loss_type="sigmoid"
    (Δ_c - Δ_r - 1 / 2β)²                                                           loss_type="ipo"

    averaged over the pairs of the batch, for the chosen completion c and the rejected one r, plus nll · the mean of
    -log p over the tokens of c. ε is `label_smoothing`, and

        Δ = Σₜ (log p(tokenₜ) - log p_ref(tokenₜ))

    which is a mean over tokens with `length_normalised`, and has p_ref = 1 without `reference`. DPO is the default;
    SimPO is `Preference(reference=False, length_normalised=True, beta=2.0, margin=1.0)`.

    Columns: `mask`, 1 for the tokens of the completions ("tokens" for all); "reference_logprobs" with `reference`;
    "margins" with `margins`, which is added to `margin`.
    """

    loss_type: Common[LossType] = "sigmoid"
    """The loss of a pair: sigmoid is DPO's."""
    beta: Common[Positive] = 0.1
    """β, the scale of differences."""
    label_smoothing: float = 0.0
    """The expected share of wrong labels."""
    length_normalised: bool = False
    """Whether Δ is a mean over tokens, not a sum."""
    reference: bool = True
    """Whether Δ is relative to the reference model."""
    margin: NonNegative = 0.0
    """The margin by which the chosen completion should lead."""
    margins: bool = False
    """Whether each pair has a margin of its own besides, in the column "margins"."""
    nll: NonNegative = 0.0
    """Weight of the chosen completions' negative log-likelihood."""
    mask: str = "response_mask"
    """The column that marks completions."""

    def __post_init__(self) -> None:
        check_choice("loss_type", self.loss_type, get_args(LossType))
        check_bounds(self)
        check_per_token(self.mask)
        if not 0.0 <= self.label_smoothing < 0.5:
            raise ValueError(
                f"label_smoothing is {self.label_smoothing:g}, but the share of wrong labels is in [0, 0.5). "
                "Swap the completions if most labels are wrong."
            )
        if self.loss_type == "ipo" and (self.label_smoothing or self.margin or self.margins):
            raise ValueError(
                'loss_type="ipo" has a margin of its own, 1 / 2β. Leave label_smoothing, margin and margins at 0.'
            )

    def __call__(self, inputs: OutputInputs) -> Loss:
        microbatch = inputs.microbatch
        check_pairs(microbatch)
        logprob, has_weight = masked_logprobs(inputs, self.mask)
        delta = logprob - microbatch.column(REFERENCE).float() if self.reference else logprob
        if self.length_normalised:
            deltas = sequence_mean(microbatch, delta, has_weight)
        else:
            deltas = microbatch.sequence_sum(delta.where(has_weight, 0.0))
        chosen, rejected = pairs(deltas)
        losses = self.loss(chosen - rejected, pair_margins(microbatch) if self.margins else 0.0)
        if self.nll:
            losses = losses - self.nll * pairs(sequence_mean(microbatch, logprob, has_weight))[0]
        return pair_loss(losses, rewards_of(chosen, rejected, self.beta))

    def loss(self, difference: Tensor, margins: Tensor | float = 0.0) -> Tensor:
        """Returns the loss of each pair, given Δ_c - Δ_r and the pairs' own margins."""
        from torch.nn.functional import logsigmoid

        if self.loss_type == "ipo":
            return (difference - 0.5 / self.beta).square()
        lead = self.beta * difference - self.margin - margins
        wrong = self.label_smoothing
        return -(1 - wrong) * logsigmoid(lead) - wrong * logsigmoid(-lead)


def pair_margins(microbatch: Microbatch) -> Tensor:
    """Returns the margin of each pair, [pairs] fp32."""
    from postlude.data import IGNORE

    return pairs(sequence_value(microbatch, MARGINS, microbatch.targets != IGNORE))[0]


def rewards_of(chosen: Tensor, rejected: Tensor, beta: float) -> dict[str, Tensor]:
    """Returns the metrics of each pair whose implicit rewards are β times these values."""
    return {
        "accuracy": ((chosen - rejected).sign() + 1) / 2,  # a tie counts half
        "margin": beta * (chosen - rejected),
        "chosen_reward": beta * chosen,
        "rejected_reward": beta * rejected,
    }


def pair_loss(losses: Tensor, metrics: Mapping[str, Tensor]) -> Loss:
    """Returns the loss and the metrics of each pair as means over the batch's sequences."""
    means = {name: mean(repeat_for_pair(value), "sequences") for name, value in metrics.items()}
    return Loss(repeat_for_pair(losses), "sequences", means)


def check_pairs(microbatch: Microbatch) -> None:
    """Refuses a microbatch that holds one completion of a pair without the other."""
    indices = set(microbatch.sequences)
    for index in microbatch.sequences:
        if index ^ 1 not in indices:
            role, partner = ("rejected", "chosen") if index % 2 else ("chosen", "rejected")
            raise ValueError(
                f"sequence {index}, the {role} completion of pair {index // 2}, is in microbatch {microbatch.index} "
                f"without the {partner} one, sequence {index ^ 1}. Pack the two of a pair together: list them "
                "side by side, and give the batch one group per pair."
            )


def pairs(values: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the values of the chosen and of the rejected completions: [2 · pairs] -> [pairs] each."""
    chosen, rejected = values.view(-1, 2).unbind(1)
    return chosen, rejected


def repeat_for_pair(values: Tensor) -> Tensor:
    """Returns each pair's value for both of its sequences, so that a mean over sequences is one over pairs."""
    return values.repeat_interleave(2)


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
        from torch.nn.functional import logsigmoid

        check_pairs(inputs.microbatch)
        chosen, rejected = pairs(sequence_mean(inputs.microbatch, *masked_logprobs(inputs, self.mask)))
        difference = log_odds(chosen) - log_odds(rejected)
        losses = -self.nll * chosen - self.beta * logsigmoid(difference)
        return pair_loss(losses, rewards_of(chosen, rejected, self.beta) | {"log_odds_ratio": difference})


def log_odds(logprob: Tensor) -> Tensor:
    """Returns log(p / (1 - p)), given log p < 0."""
    bounded = logprob.clamp(max=LARGEST_LOGPROB)
    return bounded - (-bounded.expm1()).log()


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


@dataclass(frozen=True, kw_only=True)
class BradleyTerry(MeanOverSequences):
    """-log σ(s_c - s_r - margin) + centring · (s_c + s_r)²

    averaged over the pairs of the batch, for the scores s of the chosen completion c and the rejected one r. The score
    of a sequence is the value head's output at its last token (`sequence_scores`). Sequence 2i of a batch is the chosen
    completion of a pair, sequence 2i + 1 the rejected one, both in one microbatch. With `margins` the column "margins"
    is added to `margin`.
    """

    margin: NonNegative = 0.0
    """The margin by which the chosen completion should lead."""
    margins: bool = False
    """Whether each pair has a margin of its own besides, in the column "margins"."""
    centring: NonNegative = 0.0
    """Weight of the penalty that keeps the scores of a pair around 0."""

    def __post_init__(self) -> None:
        check_bounds(self)

    def __call__(self, inputs: OutputInputs) -> Loss:
        from torch.nn.functional import logsigmoid

        check_pairs(inputs.microbatch)
        chosen, rejected = pairs(sequence_scores(inputs))
        difference = chosen - rejected
        margins = pair_margins(inputs.microbatch) if self.margins else 0.0
        losses = -logsigmoid(difference - self.margin - margins)
        if self.centring:
            losses = losses + self.centring * (chosen + rejected).square()
        values = {
            "accuracy": (difference.sign() + 1) / 2,  # a tie counts half
            "margin": difference,
            "chosen_score": chosen,
            "rejected_score": rejected,
        }
        return pair_loss(losses, values)


def sequence_scores(inputs: OutputInputs) -> Tensor:
    """Returns the value head's output at the last token of each sequence, [n] fp32."""
    from postlude.data import IGNORE

    microbatch = inputs.microbatch
    last = microbatch.targets == IGNORE  # and padding, which a sum over sequences ignores
    return microbatch.sequence_sum(inputs.head.values(inputs.hidden).where(last, 0.0))
