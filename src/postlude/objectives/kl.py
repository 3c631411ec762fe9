"""KL divergence estimated from sampled tokens, and the penalty for leaving a reference policy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from postlude.checks import Positive, check_bounds, check_choice
from postlude.options import Common

if TYPE_CHECKING:
    from torch import Tensor

Estimator = Literal["k1", "k2", "k3"]
Gradient = Literal["expectation", "importance", "estimator"]

LOG_BOUND = 20.0
"""Differences of log-probs are clamped to ± this before they are exponentiated."""


def clamp_log_ratio(difference: Tensor) -> Tensor:
    return difference.clamp(-LOG_BOUND, LOG_BOUND)


def estimate_kl(logprob: Tensor, other: Tensor, estimator: Estimator = "k3") -> Tensor:
    """Returns an estimate of KL(p ‖ q) at tokens sampled from p, given log p = `logprob` and log q = `other`, [...].

    With d = log q - log p, clamped to ± 20:

        k1 = -d          unbiased, of either sign
        k2 = d² / 2      biased, never negative
        k3 = eᵈ - 1 - d  unbiased, never negative
    """
    check_choice("estimator", estimator, get_args(Estimator))
    difference = clamp_log_ratio(other - logprob)
    if estimator == "k1":
        return -difference
    if estimator == "k2":
        return 0.5 * difference.square()
    return difference.expm1() - difference


@dataclass(frozen=True, kw_only=True)
class ReferenceKL:
    """coefficient · w · k,   k = `estimate_kl(log p, log p_ref)`: a penalty for leaving the reference policy.

    The derivative of k is not the gradient of the divergence, since the policy also decides how often a token is
    sampled. `gradient` chooses w:

    - "expectation": w = p / sg(p), which is 1 and has the gradient of log p. The result is the gradient of the mean of
      k under the policy. For k1 and k3 that is the gradient of the divergence, for k3 (log p - log p_ref) · ∇log p.
    - "importance": w = p / p_old. The same, and the value too is corrected for tokens sampled from the old policy.
    - "estimator": w = 1, the derivative of k alone, as in the published GRPO. For k2 it is the gradient of the
      divergence, for k3 a biased one. For k1 it is ∇log p, which is zero on average: that is refused.

    Where log p_ref - log p is beyond ± 20, value and gradient are those at the bound.
    """

    coefficient: Common[Positive]
    """Weight of the penalty."""
    estimator: Estimator = "k3"
    """Estimator of the divergence at a token."""
    gradient: Gradient = "expectation"
    """Gradient of the penalty: of its mean under the policy ("expectation"), the same with importance weights for
    tokens of the old policy ("importance"), or of the estimator alone, as in the published GRPO ("estimator")."""

    def __post_init__(self) -> None:
        check_bounds(self)
        check_choice("estimator", self.estimator, get_args(Estimator))
        check_choice("gradient", self.gradient, get_args(Gradient))
        if (self.estimator, self.gradient) == ("k1", "estimator"):
            raise ValueError(
                'ReferenceKL(estimator="k1", gradient="estimator") has a gradient of zero on average, so it restrains '
                'nothing. Use gradient="expectation", or estimator="k2".'
            )

    def __call__(self, logprob: Tensor, reference: Tensor, old: Tensor) -> Tensor:
        """Returns the penalty at each token, [...], given log-probs of the policy, the reference and the old policy."""
        now = logprob.detach()
        values, difference = estimate_kl(now, reference, self.estimator), clamp_log_ratio(reference - now)
        if self.gradient == "estimator":
            slopes = -difference.expm1() if self.estimator == "k3" else -difference
        elif self.estimator == "k3":
            slopes = -difference  # k + dk / d log p, simplified: both terms are huge where the reference is likelier
        else:
            slopes = values + (1.0 if self.estimator == "k1" else -difference)
        if self.gradient == "importance":
            weights = clamp_log_ratio(now - old).exp()
            values, slopes = values * weights, slopes * weights
        return self.coefficient * (values + slopes * (logprob - now))


@dataclass(frozen=True, kw_only=True)
class RewardKL:
    """coefficient · k,   k = `estimate_kl(log p, log p_ref)`: a penalty that is subtracted from the reward of a token.

    p is the policy before the step. The policy gradient of the reward does the rest, so that k has no gradient.
    """

    coefficient: Positive
    """Weight of the penalty."""
    estimator: Estimator = "k1"
    """Estimator of the divergence at a token."""

    def __post_init__(self) -> None:
        check_bounds(self)
        check_choice("estimator", self.estimator, get_args(Estimator))

    def __call__(self, logprob: Tensor, reference: Tensor) -> Tensor:
        """Returns the penalty at each token, [...]."""
        return self.coefficient * estimate_kl(logprob, reference, self.estimator)
