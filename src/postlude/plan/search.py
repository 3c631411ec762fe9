"""Search: every layout of so many GPUs that fits the model and its memory, and the fastest of them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from postlude.layout import Layout, Stage
from postlude.model.blocks import BLOCKS
from postlude.options import ZERO_BUBBLE, Overlap, check_overlap
from postlude.plan.cost import CostModel
from postlude.plan.forecast import StepForecast, forecast, memory_of
from postlude.plan.memory import STORED
from postlude.plan.parameter_count import ModelParameterCount, count_parameters

ROOM = 0.92  # of a GPU's memory: the rest is for NCCL, CUDA and what lies between blocks of the allocator
SIMULATED = 32  # layouts that are run on the clock; the others are told apart by what theory says of their time
VARIANTS = 3  # of them, that differ in ep or replicas alone


@dataclass(frozen=True)
class SearchResult:
    """The best layouts, and how many there were to choose from."""

    best: Sequence[StepForecast]
    fitting: int
    """That divide the model."""
    least: float
    """Bytes that a rank needs at least, as far as was looked."""


def search(start: CostModel, gpus: int, batch_tokens: int, *, overlap: Overlap = False, most: int = 5) -> SearchResult:
    """The fastest layouts of `gpus` GPUs for steps of at least `batch_tokens` tokens, all else as in `start`."""
    room, least, fitting = ROOM * start.machine.memory, math.inf, 0
    ranked: list[tuple[float, int, CostModel]] = []
    counted: dict[tuple[int, int], ModelParameterCount] = {}
    for layout in layouts(start, gpus):
        microbatches = -(-batch_tokens // (start.budget * layout.dp))
        if microbatches < layout.pp or start.budget % (2 * layout.cp * layout.tp):
            continue
        with suppress(ValueError):
            check_overlap(overlap, pp=layout.pp, vpp=layout.vpp)
            start.config.check_layout(layout)
            fitting += 1
            key = layout.tp, layout.ep
            if key not in counted:
                counted[key] = count_parameters(start.config, layout, start.blocks or BLOCKS)
            model = replace(start, layout=layout, microbatches=microbatches, known=counted[key])
            needed = _weights(model)
            least = min(least, needed)
            if needed <= room:
                ranked.append((_foretold(model, overlap), len(ranked), model))
    chosen: list[StepForecast] = []
    tried: Counter[tuple[int, ...]] = Counter()
    for _, _, model in sorted(ranked):
        kind = _kind(model.layout)
        if tried[kind] == VARIANTS:
            continue
        needed = max(each.total for each in memory_of(model, overlap=overlap))
        least = needed if not chosen else least
        if needed <= room:
            tried[kind] += 1
            chosen.append(forecast(model, overlap=overlap))
        if len(chosen) == SIMULATED:
            break
    best = sorted(chosen, key=lambda each: -each.tokens_a_second)
    return SearchResult(_apart(best)[:most], fitting, least)


def _weights(model: CostModel) -> float:
    """Bytes that weights and what belongs to them take on an average rank: at least so many are needed."""
    layout = model.layout
    whole = model.sizes.stage(Stage())
    whole_between = (model.compute_bytes + STORED) * whole.used if layout.pp > 1 else 0
    return (4 * STORED * whole.stored(layout) + whole_between) / layout.pp


def layouts(start: CostModel, gpus: int) -> Iterator[Layout]:
    """What is worth a look: tensor parallelism inside a node, contexts cut to no less than 1,024 tokens a rank."""
    experts = any(block.has_experts for block in start.config.blocks.values())
    for pp in _divisors(gpus, min(len(start.config.pattern), 64)):
        for tp in _divisors(gpus // pp, start.machine.node):
            for cp in _divisors(gpus // (pp * tp), max(1, start.length // 1024)):
                data = gpus // (pp * tp * cp)
                for shard in {data} | {size // (cp * tp) for size in (start.machine.node, 64) if size < data * cp * tp}:
                    if shard < 1 or data % shard:
                        continue
                    replicate = data // shard
                    for ep in _divisors(shard * cp * tp, 512) if experts else (1,):
                        for vpp in (1, 2, 4) if pp > 1 else (1,):
                            yield Layout(pp=pp, vpp=vpp, dp_replicate=replicate, dp_shard=shard, cp=cp, tp=tp, ep=ep)


def _divisors(number: int, most: int) -> list[int]:
    """Those of a number that are powers of two, or its whole where it is odd besides; at most so many."""
    return [each for each in range(1, min(number, most) + 1) if number % each == 0 and (each & (each - 1)) == 0]


def _foretold(model: CostModel, overlap: Overlap) -> float:
    """Seconds for a token by theory: the busiest rank's work, and a bubble of (pp - 1) / (vpp · microbatches).

    With "zero_bubble" a third of it, as if all actions took as long.
    """
    layout = model.layout
    busy = [0.0] * layout.pp
    for (kind, stage), work in model.works.items():
        exposed = max(0.0, work.exchange - work.compute) if overlap is True else work.exchange
        busy[stage % layout.pp] += work.compute + work.waited + exposed
        busy[stage % layout.pp] += (model.once[kind, stage].waited - work.waited) / model.microbatches
    bubble = (layout.pp - 1) / layout.vpp / (3 if overlap == ZERO_BUBBLE else 1)
    rounds = model.microbatches + bubble
    return max(busy) * rounds / (model.microbatches * layout.dp)


def _apart(ranked: Sequence[StepForecast]) -> list[StepForecast]:
    """Without those that differ from a faster one in ep or replicas alone."""
    first = {_kind(each.model.layout): each for each in reversed(ranked)}
    return [each for each in ranked if first[_kind(each.model.layout)] is each]


def _kind(layout: Layout) -> tuple[int, ...]:
    return layout.pp, layout.vpp, layout.cp, layout.tp


def explain_time(found: StepForecast) -> str:
    """Where a layout's time goes, in a sentence without its end."""
    step, seconds = found.step, found.step.timeline.makespan
    parts = {
        "to the pipeline's bubble": step.bubble,
        "to exchanges with experts that nothing hides": step.exposed / seconds,
        "to waiting for tokens, weights or gradients": step.waited / seconds,
    }
    told = [f"{share:.0%} {name}" for name, share in sorted(parts.items(), key=lambda part: -part[1]) if share >= 0.005]
    compute = 1 - sum(parts.values())
    return ", ".join([f"{compute:.0%} of its time goes to compute", *told])
