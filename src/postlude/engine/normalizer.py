"""Loss normalisation and metrics: a loss is a sum over this rank's tokens, divided by a global count and nothing else.

Every rank has the counts of the whole batch before the step. Gradients, and the losses themselves, are summed over
all ranks that processed different tokens.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from postlude.data import IGNORE, Microbatch
from postlude.objectives import Loss, Metric, Objective
from postlude.objectives.loss import Reduction
from postlude.world.devices import group_device

MetricKey = tuple[str, Reduction]
Number = TypeVar("Number", float, Tensor)
MIN_SLOTS = 256
"""The minimum number of slots in the reduced tensor, so that ranks with different metrics use one size."""
DIGEST, NEGATED_DIGEST, FAILED_RANK, HAS_GRADIENT, CONSTANT_LOSS, FIRST_SLOT = range(6)
"""Entries of the tensor whose maximum is taken; from FIRST_SLOT on, one per slot."""
NO_GRADIENT = (
    "the loss has no gradient: the values that the objective returns do not depend on the model. Compute them from "
    "inputs.head and inputs.hidden, without detach, item or torch.no_grad."
)


def count_name(over: str, depth: int = 0) -> str:
    """Returns the name of a count at a multi-token-prediction depth. Every depth has the same count of sequences."""
    return f"{over} +{depth}" if depth and over != "sequences" else over


class LossNormalizer:
    """The counts of one batch, which divide its losses, and the weights of means.

    `counts` are sums of weights over the whole step, by name. By default they are computed from `microbatches`, which
    must then be the whole batch, not sharded. `cp_size` is the number of context-parallel ranks, which all hold the
    per-sequence values.
    """

    def __init__(
        self, microbatches: Sequence[Microbatch], counts: Mapping[str, float] | None = None, *, cp_size: int = 1
    ) -> None:
        self.microbatches = microbatches
        self.cp_size = cp_size
        self.counts_are_global = counts is not None
        self.counts = dict(counts or {})

    def count(self, over: str, depth: int = 0) -> float:
        """Returns the sum of the weights named `over` in the whole batch."""
        name = count_name(over, depth)
        if name not in self.counts and self.counts_are_global:
            known = ", ".join(f'"{column}"' for column in self.counts) or "none"
            raise LookupError(
                f'a loss is a mean over "{name}", whose sum over the step is not known (known are: {known}). Add a '
                "column of that name to the batch, or pass counts=engine.count(*batches) with its sum."
            )
        if name not in self.counts:
            sums = (self.weights(over, microbatch, depth).sum(dtype=torch.float64) for microbatch in self.microbatches)
            self.counts[name] = float(sum(sums)) * self.cp_replicas(over)
        if not self.counts[name] > 0 and not (depth and self.counts[name] == 0):
            raise ValueError(
                f'a loss is a mean over "{over}", whose weights sum to {self.counts[name]:g} in this batch. '
                "Skip a batch with nothing to learn, or name other weights."
            )
        return self.counts[name] or 1.0  # avoids 0 / 0 for an MTP depth without targets: all sequences too short

    def weights(self, over: str, microbatch: Microbatch, depth: int = 0) -> Tensor:
        """Returns the weights named `over`: [T], or [n] for "sequences"."""
        if depth:
            return self.weights(over, microbatch.mtp_microbatches[depth - 1])
        match over:
            case "tokens":
                return microbatch.targets != IGNORE
            case "sequences":
                return torch.full((microbatch.packing.count,), 1.0 / self.cp_size, device=microbatch.tokens.device)
        return microbatch.column(over)

    def loss(self, loss: Loss, microbatch: Microbatch) -> Tensor:
        """Returns what this microbatch adds to the batch's loss: a scalar, fp32."""
        means = [self._sum(term, microbatch) / self.count(term.over, term.depth) for term in loss.terms()]
        return torch.stack(means).sum()

    def _sum(self, loss: Loss, microbatch: Microbatch) -> Tensor:
        if loss.values.ndim == 0:
            return loss.values.float() / self.cp_replicas(loss.over)
        weights = self.weights_of(loss, microbatch)
        return torch.where(weights != 0, loss.values.float() * weights, 0.0).sum()

    def cp_replicas(self, over: str) -> int:
        """Returns how many ranks have the same values: every context-parallel rank has those of a sequence."""
        return self.cp_size if over == "sequences" else 1

    def weights_of(self, term: Loss | Metric, microbatch: Microbatch) -> Tensor:
        """Returns the weights of `term.values`, one for each. Raises ValueError if the shapes differ."""
        weights = self.weights(term.over, microbatch, term.depth)
        if term.values.shape != weights.shape:
            raise ValueError(
                f'values over "{term.over}" have shape {tuple(term.values.shape)}, but this microbatch has weights of '
                f"shape {tuple(weights.shape)}. Give one value for each, or their sum as a scalar."
            )
        return weights


def check_counts(objective: Objective, counts: Mapping[str, float], depths: int) -> None:
    """Raises before a pass if an objective is a mean over something unknown, or whose weights sum to zero.

    The objective's method `denominators(depths)` returns pairs of a name and a depth. Without it, the error is
    raised after the pass.
    """
    denominators = getattr(objective, "denominators", None)
    normalizer = LossNormalizer((), counts)
    for over, depth in denominators(depths) if denominators is not None else ():
        normalizer.count(over, depth)


class MetricIndex:
    """The metrics that all ranks know, each with its slot in the tensor that they reduce.

    It is kept between steps: ranks exchange names once, and afterwards only numbers.
    """

    def __init__(self) -> None:
        self.slots: dict[MetricKey, int] = {}

    @property
    def digest(self) -> int:
        """A 48-bit digest of the names; never 0."""
        text = json.dumps(list(self.slots)).encode()
        return 1 + int.from_bytes(hashlib.blake2b(text, digest_size=6).digest(), "little")

    @property
    def size(self) -> int:
        """The number of slots that are reduced: the same on every rank, even if some know no metric yet."""
        return max(MIN_SLOTS, len(self.slots))

    def has(self, names: Iterable[MetricKey]) -> bool:
        """Returns whether each of these metrics has a slot."""
        return all(name in self.slots for name in names)

    def add(self, names: Iterable[MetricKey]) -> None:
        """Gives each of these a slot after the known ones. Over MIN_SLOTS in all, the known ones are dropped."""
        names = list(dict.fromkeys(names))
        known = list(dict.fromkeys([*self.slots, *names]))
        self.slots = {name: slot for slot, name in enumerate(known if len(known) <= MIN_SLOTS else names)}


class MetricNumbers(NamedTuple, Generic[Number]):
    """One metric as numbers that ranks reduce: two sums and a maximum.

    For "mean" and "sum", `total` is the sum of weight · value and `weight` the sum of weights. For "max" and "min",
    `total` counts NaNs, which a maximum would ignore, `weight` counts values, and `highest` is the largest value; "min"
    negates its values.
    """

    total: Number
    weight: Number
    highest: Number


@dataclass(frozen=True)
class ReducedNumbers:
    """The numbers of all ranks after one sum and one maximum."""

    metrics: Mapping[MetricKey, MetricNumbers[float]]
    """The metrics that some rank has."""
    layer_totals: list[float]
    same_names: bool
    """Whether all ranks have the same metric index, with a slot for each of their metrics."""
    failed_rank: int | None
    """A rank with a loss error."""
    has_gradient: bool
    """False if the loss is not zero, and no microbatch of any rank has a gradient."""


class MetricAccumulator:
    """Metrics of this rank's microbatches, and their reduction over all ranks."""

    def __init__(self, normalizer: LossNormalizer, metric_index: MetricIndex | None = None) -> None:
        self.normalizer = normalizer
        self.metric_index = metric_index or MetricIndex()
        self.entries: dict[str, tuple[Reduction, list[Tensor], list[Tensor]]] = {}
        self.outputs: list[Mapping[str, Tensor]] = []  # of each microbatch; empty on all stages but the last
        self.layer_sums: Tensor | None = None  # [n] float64 of this rank; n is the same on all ranks
        self.layer_totals: list[float] = []  # [n] over all ranks, after `reduce`
        self.loss_error: Exception | None = None
        self.has_gradient = False  # whether a microbatch's loss has one; `constant_losses` are magnitudes of the others
        self.constant_losses: list[Tensor] = []

    def evaluate(self, loss: Loss, microbatch: Microbatch) -> Tensor:
        """Returns what one microbatch adds to the batch's loss, and records it and the loss's metrics.

        The error of a loss or metric that cannot be normalised is kept in `loss_error` and raised after the pass: other
        ranks are in the middle of it, and would deadlock. Until then it adds zero with the same graph.
        """
        if not isinstance(loss, Loss):
            raise TypeError(f"an objective returns a Loss, but this one returned a {type(loss).__name__}.")
        self.outputs.append(loss.outputs)
        try:
            value = self.normalizer.loss(loss, microbatch)
            self.add_loss(value)
            for term in loss.terms():
                for name, metric in term.metrics.items():
                    self.add(name, metric, microbatch)
        except (LookupError, ValueError) as error:
            self.loss_error = self.loss_error or error
            return 0.0 * torch.stack([term.values.float().sum() for term in loss.terms()]).sum()
        return value

    def add_loss(self, value: Tensor) -> None:
        """Records what one microbatch added to the batch's loss."""
        _, numerators, denominators = self.entries.setdefault("loss", ("sum", [], []))
        numerators.append(value.detach())
        denominators.append(torch.ones_like(value.detach()))

    @torch.no_grad()
    def add(self, name: str, metric: Metric, microbatch: Microbatch) -> None:
        """Records the values of one microbatch."""
        if name == "loss":
            raise ValueError('a metric is named "loss", which the loss itself is called. Choose another name.')
        values = metric.values.detach().float()
        if values.ndim == 0:
            # A scalar mean is weighted by the microbatch's weight sum; a scalar sum is added as it is.
            total = self.normalizer.weights(metric.over, microbatch, metric.depth).sum().float()
            addend = torch.ones_like(values) / self.normalizer.cp_replicas(metric.over)
            weights = addend if metric.reduction == "sum" else total
        else:
            weights = self.normalizer.weights_of(metric, microbatch).float()
        mask = weights != 0
        reduction, numerators, denominators = self.entries.setdefault(name, (metric.reduction, [], []))
        if reduction != metric.reduction:
            raise ValueError(f'metric "{name}" is a {reduction} in one microbatch and a {metric.reduction} in another.')
        match metric.reduction:
            case "max":
                numerators.append(torch.where(mask, values, float("-inf")).amax() if values.numel() else values.sum())
                denominators.append(mask.sum())
            case "min":
                numerators.append(torch.where(mask, values, float("inf")).amin() if values.numel() else values.sum())
                denominators.append(mask.sum())
            case _:
                numerators.append(torch.where(mask, values * weights, 0.0).sum())
                denominators.append(weights.sum())

    @torch.no_grad()
    def reduce(self, reports_results: bool) -> dict[str, float]:
        """Returns one number per metric, the same on every rank, and sets `layer_totals`.

        The objective's metrics are taken only from ranks with `reports_results`. If one of several ranks has a
        `loss_error`, every rank gets it, and {} is returned. All numbers go through one sum and one maximum, with one
        synchronisation. Names are exchanged only when a rank has a metric that not all know.
        """
        entries = self.entries if reports_results else {}
        local = {(name, reduction): _combine(reduction, *sums) for name, (reduction, *sums) in entries.items()}
        single_rank = not dist.is_initialized() or dist.get_world_size() == 1
        if single_rank:
            self.metric_index.add(local)
        reduced = self._all_reduce(local, single_rank)
        if reduced.failed_rank is not None and not single_rank:
            message: list[str | None] = [None if self.loss_error is None else str(self.loss_error)]
            dist.broadcast_object_list(message, src=reduced.failed_rank)
            self.loss_error = self.loss_error or ValueError(message[0])
            return {}
        if not reduced.has_gradient:
            self.loss_error = self.loss_error or ValueError(NO_GRADIENT)
            return {}
        if not reduced.same_names:
            names_by_rank: list[list[MetricKey]] = [[] for _ in range(dist.get_world_size())]
            dist.all_gather_object(names_by_rank, list(local))
            self.metric_index.add(name for names in names_by_rank for name in names)
            reduced = self._all_reduce(local, single_rank)
        self.layer_totals = reduced.layer_totals
        return {name: _final_value(reduction, numbers) for (name, reduction), numbers in reduced.metrics.items()}

    def _all_reduce(self, local: Mapping[MetricKey, MetricNumbers[Tensor]], single_rank: bool) -> ReducedNumbers:
        """Sums this rank's numbers over all ranks, and takes maxima.

        A rank with a metric that has no slot sends 0 instead of the negated digest, so that the digests differ.
        """
        slots, size = self.metric_index.slots, self.metric_index.size
        has_slots, digest = self.metric_index.has(local), float(self.metric_index.digest)
        device = next(
            (numbers.total.device for numbers in local.values()),
            torch.device("cpu") if single_rank else group_device(),
        )
        sums = torch.zeros(size, 3, dtype=torch.float64, device=device)  # total, weight, number of ranks that have it
        highest = torch.full((FIRST_SLOT + size,), float("-inf"), dtype=torch.float64, device=device)
        highest[DIGEST].fill_(digest)
        highest[NEGATED_DIGEST].fill_(-digest if has_slots else 0.0)
        if self.loss_error is not None:
            highest[FAILED_RANK].fill_(0.0 if single_rank else float(dist.get_rank()))
        highest[HAS_GRADIENT].fill_(float(self.has_gradient))
        if self.constant_losses:
            highest[CONSTANT_LOSS] = torch.stack(self.constant_losses).amax()
        for name, numbers in local.items() if has_slots else ():
            slot = slots[name]
            sums[slot, 0], sums[slot, 1], highest[FIRST_SLOT + slot] = numbers
            sums[slot, 2].fill_(1.0)
        layer_sums = sums.new_zeros(0) if self.layer_sums is None else self.layer_sums.to(device)
        flat, end = torch.cat((sums.flatten(), layer_sums, highest)), 3 * size + len(layer_sums)
        if not single_rank:
            flat = flat.cpu() if dist.get_backend() == "gloo" else flat
            dist.all_reduce(flat[:end])
            dist.all_reduce(flat[end:], dist.ReduceOp.MAX)
        reduced = flat.tolist()  # synchronises
        all_sums, layer_totals, maxima = reduced[: 3 * size], reduced[3 * size : end], reduced[end:]
        metrics = {
            name: MetricNumbers(all_sums[3 * slot], all_sums[3 * slot + 1], maxima[FIRST_SLOT + slot])
            for name, slot in slots.items()
            if all_sums[3 * slot + 2]
        }
        failed_rank = int(maxima[FAILED_RANK]) if maxima[FAILED_RANK] >= 0 else None
        has_gradient = maxima[HAS_GRADIENT] > 0 or not maxima[CONSTANT_LOSS] > 0
        same_names = maxima[DIGEST] == -maxima[NEGATED_DIGEST]
        return ReducedNumbers(metrics, layer_totals, same_names, failed_rank, has_gradient)


def _combine(
    reduction: Reduction, numerators: Sequence[Tensor], denominators: Sequence[Tensor]
) -> MetricNumbers[Tensor]:
    """Returns the numbers of one metric, from its entries of all microbatches."""
    values, counts = torch.stack(tuple(numerators)).double(), torch.stack(tuple(denominators)).double()
    if reduction in ("mean", "sum"):
        return MetricNumbers(values.sum(), counts.sum(), torch.zeros_like(values[0]))
    is_nan = values.isnan() & (counts > 0)
    signed = values if reduction == "max" else -values
    highest = signed.where((counts > 0) & ~is_nan, float("-inf")).amax()
    return MetricNumbers(is_nan.double().sum(), counts.sum(), highest)


def _final_value(reduction: Reduction, numbers: MetricNumbers[float]) -> float:
    total, weight, highest = numbers
    if reduction == "sum":
        return total
    if reduction == "mean":
        return total / weight if weight else float("nan")
    if total or not weight:  # there is a NaN, or no value
        return float("nan")
    return highest if reduction == "max" else -highest
