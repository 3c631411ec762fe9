"""Gemma 3's text models: norms before and after every block, mostly sliding windows, scaled embeddings."""

from __future__ import annotations

from dataclasses import replace

from postlude.checks import Bounds
from postlude.hf.decoder import ATTENTION_NAMES, MLP_NAMES, QK_NORM_NAMES, activation, decoder_config
from postlude.hf.family import Family, HFConfig
from postlude.model import ModelConfig
from postlude.model.blocks import MLPConfig


def to_model(hf: HFConfig) -> ModelConfig:
    """Returns the model's config. Norms store weights minus one; sliding layers have their own rotary frequencies."""
    if hf.use_bidirectional_attention:
        raise ValueError(
            "use_bidirectional_attention=true makes this an encoder, not a causal model; load a causal Gemma."
        )
    Bounds(above=0).check("query_pre_attn_scalar", hf.query_pre_attn_scalar)
    mlp = MLPConfig(intermediate_size=hf.intermediate_size, activation=activation(hf, "hidden_activation"), norm="both")
    config = decoder_config(
        hf,
        qkv_bias=hf.attention_bias,
        output_bias=hf.attention_bias,
        qk_norm="head",
        norm="both",
        scale=hf.query_pre_attn_scalar**-0.5,
        blocks={"-": mlp},
    )
    return replace(
        config,
        norm_offset=1.0,
        embedding_scale=hf.hidden_size**0.5,
        embedding_scale_rounded=True,
        logit_softcap=hf.final_logit_softcapping,
    )


NORM_NAMES = {
    "attention.post_norm": "post_attention_layernorm",
    "mlp.norm": "pre_feedforward_layernorm",
    "mlp.post_norm": "post_feedforward_layernorm",
}
GEMMA3 = Family("gemma3_text", to_model, ATTENTION_NAMES | QK_NORM_NAMES | MLP_NAMES | NORM_NAMES)
