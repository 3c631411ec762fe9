"""Llama (with SmolLM2) and the families that differ by a few settings: Mistral, Qwen2 (with Qwen2.5), Qwen3, OLMo 3.

Also Qwen3-MoE, which has experts in all layers but those the config keeps dense, and Gemma 3's text models, which have
norms before and after every block, mostly sliding windows and scaled embeddings.
"""

from __future__ import annotations

from dataclasses import replace

from postlude.checks import Bounds
from postlude.hf.decoder import ATTENTION_NAMES, MLP_NAMES, MOE_NAMES, QK_NORM_NAMES, activation, decoder_config
from postlude.hf.family import Family, HFConfig
from postlude.model import ModelConfig
from postlude.model.blocks import BlockConfig, MLPConfig, MoEConfig


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


def _qwen3_moe(hf: HFConfig) -> ModelConfig:
    second = experts_or_dense(hf)
    blocks: dict[str, BlockConfig] = {"E": experts(hf, normalise=hf.norm_topk_prob)} if "E" in second else {}
    return decoder_config(
        hf,
        qkv_bias=hf.attention_bias,
        output_bias=hf.attention_bias,
        qk_norm="head",
        sliding=[hf.sliding_window is not None] * hf.num_hidden_layers,
        layers=second,
        blocks=blocks,
    )


def experts(hf: HFConfig, *, normalise: bool) -> MoEConfig:
    """Returns the experts. Their balance loss is on if transformers would add it: with `output_router_logits`."""
    return MoEConfig(
        experts=hf.num_experts,
        top_k=hf.num_experts_per_tok,
        intermediate_size=hf.moe_intermediate_size,
        activation=activation(hf),
        normalise=normalise,
        # transformers counts each of the top_k choices separately.
        balance_coefficient=hf.router_aux_loss_coef * hf.num_experts_per_tok if hf.output_router_logits else 0.0,
    )


def experts_or_dense(hf: HFConfig) -> list[str]:
    """Returns the second block of each layer: an MLP where `mlp_only_layers` or `decoder_sparse_step` ask for it."""
    Bounds(least=1).check("decoder_sparse_step", hf.decoder_sparse_step)
    Bounds(least=0).check("num_experts", hf.num_experts)
    dense = set(hf.mlp_only_layers or ())
    sparse = (
        layer not in dense and hf.num_experts > 0 and (layer + 1) % hf.decoder_sparse_step == 0
        for layer in range(hf.num_hidden_layers)
    )
    return ["E" if experts else "-" for experts in sparse]


QWEN3_MOE = Family(
    "qwen3_moe", _qwen3_moe, ATTENTION_NAMES | QK_NORM_NAMES | MLP_NAMES | MOE_NAMES, peft_stacks_experts=True
)


def _gemma3(hf: HFConfig) -> ModelConfig:
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


GEMMA3_NORM_NAMES = {
    "attention.post_norm": "post_attention_layernorm",
    "mlp.norm": "pre_feedforward_layernorm",
    "mlp.post_norm": "post_feedforward_layernorm",
}
GEMMA3 = Family("gemma3_text", _gemma3, ATTENTION_NAMES | QK_NORM_NAMES | MLP_NAMES | GEMMA3_NORM_NAMES)
