"""Qwen3: queries and keys normalised head by head."""

from __future__ import annotations

from typing import TYPE_CHECKING

from postlude.hf.decoder import ATTENTION_NAMES, MLP_NAMES, QK_NORM_NAMES, decoder_config
from postlude.hf.family import Family
from postlude.model import ModelConfig

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def to_model(hf: PretrainedConfig) -> ModelConfig:
    """The later layers may slide."""
    return decoder_config(hf, qkv_bias=hf.attention_bias, output_bias=hf.attention_bias, qk_norm="head")


QWEN3 = Family("qwen3", to_model, ATTENTION_NAMES | QK_NORM_NAMES | MLP_NAMES)
