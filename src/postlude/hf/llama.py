"""Llama, and what shares its code: SmolLM2, Llama 3.x."""

from __future__ import annotations

from typing import TYPE_CHECKING

from postlude.hf.decoder import ATTENTION_NAMES, MLP_NAMES, decoder_config
from postlude.hf.family import Family
from postlude.model import ModelConfig

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def to_model(hf: PretrainedConfig) -> ModelConfig:
    """Pre-norm attention and SwiGLU; the biases are the config's to choose."""
    return decoder_config(hf, qkv_bias=hf.attention_bias, output_bias=hf.attention_bias, mlp_bias=hf.mlp_bias)


LLAMA = Family("llama", to_model, ATTENTION_NAMES | MLP_NAMES)
