"""Qwen2 and Qwen2.5: Llama with biases on queries, keys and values."""

from __future__ import annotations

from typing import TYPE_CHECKING

from postlude.hf.decoder import ATTENTION_NAMES, MLP_NAMES, decoder_config
from postlude.hf.family import Family
from postlude.model import ModelConfig

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def to_model(hf: PretrainedConfig) -> ModelConfig:
    """The later layers may slide."""
    return decoder_config(hf, qkv_bias=True)


QWEN2 = Family("qwen2", to_model, ATTENTION_NAMES | MLP_NAMES)
