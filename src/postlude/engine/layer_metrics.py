"""LayerMetrics: what the blocks of every layer measured in a pass, on all pipeline stages and MTP depths.

A block adds up sums over its tokens (`Block.metric_sums`). They are reduced over all ranks with the other metrics,
and every rank computes the same numbers from the totals (`BlockConfig.metrics`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import fmean

import torch
from torch import Tensor

from postlude.model import ModelConfig
from postlude.model.block_config import LayerMetric
from postlude.model.blocks import Block
from postlude.objectives.loss import Reduction

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
