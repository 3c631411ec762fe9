"""LoRA: the settings of low-rank adapters as a value. Part of configs, so it needs no torch.

`model/parallel.py` has the adapter of a layer, and `hf/linear_layers.py` finds the layers that `targets` names.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Annotated, Any, Literal, TypeAlias, get_args

from postlude.checks import Bounds, check_bounds, check_choice
from postlude.options import Common

ExpertAdapters = Literal["shared_outer", "per_expert"]
"""What the experts of a layer share: A of gate and up and B of down ("shared_outer"), or nothing ("per_expert")."""

LoRAGroup = Literal["attention", "mlp", "experts", "router", "embedding", "head", "named", "none"]
"""How `targets` selects a layer: by its group, only by its own name ("named"), or not at all (no adapter)."""
SharedMatrix = Literal["", "a", "b"]


@dataclass(frozen=True)
class AdapterConfig:
    """The adapter of one linear layer: its output is the layer's + scale · B · A · input."""

    rank: int
    scale: float
    shared: SharedMatrix = ""
    """Of experts: the matrix that all experts of the layer share."""


AdapterConfigs: TypeAlias = Mapping[str, AdapterConfig]
"""Adapters by the names of their layers."""
NO_ADAPTERS: AdapterConfigs = MappingProxyType({})


@dataclass(frozen=True, kw_only=True)
class LoRA:
    """Low-rank adapters on linear layers. The model's own weights are frozen."""

    rank: Common[Annotated[int, Bounds(least=1)]] = 32
    """Rank of the adapters."""
    alpha: Annotated[float, Bounds(above=0)] = 32.0
    """The scale of an adapter is alpha / rank."""
    rslora: bool = False
    """The scale of an adapter is alpha / √rank."""
    targets: Common[str | tuple[str, ...]] = "all"
    """Adapted layers: modules as Hugging Face names them (q_proj), or attention, mlp, experts, all (of these three),
    router, embedding, head; a list, or names with commas between."""
    experts: ExpertAdapters = "shared_outer"
    """The experts of a layer share A of gate and up and B of down ("shared_outer"), or nothing ("per_expert")."""
    ranks: Mapping[str, int] = field(default_factory=dict)
    """Ranks of single targets, which override `rank`."""
    alphas: Mapping[str, float] = field(default_factory=dict)
    """Alphas of single targets, which override `alpha`."""

    def __post_init__(self) -> None:
        check_bounds(self)
        check_choice("lora.experts", self.experts, get_args(ExpertAdapters))
        if not self.targets:
            raise ValueError('lora.targets is empty: name modules such as "q_proj", or "all".')
        for name, value in (*self.ranks.items(), *self.alphas.items()):
            if value <= 0:
                raise ValueError(f"lora: rank and alpha are above 0, but those of {name} are {value}.")

    @classmethod
    def parse(cls, text: str) -> LoRA:
        """Parses settings as they are written on the command line: `"rank=8,targets=q_proj,v_proj,rslora=true"`."""
        names = [setting.name for setting in fields(cls) if setting.name not in ("ranks", "alphas")]  # mappings
        values: dict[str, str] = {}
        name = ""
        for part in filter(None, (part.strip() for part in text.split(","))):
            key, equals, value = (piece.strip() for piece in part.partition("="))
            if not equals and name == "targets":  # one more target
                values[name] += f",{part}"
                continue
            if key not in names or not equals or not value:
                near = difflib.get_close_matches(key, names, 1)
                hint = f"did you mean {near[0]!r}?" if near else f"the settings are {', '.join(names)}."
                problem = f"{key!r} is not a setting; {hint}" if key not in names else f"give a value as {key}=VALUE."
                raise ValueError(f"lora {text!r}: {problem}")
            if key in values:
                raise ValueError(f"lora {text!r}: {key!r} is given twice.")
            name, values[key] = key, value
        return cls(**{key: _parse_value(text, key, value) for key, value in values.items()})

    @property
    def target_names(self) -> tuple[str, ...]:
        if isinstance(self.targets, str):
            return tuple(name.strip() for name in self.targets.split(","))
        return tuple(self.targets)

    def scale(self, rank: int, alpha: float) -> float:
        """Returns the factor of an adapter."""
        return alpha / (math.sqrt(rank) if self.rslora else rank)


def _parse_value(text: str, name: str, value: str) -> Any:
    default = getattr(LoRA, name)
    if isinstance(default, bool):
        if value not in ("true", "false"):
            raise ValueError(f"lora {text!r}: {name} is {value!r}; give true or false.")
        return value == "true"
    if isinstance(default, str):
        return value
    try:
        return type(default)(value)
    except ValueError:
        kind = "a whole number" if isinstance(default, int) else "a number"
        raise ValueError(f"lora {text!r}: {name} is {value!r}; give {kind}.") from None
