"""Merges an adapter into a model: one of peft, or those of a checkpoint of a LoRA run."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from postlude.hf.family import VALUE_HEAD, Family
from postlude.hf.linear_layers import linear_layers
from postlude.hf.peft import CONFIG, AdapterMatrices, read_adapter
from postlude.hf.read_peft import from_peft
from postlude.hf.tensor_sources import MODEL
from postlude.lora import AdapterConfig, AdapterConfigs
from postlude.model import LanguageModel, ModelConfig
from postlude.model.blocks import BLOCKS
from postlude.sharded_tensors import STATE, ShardReader, damaged_files, read_state


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
        """The number of parameters in all its matrices."""
        return sum(a.numel() + b.numel() for a, b in self.pairs.values())


def is_adapter_directory(path: str | os.PathLike[str]) -> bool:
    """Whether a directory has an adapter of peft, or a checkpoint of a LoRA run."""
    folder = Path(path).expanduser()
    if (folder / CONFIG).is_file():
        return True
    return (folder / STATE).is_file() and read_state(folder).get("base") is not None


def read_saved_adapter(path: str | os.PathLike[str], family: Family | None, config: ModelConfig) -> SavedAdapter:
    """Reads an adapter of this model. Raises ValueError for one that belongs to another, naming what does not match."""
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
    if not state.get("adapter"):
        raise ValueError(
            f"{folder} has no rank and scale of its adapters: an earlier version wrote it. Continue its run for a "
            "step, or use the adapter/ that the run exported."
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
