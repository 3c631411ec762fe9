"""The linear layers of a model, and the matrices of transformers' model that they are: what adapters are made for.

`adapter_configs` finds the layers that `LoRA.targets` names, and the adapter of each.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor, nn

from postlude.hf.family import EXPERT, Family, TensorMapping
from postlude.lora import AdapterConfig, AdapterConfigs, LoRA, LoRAGroup, SharedMatrix
from postlude.model import LanguageModel, ModelConfig
from postlude.model.blocks import BLOCKS, BlockTable
from postlude.model.blocks.experts import ExpertLinear
from postlude.model.parallel import ColumnLinear, FP32Linear, Linear, RowLinear, VocabularyEmbedding

ADAPTABLE = (Linear, ColumnLinear, RowLinear, ExpertLinear, FP32Linear, VocabularyEmbedding)


@dataclass(frozen=True)
class LinearLayer:
    name: str
    shape: tuple[int, ...]
    """The shape of its whole weight: [out, in], or [experts, out, in]."""
    group: LoRAGroup
    shared: SharedMatrix
    """The matrix of an adapter that its experts may share."""


def linear_layers(config: ModelConfig, blocks: BlockTable) -> dict[str, LinearLayer]:
    """Returns every linear layer of the whole model by name, with the embedding; those of group "none" cannot adapt."""
    with torch.device("meta"):
        model = LanguageModel(config, blocks=blocks)
    layers = {}
    for name, module in model.named_modules():
        if isinstance(module, ADAPTABLE):
            group = _group_of(model, name)
            parent, _, leaf = name.rpartition(".")
            shared: Mapping[str, SharedMatrix] = getattr(model.get_submodule(parent), "lora_shared", {})
            layers[name] = LinearLayer(name, tuple(module.weight.shape), group, shared.get(leaf, ""))
    return layers


def _group_of(model: nn.Module, name: str) -> LoRAGroup:
    """Returns the group of a layer from `lora_groups` of the nearest parent that lists it."""
    path = name.split(".")
    for cut in range(len(path) - 1, -1, -1):
        groups: Mapping[str, LoRAGroup] = getattr(model.get_submodule(".".join(path[:cut])), "lora_groups", {})
        for inner in (".".join(path[cut:]), ""):
            if inner in groups:
                return groups[inner]
    return "none"


def shared_use(config: ModelConfig) -> str:
    """Returns why embedding and head take no adapter: another part of the model uses the same weight."""
    if config.tied_head:
        return "the head is the embedding here: an adapter of one of them could not be merged."
    return "the depths of multi-token prediction use the embedding and the head too, without an adapter."


def existing_modules(name: str, existing: Iterable[str]) -> str:
    """Returns the end of a message about a module that does not exist: the closest one, and all."""
    names = sorted(existing)
    close = difflib.get_close_matches(name.rpartition(".")[2], names, n=1)
    return (f'; did you mean "{close[0]}"?' if close else ".") + f" There are {', '.join(names)}."


@dataclass(frozen=True, eq=False)
class LayerRows:
    layer: LinearLayer
    rows: Tensor
    """[out]: the row of the Hugging Face matrix for each row of the layer."""
    file_module: str
    """The module in the model files; with `{expert}` if the files have experts one by one."""


@dataclass(frozen=True, eq=False)
class HFMatrix:
    """One matrix of transformers' model, or one for each expert, stacked."""

    name: str
    """Its parameter, such as model.layers.0.self_attn.q_proj.weight or model.layers.0.mlp.experts.gate_up_proj."""
    experts: int
    """The number of stacked matrices; 0 for a plain matrix."""
    out_features: int
    in_features: int
    parts: tuple[LayerRows, ...]

    @property
    def module(self) -> str:
        return self.name.removesuffix(".weight")

    @property
    def group(self) -> LoRAGroup:
        return self.parts[0].layer.group

    @property
    def in_files_one_by_one(self) -> bool:
        return EXPERT in self.parts[0].file_module


def module_name(family: Family | None, name: str) -> str:
    """Returns the name in transformers' modules of what its files call `name`."""
    for in_module, in_file in {} if family is None else family.module_renames.items():
        name = name.replace(in_file, in_module)
    return name


def hf_matrices(config: ModelConfig, family: Family | None, layers: Iterable[LinearLayer]) -> dict[str, HFMatrix]:
    """Returns the Hugging Face matrices of Postlude's layers, by name; Postlude names if there is no family.

    Transformers stacks experts that files have one by one, with each one's gate before its up projection.
    """
    known = {layer.name: layer for layer in layers}
    matrices: dict[str, HFMatrix] = {}
    for layer in known.values():
        tensor = f"{layer.name}.weight"
        mapping = TensorMapping(tensor) if family is None else family.mapping(tensor, config)
        file_module = mapping.hf_name.removesuffix(".weight")
        out, experts = layer.shape[-2], layer.shape[0] if len(layer.shape) == 3 else 0
        if EXPERT in mapping.hf_name:
            name, rows = file_module.replace(f".{EXPERT}", ""), torch.arange(out)
            module, _, leaf = name.rpartition(".")
            if leaf in ("gate_proj", "up_proj") and f"{layer.name.rpartition('.')[0]}.gate_proj" in known:
                name, rows, out = f"{module}.gate_up_proj", rows + (out if leaf == "up_proj" else 0), 2 * out
        else:
            name = mapping.hf_name
            out, rows = _rows(replace(mapping, hf_shape=mapping.hf_shape or layer.shape))
        name = module_name(family, name)
        part = LayerRows(layer, rows, file_module)
        parts = (*matrices[name].parts, part) if name in matrices else (part,)
        matrices[name] = HFMatrix(name, experts, out, layer.shape[-1], parts)
    return matrices


def _rows(mapping: TensorMapping) -> tuple[int, Tensor]:
    """Returns the number of rows of the Hugging Face matrix, and the layer's rows. A stacked one may be transposed."""
    shape = mapping.hf_shape
    rows_at = 0 if len(shape) == 2 else 2 if mapping.permute else 1
    sizes = [-1 if dimension == rows_at else 1 for dimension in range(len(shape))]
    numbers = mapping.select(torch.arange(shape[rows_at]).view(sizes).expand(shape))[..., 0]
    return shape[rows_at], (numbers[0] if len(shape) == 3 else numbers).reshape(-1)


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
