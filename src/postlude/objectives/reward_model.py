"""The loss of a reward model on pairs of completions (Bradley-Terry), and how it scores a sequence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from postlude.checks import NonNegative, check_bounds
from postlude.objectives.loss import Loss
from postlude.objectives.loss_weights import MeanOverSequences
from postlude.objectives.preference import check_pairs, pair_loss, pair_margins, pairs

if TYPE_CHECKING:
    from torch import Tensor

    from postlude.model import OutputInputs


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
        """Returns the loss of one microbatch."""
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
