"""Learning from pairs of answers, one of them preferred: DPO, IPO, SimPO.

**Pairs.** A batch lists them side by side: sequence 2i is the answer chosen, sequence 2i + 1 the one rejected. Both
must be in one microbatch, since the loss is of both together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from postlude.checks import NonNegative, Positive, check_bounds, check_choice
from postlude.objectives.checks import per_token
from postlude.objectives.loss import Loss, mean
from postlude.objectives.weights import learned, sequence_mean

if TYPE_CHECKING:
    from torch import Tensor

    from postlude.data import Microbatch
    from postlude.model import OutputInputs

REFERENCE = "reference_logprobs"
"""Log-prob of each token under the model the training started from. Not read without `reference`."""

LossType = Literal["sigmoid", "ipo"]


@dataclass(frozen=True, kw_only=True)
class Preference:
    """How much more the chosen answer c has gained on the reference than the rejected one r, turned into a loss:

        Δ = Σₜ (log p(tokenₜ) - log p_ref(tokenₜ))     its mean over tokens with `length_normalised`; p_ref = 1 without
                                                       `reference`
        m = β · (Δ_c - Δ_r) - margin
        "sigmoid"   -(1 - ε) · log σ(m) - ε · log σ(-m)          ε = `label_smoothing`, the share of wrong labels
        "ipo"       (Δ_c - Δ_r - 1 / 2β)²
        + nll · mean over the chosen answer's tokens of -log p(token)

    averaged over the pairs of the batch. DPO is the default; SimPO is
    `Preference(reference=False, length_normalised=True, beta=2.0, margin=1.0)`.

    Columns: `mask`, 1 for the tokens of the answers ("tokens" for all); "reference_logprobs" with `reference`.
    """

    loss_type: LossType = "sigmoid"
    """How the difference becomes a loss: sigmoid is DPO's."""
    beta: Positive = 0.1
    """How sharply differences count."""
    label_smoothing: float = 0.0
    """The share of wrong labels."""
    length_normalised: bool = False
    """Whether gains are means over tokens, not sums."""
    reference: bool = True
    """Whether gains are measured from the reference."""
    margin: NonNegative = 0.0
    """By how much the chosen answer shall lead."""
    nll: NonNegative = 0.0
    """Weight of the chosen answers' negative log-likelihood."""
    mask: str = "response_mask"
    """The column that marks answers."""

    def __post_init__(self) -> None:
        check_choice("loss_type", self.loss_type, get_args(LossType))
        check_bounds(self)
        per_token(self.mask)
        if not 0.0 <= self.label_smoothing < 0.5:
            raise ValueError(
                f"label_smoothing is {self.label_smoothing:g}, but the share of wrong labels is in [0, 0.5). "
                "Swap the answers if most labels are wrong."
            )
        if self.loss_type == "ipo" and (self.label_smoothing or self.margin):
            raise ValueError('loss_type="ipo" has a margin of its own, 1 / 2β. Leave label_smoothing and margin at 0.')

    def denominators(self, depths: int) -> tuple[tuple[str, int], ...]:
        """What it is a mean over: the name of weights, and how many tokens further ahead than the next they are."""
        return (("sequences", 0),)

    def __call__(self, inputs: OutputInputs) -> Loss:
        """Evaluate it on one microbatch."""
        from postlude.data import IGNORE

        microbatch = inputs.microbatch
        check_pairs(microbatch)
        targets, _, count = learned(microbatch, self.mask)
        kept = targets != IGNORE
        logprob = inputs.head.logprobs(inputs.hidden, targets, target_count=count).logprob
        gain = logprob - microbatch.column(REFERENCE).float() if self.reference else logprob
        if self.length_normalised:
            gains = sequence_mean(microbatch, gain, kept)
        else:
            gains = microbatch.sequence_sum(gain.where(kept, 0.0))
        chosen, rejected = _pairs(gains)
        losses = self.loss(chosen - rejected)
        if self.nll:
            losses = losses - self.nll * _pairs(sequence_mean(microbatch, logprob, kept))[0]
        values = {
            "accuracy": ((chosen - rejected).sign() + 1) / 2,  # of a tie, half
            "margin": self.beta * (chosen - rejected),
            "chosen_reward": self.beta * chosen,
            "rejected_reward": self.beta * rejected,
        }
        metrics = {name: mean(_both(value), "sequences") for name, value in values.items()}
        return Loss(_both(losses), "sequences", metrics)

    def loss(self, difference: Tensor) -> Tensor:
        """The loss of each pair, given how much more the chosen answer has gained, Δ_c - Δ_r."""
        from torch.nn.functional import logsigmoid

        if self.loss_type == "ipo":
            return (difference - 0.5 / self.beta).square()
        margins = self.beta * difference - self.margin
        wrong = self.label_smoothing
        return -(1 - wrong) * logsigmoid(margins) - wrong * logsigmoid(-margins)


def check_pairs(microbatch: Microbatch) -> None:
    """Refuse a microbatch that holds one answer of a pair without the other."""
    held = set(microbatch.sequences)
    for index in microbatch.sequences:
        if index ^ 1 not in held:
            role, other = ("rejected", "chosen") if index % 2 else ("chosen", "rejected")
            raise ValueError(
                f"sequence {index}, the {role} answer of pair {index // 2}, is in microbatch {microbatch.index} "
                f"without the {other} one, sequence {index ^ 1}. Pack the two of a pair together: list them side by "
                "side, and give the batch one group a pair."
            )


def _pairs(values: Tensor) -> tuple[Tensor, Tensor]:
    """[2 · pairs] -> those of the chosen and of the rejected answers. A microbatch keeps the caller's order."""
    chosen, rejected = values.view(-1, 2).unbind(1)
    return chosen, rejected


def _both(values: Tensor) -> Tensor:
    """A pair's value for each of its two sequences, so that a mean over sequences is one over pairs."""
    return values.repeat_interleave(2)
