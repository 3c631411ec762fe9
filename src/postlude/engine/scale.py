"""The one scale: a loss is a sum over this rank's tokens divided by a count over the whole batch. Nothing else scales.

Every rank has the whole batch, so every rank knows the counts before the step. Gradients are then summed over all ranks
that saw different tokens, and so are the losses themselves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from postlude.data import IGNORE, Microbatch
from postlude.model import OutputInputs
from postlude.objectives import Loss, Metric, Objective
from postlude.objectives.loss import Reduction


class Scale:
    """The counts of one batch, and what a microbatch adds to a loss or a metric.

    `microbatches` are all of the batch, uncut. `counts` overrides what they hold, for a batch that is only part of a
    step. `sharers` is the number of context-parallel ranks, each of which holds every sequence's values.
    """

    def __init__(
        self, microbatches: Sequence[Microbatch], counts: Mapping[str, float] | None = None, *, sharers: int = 1
    ) -> None:
        self.microbatches = microbatches
        self.sharers = sharers
        self.counts = dict(counts or {})

    def count(self, over: str) -> float:
        """The sum of the weights `over` names, in the whole batch."""
        if over not in self.counts:
            weights = (self.weights(over, microbatch).sum(dtype=torch.float64) for microbatch in self.microbatches)
            self.counts[over] = float(sum(weights)) * self._sharers_of(over)
        if self.counts[over] <= 0:
            raise ValueError(
                f'a loss is a mean over "{over}", whose weights sum to {self.counts[over]:g} in this batch. '
                "Skip a batch with nothing to learn, or name other weights."
            )
        return self.counts[over]

    def weights(self, over: str, microbatch: Microbatch) -> Tensor:
        """[T], or [n] over "sequences"."""
        match over:
            case "tokens":
                return microbatch.targets != IGNORE
            case "sequences":
                return torch.full((microbatch.packing.count,), 1.0 / self.sharers, device=microbatch.tokens.device)
        return microbatch.column(over)

    def loss(self, loss: Loss, microbatch: Microbatch) -> Tensor:
        """What this microbatch adds to the batch's loss: a scalar, fp32."""
        parts = [self._sum(part.values, part.over, microbatch) / self.count(part.over) for part in loss.parts()]
        return torch.stack(parts).sum()

    def _sum(self, values: Tensor, over: str, microbatch: Microbatch) -> Tensor:
        if values.ndim == 0:
            return values.float() / self._sharers_of(over)
        weights = self._fitting(values, over, microbatch)
        return torch.where(weights != 0, values.float() * weights, 0.0).sum()

    def _sharers_of(self, over: str) -> int:
        """How many ranks have the same values: a sequence's are whole on every rank that holds part of it."""
        return self.sharers if over == "sequences" else 1

    def _fitting(self, values: Tensor, over: str, microbatch: Microbatch) -> Tensor:
        weights = self.weights(over, microbatch)
        if values.shape != weights.shape:
            raise ValueError(
                f'values over "{over}" have shape {tuple(values.shape)}, but this microbatch has '
                f"{tuple(weights.shape)} of them. Give one value for each, or their sum as a scalar."
            )
        return weights


class Tally:
    """Metrics of the microbatches seen on this rank, and their reduction over all ranks."""

    def __init__(self, scale: Scale) -> None:
        self.scale = scale
        self.entries: dict[str, tuple[Reduction, list[Tensor], list[Tensor]]] = {}

    def evaluate(self, objective: Objective, inputs: OutputInputs) -> Tensor:
        """What one microbatch adds to the batch's loss. It and the objective's metrics are counted."""
        loss = objective(inputs)
        if not isinstance(loss, Loss):
            raise TypeError(f"an objective returns a Loss, but this one returned a {type(loss).__name__}.")
        value = self.scale.loss(loss, inputs.microbatch)
        self.add_loss(value)
        for part in loss.parts():
            for name, metric in part.metrics.items():
                self.add(name, metric, inputs.microbatch)
        return value

    def add_loss(self, value: Tensor) -> None:
        """Count what one microbatch added to the batch's loss."""
        _, upper, lower = self.entries.setdefault("loss", ("sum", [], []))
        upper.append(value.detach())
        lower.append(torch.ones_like(value.detach()))

    @torch.no_grad()
    def add(self, name: str, metric: Metric, microbatch: Microbatch) -> None:
        """Count the values of one microbatch."""
        values = metric.values.detach().float()
        if values.ndim == 0:
            # A number of the whole microbatch weighs as much as what it is of; of a sum, it is an addend.
            whole = self.scale.weights(metric.over, microbatch).sum().float()
            addend = torch.ones_like(values) / self.scale._sharers_of(metric.over)
            weights = addend if metric.reduction == "sum" else whole
        else:
            weights = self.scale._fitting(values, metric.over, microbatch).float()
        kept = weights != 0
        reduction, upper, lower = self.entries.setdefault(name, (metric.reduction, [], []))
        if reduction != metric.reduction:
            raise ValueError(f'metric "{name}" is a {reduction} in one microbatch and a {metric.reduction} in another.')
        match metric.reduction:
            case "max":
                upper.append(torch.where(kept, values, float("-inf")).amax() if values.numel() else values.sum())
                lower.append(kept.sum())
            case "min":
                upper.append(torch.where(kept, values, float("inf")).amin() if values.numel() else values.sum())
                lower.append(kept.sum())
            case _:
                upper.append(torch.where(kept, values * weights, 0.0).sum())
                lower.append(weights.sum())

    def reduce(self, counts_here: bool, group: dist.ProcessGroup | None = None) -> dict[str, float]:
        """One number a metric, the same on every rank. Only ranks where `counts_here` holds bring values in."""
        own = {}
        if counts_here:
            for name, (reduction, upper, lower) in self.entries.items():
                own[name] = reduction, torch.stack(upper).double().tolist(), torch.stack(lower).double().tolist()
        everyone = [own]
        if dist.is_initialized():
            everyone = [{} for _ in range(dist.get_world_size(group))]
            dist.all_gather_object(everyone, own, group=group)
        names = dict.fromkeys(name for entries in everyone for name in entries)
        return {name: _combine([entries[name] for entries in everyone if name in entries]) for name in names}


def _combine(entries: Sequence[tuple[Reduction, list[float], list[float]]]) -> float:
    reduction = entries[0][0]
    pairs = [pair for _, upper, lower in entries for pair in zip(upper, lower, strict=True)]
    if reduction in ("max", "min"):
        found = torch.tensor([value for value, kept in pairs if kept] or [float("nan")], dtype=torch.float64)
        return float(found.amax() if reduction == "max" else found.amin())  # not Python's, which may pass over a NaN
    weighted, weight = sum(value for value, _ in pairs), sum(value for _, value in pairs)
    if reduction == "sum":
        return weighted
    return weighted / weight if weight else float("nan")
