"""Distillation from a teacher's k likeliest tokens at every position."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal, get_args

from postlude.checks import Bounds, NonNegative, Positive, check_bounds, check_choice
from postlude.objectives.loss import Loss, mean
from postlude.objectives.loss_weights import MeanOverTokens, check_per_token, weighted_targets

if TYPE_CHECKING:
    from torch import Tensor

    from postlude.model import OutputInputs

TEACHER_IDS = "teacher_ids"
"""[length, k] per sequence: the teacher's likeliest ids in place of each token, from `engine.topk`."""

TEACHER_LOGPROBS = "teacher_logprobs"
"""[length, k] per sequence: their log-probs under the teacher."""

Outside = Literal["bucket", "renormalise", "ignore"]

MIN_MASS = 1e-7
"""The minimum mass of the tokens outside the k: fp32 does not resolve less."""

MIN_LOGPROB = -100.0
"""The minimum log-prob of a teacher's token, which may be -inf."""


@dataclass(frozen=True, kw_only=True)
class Distill(MeanOverTokens):
    """forward · Σ p · log(p / q) + (1 - forward) · Σ q · log(q / p) + nll · (-log q(token))

    for student q and teacher p, summed over the teacher's k likeliest tokens of each position and averaged by the
    weights that `over` names. `forward` is 1 for the forward divergence (mode-covering), 0 for the reverse one
    (mode-seeking), between for a mixture. `outside` chooses how the rest of the vocabulary counts:

    - "bucket": as one more token, of probability 1 - Σ p and 1 - Σ q. Both divergences are then exact for k + 1 tokens.
    - "renormalise": p and q are divided by their sums over the k tokens.
    - "ignore": not at all.

    `temperature` is the student's, and should be that of the teacher's log-probs.

    Columns: "teacher_ids" and "teacher_logprobs", [k] per token; the weights that `over` names.
    """

    forward: Annotated[float, Bounds(least=0, most=1)] = 1.0
    """Fraction of the forward divergence; the rest is the reverse one."""
    outside: Outside = "bucket"
    """How tokens outside the teacher's k count."""
    nll: NonNegative = 0.0
    """Weight of the tokens' own negative log-likelihood."""
    temperature: Positive = 1.0
    """Temperature of teacher and student."""
    over: str = "tokens"
    """The weights: "tokens", or a column."""

    def __post_init__(self) -> None:
        check_choice("outside", self.outside, get_args(Outside))
        check_bounds(self)
        check_per_token(self.over)
        if self.forward < 1.0 and self.outside == "ignore":
            raise ValueError(
                'outside="ignore" lets the reverse divergence fall by moving the student away from all k tokens. '
                'Use outside="bucket" or "renormalise", or forward=1.'
            )

    def __call__(self, inputs: OutputInputs) -> Loss:
        ids, teacher = inputs.microbatch.column(TEACHER_IDS), inputs.microbatch.column(TEACHER_LOGPROBS).float()
        if ids.shape != teacher.shape or ids.ndim != 2:
            raise ValueError(
                f"teacher_ids {tuple(ids.shape)} and teacher_logprobs {tuple(teacher.shape)} must both be [tokens, k]."
            )
        _check_ids(inputs)
        targets, _, count = weighted_targets(inputs.microbatch, self.over)
        stats, student = inputs.head.logprobs_at(
            inputs.hidden, targets, ids, target_count=count, temperature=self.temperature
        )
        p = self.logs(teacher.clamp_min(MIN_LOGPROB))
        q = self.logs(student)
        forward = (p.exp() * (p - q)).sum(-1)
        reverse = (q.exp() * (q - p)).sum(-1)
        metrics = {
            "kl_forward": mean(forward, self.over),
            "kl_reverse": mean(reverse, self.over),
            "teacher_mass": mean(teacher.exp().sum(-1), self.over),
            "student_mass": mean(student.exp().sum(-1), self.over),
            "nll": mean(-stats.logprob, self.over),
        }
        values = self.forward * forward + (1.0 - self.forward) * reverse - self.nll * stats.logprob
        return Loss(values, self.over, metrics)

    def logs(self, logprobs: Tensor) -> Tensor:
        """Returns the log-probs to compare, given those of k tokens [T, k]: [T, k], or [T, k + 1] with a bucket."""
        import torch

        if self.outside == "renormalise":
            return logprobs.log_softmax(-1)
        if self.outside == "ignore":
            return logprobs
        other_mass = (1.0 - logprobs.exp().sum(-1, keepdim=True)).clamp_min(MIN_MASS)
        return torch.cat([logprobs, other_mass.log()], -1)


def _check_ids(inputs: OutputInputs) -> None:
    """Refuses ids outside the vocabulary, by the column's range on the host."""
    stats, size = inputs.microbatch.column_stats.get(TEACHER_IDS), inputs.config.vocab_size
    if stats is not None and (stats.minimum < 0 or stats.maximum >= size):
        wrong = stats.minimum if stats.minimum < 0 else stats.maximum
        raise ValueError(
            f'"{TEACHER_IDS}" holds {wrong:.0f}, which is outside the vocabulary, 0 to {size - 1}. '
            "Give ids of this model's vocabulary."
        )
