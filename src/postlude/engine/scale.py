"""The one scale: a loss is a sum over this rank's tokens divided by a count over the whole batch. Nothing else scales.

Every rank knows the counts of the whole batch before the step. Gradients are then summed over all ranks
that saw different tokens, and so are the losses themselves.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from postlude.data import IGNORE, Microbatch
from postlude.model import MTPOptions, OutputInputs
from postlude.objectives import Loss, Metric, Objective
from postlude.objectives.loss import Reduction
from postlude.world.devices import group_device

Named = tuple[str, Reduction]
USUAL_LINES = 256
"""How many metrics there is room for before more are known."""


def count_name(over: str, depth: int = 0) -> str:
    """What the count of weights is called that are `depth` tokens further ahead than the next.

    There are as many sequences at every depth.
    """
    return f"{over} +{depth}" if depth and over != "sequences" else over


class Scale:
    """The counts of one batch, and what a microbatch adds to a loss or a metric.

    `counts` are sums of weights over the whole step, by name. Without them weights are summed over `microbatches`,
    which are then all of the batch, uncut. `cp_size` is the number of context-parallel ranks, each of which holds every
    sequence's values.
    """

    def __init__(
        self, microbatches: Sequence[Microbatch], counts: Mapping[str, float] | None = None, *, cp_size: int = 1
    ) -> None:
        self.microbatches = microbatches
        self.cp_size = cp_size
        self.given = counts is not None
        self.counts = dict(counts or {})

    def count(self, over: str, depth: int = 0) -> float:
        """The sum of the weights `over` names, in the whole batch."""
        name = count_name(over, depth)
        if name not in self.counts and self.given:
            known = ", ".join(f'"{other}"' for other in self.counts) or "none"
            raise LookupError(
                f'a loss is a mean over "{name}", whose sum over the step is not known (known are: {known}). Give the '
                "batch a column of that name, or the step's `counts` its sum, as Engine.count makes them."
            )
        if name not in self.counts:
            weights = (self.weights(over, each, depth).sum(dtype=torch.float64) for each in self.microbatches)
            self.counts[name] = float(sum(weights)) * self.replicas_of(over)
        if not self.counts[name] > 0 and not (depth and self.counts[name] == 0):
            raise ValueError(
                f'a loss is a mean over "{over}", whose weights sum to {self.counts[name]:g} in this batch. '
                "Skip a batch with nothing to learn, or name other weights."
            )
        return self.counts[name] or 1.0  # sequences too short for a depth leave it nothing to learn

    def weights(self, over: str, microbatch: Microbatch, depth: int = 0) -> Tensor:
        """[T], or [n] over "sequences"."""
        if depth:
            return self.weights(over, microbatch.mtp_microbatches[depth - 1])
        match over:
            case "tokens":
                return microbatch.targets != IGNORE
            case "sequences":
                return torch.full((microbatch.packing.count,), 1.0 / self.cp_size, device=microbatch.tokens.device)
        return microbatch.column(over)

    def loss(self, loss: Loss, microbatch: Microbatch) -> Tensor:
        """What this microbatch adds to the batch's loss: a scalar, fp32."""
        parts = [self._sum(part, microbatch) / self.count(part.over, part.depth) for part in loss.parts()]
        return torch.stack(parts).sum()

    def _sum(self, loss: Loss, microbatch: Microbatch) -> Tensor:
        if loss.values.ndim == 0:
            return loss.values.float() / self.replicas_of(loss.over)
        weights = self.fitting(loss, microbatch)
        return torch.where(weights != 0, loss.values.float() * weights, 0.0).sum()

    def replicas_of(self, over: str) -> int:
        """How many ranks have the same values: a sequence's are whole on every rank that holds part of it."""
        return self.cp_size if over == "sequences" else 1

    def fitting(self, part: Loss | Metric, microbatch: Microbatch) -> Tensor:
        """The weights of `part.values`, one for each of them."""
        weights = self.weights(part.over, microbatch, part.depth)
        if part.values.shape != weights.shape:
            raise ValueError(
                f'values over "{part.over}" have shape {tuple(part.values.shape)}, but this microbatch has '
                f"{tuple(weights.shape)} of them. Give one value for each, or their sum as a scalar."
            )
        return weights


def check_counts(objective: Objective, counts: Mapping[str, float], depths: int) -> None:
    """Refuse, before a pass, an objective that is a mean over what is unknown or sums to zero.

    It says what that is in a method `denominators(depths)`: pairs of a name and a depth. One that has none is refused
    after the pass.
    """
    denominators = getattr(objective, "denominators", None)
    scale = Scale((), counts)
    for over, depth in denominators(depths) if denominators is not None else ():
        scale.count(over, depth)


class MetricIndex:
    """The metrics that all ranks know of, each with a line of its own in what they sum together.

    It outlives a step: ranks tell each other names once, and then only numbers.
    """

    def __init__(self) -> None:
        self.lines: dict[Named, int] = {}

    @property
    def digest(self) -> int:
        """A number of 48 bits that tells ledgers apart; never 0."""
        text = json.dumps(list(self.lines)).encode()
        return 1 + int.from_bytes(hashlib.blake2b(text, digest_size=6).digest(), "little")

    @property
    def room(self) -> int:
        """How many lines are summed: the same on every rank, though some know no metric yet."""
        return max(USUAL_LINES, len(self.lines))

    def has(self, names: Iterable[Named]) -> bool:
        """Whether each of these metrics has a line."""
        return all(name in self.lines for name in names)

    def learn(self, names: Iterable[Named]) -> None:
        """Give each of these a line: beside the known ones, or alone where there is no room for both."""
        names = list(dict.fromkeys(names))
        known = list(dict.fromkeys([*self.lines, *names]))
        self.lines = {name: line for line, name in enumerate(known if len(known) <= USUAL_LINES else names)}


class MetricAccumulator:
    """Metrics of the microbatches seen on this rank, and their reduction over all ranks."""

    def __init__(self, scale: Scale, metric_index: MetricIndex | None = None) -> None:
        self.scale = scale
        self.metric_index = metric_index or MetricIndex()
        self.entries: dict[str, tuple[Reduction, list[Tensor], list[Tensor]]] = {}
        self.shares: dict[str, tuple[Reduction, list[Tensor], list[Tensor]]] = {}
        self.refused: Exception | None = None

    def evaluate(self, objective: Objective, inputs: OutputInputs) -> Tensor:
        """What one microbatch adds to the batch's loss. It and the objective's metrics are counted.

        A loss or metric that cannot be counted is `refused` when the pass is over: other ranks are in the middle of it.
        Till then it adds zero, by the same graph, so that ranks keep step.
        """
        loss = objective(inputs)
        if not isinstance(loss, Loss):
            raise TypeError(f"an objective returns a Loss, but this one returned a {type(loss).__name__}.")
        try:
            value = self.scale.loss(loss, inputs.microbatch)
            self.add_loss(value)
            for part in loss.parts():
                for name, metric in part.metrics.items():
                    self.add(name, metric, inputs.microbatch)
        except (LookupError, ValueError) as error:
            self.refused = self.refused or error
            return 0.0 * torch.stack([part.values.float().sum() for part in loss.parts()]).sum()
        return value

    def add_loss(self, value: Tensor) -> None:
        """Count what one microbatch added to the batch's loss."""
        _, upper, lower = self.entries.setdefault("loss", ("sum", [], []))
        upper.append(value.detach())
        lower.append(torch.ones_like(value.detach()))

    @torch.no_grad()
    def add(self, name: str, metric: Metric, microbatch: Microbatch) -> None:
        """Count the values of one microbatch."""
        if name == "loss":
            raise ValueError('a metric is named "loss", which the loss itself is called. Choose another name.')
        values = metric.values.detach().float()
        if values.ndim == 0:
            # A number of the whole microbatch weighs as much as what it is of; of a sum, it is an addend.
            whole = self.scale.weights(metric.over, microbatch, metric.depth).sum().float()
            addend = torch.ones_like(values) / self.scale.replicas_of(metric.over)
            weights = addend if metric.reduction == "sum" else whole
        else:
            weights = self.scale.fitting(metric, microbatch).float()
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

    def add_share(self, name: str, part: Tensor, whole: Tensor) -> None:
        """Count scalars that are this rank's own, whether or not it has outputs: the metric is Σ part / Σ whole."""
        _, upper, lower = self.shares.setdefault(name, ("mean", [], []))
        upper.append(part)
        lower.append(whole)

    @torch.no_grad()
    def reduce(self, counts_here: bool) -> dict[str, float]:
        """One number a metric, the same on every rank.

        Of what outputs gave, only ranks where `counts_here` holds bring values in. Where one rank has `refused` a loss,
        every rank then has, and there are no numbers.

        All numbers go through one sum and one maximum, and the host waits once, for both. Names are told only when a
        rank has a metric that not all know of.
        """
        entries = {**(self.entries if counts_here else {}), **self.shares}
        own = {(name, reduction): _folded(reduction, *rest) for name, (reduction, *rest) in entries.items()}
        alone = not dist.is_initialized() or dist.get_world_size() == 1
        if alone:
            self.metric_index.learn(own)
        sums, highest = self._numbers(own, alone)
        if highest[2] >= 0 and not alone:
            sentence: list[str | None] = [None if self.refused is None else str(self.refused)]
            dist.broadcast_object_list(sentence, src=int(highest[2]))
            self.refused = self.refused or ValueError(sentence[0])
            return {}
        if highest[0] != -highest[1]:
            everyone: list[list[Named]] = [[] for _ in range(dist.get_world_size())]
            dist.all_gather_object(everyone, list(own))
            self.metric_index.learn(name for names in everyone for name in names)
            sums, highest = self._numbers(own, alone)
        found = {}
        for (name, reduction), line in self.metric_index.lines.items():
            first, second, present = sums[3 * line : 3 * line + 3]
            if present:
                found[name] = _number(reduction, first, second, highest[3 + line])
        return found

    def _numbers(
        self, own: Mapping[Named, tuple[Tensor, Tensor, Tensor]], alone: bool
    ) -> tuple[list[float], list[float]]:
        """Three sums a line of the metric_index; and the highest of its digest, of the digest's negation, of the
        ranks that refused a loss, and of one number a line.

        A rank with a metric that has no line says 0 instead of the digest, and so differs from itself.
        """
        known, room = self.metric_index.has(own), self.metric_index.room
        device = next((first.device for first, _, _ in own.values()), torch.device("cpu") if alone else group_device())
        sums = torch.zeros(room, 3, dtype=torch.float64, device=device)
        highest = torch.full((3 + room,), float("-inf"), dtype=torch.float64, device=device)
        highest[0].fill_(float(self.metric_index.digest))
        highest[1].fill_(-float(self.metric_index.digest) if known else 0.0)
        if self.refused is not None:
            highest[2].fill_(0.0 if alone else float(dist.get_rank()))
        for name, (first, second, extreme) in own.items() if known else ():
            line = self.metric_index.lines[name]
            sums[line, 0], sums[line, 1], highest[3 + line] = first, second, extreme
            sums[line, 2].fill_(1.0)
        both = torch.cat((sums.flatten(), highest))
        if not alone:
            both = both.cpu() if dist.get_backend() == "gloo" else both
            dist.all_reduce(both[: 3 * room])
            dist.all_reduce(both[3 * room :], dist.ReduceOp.MAX)
        numbers = both.tolist()
        return numbers[: 3 * room], numbers[3 * room :]


def _folded(reduction: Reduction, upper: Sequence[Tensor], lower: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """A metric's entries of all microbatches as two sums and a number of which the highest counts.

    Of an extreme, the sums are how often it is not a number, which a maximum would pass over, and how many values
    count; of a smallest value the negation is taken, so that the highest counts.
    """
    values, counted = torch.stack(tuple(upper)).double(), torch.stack(tuple(lower)).double()
    if reduction in ("mean", "sum"):
        return values.sum(), counted.sum(), torch.zeros_like(values[0])
    unknown = values.isnan() & (counted > 0)
    signed = values if reduction == "max" else -values
    return unknown.double().sum(), counted.sum(), signed.where((counted > 0) & ~unknown, float("-inf")).amax()


def _number(reduction: Reduction, first: float, second: float, highest: float) -> float:
    """A metric, from what `_folded` made of it on all ranks."""
    if reduction == "sum":
        return first
    if reduction == "mean":
        return first / second if second else float("nan")
    if first or not second:
        return float("nan")
    return highest if reduction == "max" else -highest


@dataclass(frozen=True)
class ObjectiveProcessor:
    """The output processor of a step: what an objective makes of a microbatch is counted, and added to the loss."""

    objective: Objective
    tally: MetricAccumulator

    @property
    def mtp_options(self) -> MTPOptions | None:
        """How the objective asks for depths, where it says so."""
        return getattr(self.objective, "mtp_options", None)

    def __call__(self, inputs: OutputInputs, context: None) -> Tensor:
        """What is differentiated."""
        return _connected(self.tally.evaluate(self.objective, inputs), inputs)


def _connected(value: Tensor, inputs: OutputInputs) -> Tensor:
    """A loss with a gradient for every parameter, though it be zero: FSDP sums what all ranks have, or none."""
    if value.requires_grad:
        return value
    reached = inputs.hidden.float().sum() + inputs.head.weight.float().sum()
    if inputs.head.value_head is not None:
        reached = reached + inputs.head.values(inputs.hidden).sum()
    return value + 0.0 * reached
