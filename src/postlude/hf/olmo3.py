"""OLMo 3: norms after attention and MLP, queries and keys normalised as a whole, three sliding layers in four."""

from __future__ import annotations

from postlude.hf.decoder import ATTENTION_NAMES, MLP_NAMES, QK_NORM_NAMES, decoder_config
from postlude.hf.family import Family, HFConfig
from postlude.model import ModelConfig


def to_model(hf: HFConfig) -> ModelConfig:
    """Returns the model's config. Rotary scaling applies to full-attention layers only; other layers have their own."""
    return decoder_config(hf, qkv_bias=hf.attention_bias, output_bias=hf.attention_bias, qk_norm="full", norm="post")


POST_NORM_NAMES = {
    "attention.post_norm": "post_attention_layernorm",
    "mlp.post_norm": "post_feedforward_layernorm",
}
OLMO3 = Family("olmo3", to_model, ATTENTION_NAMES | QK_NORM_NAMES | MLP_NAMES | POST_NORM_NAMES)
