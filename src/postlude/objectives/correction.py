"""Where the engine that sampled a token and the one that trains on it disagree: weigh the token, or leave it out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from postlude.checks import check_choice
from postlude.objectives.checks import interval
from postlude.objectives.kl import bounded
from postlude.objectives.weights import sequence_mean, spread

if TYPE_CHECKING:
    from torch import Tensor

    from postlude.data import Microbatch

Level = Literal["token", "sequence"]
Bounds = tuple[float, float]


@dataclass(frozen=True)
class Corrected:
    """Importance weights [T] without gradient, and 1.0 where a bound changed the weight or dropped the token [T]."""

    weights: Tensor
    changed: Tensor


@dataclass(frozen=True, kw_only=True)
class RolloutCorrection:
    """Importance weights of the policy that computed "old_logprobs" over the one that sampled "rollout_logprobs":

        w = exp(old - rollout)                     of each token; with level="sequence", exp Σₜ(old - rollout) for all
                                                   tokens of a sequence

    then, each if given, with bounds (low, high):

        truncate        w held to [low, high]                                        TIS; (0, 2) bounds it above only
        mask            w, but 0 outside [low, high]                                 IcePop
        sequence_mask   0 for the sequences whose geometric mean of exp(old - rollout) is outside [low, high]

    Dropped tokens stay in the mean's count.
    """

    level: Level = "token"
    """Whether weights are of tokens or of whole sequences."""
    truncate: Bounds | None = (0.0, 2.0)
    """Bounds that weights are held to."""
    mask: Bounds | None = None
    """Bounds outside which a token counts for nothing."""
    sequence_mask: Bounds | None = None
    """Bounds outside which a sequence counts for nothing."""

    def __post_init__(self) -> None:
        check_choice("level", self.level, get_args(Level))
        for name in ("truncate", "mask", "sequence_mask"):
            interval(name, getattr(self, name))

    def __call__(self, microbatch: Microbatch, old: Tensor, rollout: Tensor, kept: Tensor) -> Corrected:
        """Weigh the tokens [T] of a microbatch, given both log-probs of each. `kept` [T]: those that are learned."""
        gap = (old - rollout).detach().where(kept, 0.0)
        logs = gap if self.level == "token" else spread(microbatch, microbatch.sequence_sum(gap))
        raw = bounded(logs).exp()
        weights = raw if self.truncate is None else raw.clamp(*self.truncate)
        if self.mask is not None:
            weights = weights.where(_inside(raw, self.mask), 0.0)
        if self.sequence_mask is not None:
            average = bounded(sequence_mean(microbatch, gap, kept)).exp()
            weights = weights.where(spread(microbatch, _inside(average, self.sequence_mask)), 0.0)
        return Corrected(weights, (weights != raw).float())


def _inside(values: Tensor, bounds: Bounds) -> Tensor:
    low, high = bounds
    return (values >= low) & (values <= high)
