"""HybridStack: the logical layers of one pipeline stage."""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import chain

from torch import Tensor, nn

from postlude.layout import Stage
from postlude.model.blocks import BlockTable
from postlude.model.config import ModelConfig
from postlude.model.context import ForwardContext
from postlude.model.offload import ActivationOffload
from postlude.model.parallel import FSDPUnit
from postlude.model.pattern import Layer
from postlude.model.recompute import Recompute, recomputed
from postlude.model.schedule_plan import PlannedStep
from postlude.model.steps import LayerStep, run_steps
from postlude.world.mesh import Mesh


class LogicalLayer(FSDPUnit):
    """The blocks of one logical layer in order, under distinct names such as "attention" and "mlp"."""

    offload: ActivationOffload | None = None
    """Moves what the layer keeps for its backward to host memory."""

    def __init__(
        self, layer: Layer, config: ModelConfig, mesh: Mesh, blocks: BlockTable, *, prefix: str = "layers"
    ) -> None:
        super().__init__()
        self.name = f"{prefix}.{layer.index}"
        self.block_names = layer.names
        self.blocks = tuple(
            blocks[symbol](config.blocks[symbol], config, f"{self.name}.{name}", mesh)
            for symbol, name in zip(layer.blocks, layer.names, strict=True)
        )
        for name, block in zip(self.block_names, self.blocks, strict=True):
            self.add_module(name, block)

    @functools.cached_property
    def steps_by_block(self) -> tuple[tuple[LayerStep, ...], ...]:
        return tuple(block.steps() for block in self.blocks)

    @functools.cached_property
    def steps(self) -> tuple[LayerStep, ...]:
        return tuple(chain.from_iterable(self.steps_by_block))

    def planned_steps(self, context: ForwardContext) -> tuple[PlannedStep, ...]:
        """Returns the steps for a schedule plan. Call it once per use of the layer."""
        owners = {name: object() for name in self.block_names}
        steps = [
            PlannedStep(step, context, owners[name], f"{self.name} {name}.{step.name}", offloading=self.offloading)
            for name, block in zip(self.block_names, self.blocks, strict=True)
            for step in block.steps()
        ]
        # The backward runs in reverse, so the first step is the one after which the layer's gradients are complete.
        return (replace(steps[0], completes=(self,)), *steps[1:])

    def forward(self, hidden: Tensor, context: ForwardContext) -> Tensor:
        """Runs the layer's steps, [T / tp, H] -> [T / tp, H]. While decoding, a block may run as a whole."""
        if context.decode_state is not None:
            return self._decode(hidden, context)
        layer_recompute: Recompute = "full" if context.recompute == "full" else "none"
        with self.offloading(context, [hidden] if hidden.is_leaf else []):
            return recomputed(run_steps, layer_recompute, self.steps, hidden, context)

    def _decode(self, hidden: Tensor, context: ForwardContext) -> Tensor:
        for block, steps in zip(self.blocks, self.steps_by_block, strict=True):
            fused = block.fused_decode_or_none(hidden, context)
            hidden = run_steps(steps, hidden, context) if fused is None else fused
        return hidden

    def offloading(self, context: ForwardContext, held: list[Tensor]) -> AbstractContextManager[None]:
        """Offloads what steps save for the backward inside, if `offload` is set; see `ActivationOffload.layer`."""
        return nullcontext() if self.offload is None else self.offload.layer(self, context, held)


class HybridStack(nn.ModuleDict):
    """Logical layers by their global index, so that names are the same in every layout."""

    def __init__(self, config: ModelConfig, stage: Stage, mesh: Mesh, blocks: BlockTable) -> None:
        for symbol in config.symbols:
            _check_block(symbol, config, blocks)
        layers = (config.pattern.layer(index) for index in config.stage_layers(stage))
        super().__init__({str(layer.index): LogicalLayer(layer, config, mesh, blocks) for layer in layers})

    def forward(self, hidden: Tensor, context: ForwardContext) -> Tensor:
        """Runs the layers in order, [T / tp, H] -> [T / tp, H]."""
        for layer in self.values():
            hidden = layer(hidden, context)
        return hidden


def _check_block(symbol: str, config: ModelConfig, blocks: BlockTable) -> None:
    if symbol not in blocks:
        raise ValueError(
            f"pattern {config.pattern} uses {symbol!r} ({config.pattern.symbols[symbol]}), which has no "
            f"block yet; there are blocks for {', '.join(map(repr, blocks))}. Write one and pass it in `blocks`."
        )
    expected, actual = blocks[symbol].Config, type(config.blocks[symbol])
    if not issubclass(actual, expected):
        raise TypeError(
            f"blocks[{symbol!r}] of the config is a {actual.__name__}; {symbol!r} needs a {expected.__name__}."
        )
