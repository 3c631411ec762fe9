"""LoRA: the settings of low-rank adapters as a value. Part of configs, so it needs no torch.

`model/parallel.py` has the adapter of a layer, and `hf/lora_targets.py` finds the layers that `targets` names.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Annotated, Literal, get_args

from postlude.checks import Bounds, check_bounds, check_choice

ExpertAdapters = Literal["shared_outer", "per_expert"]
"""What the experts of a layer share: A of gate and up and B of down ("shared_outer"), or nothing ("per_expert")."""

LoRAGroup = Literal["attention", "mlp", "experts", "named", "none"]
"""What names a linear layer in `targets`: a group, only its own name ("named"), or nothing, as it takes no adapter."""
SharedMatrix = Literal["", "a", "b"]


@dataclass(frozen=True)
class AdapterConfig:
    """The adapter of one linear layer: its output is the layer's + scale · B · A · input."""

    rank: int
    scale: float
    shared: SharedMatrix = ""
    """Of experts: the matrix that all experts of the layer share."""


NO_ADAPTERS: Mapping[str, AdapterConfig] = MappingProxyType({})


@dataclass(frozen=True, kw_only=True)
class LoRA:
    """Low-rank adapters on linear layers. The model's own weights are frozen."""

    rank: Annotated[int, Bounds(least=1)] = 32
    """Rank of the adapters."""
    alpha: Annotated[float, Bounds(above=0)] = 32.0
    """The scale of an adapter is alpha / rank."""
    rslora: bool = False
    """The scale of an adapter is alpha / √rank."""
    targets: str | tuple[str, ...] = "all"
    """Adapted layers: modules as Hugging Face names them (q_proj), or attention, mlp, experts, all; a list, or names
    with commas between."""
    experts: ExpertAdapters = "shared_outer"
    """What the adapters of a layer's experts share."""
    ranks: Mapping[str, int] = field(default_factory=dict)
    """Ranks that differ, by target."""
    alphas: Mapping[str, float] = field(default_factory=dict)
    """Alphas that differ, by target."""

    def __post_init__(self) -> None:
        check_bounds(self)
        check_choice("lora.experts", self.experts, get_args(ExpertAdapters))
        if not self.targets:
            raise ValueError('lora.targets is empty: name modules such as "q_proj", or "all".')
        for name, value in (*self.ranks.items(), *self.alphas.items()):
            if value <= 0:
                raise ValueError(f"lora: rank and alpha are above 0, but those of {name} are {value}.")

    @property
    def target_names(self) -> tuple[str, ...]:
        """The targets one by one."""
        if isinstance(self.targets, str):
            return tuple(name.strip() for name in self.targets.split(","))
        return tuple(self.targets)

    def scale(self, rank: int, alpha: float) -> float:
        """Returns the factor of an adapter."""
        return alpha / (math.sqrt(rank) if self.rslora else rank)
