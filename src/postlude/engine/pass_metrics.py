"""Metrics and losses of a pass: what a rank adds up over its microbatches, and one reduction of it over all ranks.

`LayerMetrics` are what the blocks of every layer measured, on all pipeline stages and MTP depths. A block adds up sums
over its tokens (`Block.metric_sums`). They are reduced over all ranks with the other metrics, and every rank computes
the same numbers from the totals (`BlockConfig.metrics`).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Generic, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from postlude.data import Microbatch
from postlude.engine.normalizer import LossNormalizer
from postlude.model import ModelConfig
from postlude.model.block_config import LayerMetric
from postlude.model.blocks import Block
from postlude.objectives import Loss, Metric
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


class MetricNumbers(NamedTuple, Generic[Number]):
    """One metric as numbers that ranks reduce: two sums and a maximum.

    For "mean" and "sum", `total` is the sum of weight · value and `weight` the sum of weights. For "max" and "min",
    `total` counts NaNs, which a maximum would ignore, `weight` counts values, and `highest` is the largest value; "min"
    negates its values.
    """

    total: Number
    weight: Number
    highest: Number


class MetricEntries:
    """The values of metrics in this rank's microbatches: for each metric two numbers per microbatch."""

    def __init__(self, normalizer: LossNormalizer) -> None:
        self.normalizer = normalizer
        self._entries: dict[str, tuple[Reduction, list[Tensor], list[Tensor]]] = {}

    def add_loss(self, value: Tensor) -> None:
        _, numerators, denominators = self._entries.setdefault("loss", ("sum", [], []))
        numerators.append(value.detach())
        denominators.append(torch.ones_like(value.detach()))

    @torch.no_grad()
    def add(self, name: str, metric: Metric, microbatch: Microbatch) -> None:
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
        reduction, numerators, denominators = self._entries.setdefault(name, (metric.reduction, [], []))
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

    def numbers(self) -> dict[MetricKey, MetricNumbers[Tensor]]:
        """Returns the numbers of each metric, over all microbatches so far."""
        return {(name, reduction): _combine(reduction, *sums) for name, (reduction, *sums) in self._entries.items()}


@dataclass(eq=False)
class LossRecord:
    """The losses of this rank's microbatches in one pass, and what the other ranks need to know at its end."""

    normalizer: LossNormalizer
    metrics: MetricEntries = field(init=False)
    outputs: list[Mapping[str, Tensor]] = field(init=False, default_factory=list)
    """The objective's outputs of each microbatch; empty on all stages but the last."""
    error: Exception | None = field(init=False, default=None)
    has_gradient: bool = field(init=False, default=False)
    """Whether the loss of a microbatch has a gradient."""
    constant_losses: list[Tensor] = field(init=False, default_factory=list)
    """Magnitudes of the losses that have none."""

    def __post_init__(self) -> None:
        self.metrics = MetricEntries(self.normalizer)

    def evaluate(self, loss: Loss, microbatch: Microbatch) -> Tensor:
        """Returns what one microbatch adds to the batch's loss, and records it and the loss's metrics.

        The error of a loss or metric that cannot be normalised is kept in `error` and raised after the pass: other
        ranks are in the middle of it, and would deadlock. Until then it adds zero with the same graph.
        """
        if not isinstance(loss, Loss):
            raise TypeError(f"an objective returns a Loss, but this one returned a {type(loss).__name__}.")
        self.outputs.append(loss.outputs)
        try:
            value = self.normalizer.loss(loss, microbatch)
            self.metrics.add_loss(value)
            for term in loss.terms():
                for name, metric in term.metrics.items():
                    self.metrics.add(name, metric, microbatch)
        except (LookupError, ValueError) as error:
            self.error = self.error or error
            return 0.0 * torch.stack([term.values.float().sum() for term in loss.terms()]).sum()
        return value

    def record_gradient(self, value: Tensor) -> None:
        if value.requires_grad:
            self.has_gradient = True
        else:
            self.constant_losses.append(value.abs())


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
        return all(name in self.slots for name in names)

    def add(self, names: Iterable[MetricKey]) -> None:
        """Gives each of these a slot after the known ones. Over MIN_SLOTS in all, the known ones are dropped."""
        names = list(dict.fromkeys(names))
        known = list(dict.fromkeys([*self.slots, *names]))
        self.slots = {name: slot for slot, name in enumerate(known if len(known) <= MIN_SLOTS else names)}


@dataclass(frozen=True)
class ReducedPass:
    """What all ranks know of a pass, the same on each."""

    metrics: Mapping[str, float]
    """One number per metric, the loss among them; none after an error."""
    layer_totals: Sequence[float]
    error: Exception | None


@dataclass(frozen=True)
class _ReducedNumbers:
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


@torch.no_grad()
def reduce_pass(
    record: LossRecord, index: MetricIndex, *, reports_results: bool, layer_sums: Tensor | None = None
) -> ReducedPass:
    """Returns the sums over all ranks. Every rank calls it at the end of a pass.

    The objective's metrics are taken only from ranks with `reports_results`. If one of several ranks has an error,
    every rank gets it. All numbers go through one sum and one maximum, with one synchronisation. Names are exchanged
    only when a rank has a metric that not all know. `layer_sums` [n] are float64, with the same n on all ranks.
    """
    local = record.metrics.numbers() if reports_results else {}
    single_rank = not dist.is_initialized() or dist.get_world_size() == 1
    if single_rank:
        index.add(local)
    reduced = _all_reduce(record, index, local, layer_sums, single_rank)
    if reduced.failed_rank is not None:
        error = record.error
        if not single_rank:
            message: list[str | None] = [None if error is None else str(error)]
            dist.broadcast_object_list(message, src=reduced.failed_rank)
            error = error or ValueError(message[0])
        return ReducedPass({}, (), error)
    if not reduced.has_gradient:
        return ReducedPass({}, (), ValueError(NO_GRADIENT))
    if not reduced.same_names:
        names_by_rank: list[list[MetricKey]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(names_by_rank, list(local))
        index.add(name for names in names_by_rank for name in names)
        reduced = _all_reduce(record, index, local, layer_sums, single_rank)
    values = {name: _final_value(reduction, numbers) for (name, reduction), numbers in reduced.metrics.items()}
    return ReducedPass(values, reduced.layer_totals, None)


def _all_reduce(
    record: LossRecord,
    index: MetricIndex,
    local: Mapping[MetricKey, MetricNumbers[Tensor]],
    layer_sums: Tensor | None,
    single_rank: bool,
) -> _ReducedNumbers:
    """Sums this rank's numbers over all ranks, and takes maxima.

    A rank with a metric that has no slot sends 0 instead of the negated digest, so that the digests differ.
    """
    slots, size = index.slots, index.size
    has_slots, digest = index.has(local), float(index.digest)
    device = next(
        (numbers.total.device for numbers in local.values()),
        torch.device("cpu") if single_rank else group_device(),
    )
    sums = torch.zeros(size, 3, dtype=torch.float64, device=device)  # total, weight, number of ranks that have it
    highest = torch.full((FIRST_SLOT + size,), float("-inf"), dtype=torch.float64, device=device)
    highest[DIGEST].fill_(digest)
    highest[NEGATED_DIGEST].fill_(-digest if has_slots else 0.0)
    if record.error is not None:
        highest[FAILED_RANK].fill_(0.0 if single_rank else float(dist.get_rank()))
    highest[HAS_GRADIENT].fill_(float(record.has_gradient))
    if record.constant_losses:
        highest[CONSTANT_LOSS] = torch.stack(record.constant_losses).amax()
    for name, numbers in local.items() if has_slots else ():
        slot = slots[name]
        sums[slot, 0], sums[slot, 1], highest[FIRST_SLOT + slot] = numbers
        sums[slot, 2].fill_(1.0)
    layer_sums = sums.new_zeros(0) if layer_sums is None else layer_sums.to(device)
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
    return _ReducedNumbers(metrics, layer_totals, same_names, failed_rank, has_gradient)


def _combine(
    reduction: Reduction, numerators: Sequence[Tensor], denominators: Sequence[Tensor]
) -> MetricNumbers[Tensor]:
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


WORST = "_worst"
BLOCK_NAME = re.compile(r"(?:mtp\.(\d+)\.)?layers\.(\d+)\.(\w+)")


@dataclass(frozen=True)
class LayerValues:
    """The metrics of all layers: numbers and lists by name, and how numbers of several passes are combined."""

    numbers: dict[str, float] = field(default_factory=dict)
    vectors: dict[str, list[float]] = field(default_factory=dict)
    reductions: dict[str, Reduction] = field(default_factory=dict)


class LayerMetrics:
    """The sums of all blocks of a model in one flat tensor, in the same order on every rank."""

    def __init__(self, config: ModelConfig) -> None:
        self.blocks = {name: block for name, block in config.named_blocks.items() if block.metric_sums}

    def take_sums(self, blocks: Iterable[Block], device: torch.device) -> Tensor:
        """Returns the sums of this rank's blocks since the last call, float64; zeros for blocks of other stages."""
        local = {block.name: block.take_metric_sums() for block in blocks}
        parts = []
        for name, config in self.blocks.items():
            sums = local.get(name)
            size = sum(config.metric_sums.values())
            parts.append(torch.zeros(size, dtype=torch.float64, device=device) if sums is None else sums)
        return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64, device=device)

    def compute(self, totals: Sequence[float]) -> LayerValues:
        """Returns the metrics from the sums over all ranks: of every layer, and the mean and the worst of all layers.

        Blocks that did not run, such as those of an MTP depth that the objective does not use, have none.
        """
        values = LayerValues()
        layers: dict[str, list[LayerMetric]] = {}
        remaining = iter(totals)
        for block_name, config in self.blocks.items() if len(totals) else ():
            sums = {name: [next(remaining) for _ in range(size)] for name, size in config.metric_sums.items()}
            metrics = config.metrics(sums)
            kind, layer = layer_label(block_name)
            for name, metric in metrics.items():
                layers.setdefault(f"{kind}/{name}", []).append(metric)
                values.numbers[f"{kind}/{layer}/{name}"] = metric.value
            if metrics:
                values.vectors.update({f"{kind}/{layer}/{name}": sums[name] for name in sums if len(sums[name]) > 1})
        for name, by_layer in layers.items():
            worst = by_layer[0].worst
            values.numbers[name] = fmean(metric.value for metric in by_layer)
            values.numbers[name + WORST] = (max if worst == "max" else min)(metric.value for metric in by_layer)
            values.reductions[name + WORST] = worst
        return values


def layer_label(block_name: str) -> tuple[str, str]:
    """Returns a block's kind and layer for names of metrics: ("moe", "layer_03") or ("moe", "mtp_1_layer_00")."""
    match = BLOCK_NAME.fullmatch(block_name)
    assert match is not None, block_name
    depth, layer, kind = match.groups()
    return kind, ("" if depth is None else f"mtp_{int(depth) + 1}_") + f"layer_{int(layer):02d}"
