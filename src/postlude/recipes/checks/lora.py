"""Preflight of LoRA: its targets exist, and how much is trained."""

from __future__ import annotations

import torch

from postlude.engine.adapters import Adapters, plan_adapter_tensors
from postlude.hf.family import Family
from postlude.model import ModelConfig
from postlude.model.blocks import BLOCKS
from postlude.recipes.config.settings import TrainingConfig


def adapter_parameters(config: TrainingConfig, family: Family | None, model: ModelConfig) -> int:
    """Returns the parameters of all adapters, 0 without LoRA. Raises ValueError for targets that do not exist."""
    if config.lora is None:
        return 0
    adapters = Adapters(config.lora, model, family, BLOCKS, config.weights)
    return sum(tensor.size for tensor in plan_adapter_tensors(model, BLOCKS, adapters.configs))


def describe_lora(config: TrainingConfig, family: Family | None, model: ModelConfig, dtype: torch.dtype) -> str:
    """Returns a line about what is trained, and what sampling with merged weights loses."""
    line = f"{adapter_parameters(config, family, model):,} trained parameters"
    if dtype != torch.float32 and getattr(config, "rollout", None) is not None:
        line += f"; completions are sampled with merged weights in {dtype}, which round small updates away"
    return line
