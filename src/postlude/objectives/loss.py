"""Loss and Metric: what an objective returns. They name a column of weights; the engine divides by its global sum.

`load_objective` loads one that the user wrote.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast

from postlude.user_code import load_callable

if TYPE_CHECKING:
    from torch import Tensor

    from postlude.model import OutputInputs

Reduction = Literal["mean", "sum", "max", "min"]


@dataclass(frozen=True)
class Metric:
    """Values to log, and how those of all microbatches and ranks are reduced to one number. They have no gradient."""

    reduction: Reduction
    values: Tensor
    over: str = "tokens"
    depth: int = 0
    """The MTP depth of its positions, 0 for the next token; see `Microbatch.mtp_microbatches`."""


def mean(values: Tensor, over: str = "tokens", *, depth: int = 0) -> Metric:
    """Returns a metric: the mean of per-token (or, over "sequences", per-sequence) values, weighted as in `Loss`."""
    return Metric("mean", values, over, depth)


def total(values: Tensor, over: str = "tokens") -> Metric:
    """Returns a metric: the weighted sum."""
    return Metric("sum", values, over)


def largest(values: Tensor, over: str = "tokens") -> Metric:
    """Returns a metric: the largest value where the weight is not zero."""
    return Metric("max", values, over)


def smallest(values: Tensor, over: str = "tokens") -> Metric:
    """Returns a metric: the smallest value where the weight is not zero."""
    return Metric("min", values, over)


@dataclass(frozen=True)
class Loss:
    """sum(weight · value) / sum(weight) over the whole batch, in every layout.

    `over` names the weights:

    - `"tokens"`: one for every position that has a target; `values` [T].
    - `"sequences"`: one for every sequence; `values` [n].
    - the name of a column, such as a mask of the tokens to train on: its values; `values` [T].

    A value whose weight is zero is ignored, even NaN, and so is the gradient that it would give the results at its own
    position. A scalar is taken as the weighted sum of this microbatch; over "sequences", as the sum over whole
    sequences, equal on all context-parallel ranks. Losses over different weights can be added:
    `policy + 0.1 * penalty`. With a `depth`, values and weights are those of the positions of
    `microbatch.mtp_microbatches[depth - 1]`.
    """

    values: Tensor
    over: str = "tokens"
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    addends: tuple[Loss, ...] = ()
    """The other losses of a sum."""
    depth: int = 0
    outputs: Mapping[str, Tensor] = field(default_factory=dict)
    """Values [T, ...] that `PassResult.outputs` returns per sequence, if the objective has `has_outputs = True`."""

    def __add__(self, other: Loss) -> Loss:
        """Returns the sum, with the metrics and outputs of both. Metrics of one name are reduced together."""
        addends = (*self.addends, replace(other, addends=()), *other.addends)
        return replace(self, addends=addends, outputs={**self.outputs, **other.outputs})

    def __mul__(self, factor: float) -> Loss:
        """Returns the loss times `factor`. Metrics stay as they are."""
        return replace(self, values=self.values * factor, addends=tuple(addend * factor for addend in self.addends))

    __rmul__ = __mul__

    def terms(self) -> tuple[Loss, ...]:
        """Returns the losses that this one is the sum of."""
        return (replace(self, addends=()), *self.addends)


Objective: TypeAlias = Callable[["OutputInputs"], Loss]


def load_objective(location: str, settings: Mapping[str, Any] | None = None) -> Objective:
    """Loads `name` from a Python file. The file is run, so name only files you trust.

    `name` is a function of `OutputInputs`, a callable object, or a class of such objects. A class is built with
    `settings` as keywords; a function gets them as keywords at every call.
    """
    target = load_callable(location, kind="function of OutputInputs that returns a Loss")
    _check_settings(target, settings or {}, location)
    try:
        objective = _with_settings(target, settings or {})
        inspect.signature(objective).bind(None)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"{location} does not take what it is given: {error}. It is called with one argument, OutputInputs, "
            f"and these settings: {', '.join(settings or {}) or 'none'}."
        ) from error
    return objective


def _check_settings(target: Any, settings: Mapping[str, Any], location: str) -> None:
    """Refuses an unknown setting. The message names the nearest known one."""
    parameters = list(inspect.signature(target).parameters.values())
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return
    known = [parameter.name for parameter in (parameters if inspect.isclass(target) else parameters[1:])]
    for name in settings:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f'did you mean "{near[0]}"?' if near else f"it takes {', '.join(known) or 'none'}."
            raise TypeError(f'{location} has no setting "{name}"; {hint}')


def _with_settings(target: Any, settings: Mapping[str, Any]) -> Objective:
    if inspect.isclass(target):
        objective = target(**settings)
        if not callable(objective):
            raise TypeError("its objects cannot be called")
        return cast(Objective, objective)
    return functools.partial(target, **settings) if settings else cast(Objective, target)
