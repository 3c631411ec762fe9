"""Llama (with SmolLM2) and the families that differ by a few settings: Mistral, Qwen2 (with Qwen2.5), Qwen3, OLMo 3."""

from __future__ import annotations

from postlude.hf.decoder import ATTENTION_NAMES, MLP_NAMES, QK_NORM_NAMES, decoder_config
from postlude.hf.family import Family, HFConfig
from postlude.model import ModelConfig


def _llama(hf: HFConfig) -> ModelConfig:
    return decoder_config(hf, qkv_bias=hf.attention_bias, output_bias=hf.attention_bias, mlp_bias=hf.mlp_bias)


def _mistral(hf: HFConfig) -> ModelConfig:
    """Returns the model's config, with a sliding window in every layer or in none."""
    return decoder_config(hf, sliding=[hf.sliding_window is not None] * hf.num_hidden_layers)


def _qwen2(hf: HFConfig) -> ModelConfig:
    """Returns the model's config, with biases on queries, keys and values. Later layers may have a sliding window."""
    return decoder_config(hf, qkv_bias=True)


def _qwen3(hf: HFConfig) -> ModelConfig:
    """Returns the model's config, with queries and keys normalised per head. Later layers may have a sliding window."""
    return decoder_config(hf, qkv_bias=hf.attention_bias, output_bias=hf.attention_bias, qk_norm="head")


LLAMA = Family("llama", _llama, ATTENTION_NAMES | MLP_NAMES)
MISTRAL = Family("mistral", _mistral, ATTENTION_NAMES | MLP_NAMES)
QWEN2 = Family("qwen2", _qwen2, ATTENTION_NAMES | MLP_NAMES)
QWEN3 = Family("qwen3", _qwen3, ATTENTION_NAMES | QK_NORM_NAMES | MLP_NAMES)


def _olmo3(hf: HFConfig) -> ModelConfig:
    """Returns the model's config. Rotary scaling applies to full-attention layers only; other layers have their own."""
    return decoder_config(hf, qkv_bias=hf.attention_bias, output_bias=hf.attention_bias, qk_norm="full", norm="post")


POST_NORM_NAMES = {
    "attention.post_norm": "post_attention_layernorm",
    "mlp.post_norm": "post_feedforward_layernorm",
}
OLMO3 = Family("olmo3", _olmo3, ATTENTION_NAMES | QK_NORM_NAMES | MLP_NAMES | POST_NORM_NAMES)
