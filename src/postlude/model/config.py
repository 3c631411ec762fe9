"""ModelConfig: a pattern of blocks, one config per block symbol, and the sizes they share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from postlude.checks import Finite, NonNegative, Positive, check_bounds
from postlude.layout import Layout, Stage
from postlude.model.block_config import BlockConfig, Size
from postlude.model.pattern import Pattern, PatternError
from postlude.router_losses import RouterLosses

RATE = "selection_bias_rate"


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Everything that decides a model's function and its parameters' names and shapes.

    `blocks` holds one config for each symbol of the pattern. A norm multiplies by `norm_offset` + its weight; the
    offset is 1 if weights are stored around zero. `family` names the Hugging Face family for export; a model without
    one is written in Postlude's own format. `hf_config` keeps the whole config.json that the model was read from, token
    ids and lengths included; a recast model keeps it too.
    """

    pattern: Pattern
    hidden_size: Size
    vocab_size: Size
    blocks: Mapping[str, BlockConfig]
    tied_head: bool = False
    mtp_repeated: bool = False
    """Whether every MTP depth uses the parameters of the first."""
    norm_eps: Positive = 1e-6
    norm_offset: Finite = 0.0
    embedding_scale: Finite = 1.0
    embedding_scale_rounded: bool = False
    """Whether the scale is rounded to the embedding's dtype, as in Gemma."""
    logit_scale: Finite = 1.0
    logit_softcap: Positive | None = None
    initializer_range: NonNegative = 0.02
    family: str | None = None
    hf_config: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_bounds(self)
        missing = [symbol for symbol in self.symbols if symbol not in self.blocks]
        if missing:
            raise ValueError(
                f"the pattern {self.pattern} uses {', '.join(map(repr, missing))}, but `blocks` has configs for "
                f"{', '.join(map(repr, self.blocks)) or 'nothing'} only. Add a config for each symbol."
            )

    @property
    def symbols(self) -> tuple[str, ...]:
        """The block symbols it uses, MTP included."""
        return self.pattern.kinds

    @property
    def mtp_module_count(self) -> int:
        """The number of MTP depths with their own parameters."""
        depths = len(self.pattern.mtp)
        return min(1, depths) if self.mtp_repeated else depths

    @property
    def shared_parameters(self) -> frozenset[str]:
        """Parameters that the first and the last stage hold. The first owns them; gradients are summed over both."""
        at_both_ends = self.tied_head or self.pattern.mtp
        return frozenset(("embedding.weight",)) if at_both_ends else frozenset()

    @property
    def named_blocks(self) -> dict[str, BlockConfig]:
        """The config of every block of every stage by its global name, those of MTP depths last."""
        return {name: self.blocks[symbol] for name, symbol in self.block_symbols.items()}

    @cached_property
    def block_symbols(self) -> dict[str, str]:
        """The symbol of every block of every stage by its global name, those of MTP depths last."""
        trunk = {f"layers.{index}": self.pattern.layer(index) for index in range(len(self.pattern))}
        ahead = {
            f"mtp.{depth}.layers.{layer.index}": layer
            for depth in range(self.mtp_module_count)
            for layer in self.pattern.depth_layers(depth)
        }
        return {
            f"{within}.{name}": symbol
            for within, layer in (trunk | ahead).items()
            for symbol, name in zip(layer.blocks, layer.names, strict=True)
        }

    @property
    def routers(self) -> dict[str, tuple[int, int]]:
        """(top_k, experts) of each router of the trunk, by block name, in the order of `Microbatch.routing`."""
        shapes = {name: block.router_shape for name, block in self.named_blocks.items() if name.startswith("layers.")}
        return {name: shape for name, shape in shapes.items() if shape[0]}

    def with_selection_bias_rate(self, rate: float) -> ModelConfig:
        """Returns the config with routers whose selection biases move by `rate` after each optimizer step."""
        changed: dict[str, Any] = {RATE: rate}
        biased = {
            symbol: replace(block, **changed)
            for symbol, block in self.blocks.items()
            if getattr(block, "selection_bias", False)
        }
        if not biased:
            raise ValueError(
                f"{RATE} is {rate:g}, but no router of {self.pattern} has a selection bias. Leave the setting out."
            )
        return replace(self, blocks={**self.blocks, **biased})

    def with_router_losses(self, losses: RouterLosses) -> ModelConfig:
        """Returns the config with these auxiliary losses in every router."""
        changes = losses.changes
        if not changes:
            return self
        set_text = ", ".join(f"router_losses.{name} is {value}" for name, value in changes.items())
        routers = {
            symbol: replace(block, **changes)
            for symbol, block in self.blocks.items()
            if symbol in self.symbols and hasattr(block, "balance_coefficient")
        }
        if not routers:
            raise ValueError(f"{set_text}, but {self.pattern} has no router. Leave router_losses out.")
        if losses.balance and not any(getattr(block, "balance_coefficient", 0.0) for block in routers.values()):
            raise ValueError(
                f"{set_text}, but no router of {self.pattern} has a balance loss. Set "
                "router_losses.balance_coefficient above 0, or leave router_losses.balance out."
            )
        return replace(self, blocks={**self.blocks, **routers})

    def check_layout(self, layout: Layout) -> None:
        """Raises ValueError for a layout that cannot divide this model, with the nearest that can."""
        self.stage_layers(Stage(0, layout.stages))
        for symbol in self.symbols:
            self.blocks[symbol].check_layout(layout, self.pattern.symbols[symbol])

    def stage_layers(self, stage: Stage) -> range:
        """Returns the logical layers of one pipeline stage: as the pattern is cut, else balanced by cost."""
        if stage.count not in self._stages:
            self._stages[stage.count] = self._divided(stage.count)
        return self._stages[stage.count][stage.index]

    @cached_property
    def _stages(self) -> dict[int, tuple[range, ...]]:
        return {}

    def _divided(self, count: int) -> tuple[range, ...]:
        def cost(symbol: str) -> float:
            return self.blocks[symbol].flops(self.hidden_size)

        head = 2.0 * self.hidden_size * self.vocab_size
        depths = [sum(cost(symbol) for layer in depth for symbol in layer) + head for depth in self.pattern.mtp]
        stages = self.pattern.stages(count, cost=cost, head_cost=head + sum(depths))
        for number, layers in enumerate(stages[1:-1], start=2):
            if not layers:
                raise PatternError(
                    str(self.pattern),
                    f"stage {number} of pp·vpp = {count} has no layer, and so nothing to run",
                    "Move a cut: the first stage, which embeds, and the last, which has the head, may be empty.",
                )
        return stages
