"""The layers that `LoRA.targets` names, and the adapter of each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from postlude.hf.family import EXPERT, Family
from postlude.hf.linear_layers import LinearLayer, existing_modules, hf_matrices, linear_layers, shared_use
from postlude.lora import AdapterConfig, AdapterConfigs, LoRA
from postlude.model import ModelConfig
from postlude.model.blocks import BLOCKS, BlockTable

IN_ALL = ("attention", "mlp", "experts")
GROUPS = (*IN_ALL, "router", "embedding", "head")
T = TypeVar("T")


def adapter_configs(
    lora: LoRA, config: ModelConfig, family: Family | None, blocks: BlockTable = BLOCKS
) -> dict[str, AdapterConfig]:
    """Returns the adapter of every adapted layer of the whole model, by our name of the layer.

    A target is a group or the last parts of a module's name, as in peft: "q_proj", "self_attn.q_proj". Experts are also
    named by the module that holds them. Of several ranks or alphas of a layer the one with the longest name counts.
    Raises ValueError for names of no module, or of one that takes no adapter.
    """
    targets = _Targets(config, family, blocks)
    adapted = {layer for target in lora.target_names for layer in targets.layers_of(target, "targets")}
    for field, values in (("ranks", lora.ranks), ("alphas", lora.alphas)):
        for key in values:
            if adapted.isdisjoint(targets.layers_of(key, field)):
                raise ValueError(f'lora.{field} names "{key}", which lora.targets does not adapt; add it there.')
    configs = {}
    for name, layer in targets.layers.items():
        if name in adapted:
            rank = targets.value_of(name, lora.ranks, lora.rank)
            scale = lora.scale(rank, targets.value_of(name, lora.alphas, lora.alpha))
            configs[name] = AdapterConfig(rank, scale, layer.shared if lora.experts == "shared_outer" else "")
    _check_alike(targets, configs)
    return configs


class _Targets:
    """The names of a model's linear layers."""

    def __init__(self, config: ModelConfig, family: Family | None, blocks: BlockTable) -> None:
        self.config = config
        self.layers = linear_layers(config, blocks)
        self.matrices = hf_matrices(config, family, self.layers.values())
        self.names: dict[str, set[str]] = {name: set() for name in self.layers}
        """By layer, the modules that it is."""
        for matrix in self.matrices.values():
            for part in matrix.parts:
                names = {matrix.module, part.file_module.replace(f".{EXPERT}", "")}
                holders = {name.rpartition(".")[0] for name in names} if matrix.experts else set()
                self.names[part.layer.name] |= names | {name for name in holders if name.endswith("experts")}

    def layers_of(self, key: str, field: str) -> list[str]:
        """Returns the layers that a name matches."""
        matched = [layer for layer in self.layers.values() if self._matches(key, layer)]
        if not matched and key in ("head", "lm_head") and self.config.tied_head:
            raise ValueError(f'lora.{field} names "{key}", but {shared_use(self.config)} Leave it out.')
        if not matched:
            raise ValueError(f'lora.{field} names "{key}", which is not a module of the model{self._suggestion(key)}')
        for layer in matched:
            if layer.group == "none":
                raise ValueError(f'lora.{field} names "{key}", but {layer.name} takes no adapter. Leave it out.')
            if layer.group in ("embedding", "head") and self.config.shared_parameters:
                raise ValueError(f'lora.{field} names "{key}", but {shared_use(self.config)} Leave it out.')
        return [layer.name for layer in matched]

    def value_of(self, name: str, values: Mapping[str, T], default: T) -> T:
        """Returns the value of the longest key that matches a layer."""
        keys = [key for key in values if self._matches(key, self.layers[name])]
        return values[max(keys, key=_specificity)] if keys else default

    def _matches(self, key: str, layer: LinearLayer) -> bool:
        if key == "all":
            return layer.group in IN_ALL
        if key in GROUPS:
            return layer.group == key
        return any(name == key or name.endswith(f".{key}") for name in self.names[layer.name])

    def _suggestion(self, key: str) -> str:
        groups = {layer.group for layer in self.layers.values()} & set(GROUPS)
        adaptable = (layer.name for layer in self.layers.values() if layer.group != "none")
        modules = {name.rpartition(".")[2] for layer in adaptable for name in self.names[layer]}
        return existing_modules(key, {"all", *groups, *modules})


def _specificity(key: str) -> tuple[int, int]:
    if key == "all" or key in GROUPS:
        return (0, int(key != "all"))
    return (1 + key.count("."), len(key))


def _check_alike(targets: _Targets, configs: AdapterConfigs) -> None:
    """Refuses different adapters of layers that are one matrix in transformers, which has one adapter there."""
    for matrix in targets.matrices.values():
        by_layer = {part.layer.name: configs.get(part.layer.name) for part in matrix.parts}
        if len(set(by_layer.values())) > 1:
            names = " and ".join(name.rpartition(".")[2] for name in by_layer)
            raise ValueError(
                f"lora: {names} are one matrix in transformers, {matrix.module}, with one adapter: name all of them in "
                "lora.targets, and give them the same rank and alpha."
            )
