"""Preflight of LoRA: its targets exist, and how much is trained."""

from __future__ import annotations

from collections.abc import Mapping

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


def describe_lora(config: TrainingConfig, family: Family | None, model: ModelConfig) -> str:
    """Returns a line about what is trained."""
    trained = count_parameters(model, adapters=adapters_of(config, family, model)).trained(Stage()).used
    return f"{trained:,} trained parameters"
