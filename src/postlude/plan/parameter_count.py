"""Counts a rank's parameters, layer by layer: one layer of each kind is built on the meta device.

So a model of hundreds of billions of parameters is counted in a moment.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from postlude.layout import Layout, Stage
from postlude.lora import NO_ADAPTERS, AdapterConfig, AdapterConfigs
from postlude.model import ModelConfig
from postlude.model.adapters import add_adapters, is_adapter
from postlude.model.blocks import BLOCKS, SeparateUnit
from postlude.model.mtp import MTPDepth
from postlude.model.stack import LogicalLayer
from postlude.world.mesh import Mesh


@dataclass(frozen=True)
class ParameterCount:
    """Parameters that a rank uses: its part of what tensor- and expert-parallel ranks share.

    `dense` ones are sharded over dp_shard · cp ranks, those of `experts` over dp_shard · cp · tp / ep.
    """

    dense: int = 0
    experts: int = 0

    @property
    def used(self) -> int:
        """All of them, gathered, as a layer uses them."""
        return self.dense + self.experts

    def stored(self, layout: Layout) -> int:
        """Returns what one rank stores of them, without padding."""
        shards = layout.dp_shard * layout.cp
        return -(-self.dense // shards) + -(-self.experts * layout.ep // (shards * layout.tp))

    def __add__(self, other: ParameterCount) -> ParameterCount:
        return ParameterCount(self.dense + other.dense, self.experts + other.experts)


@dataclass(frozen=True)
class ModelParameterCount:
    """The parameters of a whole model in a layout."""

    config: ModelConfig
    layers: Mapping[str, ParameterCount]
    """By the pattern of a logical layer."""
    depth: ParameterCount
    """One multi-token-prediction depth."""
    embedding: ParameterCount
    head: ParameterCount
    norm: ParameterCount
    adapters: tuple[ParameterCount, ...] = ()
    """The adapters of each layer in order, then of each multi-token-prediction depth; empty without LoRA."""
    embedding_adapter: ParameterCount = ParameterCount()
    head_adapter: ParameterCount = ParameterCount()

    def outside(self, stage: Stage) -> ParameterCount:
        """Returns the count of a stage's embedding, norm and head."""
        config, count = self.config, ParameterCount()
        if stage.first or (stage.last and config.shared_parameters):
            count += self.embedding
        if stage.last:
            count += self.norm if config.tied_head else self.norm + self.head
        return count

    def inside(self, stage: Stage) -> list[ParameterCount]:
        """Returns the count of each layer of a stage in order, and of each multi-token-prediction depth after them."""
        layers = [self.layers[layer] for layer in layers_of(self.config, stage)]
        return layers + [self.depth] * (self.config.mtp_module_count if stage.last else 0)

    def stage(self, stage: Stage) -> ParameterCount:
        """Returns the count of a whole stage, without adapters."""
        return total([self.outside(stage), *self.inside(stage)])

    def adapters_inside(self, stage: Stage) -> list[ParameterCount]:
        """Returns the adapters of each layer of a stage in order, and of each depth after them; empty without LoRA."""
        layers, depths = self.config.stage_layers(stage), self.adapters[len(self.config.pattern) :]
        return [*self.adapters[layers.start : layers.stop], *(depths if stage.last else ())]

    def trained(self, stage: Stage) -> ParameterCount:
        """Returns what is trained of a stage: its adapters, or all without LoRA."""
        if not self.adapters:
            return self.stage(stage)
        outside = [self.embedding_adapter] * stage.first + [self.head_adapter] * stage.last
        return total([*self.adapters_inside(stage), *outside])


def layers_of(config: ModelConfig, stage: Stage) -> tuple[str, ...]:
    layers = config.stage_layers(stage)
    return config.pattern.layers[layers.start : layers.stop]


def total(parts: Iterable[ParameterCount]) -> ParameterCount:
    return sum(parts, ParameterCount())


def count_parameters(
    config: ModelConfig, layout: Layout | None = None, *, adapters: AdapterConfigs = NO_ADAPTERS
) -> ModelParameterCount:
    """Counts the parameters that the first rank of each stage of a layout uses; by default of one rank.

    `adapters` are those of the whole model, by the names of their layers.
    """
    mesh = Mesh.without_processes(layout or Layout())
    pattern = config.pattern
    kinds = {blocks: index for index, blocks in enumerate(pattern.layers)}
    vocabulary = ParameterCount(_local_rows(config.vocab_size, mesh) * config.hidden_size)
    with torch.device("meta"):
        layers = {
            kind: _count(LogicalLayer(pattern.layer(index), config, mesh, BLOCKS)) for kind, index in kinds.items()
        }
        depth = ParameterCount()
        if pattern.mtp:
            depth = _count(MTPDepth(0, config, mesh, BLOCKS))
    norm, inside = ParameterCount(config.hidden_size), _count_adapters(config, mesh, adapters)
    features = config.hidden_size + _local_rows(config.vocab_size, mesh)
    ranks = [adapters[name].rank if name in adapters else 0 for name in ("embedding", "head")]
    outside = [ParameterCount(rank * features) for rank in ranks]
    return ModelParameterCount(config, layers, depth, vocabulary, vocabulary, norm, inside, *outside)


def _count_adapters(config: ModelConfig, mesh: Mesh, adapters: AdapterConfigs) -> tuple[ParameterCount, ...]:
    """Returns the adapters of each layer and depth. Of layers with the same blocks and adapters one is built."""
    counted: dict[tuple[str, frozenset[tuple[str, AdapterConfig]]], ParameterCount] = {}
    counts = []
    for index, blocks in enumerate(config.pattern.layers if adapters else ()):
        prefix = f"layers.{index}."
        inner = frozenset(
            (name.removeprefix(prefix), adapter) for name, adapter in adapters.items() if name.startswith(prefix)
        )
        if (blocks, inner) not in counted:
            with torch.device("meta"):
                layer = LogicalLayer(config.pattern.layer(index), config, mesh, BLOCKS)
                add_adapters(layer, adapters, prefix=f"layers.{index}")
            counted[blocks, inner] = _count(layer, only_adapters=True)
        counts.append(counted[blocks, inner])
    for index in range(config.mtp_module_count if adapters else 0):
        with torch.device("meta"):
            depth = MTPDepth(index, config, mesh, BLOCKS)
            add_adapters(depth, adapters, prefix=f"mtp.{index}")
        counts.append(_count(depth, only_adapters=True))
    return tuple(counts)


def total_parameters(config: ModelConfig) -> int:
    return count_parameters(config).stage(Stage()).used


def _local_rows(rows: int, mesh: Mesh) -> int:
    start, stop = mesh.tp.block(rows)
    return stop - start


def _count(module: LogicalLayer | MTPDepth, *, only_adapters: bool = False) -> ParameterCount:
    units: list[SeparateUnit] = [unit for block in module.blocks for unit in block.sharded_separately()]
    experts = {id(parameter) for unit in units if unit.experts for parameter in unit.module.parameters()}
    sizes = [
        (parameter.numel(), id(parameter) in experts)
        for name, parameter in module.named_parameters()
        if is_adapter(name) or not only_adapters
    ]
    return ParameterCount(
        sum(size for size, expert in sizes if not expert), sum(size for size, expert in sizes if expert)
    )
