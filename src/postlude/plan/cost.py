"""The cost model: the seconds of one action of a schedule, from FLOPs, bytes and link speeds.

A forward takes its FLOPs over the GPU's rate, a backward twice that, and once more for a recomputed layer. Deferred
weight gradients are an action of their own. A rank waits for tokens that are gathered for tensor or context
parallelism. It waits for exchanges with experts unless another microbatch's compute hides them, which depends on the
schedule (`forecast.py`). Gathers of weights and reductions of gradients run behind their action, and a rank waits for
them only if they take longer. So do the copies of offloaded activations.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from postlude.layout import Layout, Stage
from postlude.lora import NO_ADAPTERS, AdapterConfigs
from postlude.model import ModelConfig
from postlude.model.block_config import NOMINAL_LENGTH
from postlude.options import Recompute, chosen_layers
from postlude.pipeline.schedule import Action
from postlude.plan.hardware import Hardware
from postlude.plan.memory import NARROW, STORED, defers_wgrads, saved_numbers, symbols_of
from postlude.plan.parameter_count import ModelParameterCount, count_parameters, layers_of
from postlude.training_options import TrainingOptions

RECOMPUTED: Mapping[Recompute, float] = {"none": 0.0, "selective": 0.1, "full": 1.0}
"""The fraction of a forward that the backward repeats; "selective" repeats only what is cheap."""
ADAMW_BYTES = 28  # that a fused AdamW reads and writes per parameter, all in fp32
FP8_TIME = 0.65  # of a product in bf16, rounding included: measured on an H200, docs/fp8.md
ADAPTER_OVERHEAD = 1.15  # of compute with adapters, whose products are narrow: measured on an H200, docs/benchmarks.md


@dataclass(frozen=True)
class ActionCost:
    """Seconds of one action on one rank. `exchange` with experts can hide behind another action's compute."""

    compute: float
    exchange: float = 0.0
    waited: float = 0.0
    """Waits for tokens of other ranks, and for weights and gradients that compute does not hide."""

    @property
    def total(self) -> float:
        """The seconds if nothing is hidden."""
        return self.compute + self.exchange + self.waited


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """The cost of every action of a model on given hardware, at a full microbatch.

    `length` is that of the sequences. With `mtp` the last stage runs and trains its depths.
    """

    config: ModelConfig
    options: TrainingOptions
    hardware: Hardware
    length: int
    microbatches: int
    compute_bytes: int = 2
    mtp: bool = True
    frozen: int = 0
    """Parameters of other models in memory: a reference, a teacher."""
    adapters: AdapterConfigs = field(default_factory=lambda: NO_ADAPTERS)
    """With LoRA, the adapters of the whole model: they alone are trained."""
    known: ModelParameterCount | None = None
    """The parameters of a rank of this layout, if they are counted already."""

    @property
    def layout(self) -> Layout:
        return self.options.layout

    @cached_property
    def sizes(self) -> ModelParameterCount:
        return self.known or count_parameters(self.config, self.layout, adapters=self.adapters)

    @cached_property
    def costs(self) -> Mapping[tuple[str, int], ActionCost]:
        """The cost of a forward and a backward of each stage, between the first microbatch and the last."""
        return self._costs(with_collectives=False)

    @cached_property
    def costs_with_collectives(self) -> Mapping[tuple[str, int], ActionCost]:
        """The same for the action that gathers weights for all microbatches, or reduces gradients after all."""
        return self._costs(with_collectives=True)

    def __call__(self, action: Action) -> ActionCost:
        """Returns an action's cost. In a pipeline, a stage's first forward gathers, and its last backward reduces."""
        collective_microbatch = 0 if action.kind == "F" else self.microbatches - 1
        table = self.costs_with_collectives if action.microbatch == collective_microbatch else self.costs
        return table[action.kind, action.stage]

    def with_deferred_wgrads(self, action: Action) -> ActionCost:
        """Returns an action's cost if backwards defer weight gradients: a W computes them, and the last W reduces."""
        if action.kind == "F":
            return self(action)
        stage = Stage(action.stage, self.layout.stages)
        deferred = self._seconds(self._weight_flops(stage))
        if action.kind == "B":
            backward = self.costs["B", action.stage]
            return replace(backward, compute=backward.compute - deferred)
        reduction = self._weights("B", stage, action.microbatch == self.microbatches - 1)
        return ActionCost(deferred, waited=max(0.0, reduction - deferred))

    @property
    def transfer_seconds(self) -> float:
        """Seconds from one pipeline rank to the next, for this rank's tokens, [T / tp, H]."""
        layout, hardware = self.layout, self.hardware
        if layout.pp == 1:
            return 0.0
        size = self.tokens * self.config.hidden_size * self.compute_bytes
        rate = hardware.intra_node if hardware.near(2, layout.world_size // layout.pp) == 2 else hardware.inter_node
        return hardware.latency + size / (rate * hardware.link_efficiency)

    @property
    def step_seconds(self) -> float:
        """Seconds of the optimizer step on the rank that stores most."""
        layout, stored = self.layout, [0] * self.layout.pp
        for index in range(layout.stages):
            stored[index % layout.pp] += self.sizes.trained(Stage(index, layout.stages)).stored(layout)
        return max(stored) * ADAMW_BYTES / self.hardware.memory_bandwidth

    @property
    def tokens(self) -> float:
        """Tokens of one microbatch that one rank holds between blocks."""
        return self.options.budget / (self.layout.cp * self.layout.tp)

    @cached_property
    def model_flops(self) -> float:
        """FLOPs of a forward and a backward of one token through the whole model, without recompute.

        With LoRA the same: MFU counts weight gradients of the model that are not computed.
        """
        stages = [Stage(index, self.layout.stages) for index in range(self.layout.stages)]
        return 3 * sum(self._flops(stage) for stage in stages)

    def _flops(self, stage: Stage) -> float:
        config, hidden = self.config, self.config.hidden_size
        total = 0.0
        for symbol, count in self._counts(stage).items():
            block = config.blocks[symbol]
            total += count * (
                block.flops(hidden) - block.attention_flops(NOMINAL_LENGTH) + block.attention_flops(self.length)
            )
        if stage.last:
            depths = len(config.pattern.mtp) if self.mtp else 0
            total += (1 + depths) * 2.0 * hidden * config.vocab_size + depths * 4.0 * hidden**2
        return total

    def _saved_by_fp8(self, stage: Stage) -> float:
        """Returns the FLOPs per token that take no time in a forward, or in the gradient of its inputs."""
        config = self.config
        chosen = chosen_layers("fp8", self.options.fp8, len(config.pattern))
        numbered = zip(config.stage_layers(stage), layers_of(config, stage), strict=True)
        layers = [layer for index, layer in numbered if index in chosen]
        if self.mtp and stage.last and len(config.pattern) - 1 in chosen:
            layers += itertools.chain(*config.pattern.mtp)
        blocks = [block for symbol in itertools.chain(*layers) if not (block := config.blocks[symbol]).has_experts]
        products = (block.flops(config.hidden_size) - block.attention_flops(NOMINAL_LENGTH) for block in blocks)
        return (1 - FP8_TIME) * sum(products)

    def _weight_flops(self, stage: Stage) -> float:
        """Returns the FLOPs per token of deferred weight gradients: all but the head's."""
        config, hidden = self.config, self.config.hidden_size
        if not defers_wgrads(config, stage) or self.adapters:  # those of adapters are next to nothing
            return 0.0
        depths = len(config.pattern.mtp) if self.mtp and stage.last else 0
        blocks = [(config.blocks[symbol], count) for symbol, count in self._counts(stage).items()]
        flops = sum(count * (block.flops(hidden) - block.attention_flops(NOMINAL_LENGTH)) for block, count in blocks)
        return flops + depths * 4.0 * hidden**2

    def _seconds(self, flops: float) -> float:
        """Returns the seconds of a microbatch with so many FLOPs per token."""
        return flops * self.tokens / (self.hardware.flops * self.hardware.efficiency)

    def _counts(self, stage: Stage) -> Counter[str]:
        return Counter(symbols_of(self.config, stage, self.mtp))

    def _costs(self, *, with_collectives: bool) -> dict[tuple[str, int], ActionCost]:
        stages = [Stage(index, self.layout.stages) for index in range(self.layout.stages)]
        return {
            (kind, stage.index): self._cost(kind, stage, with_collectives=with_collectives)
            for stage in stages
            for kind in "FB"
        }

    def _cost(self, kind: str, stage: Stage, *, with_collectives: bool) -> ActionCost:
        config, layout, hardware = self.config, self.layout, self.hardware
        blocks = [(config.blocks[symbol], count) for symbol, count in self._counts(stage).items()]
        hidden, size = config.hidden_size, self.compute_bytes
        # A backward moves what its forward did.
        trips = 2.0 if kind == "B" and self.options.recompute == "full" else 1.0
        compute = self._compute(kind, stage)
        by_tp = sum(count * block.tp_traffic(hidden) for block, count in blocks) * (layout.tp - 1)
        by_cp = sum(count * block.cp_traffic(layout.cp) for block, count in blocks)
        waited = by_tp / hardware.ring_rate(layout.tp, 1) + by_cp / hardware.ring_rate(layout.cp, layout.tp)
        exchange = 0.0
        for block, count in blocks:
            if sent := block.ep_traffic(hidden):
                exchange += 2 * count * hardware.exchange_seconds(sent * self.tokens * size, layout.ep, 1)
        weights = self._weights(kind, stage, with_collectives)
        saved = saved_numbers(config, stage, self.options, self.mtp, bool(self.adapters), kernels=size == NARROW)
        behind = max(weights, saved.host * self.tokens * size / hardware.host)
        return ActionCost(compute, trips * exchange, trips * waited * self.tokens * size + max(0.0, behind - compute))

    def _compute(self, kind: str, stage: Stage) -> float:
        """Returns the seconds of compute: a backward is twice a forward, and without weight gradients as long as one.

        Attention between tokens has no weights, so its backward is always twice as long.
        """
        forward = self._flops(stage)
        backward = 2.0 * forward
        if self.adapters:
            counts = self._counts(stage).items()
            attention = sum(count * self.config.blocks[symbol].attention_flops(self.length) for symbol, count in counts)
            backward = forward + attention
        flops = forward if kind == "F" else backward + RECOMPUTED[self.options.recompute] * forward
        flops -= (1 + (kind == "B" and self.options.recompute == "full")) * self._saved_by_fp8(stage)
        return self._seconds(flops) * (ADAPTER_OVERHEAD if self.adapters else 1.0)

    def _weights(self, kind: str, stage: Stage, with_collectives: bool) -> float:
        """Returns the seconds in which this action gathers weights and reduces gradients, without overlap."""
        parameters, trained = self.sizes.stage(stage), self.sizes.trained(stage)
        layout, hardware = self.layout, self.hardware
        stays_gathered = layout.pp > 1 or self.options.gather_once
        if stays_gathered and not with_collectives:
            return 0.0
        gathered = 0 if kind == "B" and stays_gathered else self.compute_bytes  # a backward gathers once more
        reduced = STORED if kind == "B" else 0
        shards = layout.dp_shard * layout.cp
        of_experts = shards * layout.tp // layout.ep
        seconds = _ring(hardware, parameters.dense * gathered + trained.dense * reduced, shards, layout.tp)
        seconds += _ring(hardware, parameters.experts * gathered + trained.experts * reduced, of_experts, layout.ep)
        if kind == "B" and with_collectives and layout.dp_replicate > 1:
            replica = layout.dp_shard * layout.cp * layout.tp
            seconds += 2 * _ring(hardware, trained.stored(layout) * STORED, layout.dp_replicate, replica)
        return seconds


def _ring(hardware: Hardware, size: float, ranks: int, stride: int) -> float:
    """Returns the seconds to gather `size` bytes on each of so many ranks, or to reduce them to shards."""
    return 0.0 if ranks == 1 else size * (ranks - 1) / ranks / hardware.ring_rate(ranks, stride)
