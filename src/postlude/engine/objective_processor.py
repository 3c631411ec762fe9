"""The output processor of a step: runs the objective, and the parts of the model that it left out.

FSDP gathers weights and sums gradients over ranks, part by part. It would wait forever for a rank whose microbatch
used other parts than those of the other ranks.

Values without a weight get gradients of zero, even if they are not finite. A loss leaves such values out. But autograd
multiplies their gradient of zero by what the objective multiplied them by, and zero times NaN is NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from postlude.data import Microbatch
from postlude.engine.normalizer import LossNormalizer
from postlude.engine.pass_metrics import LossRecord
from postlude.model import MTPOptions, OutputInputs
from postlude.model.output import MTPDepths, OutputHead
from postlude.model.parallel import ValueHead
from postlude.objectives import Loss, Objective
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
        """Finds the positions at an MTP depth from the objective's `loss`. `microbatch` is that of depth 0."""
        for term in loss.terms():
            if term.depth == depth and term.over != "sequences" and term.values.ndim:
                without_weight = normalizer.weights(term.over, microbatch, term.depth) == 0
                self.ignored = without_weight if self.ignored is None else self.ignored & without_weight

    def attach(self, inputs: OutputInputs) -> OutputInputs:
        """Returns the objective's inputs. Their hidden states and the head's results drop the ignored gradients."""
        head, tp = inputs.head, inputs.head.tp
        self.filter(inputs.hidden, lambda ignored: ignored[slice(*tp.block(len(ignored)))])
        head_fields = {field.name: getattr(head, field.name) for field in fields(OutputHead)}
        return replace(inputs, head=_FilteringHead(**head_fields, ignored_gradients=self))

    def filter(self, values: Tensor, select: Callable[[Tensor], Tensor] = lambda ignored: ignored) -> Tensor:
        """Returns `values` [T, ...] with a filtered gradient; `select` picks the positions of values [T / tp, ...]."""

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
    """The objective's head, whose results drop non-finite gradients at positions without a weight."""

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


@dataclass(frozen=True)
class ObjectiveProcessor:
    """Returns a microbatch's loss, and records it and the objective's metrics.

    In every microbatch it runs the value head and, if they are trained, the multi-token-prediction depths, and each of
    these, the head and the trunk gets a gradient, if need be of zero.
    """

    objective: Objective
    record: LossRecord
    trains_depths: bool

    @property
    def mtp_options(self) -> MTPOptions | None:
        return getattr(self.objective, "mtp_options", None)

    def __call__(self, inputs: OutputInputs, context: None = None) -> Tensor:
        head, mtp = inputs.head, inputs.mtp
        values = None if head.value_head is None else _RecordedValueHead(head.value_head, inputs.hidden)
        depths = None if mtp is None else _RecordedDepths(mtp, values)
        recorded_head, ignored = replace(head, value_head=cast(ValueHead | None, values)), IgnoredGradients()
        loss = self.objective(ignored.attach(replace(inputs, head=recorded_head, mtp=depths)))
        value = self.record.evaluate(loss, inputs.microbatch)
        parts = [inputs.hidden]
        if values is not None:
            parts.append(values.run())
        if depths is not None and self.trains_depths:
            parts += depths.run(inputs, stop_trunk=bool(self.mtp_options and self.mtp_options.stop_trunk))
        if not torch.is_grad_enabled():
            return value
        if self.record.error is None:
            for depth, positions in enumerate([ignored, *([] if depths is None else depths.ignored)]):
                positions.set_positions(loss, depth, inputs.microbatch, self.record.normalizer)
        self.record.record_gradient(value)
        if not (inputs.config.tied_head and inputs.layout.stages == 1):  # else the trunk has that weight too
            parts.append(head.weight)
        unused = _without_gradient(value, [part for part in parts if part.requires_grad])
        if head.adapter is not None and any(part is head.weight for part in unused):
            unused.append(head.gather(inputs.hidden))
        return cast(Tensor, _WithZeroGradients.apply(value, *unused)) if unused else value


def _without_gradient(value: Tensor, parts: Sequence[Tensor]) -> list[Tensor]:
    """Returns those of `parts` that a backward from `value` does not reach. The search stops at each part."""
    by_node = {get_gradient_edge(part).node: part for part in parts}
    reached, waiting = set[Any](), [value.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in reached:
            continue
        reached.add(node)
        if node not in by_node:
            waiting += [before for before, _ in node.next_functions]
    return [part for node, part in by_node.items() if node not in reached]


class _WithZeroGradients(torch.autograd.Function):
    """A value, with a gradient of zero for other tensors, whatever these hold."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, *others: Tensor) -> Tensor:
        ctx.others = [(other.shape, other.dtype, other.device) for other in others]
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        zeros = (torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.others)
        return gradients[0], *zeros


class _RecordedValueHead:
    """A value head that keeps its last output. `hidden` are the trunk's final states."""

    def __init__(self, value_head: ValueHead, hidden: Tensor) -> None:
        self.value_head, self.hidden = value_head, hidden
        self.last: tuple[Tensor, bool, Tensor] | None = None  # input, whether autograd recorded, and output

    def __call__(self, hidden: Tensor) -> Tensor:
        records = torch.is_grad_enabled()
        if self.last is None or self.last[0] is not hidden or self.last[1] != records:
            self.last = hidden, records, self.value_head(hidden)
        return self.last[2]

    def run(self) -> Tensor:
        """Returns the last output; computes one if there is none."""
        return self(self.hidden) if self.last is None else self.last[2]


class _RecordedDepths:
    """The depths of a model, whose states are kept. They run after the value head: in the same order on every rank."""

    def __init__(self, depths: MTPDepths, values: _RecordedValueHead | None) -> None:
        self.depths, self.values = depths, values
        self.iterator: Iterator[OutputInputs] | None = None
        self.states: list[Tensor] = []
        self.ignored: list[IgnoredGradients] = []

    def __call__(self, inputs: OutputInputs, *, stop_trunk: bool, stop_head: bool) -> Iterator[OutputInputs]:
        if self.values is not None:
            self.values.run()
        self.iterator = self.depths(inputs, stop_trunk=stop_trunk, stop_head=stop_head)
        for depth in self.iterator:
            self.states.append(depth.hidden)
            self.ignored.append(IgnoredGradients())
            yield self.ignored[-1].attach(depth)

    def run(self, inputs: OutputInputs, *, stop_trunk: bool) -> list[Tensor]:
        """Runs the depths that were not requested. Returns the states of all."""
        remaining = self.iterator or self.depths(inputs, stop_trunk=stop_trunk, stop_head=True)
        return self.states + [depth.hidden for depth in remaining]
