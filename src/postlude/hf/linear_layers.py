"""The linear layers of a model, and the matrices of transformers' model that they are: what adapters are made for."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from postlude.hf.family import EXPERT, Family, TensorMapping
from postlude.lora import LoRAGroup, SharedMatrix
from postlude.model import LanguageModel, ModelConfig
from postlude.model.blocks import BlockTable
from postlude.model.expert_linear import ExpertLinear
from postlude.model.parallel import ColumnLinear, FP32Linear, Linear, RowLinear, VocabularyEmbedding

ADAPTABLE = (Linear, ColumnLinear, RowLinear, ExpertLinear, FP32Linear, VocabularyEmbedding)


@dataclass(frozen=True)
class LinearLayer:
    """A linear layer of Postlude."""

    name: str
    shape: tuple[int, ...]
    """Of its whole weight: [out, in], or [experts, out, in]."""
    group: LoRAGroup
    shared: SharedMatrix
    """Of experts: the matrix of an adapter that they may share."""


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
    """A Postlude layer, and its rows in a Hugging Face matrix."""

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
        """The name without `.weight`."""
        return self.name.removesuffix(".weight")

    @property
    def group(self) -> LoRAGroup:
        """The group of its layers."""
        return self.parts[0].layer.group

    @property
    def in_files_one_by_one(self) -> bool:
        """Whether the model files have its experts one by one."""
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
