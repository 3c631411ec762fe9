"""An estimate of the memory that a rank needs, from the model's config, the layout and the schedule.

Parameters, gradients and optimizer state are counted exactly, without padding. The schedule that ranks run gives the
number of microbatches in flight. The blocks' configs give what each keeps for its backward
(`BlockConfig.saved_activations`), at a full microbatch.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from postlude.layout import Layout, Stage
from postlude.model import LanguageModel, ModelConfig
from postlude.model.block_config import BlockConfig
from postlude.model.fp8 import FP8Weights
from postlude.model.offload import offloaded_layers
from postlude.ops.linear_logprobs.plan import Shape, plan_sweep
from postlude.options import Overlap, Recompute
from postlude.pipeline.schedule import ScheduleEntry, rank_schedule
from postlude.plan.parameter_count import ModelParameterCount, count_parameters, layers_of, total
from postlude.plan.simulator import peak_held
from postlude.training_options import TrainingOptions

STORED = 4  # bytes of a stored parameter, of its gradient, and of each number of the optimizer
NARROW = 2  # bytes of a parameter that is stored in bf16
WORKING = 0.35  # gradients that a backward holds, roughly, as a fraction of what its largest block keeps
LOGIT_COPIES = 4  # of all logits in fp32, with the plain head: what their softmax keeps, and gradients
ADAPTED = 0.7  # share of `saved_activations` that a block with adapters keeps: measured on an H200, docs/lora.md


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on one rank."""

    parameters: int
    gradients: int
    optimizer: int
    frozen: int
    """Weights of a reference or a teacher."""
    gathered: int
    """Gathered weights in the compute dtype; also gradients if they are reduced once per step."""
    activations: int
    """Activations of microbatches in flight, for their backward and for deferred weight gradients."""
    working: int
    """Additional memory of the backward of a layer, and of its recompute."""
    head: int
    """Logits that exist at a time, and the gradients of the head and of its input."""
    summed: int
    """Gradients outside the layers, while they are reduced at the end."""
    generator: int = 0
    """Weights of the native generator, a whole copy of the model on each rank, and of their copies in FP8."""
    host: int = 0
    """Offloaded activations, in host memory; no part of the total."""

    @property
    def lasting(self) -> int:
        """The memory that a run needs all the time."""
        return self.parameters + self.gradients + self.optimizer + self.frozen + self.generator

    @property
    def total(self) -> int:
        """The peak: the head and a layer's backward never run at once, and the reduction comes after both."""
        passing = self.activations + max(self.working, self.head)
        return self.lasting + self.gathered + max(passing, self.summed)


def estimate_memory(
    config: ModelConfig,
    options: TrainingOptions,
    *,
    compute_bytes: int,
    frozen: int = 0,
    device: str = "cpu",
    microbatches: int | None = None,
    mtp: bool = True,
    sizes: ModelParameterCount | None = None,
) -> list[MemoryEstimate]:
    """Returns the estimate of each pipeline rank.

    `frozen` are the parameters of other models that are held in the same layout, in all. `microbatches` are those of
    one data-parallel rank in a step, by default as many as fill the pipeline. Without `mtp`
    multi-token-prediction depths are held, but neither run nor trained. `sizes` are the model's in this layout,
    if they are known already; with LoRA they have the adapters, which alone are trained.
    """
    layout, budget, overlap = options.layout, options.budget, options.overlap
    sizes = sizes or count_parameters(config, layout)
    tokens = -(-budget // (layout.cp * layout.tp))
    lora, kernels = bool(sizes.adapters), device == "cuda" and compute_bytes == NARROW
    weight_bytes = compute_bytes if lora else STORED if options.weights == "fp32" else NARROW
    ranks = layout.dp_shard * layout.cp * layout.tp * layout.pp
    estimates = []
    for rank in range(layout.pp):
        stages = [Stage(index, layout.stages) for index in range(rank, layout.stages, layout.pp)]
        stored = sum(sizes.stage(stage).stored(layout) for stage in stages)
        idle = 0 if mtp or not stages[-1].last else sizes.depth.stored(layout) * config.mtp_module_count
        adapters = sum(sizes.trained(stage).stored(layout) for stage in stages) if lora else 0
        last, trained = stages[-1].last, adapters if lora else stored - idle
        saved = {stage.index: saved_numbers(config, stage, options, mtp, lora, kernels) for stage in stages}
        on_device = {index: numbers.device for index, numbers in saved.items()}
        on_host = {index: numbers.host for index, numbers in saved.items()}
        copied = max(numbers.copied for numbers in saved.values())
        schedule = schedule_of(layout, microbatches, overlap=overlap)[rank]
        deferred = {stage.index: _deferred(config, stage, mtp) for stage in stages}
        in_flight = copied + peak_held(schedule, on_device.__getitem__, deferred.__getitem__)
        in_host = peak_held(schedule, on_host.__getitem__)
        at_work = max(_backward_numbers(config, stage, options.recompute, mtp) for stage in stages)
        at_work = copied + at_work * (ADAPTED if lora else 1.0)
        estimates.append(
            MemoryEstimate(
                parameters=stored * weight_bytes + adapters * STORED,
                gradients=trained * STORED,
                optimizer=int(trained * STORED * options.moments),
                frozen=frozen * weight_bytes // ranks,
                gathered=0
                if compute_bytes == weight_bytes and _is_unsharded(sizes, stages, layout)
                else _gathered(sizes, stages, layout, compute_bytes, overlap=overlap, once=options.gather_once),
                activations=int(in_flight * tokens * compute_bytes),
                working=int(at_work * tokens * compute_bytes),
                head=_head(config, options, device, compute_bytes, frozen=lora) if last else 0,
                host=int(in_host * tokens * compute_bytes),
                summed=0 if lora else _summed(sizes, stages, layout, compute_bytes, once=options.gather_once),
            )
        )
    return estimates


def generator_bytes(config: ModelConfig, compute_bytes: int, *, fp8: bool) -> int:
    """Returns the bytes of the weights of a native generator."""
    with torch.device("meta"):
        model = LanguageModel(config)
    weights = sum(parameter.numel() for parameter in model.parameters()) * compute_bytes
    return weights + (FP8Weights(model).size_in_bytes if fp8 else 0)


def schedule_of(layout: Layout, microbatches: int | None, *, overlap: Overlap) -> tuple[tuple[ScheduleEntry, ...], ...]:
    """Returns the schedule of every pipeline rank; by default with so many microbatches that more change nothing."""
    return _schedule(layout.pp, layout.vpp, 4 * layout.pp if microbatches is None else microbatches, overlap)


@lru_cache(maxsize=64)  # a search needs few of them many times
def _schedule(pp: int, vpp: int, microbatches: int, overlap: Overlap) -> tuple[tuple[ScheduleEntry, ...], ...]:
    return tuple(
        rank_schedule(pp=pp, vpp=vpp, microbatches=microbatches, rank=rank, overlap=overlap) for rank in range(pp)
    )


def _gathered(
    sizes: ModelParameterCount,
    stages: Sequence[Stage],
    layout: Layout,
    compute_bytes: int,
    *,
    overlap: Overlap,
    once: bool,
) -> int:
    """Returns the bytes of gathered weights: of a layer and the next one, or of all.

    Without sharding, all: a copy in the compute dtype. In a pipeline, or with `once`, all stay gathered between
    microbatches, and gradients of what is trained too, in fp32. Otherwise what is outside the layers is gathered for
    the whole pass. With overlap all is, and a layer's gradient waits in fp32.
    """
    parameters = total(sizes.stage(stage) for stage in stages)
    if _is_unsharded(sizes, stages, layout):
        return parameters.used * compute_bytes
    if layout.pp > 1 or once:
        trained = total(sizes.trained(stage) for stage in stages)
        stored = sum(sizes.trained(stage).stored(layout) for stage in stages)  # gradients that replace gathered ones
        return parameters.used * compute_bytes + (trained.used - stored) * STORED
    largest = max((layer.used for layer in sizes.inside(stages[0])), default=0)
    if overlap:
        trained_layers = sizes.adapters_inside(stages[0]) if sizes.adapters else sizes.inside(stages[0])
        waiting = max((layer.used for layer in trained_layers), default=0)
        return sizes.stage(stages[0]).used * compute_bytes + waiting * STORED
    return (2 * largest + sizes.outside(stages[0]).used) * compute_bytes


def _summed(
    sizes: ModelParameterCount, stages: Sequence[Stage], layout: Layout, compute_bytes: int, *, once: bool
) -> int:
    """Returns the bytes of a gradient, of what is sent of it, and of this rank's shard of the sum."""
    largest = max((sizes.outside(stage) for stage in stages), key=lambda count: count.used)
    if _is_unsharded(sizes, stages, layout):
        return largest.used * compute_bytes
    unreduced = 0 if layout.pp > 1 or once else compute_bytes
    return largest.used * (unreduced + STORED) + largest.stored(layout) * STORED


def _is_unsharded(sizes: ModelParameterCount, stages: Sequence[Stage], layout: Layout) -> bool:
    """Returns whether no rank shares what this one holds, so that nothing is gathered."""
    parameters = total(sizes.stage(stage) for stage in stages)
    return layout.dp_replicate == 1 and parameters.stored(layout) == parameters.used


def symbols_of(config: ModelConfig, stage: Stage, mtp: bool) -> list[str]:
    """Returns the blocks that a stage runs in order, with those of its multi-token-prediction depths."""
    symbols = [symbol for layer in layers_of(config, stage) for symbol in layer]
    mtp_symbols = [symbol for depth in config.pattern.mtp for layer in depth for symbol in layer]
    return symbols + mtp_symbols if mtp and stage.last else symbols


@dataclass(frozen=True)
class SavedNumbers:
    """How many numbers are saved per token for a stage's backward."""

    device: float
    host: float
    """Numbers that offloaded layers save."""
    copied: float
    """Numbers that the largest offloaded layer saves, which are on the device while they are copied."""


def saved_numbers(
    config: ModelConfig, stage: Stage, options: TrainingOptions, mtp: bool, lora: bool, kernels: bool
) -> SavedNumbers:
    hidden = config.hidden_size

    def of_layer(layer: str, recompute: Recompute) -> float:
        if recompute == "full":
            return hidden
        blocks = [config.blocks[symbol] for symbol in layer]
        return sum(block.saved_activations(hidden) * _share(block, recompute, lora, kernels) for block in blocks)

    depths = config.pattern.mtp if mtp and stage.last else ()
    offloaded = offloaded_layers(options.offload_activations, len(config.pattern))
    numbered = dict(zip(config.stage_layers(stage), layers_of(config, stage), strict=True))
    stay = [layer for index, layer in numbered.items() if index not in offloaded] + [*itertools.chain(*depths)]
    # Selective recompute is off in offloaded layers. In a schedule plan their inputs stay.
    whole: Recompute = "full" if options.recompute == "full" else "none"
    leave = [of_layer(layer, whole) for index, layer in numbered.items() if index in offloaded]
    inputs = hidden * len(leave) if options.overlap else 0.0
    outside = hidden * (2 * stage.last + 6 * len(depths))  # of the final norm; of a depth's two norms and projection
    on_device = sum(of_layer(layer, options.recompute) for layer in stay) + inputs + outside
    return SavedNumbers(on_device, sum(leave) - inputs, max(leave, default=0.0))


def _share(block: BlockConfig, recompute: Recompute, lora: bool, kernels: bool) -> float:
    if recompute == "selective":
        return block.selective_share
    return ADAPTED if lora else block.kernel_share if kernels else 1.0


def defers_wgrads(config: ModelConfig, stage: Stage) -> bool:
    """Returns whether a stage's backward can defer weight gradients: not if a weight is used twice."""
    return not (stage.last and config.mtp_module_count < len(config.pattern.mtp))


def _deferred(config: ModelConfig, stage: Stage, mtp: bool) -> float:
    """Returns the numbers that one token keeps for deferred weight gradients of a stage."""
    if not defers_wgrads(config, stage):
        return 0.0
    depths = len(config.pattern.mtp) if mtp and stage.last else 0
    blocks = [config.blocks[symbol] for symbol in symbols_of(config, stage, mtp)]
    return sum(block.wgrad_activations(config.hidden_size) for block in blocks) + 3 * config.hidden_size * depths


def _backward_numbers(config: ModelConfig, stage: Stage, recompute: Recompute, mtp: bool) -> float:
    """Returns the numbers per token that a block's backward holds in addition: gradients, and what it recomputes."""
    hidden = config.hidden_size
    layers = [*layers_of(config, stage)]
    layers += [layer for depth in config.pattern.mtp for layer in depth] if mtp and stage.last else []
    saved = [[config.blocks[symbol].saved_activations(hidden) for symbol in layer] for layer in layers] or [[0.0]]
    largest = max(max(layer) for layer in saved)
    recomputed = {"none": 0.0, "selective": largest / 2, "full": max(map(sum, saved))}[recompute]
    return largest * WORKING + recomputed


def _head(config: ModelConfig, options: TrainingOptions, device: str, compute_bytes: int, *, frozen: bool) -> int:
    """Returns the bytes of a chunk of logits, and of the gradients of the head's input and, unless frozen, weight."""
    layout, tokens = options.layout, -(-options.budget // options.layout.cp)
    columns = -(-config.vocab_size // layout.tp)
    if options.head.backend == "logits":
        numbers = (tokens + (not frozen) * columns) * config.hidden_size
        return tokens * columns * LOGIT_COPIES * STORED + numbers * compute_bytes
    logit_bytes = 8 if device == "cpu" else 4  # on a CPU they are also held as probabilities
    shape = Shape(rows=tokens, columns=columns, hidden=config.hidden_size, logit_bytes=logit_bytes, device=device)
    plan = plan_sweep(shape, weight_gradient=not frozen, memory_budget=options.head.memory_budget)
    rows, width = plan.largest(shape)
    weight = columns * config.hidden_size * (compute_bytes + shape.accumulator_bytes * (plan.count(shape) > 1))
    states = tokens * config.hidden_size * (shape.accumulator_bytes + compute_bytes)
    return rows * width * logit_bytes + (0 if frozen else weight) + states
