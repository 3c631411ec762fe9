"""Preflight of LoRA: its targets exist, and how much is trained."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from postlude.engine.adapters import Adapters
from postlude.hf.family import Family
from postlude.layout import Stage
from postlude.lora import AdapterConfig
from postlude.model import ModelConfig
from postlude.model.blocks import BLOCKS
from postlude.plan.parameter_count import count_parameters
from postlude.recipes.config.settings import TrainingConfig


def adapters_of(config: TrainingConfig, family: Family | None, model: ModelConfig) -> Mapping[str, AdapterConfig]:
    """Returns the adapters of the model; none without LoRA. Raises ValueError for targets that it does not have."""
    return Adapters(config.lora, model, family, BLOCKS, config.weights).configs


def describe_lora(config: TrainingConfig, family: Family | None, model: ModelConfig, dtype: torch.dtype) -> str:
    """Returns a line about what is trained, and what sampling with merged weights loses."""
    trained = count_parameters(model, adapters=adapters_of(config, family, model)).trained(Stage()).used
    line = f"{trained:,} trained parameters"
    if dtype != torch.float32 and getattr(config, "rollout", None) is not None:
        line += f"; completions are sampled with merged weights in {dtype}, which round small updates away"
    return line
