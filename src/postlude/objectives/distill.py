"""Distillation: take on a teacher's distribution, given its k likeliest tokens at every position."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal, get_args

from postlude.checks import Bounds, NonNegative, Positive, check_bounds, check_choice
from postlude.objectives.checks import per_token
from postlude.objectives.loss import Loss, mean
from postlude.objectives.weights import learned

if TYPE_CHECKING:
    from torch import Tensor

    from postlude.model import OutputInputs

TEACHER_IDS = "teacher_ids"
"""[length, k] per sequence: the ids the teacher finds likeliest in place of each token, as `engine.topk` gives them."""

TEACHER_LOGPROBS = "teacher_logprobs"
"""[length, k] per sequence: their log-probs under the teacher."""

Outside = Literal["bucket", "renormalise", "ignore"]

LEAST_MASS = 1e-7
"""What is left outside of k tokens is known no better than this in fp32."""

LEAST_LOGPROB = -100.0
"""A teacher may rule a token out; its log-prob is taken as this."""


@dataclass(frozen=True, kw_only=True)
class Distill:
    """Divergence of student q and teacher p over the teacher's k likeliest tokens of each position:

        forward · Σ p · log(p / q) + (1 - forward) · Σ q · log(q / p) + nll · (-log q(token))

    averaged by the weights `over` names. `forward` is 1 for the forward divergence (cover all the teacher does), 0 for
    the reverse one (do nothing the teacher does not), between for a mixture. `outside` says what becomes of the rest of
    the vocabulary:

    - "bucket": it is one more token, of probability 1 - Σ p and 1 - Σ q. Both divergences are then proper ones.
    - "renormalise": p and q are divided by their sums over the k tokens.
    - "ignore": it is left out of the sums.

    `temperature` is the student's, and should be the one the teacher's log-probs were made at.

    Columns: "teacher_ids" and "teacher_logprobs", [k] a token; the weights that `over` names.
    """

    forward: Annotated[float, Bounds(least=0, most=1)] = 1.0
    """Fraction of the forward divergence; the rest is the reverse one."""
    outside: Outside = "bucket"
    """What becomes of tokens that are not among the teacher's k."""
    nll: NonNegative = 0.0
    """Weight of the tokens' own negative log-likelihood."""
    temperature: Positive = 1.0
    """Of teacher and student."""
    over: str = "tokens"
    """The weights: "tokens", or a column."""

    def __post_init__(self) -> None:
        check_choice("outside", self.outside, get_args(Outside))
        check_bounds(self)
        per_token(self.over)
        if self.forward < 1.0 and self.outside == "ignore":
            raise ValueError(
                'outside="ignore" lets the reverse divergence fall by moving the student away from all k tokens. '
                'Use outside="bucket" or "renormalise", or forward=1.'
            )

    def denominators(self, depths: int) -> tuple[tuple[str, int], ...]:
        """What it is a mean over: the name of weights, and how many tokens further ahead than the next they are."""
        return ((self.over, 0),)

    def __call__(self, inputs: OutputInputs) -> Loss:
        """Evaluate it on one microbatch."""
        ids, teacher = inputs.microbatch.column(TEACHER_IDS), inputs.microbatch.column(TEACHER_LOGPROBS).float()
        if ids.shape != teacher.shape or ids.ndim != 2:
            raise ValueError(
                f"teacher_ids {tuple(ids.shape)} and teacher_logprobs {tuple(teacher.shape)} must both be [tokens, k]."
            )
        _check_ids(inputs)
        targets, _, count = learned(inputs.microbatch, self.over)
        stats, student = inputs.head.logprobs_at(
            inputs.hidden, targets, ids, target_count=count, temperature=self.temperature
        )
        p = self.logs(teacher.clamp_min(LEAST_LOGPROB))
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
        """Log-probs [T, k] of k tokens -> those that are compared: [T, k], or [T, k + 1] with a bucket."""
        import torch

        if self.outside == "renormalise":
            return logprobs.log_softmax(-1)
        if self.outside == "ignore":
            return logprobs
        rest = (1.0 - logprobs.exp().sum(-1, keepdim=True)).clamp_min(LEAST_MASS)
        return torch.cat([logprobs, rest.log()], -1)


def _check_ids(inputs: OutputInputs) -> None:
    """Refuse a teacher of another vocabulary, by what the host saw of its ids."""
    facts, size = inputs.microbatch.column_stats.get(TEACHER_IDS), inputs.config.vocab_size
    if facts is not None and (facts.least < 0 or facts.most >= size):
        wrong = facts.least if facts.least < 0 else facts.most
        raise ValueError(
            f'"{TEACHER_IDS}" holds {wrong:.0f}, which is outside the vocabulary, 0 to {size - 1}. '
            "Give ids of this model's vocabulary."
        )
