"""Search: the fastest layouts of so many GPUs that fit the model and its memory."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from operator import itemgetter

from postlude.layout import Layout, Stage
from postlude.options import ZERO_BUBBLE, Overlap
from postlude.plan.cost import CostModel
from postlude.plan.forecast import StepForecast, forecast, memory_of
from postlude.plan.memory import NARROW, STORED
from postlude.plan.parameter_count import ModelParameterCount, count_parameters

USABLE_MEMORY = 0.92  # of a GPU: the rest is for NCCL, CUDA and fragmentation
SIMULATED = 32  # layouts that are simulated; a formula ranks the others
VARIANTS = 3  # of them that differ only in ep or replicas


@dataclass(frozen=True)
class SearchResult:
    """The best layouts, and how many fit."""

    best: Sequence[StepForecast]
    fitting: int
    """Layouts that divide the model."""
    min_bytes: float
    """The least that the fullest rank of a layout needs, if none fits in memory; infinite otherwise."""


def search(start: CostModel, gpus: int, batch_tokens: int, *, overlap: Overlap = False, limit: int = 5) -> SearchResult:
    """Returns the fastest layouts of `gpus` GPUs for steps of at least `batch_tokens` tokens, otherwise as `start`."""
    usable = USABLE_MEMORY * start.hardware.memory
    ranked: list[tuple[float, int, CostModel]] = []
    dividing: list[tuple[float, CostModel]] = []  # with a lower bound of what each needs
    counted: dict[tuple[int, int], ModelParameterCount] = {}
    for layout in layouts(start, gpus):
        microbatches = -(-batch_tokens // (start.options.budget * layout.dp))
        if microbatches < layout.pp:
            continue
        with suppress(ValueError):
            options = replace(start.options, layout=layout, overlap=overlap)
            start.config.check_layout(layout)
            key = layout.tp, layout.ep
            if key not in counted:
                counted[key] = count_parameters(start.config, layout, adapters=start.adapters)
            model = replace(start, options=options, microbatches=microbatches, known=counted[key])
            needed = _weights(model)
            dividing.append((needed, model))
            if needed <= usable:
                ranked.append((_rough_seconds(model), len(ranked), model))
    chosen: list[StepForecast] = []
    tried: Counter[tuple[int, ...]] = Counter()
    for _, _, model in sorted(ranked):
        kind = _kind(model.layout)
        if tried[kind] == VARIANTS:
            continue
        if _peak(model) <= usable:
            tried[kind] += 1
            chosen.append(forecast(model))
        if len(chosen) == SIMULATED:
            break
    best = sorted(chosen, key=lambda candidate: -candidate.tokens_per_second)
    min_bytes = math.inf if best else _least_peak(dividing)
    return SearchResult(_distinct(best)[:limit], len(dividing), min_bytes)


def _least_peak(bounded: Sequence[tuple[float, CostModel]]) -> float:
    """Returns the least memory that any of these layouts needs, given a lower bound of each."""
    least = math.inf
    for bound, model in sorted(bounded, key=itemgetter(0)):
        if bound >= least:
            break
        least = min(least, _peak(model))
    return least


def _peak(model: CostModel) -> float:
    return max(candidate.total for candidate in memory_of(model))


def _weights(model: CostModel) -> float:
    """Returns the bytes of weights, gradients and optimizer state on an average rank: a lower bound."""
    layout = model.layout
    parameters = model.sizes.stage(Stage())
    trained = model.sizes.trained(Stage())
    gathered = model.compute_bytes * parameters.used + STORED * trained.used if layout.pp > 1 else 0
    weight_bytes = STORED if model.options.weights == "fp32" else NARROW
    training_bytes = STORED * (1 + model.options.moments)
    stored = parameters.stored(layout) * (model.compute_bytes if model.adapters else weight_bytes)
    return (stored + training_bytes * trained.stored(layout) + gathered) / layout.pp


def layouts(start: CostModel, gpus: int) -> Iterator[Layout]:
    """Yields the layouts to consider: tp inside a node, and cp with at least 1,024 tokens per rank."""
    experts = any(block.has_experts for block in start.config.blocks.values())
    for pp in _divisors(gpus, min(len(start.config.pattern), 64)):
        for tp in _divisors(gpus // pp, start.hardware.gpus_per_node):
            for cp in _divisors(gpus // (pp * tp), max(1, start.length // 1024)):
                data = gpus // (pp * tp * cp)
                for shard in {data} | {
                    size // (cp * tp) for size in (start.hardware.gpus_per_node, 64) if size < data * cp * tp
                }:
                    if shard < 1 or data % shard:
                        continue
                    replicate = data // shard
                    for ep in _divisors(shard * cp * tp, 512) if experts else (1,):
                        for vpp in (1, 2, 4) if pp > 1 else (1,):
                            yield Layout(pp=pp, vpp=vpp, dp_replicate=replicate, dp_shard=shard, cp=cp, tp=tp, ep=ep)


def _divisors(number: int, limit: int) -> list[int]:
    """Returns the divisors that are powers of two, up to `limit`."""
    return [
        divisor
        for divisor in range(1, min(number, limit) + 1)
        if number % divisor == 0 and (divisor & (divisor - 1)) == 0
    ]


def _rough_seconds(model: CostModel) -> float:
    """Returns the seconds per token by a formula: the busiest rank, and a bubble of (pp - 1) / (vpp · microbatches).

    With "zero_bubble" a third of the bubble, as if all actions took equally long.
    """
    layout, overlap = model.layout, model.options.overlap
    busy = [0.0] * layout.pp
    for (kind, stage), work in model.costs.items():
        exposed = max(0.0, work.exchange - work.compute) if overlap is True else work.exchange
        busy[stage % layout.pp] += work.compute + work.waited + exposed
        busy[stage % layout.pp] += (model.costs_with_collectives[kind, stage].waited - work.waited) / model.microbatches
    bubble = (layout.pp - 1) / layout.vpp / (3 if overlap == ZERO_BUBBLE else 1)
    rounds = model.microbatches + bubble
    return max(busy) * rounds / (model.microbatches * layout.dp)


def _distinct(ranked: Sequence[StepForecast]) -> list[StepForecast]:
    """Returns those that do not differ only in ep or replicas from a faster one."""
    first = {_kind(candidate.model.layout): candidate for candidate in reversed(ranked)}
    return [candidate for candidate in ranked if first[_kind(candidate.model.layout)] is candidate]


def _kind(layout: Layout) -> tuple[int, ...]:
    return layout.pp, layout.vpp, layout.cp, layout.tp


def explain_time(forecast: StepForecast) -> str:
    """Returns where a layout's time goes, as a sentence without its full stop."""
    step, seconds = forecast.step, forecast.step.timeline.makespan
    parts = {
        "to the pipeline's bubble": step.bubble,
        "to exchanges with experts that nothing hides": step.exposed / seconds,
        "to waiting for tokens, weights or gradients": step.waited / seconds,
    }
    shares = [
        f"{share:.0%} {name}" for name, share in sorted(parts.items(), key=lambda part: -part[1]) if share >= 0.005
    ]
    compute = 1 - sum(parts.values())
    return ", ".join([f"{compute:.0%} of its time goes to compute", *shares])
