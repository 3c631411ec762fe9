"""PEFT's adapters, in and out: adapter_config.json and adapter_model.safetensors, as peft 0.21 and vLLM 0.32 read them.

    base_model.model.<module>.lora_A.weight  [rank, in]        .lora_B.weight  [out, rank]
    base_model.model.<module>.lora_embedding_A  [rank, vocab]  .lora_embedding_B  [H, rank]

An embedding's A is our B, transposed, and its B our A: we adapt its weight [vocab, H]. Transformers' routers are
modules with a parameter, so peft names them in target_parameters.

Where several of our layers are one matrix of transformers, its adapter has the sum of their ranks: A is stacked, and B
has each layer's columns in its own rows, and zeros elsewhere. Experts are one by one in the file, or stacked:
A [experts · rank, in] and B [out, rank · experts], where B's column is rank index · experts + expert. Neither has a
matrix that experts share, so it is repeated for each.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections import Counter
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from postlude.durable_files import sync
from postlude.hf.family import EXPERT, Family
from postlude.hf.linear_layers import HFMatrix, LayerRows, hf_matrices, linear_layers, module_name
from postlude.lora import AdapterConfigs
from postlude.model import ModelConfig
from postlude.model.blocks import BLOCKS, BlockTable
from postlude.safetensors_file import TensorInfo, write

PREFIX = "base_model.model."
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
EXPERT_MODULES = ("gate_proj", "up_proj", "down_proj")
AdapterMatrices = dict[str, tuple[Tensor, Tensor]]
"""A and B by our name of the layer."""
T = TypeVar("T")


class AdaptableModel:
    """The matrices of a model that peft can adapt, and their names."""

    def __init__(self, config: ModelConfig, family: Family | None, blocks: BlockTable = BLOCKS) -> None:
        self.family = family
        self.converts_experts = family is not None and family.peft_stacks_experts
        self.layers = {name: layer for name, layer in linear_layers(config, blocks).items() if layer.group != "none"}
        self.matrices = hf_matrices(config, family, self.layers.values())

    def holder(self, matrix: HFMatrix) -> list[HFMatrix]:
        """Returns the stacked parameters of the module that has this one, in order."""
        module = matrix.name.rpartition(".")[0]
        return [candidate for candidate in self.matrices.values() if candidate.name.rpartition(".")[0] == module]

    def named_as_experts(self, matrix: HFMatrix) -> bool:
        """Whether peft would take the name of a plain matrix for the experts'."""
        return self.converts_experts and not matrix.experts and _leaf(matrix.module) in EXPERT_MODULES

    def in_transformers(self, matrix: HFMatrix) -> bool:
        return not matrix.parts[0].layer.name.startswith("mtp.")


def to_peft(
    adapters: Mapping[str, tuple[Tensor, Tensor]],
    configs: AdapterConfigs,
    config: ModelConfig,
    family: Family | None,
    *,
    separate_experts: bool | None = None,
    blocks: BlockTable = BLOCKS,
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Returns adapter_config.json and the tensors of the file, from whole A and B by our name of the layer.

    `separate_experts` writes experts one by one if the model's files have them so; by default if peft reads that.
    Servers need it (vLLM 0.32), and peft reads it for most families.
    """
    model = AdaptableModel(config, family, blocks)
    for name in configs.keys() ^ adapters.keys() | configs.keys() - model.layers.keys():
        raise ValueError(f"{name} is not a linear layer of the model, or has only one of adapter and config.")
    separate = model.converts_experts if separate_experts is None else separate_experts
    adapted = [matrix for matrix in model.matrices.values() if any(part.layer.name in configs for part in matrix.parts)]
    tensors: dict[str, Tensor] = {}
    for matrix in adapted:
        if matrix.in_files_one_by_one and separate:
            for part in matrix.parts:
                a, b = _by_expert(matrix, *adapters[part.layer.name])
                for expert in range(matrix.experts):
                    _add_matrices(
                        tensors,
                        module_name(family, part.file_module.replace(EXPERT, str(expert))),
                        a[expert],
                        b[expert],
                    )
            continue
        a, b = _join(matrix, adapters)
        if matrix.group == "embedding":
            tensors[f"{PREFIX}{matrix.module}.lora_embedding_A"] = b.t().contiguous()
            tensors[f"{PREFIX}{matrix.module}.lora_embedding_B"] = a.t().contiguous()
            continue
        if not matrix.experts:
            _add_matrices(tensors, matrix.module, a, b)
            continue
        module = matrix.module
        if matrix.name == module:  # a parameter of a module: peft nests one adapter in the next
            siblings = [candidate for candidate in model.holder(matrix) if candidate in adapted]
            module = matrix.name.rpartition(".")[0] + ".base_layer" * (len(siblings) - 1 - siblings.index(matrix))
        _add_matrices(tensors, module, a.flatten(0, 1), b.permute(1, 2, 0).flatten(1))
    return _config_json(model, adapted, configs, separate=separate), tensors


def _add_matrices(tensors: dict[str, Tensor], module: str, a: Tensor, b: Tensor) -> None:
    tensors[f"{PREFIX}{module}.lora_A.weight"] = a.contiguous()
    tensors[f"{PREFIX}{module}.lora_B.weight"] = b.contiguous()


def _by_expert(matrix: HFMatrix, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Returns A and B with one matrix per expert: those that experts share are repeated."""
    if not matrix.experts:
        return a, b
    return (a if a.dim() == 3 else a.expand(matrix.experts, -1, -1)), (
        b if b.dim() == 3 else b.expand(matrix.experts, -1, -1)
    )


def _join(matrix: HFMatrix, adapters: Mapping[str, tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Returns A [..., rank, in] and B [..., out, rank] of a Hugging Face matrix."""
    pairs = [_by_expert(matrix, *adapters[part.layer.name]) for part in matrix.parts]
    joined_a = torch.cat([a for a, _ in pairs], dim=-2)
    joined_b = joined_a.new_zeros((*joined_a.shape[:-2], matrix.out_features, joined_a.shape[-2]))
    start = 0
    for part, (_, b) in zip(matrix.parts, pairs, strict=True):
        joined_b[..., part.rows, start : start + b.shape[-1]] = b
        start += b.shape[-1]
    return joined_a, joined_b


def _config_json(
    model: AdaptableModel, adapted: list[HFMatrix], configs: AdapterConfigs, *, separate: bool
) -> dict[str, Any]:
    """Returns adapter_config.json. It depends on the adapters alone, whatever the settings that led to them."""
    single = [matrix for matrix in adapted if matrix.in_files_one_by_one and separate]
    fused = {_rank_alpha(configs, matrix.parts[:1]) for matrix in single if len(matrix.parts) > 1}
    experts = [m for m in model.matrices.values() if m.in_files_one_by_one and model.in_transformers(m)]
    # peft adds up the ranks of gate and up itself where every layer has the default rank.
    converted = model.converts_experts and separate and len(fused) <= 1 and all(m in single for m in experts)
    values: dict[str, tuple[int, float]] = {}
    for matrix in adapted:
        if matrix in single:
            holder = matrix.name.rpartition(".")[0]
            for part in matrix.parts:
                values[f"{holder}.{_leaf(part.file_module)}"] = _rank_alpha(configs, [part])
        if matrix not in single or not converted:
            key = matrix.name if matrix.group == "router" else matrix.module
            values[key] = _rank_alpha(configs, matrix.parts)
    default = next(iter(fused)) if fused and converted else Counter(values.values()).most_common(1)[0][0]
    different = {key: value for key, value in _suffixes(values).items() if value != default}
    by_parameter = [
        m
        for m in adapted
        if (m.experts and not (converted and m in single)) or model.named_as_experts(m) or m.group == "router"
    ]
    by_module = [m for m in adapted if not m.experts]
    existing = [m for m in model.matrices.values() if model.in_transformers(m) or m in adapted]
    modules = _suffixes({m.module: m in by_module and m not in by_parameter for m in existing if not m.experts})
    parameters = _suffixes({m.name: m in by_parameter for m in existing})
    expert_modules = {_leaf(part.file_module) for m in single for part in m.parts} if converted else set()
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        **base_entries(None),
        "r": default[0],
        "lora_alpha": default[1],
        "rank_pattern": {_pattern(key): rank for key, (rank, _) in different.items() if rank != default[0]},
        "alpha_pattern": {_pattern(key): alpha for key, (_, alpha) in different.items() if alpha != default[1]},
        "use_rslora": False,
        "use_dora": False,
        "lora_dropout": 0.0,
        "lora_bias": False,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
        "modules_to_save": None,
        "target_modules": sorted({key for key, named in modules.items() if named} | expert_modules),
        "target_parameters": sorted(key for key, named in parameters.items() if named) or None,
    }


def _rank_alpha(configs: AdapterConfigs, parts: Collection[LayerRows]) -> tuple[int, float]:
    """Returns rank and alpha of the adapter of all parts, whose alpha / rank is exactly the scale of each."""
    rank = sum(configs[part.layer.name].rank for part in parts)
    scale = configs[next(iter(parts)).layer.name].scale
    near = scale * rank
    for alpha in (round(near), near, math.nextafter(near, math.inf), math.nextafter(near, 0)):
        if alpha / rank == scale:
            return rank, alpha
    return rank, near


def _pattern(suffix: str) -> str:
    """Returns the regular expression of a name: peft has experts stacked and names a parameter, vLLM has neither."""
    escaped = re.escape(suffix)
    if _leaf(suffix) in EXPERT_MODULES:
        escaped = escaped.replace(r"experts\.", r"experts(\.\d+)?\.") + r"(\.weight)?"
    return escaped


def _suffixes(values: Mapping[str, T]) -> dict[str, T]:
    """Returns the shortest ends of names, at dots, such that all names that end so have the same value."""
    values_by_suffix: dict[str, set[T]] = {}
    for name, value in values.items():
        for suffix in _ends(name):
            values_by_suffix.setdefault(suffix, set()).add(value)
    shortest = {name: next(suffix for suffix in _ends(name) if len(values_by_suffix[suffix]) == 1) for name in values}
    return {suffix: values[name] for name, suffix in shortest.items()}


def _ends(name: str) -> list[str]:
    path = name.split(".")
    return [".".join(path[start:]) for start in range(len(path) - 1, -1, -1)]


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]


def base_entries(base: str | None) -> dict[str, str | None]:
    """Returns the entries of adapter_config.json that name the base, whose revision on the Hub is one of them."""
    model, _, revision = (base or "").partition("@")
    if revision and not Path(base or "").exists():
        return {"base_model_name_or_path": model, "revision": revision}
    return {"base_model_name_or_path": base}


def write_adapter(
    directory: str | os.PathLike[str], adapter_config: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> None:
    """Writes an adapter's two files. Each has a temporary name until it is complete."""
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    weights, config = folder / f".{WEIGHTS}.{os.getpid()}", folder / f".{CONFIG}.{os.getpid()}"
    try:
        write(weights, {name: TensorInfo(t.dtype, tuple(t.shape)) for name, t in tensors.items()}, tensors.items())
        config.write_text(json.dumps(adapter_config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        sync(config)
        weights.replace(folder / WEIGHTS)
        config.replace(folder / CONFIG)
        sync(folder)
    finally:
        weights.unlink(missing_ok=True)
        config.unlink(missing_ok=True)


def read_adapter(directory: str | os.PathLike[str]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    folder = Path(directory)
    missing = [name for name in (CONFIG, WEIGHTS) if not (folder / name).is_file()]
    if missing:
        raise FileNotFoundError(f"{folder} is not an adapter of peft: it has no {' and no '.join(missing)}.")
    try:
        adapter_config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{folder / CONFIG} is not JSON ({error}). Fetch it again.") from error
    if not isinstance(adapter_config, dict):
        raise ValueError(
            f"{folder / CONFIG} holds a JSON {type(adapter_config).__name__}, but a config is an object. "
            "Fetch it again."
        )
    try:
        return adapter_config, load_file(folder / WEIGHTS)
    except SafetensorError as error:
        raise ValueError(
            f"{folder / WEIGHTS} is not a readable safetensors file ({error}); it may be cut short. Fetch it again."
        ) from error
