"""Loss and Metric: what an objective returns. They name what they are a mean over; the engine does the counting."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    from torch import Tensor

    from postlude.model import OutputInputs

Reduction = Literal["mean", "sum", "max", "min"]


@dataclass(frozen=True)
class Metric:
    """Values for the log, and how those of all microbatches and ranks become one number. They carry no gradient."""

    reduction: Reduction
    values: Tensor
    over: str = "tokens"
    depth: int = 0
    """How many tokens further ahead than the next its positions predict; see `Microbatch.mtp_microbatches`."""


def mean(values: Tensor, over: str = "tokens", *, depth: int = 0) -> Metric:
    """Mean of per-token (or, over "sequences", per-sequence) values, weighted as `Loss` weighs them."""
    return Metric("mean", values, over, depth)


def total(values: Tensor, over: str = "tokens") -> Metric:
    """Weighted sum."""
    return Metric("sum", values, over)


def largest(values: Tensor, over: str = "tokens") -> Metric:
    """Largest value where the weight is not zero."""
    return Metric("max", values, over)


def smallest(values: Tensor, over: str = "tokens") -> Metric:
    """Smallest value where the weight is not zero."""
    return Metric("min", values, over)


@dataclass(frozen=True)
class Loss:
    """A weighted mean over the whole batch: sum(weight · value) / sum(weight), whatever ranks its parts are on.

    `over` names the weights:

    - `"tokens"`: one for every position that has a target; `values` [T].
    - `"sequences"`: one for every sequence; `values` [n].
    - the name of a column, such as a mask of the tokens to learn: its values; `values` [T].

    Where the weight is zero a value counts for nothing, even if it is not a number. A scalar stands for a sum over this
    microbatch that has its weights in it already; over "sequences", a sum over whole ones, alike on every rank that
    shares them. Losses over different things add up: `policy + 0.1 * penalty`. With a `depth` the positions are those
    of `microbatch.mtp_microbatches`, which predict as many tokens further ahead, and so are the weights.
    """

    values: Tensor
    over: str = "tokens"
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    more: tuple[Loss, ...] = ()
    depth: int = 0

    def __add__(self, other: Loss) -> Loss:
        """Both together, with the metrics of both."""
        return replace(self, more=(*self.more, replace(other, more=()), *other.more))

    def __mul__(self, factor: float) -> Loss:
        """Every part times `factor`. Metrics stay as they are."""
        return replace(self, values=self.values * factor, more=tuple(part * factor for part in self.more))

    __rmul__ = __mul__

    def parts(self) -> tuple[Loss, ...]:
        """The losses this one is the sum of."""
        return (replace(self, more=()), *self.more)


Objective: TypeAlias = Callable[["OutputInputs"], Loss]
