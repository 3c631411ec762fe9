"""Reading an adapter of PEFT: the adapters of our layers, from adapter_config.json and tensors by peft's names.

`merge_adapter` merges one into a model, or those of a checkpoint of a LoRA run.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from postlude.hf.family import EXPERT, VALUE_HEAD, Family
from postlude.hf.linear_layers import HFMatrix, existing_modules, linear_layers, module_name, shared_use
from postlude.hf.peft import CONFIG, AdaptableModel, AdapterMatrices, read_adapter
from postlude.lora import AdapterConfig, AdapterConfigs
from postlude.model import LanguageModel, ModelConfig
from postlude.model.blocks import BLOCKS, BlockTable
from postlude.sharded_tensors import STATE, ShardReader, damaged_files, read_state

KEY = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_(?:(A|B)(?:\.default)?\.weight|(embedding_[AB])(?:\.default)?)")
SAVED_BASE = re.compile(r"(?:base_model\.model\.)?(.+)\.base_layer\.weight")
READ = {
    "peft_type", "bias", "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "init_lora_weights",
    "target_modules", "target_parameters", "exclude_modules", "layers_to_transform",
}  # fmt: skip
WITHOUT_EFFECT = {
    "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode",
    "lora_dropout", "fan_in_fan_out", "layers_pattern", "megatron_config", "megatron_core", "loftq_config",
    "eva_config", "corda_config", "lora_ga_config", "velora_config", "qalora_group_size", "runtime_config",
    "ensure_weight_tying",
}  # fmt: skip
"""Entries of adapter_config.json that change nothing once the adapter's tensors and the other entries are known."""
EMBEDDING_SIDES = {"embedding_A": "B", "embedding_B": "A"}  # Postlude adapts the weight [vocab, H]
PLAIN_INITS = ("gaussian", "eva", "orthogonal", "lora_ga")  # the others change the model's own weights


@dataclass(frozen=True)
class _AdapterTarget:
    """The matrix of the model that an adapter of the file belongs to, or its rows of one expert."""

    matrix: HFMatrix
    names: tuple[str, ...]
    """Its names in `rank_pattern`."""
    part: int = 0
    expert: int | None = None


def from_peft(
    adapter_config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    config: ModelConfig,
    family: Family | None,
    blocks: BlockTable = BLOCKS,
) -> tuple[dict[str, AdapterConfig], AdapterMatrices]:
    """Returns the adapter configs, and A and B, by our names of the layers.

    Layers that share a Hugging Face matrix get its A and their rows of B, or their own parts if B is zero elsewhere.
    Experts share a matrix if it is the same for all of them, in every layer of the block.
    """
    check_supported(adapter_config)
    model = AdaptableModel(config, family, blocks)
    pairs = _pairs(_without_base(model, tensors))
    targets = _adapter_targets(model, pairs, adapter_config)
    shared = [m for m in pairs if m in targets and targets[m].matrix.group in ("embedding", "head")]
    if shared and config.shared_parameters:
        raise ValueError(f"the adapter has weights for {shared[0]}, but {shared_use(config)}")
    for module in pairs:
        if module not in targets:
            raise ValueError(f"the adapter has weights for {module}, which takes no adapter here{_hint(model, module)}")
    _check_complete(model, adapter_config, {targets[module].matrix.name for module in pairs})

    configs: dict[str, AdapterConfig] = {}
    adapters: AdapterMatrices = {}
    single: dict[str, dict[int, tuple[Tensor, Tensor, float]]] = {}
    for module, (a, b) in pairs.items():
        target = targets[module]
        matrix = target.matrix
        stacked = matrix.experts if target.expert is None else 0
        rank, scale = _rank_and_scale(adapter_config, target.names)
        out = matrix.out_features if target.expert is None else len(matrix.parts[target.part].rows)
        expected_shapes = ((rank * (stacked or 1), matrix.in_features), (out, rank * (stacked or 1)))
        if (tuple(a.shape), tuple(b.shape)) != expected_shapes:
            raise ValueError(
                f"the adapter of {module} has A {tuple(a.shape)} and B {tuple(b.shape)}, but its config and the model "
                f"ask for {expected_shapes[0]} and {expected_shapes[1]}."
            )
        if target.expert is not None:
            single.setdefault(matrix.parts[target.part].layer.name, {})[target.expert] = (a, b, scale)
            continue
        pair_of_matrix = (a, b)
        if stacked:
            pair_of_matrix = a.unflatten(0, (stacked, rank)), b.unflatten(1, (rank, stacked)).permute(2, 0, 1)
        for name, pair in _split(matrix, *pair_of_matrix).items():
            adapters[name] = pair
            configs[name] = AdapterConfig(pair[0].shape[-2], scale)
    for name, experts in single.items():
        _check_experts(name, experts, model.layers[name].shape[0])
        ordered = [experts[expert] for expert in range(len(experts))]
        adapters[name] = torch.stack([a for a, _, _ in ordered]), torch.stack([b for _, b, _ in ordered])
        configs[name] = AdapterConfig(ordered[0][0].shape[0], ordered[0][2])
    _share(model, configs, adapters)
    return {name: configs[name] for name in model.layers if name in configs}, adapters


def check_supported(adapter_config: Mapping[str, Any]) -> None:
    """Raises ValueError if an adapter's config is of another kind, or lacks its rank or alpha."""
    kind = adapter_config.get("peft_type", "LORA")
    if kind != "LORA":
        raise ValueError(f"the adapter is of peft_type {kind}; only LORA is supported.")
    for key, value in adapter_config.items():
        if value and key not in READ and key not in WITHOUT_EFFECT:
            raise ValueError(
                f"the adapter has {key}={value!r}, which is not supported: train without it, or take it out of "
                "adapter_config.json if the adapted model is the same without it."
            )
    if adapter_config.get("bias", "none") != "none":
        raise ValueError(f'the adapter has bias="{adapter_config["bias"]}"; only "none" is supported.')
    for key in ("r", "lora_alpha"):
        value = adapter_config.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise ValueError(f"the adapter's config has {key}={value!r}, but it is a number above 0.")
    init = adapter_config.get("init_lora_weights", True)
    if isinstance(init, str) and init.lower() not in PLAIN_INITS:
        raise ValueError(
            f'the adapter was made with init_lora_weights="{init}", which changes the model\'s own weights; convert it '
            "to a plain one with peft's path_initial_model_for_weight_conversion."
        )


def _without_base(model: AdaptableModel, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the tensors without the weights of embedding and head, which peft saves with their adapters."""
    sizes = {
        matrix.module: (matrix.out_features, matrix.in_features)
        for matrix in model.matrices.values()
        if matrix.group in ("embedding", "head")
    }
    lora = dict[str, Tensor]()
    for name, tensor in tensors.items():
        match = SAVED_BASE.fullmatch(name)
        if match is None or match[1] not in sizes:
            lora[name] = tensor
        elif tuple(tensor.shape) != sizes[match[1]]:
            raise ValueError(
                f"the adapter holds {name} {tuple(tensor.shape)}, but the model's is {sizes[match[1]]}: it was trained "
                "with another vocabulary."
            )
    return lora


def _pairs(tensors: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    sides: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        match = KEY.fullmatch(name)
        if match is None:
            raise ValueError(
                f"the adapter holds {name}, which is not a lora_A or lora_B weight; only those are supported."
            )
        side = match[2] or EMBEDDING_SIDES[match[3]]
        sides.setdefault(match[1], {})[side] = tensor if match[2] else tensor.t()
    for module, pair in sides.items():
        if len(pair) < 2:
            raise ValueError(f"the adapter of {module} has lora_{next(iter(pair))} alone; A and B are needed.")
    if not sides:
        raise ValueError("the adapter holds no tensors.")
    return {module: (pair["A"], pair["B"]) for module, pair in sides.items()}


def _adapter_targets(
    model: AdaptableModel, modules: Collection[str], adapter_config: Mapping[str, Any]
) -> dict[str, _AdapterTarget]:
    targets: dict[str, _AdapterTarget] = {}
    for matrix in model.matrices.values():
        holder = matrix.name.rpartition(".")[0]
        names = (matrix.module, f"{matrix.module}.weight")
        if not matrix.experts or matrix.module != matrix.name:
            targets[matrix.module] = _AdapterTarget(matrix, names)
        else:
            siblings = model.holder(matrix)
            if f"{holder}.base_layer" not in modules:  # a single parameter of the module is adapted
                siblings = [
                    sibling for sibling in siblings if _named(adapter_config.get("target_parameters"), sibling.name)
                ]
            if matrix in siblings:
                depth = len(siblings) - 1 - siblings.index(matrix)
                targets[holder + ".base_layer" * depth] = _AdapterTarget(matrix, names)
        if matrix.in_files_one_by_one:
            for index, part in enumerate(matrix.parts):
                for expert in range(matrix.experts):
                    module = module_name(model.family, part.file_module.replace(EXPERT, str(expert)))
                    targets[module] = _AdapterTarget(matrix, (module,), index, expert)
    in_files = {module: module_name(model.family, module) for module in modules}
    return targets | {module: targets[name] for module, name in in_files.items() if name in targets}


def _rank_and_scale(adapter_config: Mapping[str, Any], names: Collection[str]) -> tuple[int, float]:
    rank: int = _by_pattern(adapter_config.get("rank_pattern"), names, adapter_config["r"])
    alpha: float = _by_pattern(adapter_config.get("alpha_pattern"), names, adapter_config["lora_alpha"])
    return rank, alpha / (math.sqrt(rank) if adapter_config.get("use_rslora") else rank)


def _by_pattern(patterns: Mapping[str, Any] | None, names: Collection[str], default: Any) -> Any:
    """Returns the value of the first pattern that is the end of a name, which is peft's rule."""
    for pattern, value in (patterns or {}).items():
        if any(re.match(rf"(.*\.)?({pattern})$", name) for name in names):
            return value
    return default


def _split(matrix: HFMatrix, a: Tensor, b: Tensor) -> AdapterMatrices:
    """Returns A and B of each Postlude layer in a Hugging Face matrix."""
    count, rank = len(matrix.parts), a.shape[-2]
    per_part = rank // count
    rows = {part.layer.name: b[..., part.rows, :] for part in matrix.parts}
    columns = [slice(index * per_part, (index + 1) * per_part) for index in range(count)]
    is_joined = rank % count == 0 and all(
        not row[..., column].any()
        for index, row in enumerate(rows.values())
        for other_index, column in enumerate(columns)
        if other_index != index
    )
    if not is_joined:
        return {name: (a.clone(), row.contiguous()) for name, row in rows.items()}
    return {
        name: (a[..., column, :].contiguous(), row[..., column].contiguous())
        for (name, row), column in zip(rows.items(), columns, strict=True)
    }


def _check_experts(name: str, experts: Mapping[int, tuple[Tensor, Tensor, float]], count: int) -> None:
    missing = sorted(set(range(count)) - set(experts))
    if missing:
        raise ValueError(f"the adapter has {len(experts)} of the {count} experts of {name}: {missing[0]} is missing.")
    if len({(a.shape, scale) for a, _, scale in experts.values()}) > 1:
        raise ValueError(f"the adapters of {name} differ in rank or scale between experts; they must be the same.")


def _share(model: AdaptableModel, configs: dict[str, AdapterConfig], adapters: AdapterMatrices) -> None:
    """Takes one matrix for all experts where they are the same, in all layers of the block."""
    blocks: dict[str, list[str]] = {}
    for name in configs:
        if model.layers[name].shared:
            blocks.setdefault(name.rpartition(".")[0], []).append(name)
    for names in blocks.values():
        sides = {name: model.layers[name].shared for name in names}
        shared = {name: adapters[name][0 if side == "a" else 1] for name, side in sides.items()}
        if all(torch.equal(matrices, matrices[:1].expand_as(matrices)) for matrices in shared.values()):
            for name, side in sides.items():
                a, b = adapters[name]
                adapters[name] = (a[0].clone(), b) if side == "a" else (a, b[0].clone())
                configs[name] = AdapterConfig(configs[name].rank, configs[name].scale, side)


def _check_complete(model: AdaptableModel, adapter_config: Mapping[str, Any], names: Collection[str]) -> None:
    """Refuses targets of the config that name no matrix of the model, or one that the file lacks."""
    modules, parameters = adapter_config.get("target_modules") or (), adapter_config.get("target_parameters") or ()
    expected = {name: [m for m in model.matrices.values() if _named([name], m.name)] for name in parameters}
    if isinstance(modules, str):
        plain = [m for m in model.matrices.values() if not m.experts]
        expected |= {modules: [m for m in plain if re.fullmatch(modules, m.module)]} if modules != "all-linear" else {}
    else:
        expected |= {name: [m for m in model.matrices.values() if _targets(model, name, m)] for name in modules}
    partial = adapter_config.get("exclude_modules") or adapter_config.get("layers_to_transform") is not None
    for target, matrices in expected.items():
        if not matrices:
            raise ValueError(
                f'the adapter\'s config names "{target}", which takes no adapter here{_hint(model, target)}'
            )
        missing = [m.module for m in matrices if m.name not in names and model.in_transformers(m)]
        if missing and not partial:
            raise ValueError(
                f'the adapter\'s config names "{target}", but its file has no weights for {len(missing)} of '
                f"{len(matrices)} such modules: {', '.join(missing[:3])}."
            )


def _targets(model: AdaptableModel, target: str, matrix: HFMatrix) -> bool:
    leaf = target.rpartition(".")[2]
    if matrix.in_files_one_by_one:
        return model.converts_experts and any(part.file_module.endswith(f".{leaf}") for part in matrix.parts)
    if model.named_as_experts(matrix) and any(m.in_files_one_by_one for m in model.matrices.values()):
        return False
    return not matrix.experts and _named([target], matrix.module)


def _named(targets: Collection[str] | None, name: str) -> bool:
    return any(name == target or name.endswith(f".{target}") for target in targets or ())


def _hint(model: AdaptableModel, name: str) -> str:
    return existing_modules(name, {matrix.module.rpartition(".")[2] for matrix in model.matrices.values()})


@dataclass(frozen=True)
class SavedAdapter:
    """An adapter from disk, by our names of its layers."""

    path: Path
    configs: AdapterConfigs
    pairs: AdapterMatrices
    base: str | None = None
    """The fingerprint of the model that it was trained on, if it is known."""
    value_head: Tensor | None = None
    """[H], if one was trained with the adapter."""

    @property
    def parameters(self) -> int:
        return sum(a.numel() + b.numel() for a, b in self.pairs.values())


def is_adapter_directory(path: str | os.PathLike[str]) -> bool:
    folder = Path(path).expanduser()
    if (folder / CONFIG).is_file():
        return True
    return (folder / STATE).is_file() and read_state(folder).get("base") is not None


def read_saved_adapter(path: str | os.PathLike[str], family: Family | None, config: ModelConfig) -> SavedAdapter:
    """Reads an adapter of this model. Raises ValueError for one that belongs to another, naming what does not match."""
    from postlude.hf.tensor_sources import MODEL  # imports transformers, which the check of an adapter does without

    folder = Path(path).expanduser()
    if not (folder / STATE).is_file():
        return SavedAdapter(folder, *from_peft(*read_adapter(folder), config, family))
    state = read_state(folder)
    if state.get("base") is None:
        raise ValueError(f"{folder} is a checkpoint of a whole model, not of adapters. Convert it without a base.")
    if adapter_names := state.get("adapters"):
        raise ValueError(
            f"{folder} has several adapters ({', '.join(adapter_names)}), and one can be merged. Load it in an "
            "engine, write one with export_adapter(engine, directory, name=...), and convert that directory."
        )
    if damaged := damaged_files(folder, state["files"]):
        raise ValueError(f"{folder} is damaged: {damaged[0]} is not what was written. Use another checkpoint.")
    configs = {layer: AdapterConfig(*values) for layer, values in state["adapter"].items()}
    reader = ShardReader(folder, state)
    layers = linear_layers(config, BLOCKS)
    pairs: AdapterMatrices = {}
    for name in configs:
        if name not in layers:
            raise ValueError(f"{folder} has an adapter of {name}, which this base does not have. Give its own base.")
        a, b = (reader.read(f"{MODEL}{name}.adapter.{side}") for side in "ab")
        out_features, in_features = layers[name].shape[-2:]
        if (a.shape[-1], b.shape[-2]) != (in_features, out_features):
            raise ValueError(
                f"{folder} has an adapter of {name} for [{b.shape[-2]}, {a.shape[-1]}], but it is [{out_features}, "
                f"{in_features}] in this base. Give its own base."
            )
        pairs[name] = (a, b)
    value_head = reader.read(MODEL + VALUE_HEAD) if MODEL + VALUE_HEAD in reader.tensors else None
    return SavedAdapter(folder, configs, pairs, state["base"], value_head)


@torch.no_grad()
def merge_adapter(model: LanguageModel, adapter: SavedAdapter) -> None:
    """Adds scale · B · A to the weights of a whole model, in fp32, and sets its value head, if it has one."""
    for name, (a, b) in adapter.pairs.items():
        weight = model.get_parameter(f"{name}.weight")
        weight.add_((b.float() @ a.float()).to(weight.device), alpha=adapter.configs[name].scale)
    if model.value_head is not None and adapter.value_head is not None:
        model.value_head.weight.copy_(adapter.value_head)


def rounded_to(model: LanguageModel, dtype: torch.dtype | None) -> LanguageModel:
    """Returns the model with its weights rounded to a dtype; those that blocks keep in fp32 stay so."""
    if dtype in (None, torch.float32):
        return model
    result = LanguageModel(model.config, dtype=dtype, value_head=model.has_value_head, blocks=model.block_types)
    result.load_state_dict(model.state_dict())
    return result
