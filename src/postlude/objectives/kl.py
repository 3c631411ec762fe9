"""How far a policy has moved, estimated from the tokens that were sampled; and the penalty for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from postlude.checks import Positive, check_bounds, check_choice

if TYPE_CHECKING:
    from torch import Tensor

Estimator = Literal["k1", "k2", "k3"]
Gradient = Literal["expectation", "importance", "estimator"]

LOG_BOUND = 20.0
"""Differences of log-probs are held to ± this before they are exponentiated: beyond, no weight is meant seriously."""


def bounded(difference: Tensor) -> Tensor:
    """A difference of log-probs that can be exponentiated. Beyond the bound it is constant."""
    return difference.clamp(-LOG_BOUND, LOG_BOUND)


def estimate(logprob: Tensor, other: Tensor, estimator: Estimator = "k3") -> Tensor:
    """Estimate KL(p ‖ q) at tokens sampled from p, given log p = `logprob` and log q = `other`, [...] each.

    With d = log q - log p, held to ± 20:

        k1 = -d          unbiased, of either sign
        k2 = d² / 2      biased, never negative
        k3 = eᵈ - 1 - d  unbiased, never negative
    """
    check_choice("estimator", estimator, get_args(Estimator))
    difference = bounded(other - logprob)
    if estimator == "k1":
        return -difference
    if estimator == "k2":
        return 0.5 * difference.square()
    return difference.expm1() - difference


@dataclass(frozen=True, kw_only=True)
class ReferenceKL:
    """A penalty for leaving the reference policy: coefficient · w · k, with k of `estimate(log p, log p_ref)`.

    An estimator's value at a token is one thing, the gradient of the divergence another: the policy also decides how
    often the token is drawn. `gradient` says what w is:

    - "expectation": w = p / sg(p), which is 1 and whose gradient is that of log p. The gradient is that of the mean of
      k under the policy itself; of k1 and k3, it is the divergence's own: (log p - log p_ref) · ∇log p for k3.
    - "importance": w = p / p_old. Likewise, and the value too is corrected for tokens drawn from the old policy.
    - "estimator": w = 1, the derivative of k alone, as in the published GRPO. Of k2 it is the divergence's own
      gradient, of k3 a biased one. Of k1 it is ∇log p, which is zero on average and no penalty: that is refused.

    Where log p_ref - log p is beyond ± 20, value and gradient are those at the bound: the penalty still pulls, the same
    way, and no harder.
    """

    coefficient: Positive
    """Weight of the penalty."""
    estimator: Estimator = "k3"
    """How the divergence is estimated at a token."""
    gradient: Gradient = "expectation"
    """Whose gradient it has."""

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
        """The penalty at each token, [...], given log-probs of the policy, the reference and the old policy."""
        now = logprob.detach()
        values, difference = estimate(now, reference, self.estimator), bounded(reference - now)
        if self.gradient == "estimator":
            slopes = -difference.expm1() if self.estimator == "k3" else -difference
        elif self.estimator == "k3":
            slopes = -difference  # k + dk / d log p: written out, since both are huge where the reference is likelier
        else:
            slopes = values + (1.0 if self.estimator == "k1" else -difference)
        if self.gradient == "importance":
            weights = bounded(now - old).exp()
            values, slopes = values * weights, slopes * weights
        return self.coefficient * (values + slopes * (logprob - now))
