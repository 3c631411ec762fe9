"""Gradients of values without a weight: zero, even if the value is not finite.

A loss leaves such values out. But autograd multiplies their gradient of zero by what the objective multiplied them by,
and zero times NaN is NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

from torch import Tensor

from postlude.data import Microbatch
from postlude.engine.normalizer import LossNormalizer
from postlude.model import OutputInputs
from postlude.model.output import OutputHead
from postlude.objectives import Loss
from postlude.ops.linear_logprobs import TokenStats


class IgnoredGradients:
    """Replaces non-finite gradients at the positions of a microbatch whose values have no weight in a loss.

    The positions are known once the objective has returned, before the backward. They are those that have weight zero
    in each per-token loss. Without a per-token loss there are none.
    """

    def __init__(self) -> None:
        self.ignored: Tensor | None = None
        """[T] bool."""

    def set_positions(self, loss: Loss, depth: int, microbatch: Microbatch, normalizer: LossNormalizer) -> None:
        """Finds the positions at a depth, given what the objective returned for the trunk's `microbatch`."""
        for term in loss.terms():
            if term.depth == depth and term.over != "sequences" and term.values.ndim:
                without_weight = normalizer.weights(term.over, microbatch, term.depth) == 0
                self.ignored = without_weight if self.ignored is None else self.ignored & without_weight

    def attach(self, inputs: OutputInputs) -> OutputInputs:
        """Returns the inputs of an objective whose values do not pass on the gradients."""
        head, tp = inputs.head, inputs.head.tp
        self.filter(inputs.hidden, lambda ignored: ignored[slice(*tp.block(len(ignored)))])
        head_fields = {field.name: getattr(head, field.name) for field in fields(OutputHead)}
        return replace(inputs, head=_FilteringHead(**head_fields, ignored_gradients=self))

    def filter(self, values: Tensor, select: Callable[[Tensor], Tensor] = lambda ignored: ignored) -> Tensor:
        """Returns the same values [T, ...] (or [T / tp, ...], of which it `select`s the positions)."""

        def clean(gradient: Tensor | None) -> Tensor | None:
            if self.ignored is None or gradient is None:
                return gradient
            ignored = select(self.ignored).view(-1, *[1] * (gradient.ndim - 1))
            return gradient.masked_fill(ignored & ~gradient.isfinite(), 0.0)

        if values.requires_grad:
            values.register_hook(clean)
        return values


@dataclass(frozen=True, kw_only=True)
class _FilteringHead(OutputHead):
    """The head of an objective, whose results take no gradients of values without a weight."""

    ignored_gradients: IgnoredGradients

    def logits(self, hidden: Tensor) -> Tensor:
        return self.ignored_gradients.filter(super().logits(hidden))

    def logprobs(self, *arguments: Any, **options: Any) -> TokenStats:
        return self._filtered(super().logprobs(*arguments, **options))

    def logprobs_at(self, *arguments: Any, **options: Any) -> tuple[TokenStats, Tensor]:
        stats, logprobs = super().logprobs_at(*arguments, **options)
        return self._filtered(stats), self.ignored_gradients.filter(logprobs)

    def values(self, hidden: Tensor) -> Tensor:
        return self.ignored_gradients.filter(super().values(hidden))

    def _filtered(self, stats: TokenStats) -> TokenStats:
        for values in (stats.logprob, stats.entropy, stats.lse):
            if values is not None:
                self.ignored_gradients.filter(values)
        return stats
