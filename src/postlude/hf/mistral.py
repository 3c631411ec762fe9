"""Mistral: Llama with a sliding window in every layer, or in none."""

from __future__ import annotations

from typing import TYPE_CHECKING

from postlude.hf.decoder import ATTENTION_NAMES, MLP_NAMES, decoder_config
from postlude.hf.family import Family
from postlude.model import ModelConfig

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def to_model(hf: PretrainedConfig) -> ModelConfig:
    """One window for all layers."""
    return decoder_config(hf, sliding=[hf.sliding_window is not None] * hf.num_hidden_layers)


MISTRAL = Family("mistral", to_model, ATTENTION_NAMES | MLP_NAMES)
