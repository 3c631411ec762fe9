"""DeepSeek-V3, and what shares its code (R1, Moonlight): latent attention, and experts chosen by groups.

GLM-4.5 and models that share its code have the same experts, and rotary on half of a head.
"""

from __future__ import annotations

from dataclasses import replace

from postlude.checks import Bounds
from postlude.hf.decoder import (
    ATTENTION_NAMES,
    MLP_NAMES,
    MOE_NAMES,
    PROJECTIONS,
    QK_NORM_NAMES,
    activation,
    decoder_config,
    model_config,
    rotary,
    rotary_dim,
    yarn_magnitude,
)
from postlude.hf.family import FIRST, LAST, Family, HFConfig, MTPNames
from postlude.model import ModelConfig
from postlude.model.blocks import BlockConfig, LatentAttentionConfig, MLPConfig, MoEConfig

LATENT_NAMES = {
    "latent_attention.norm": "input_layernorm",
    "latent_attention.q_proj": "self_attn.q_proj",
    "latent_attention.q_a_proj": "self_attn.q_a_proj",
    "latent_attention.q_a_norm": "self_attn.q_a_layernorm",
    "latent_attention.q_b_proj": "self_attn.q_b_proj",
    "latent_attention.kv_a_proj": "self_attn.kv_a_proj_with_mqa",
    "latent_attention.kv_a_norm": "self_attn.kv_a_layernorm",
    "latent_attention.kv_b_proj": "self_attn.kv_b_proj",
    "latent_attention.o_proj": "self_attn.o_proj",
}
BIASED_MOE_NAMES = {
    **MOE_NAMES,
    "moe.selection_bias": "mlp.gate.e_score_correction_bias",
    **{f"moe.shared.{name}": f"mlp.shared_experts.{name}" for name in PROJECTIONS},
}


def to_model(hf: HFConfig) -> ModelConfig:
    """Returns the model's config. The first layers are dense. YaRN also scales the attention scores."""
    rope, width = hf.rope_parameters, hf.qk_nope_head_dim + hf.qk_rope_head_dim
    score_scale = 1.0
    if rope.get("rope_type", "default") != "default" and rope.get("mscale_all_dim"):
        score_scale = yarn_magnitude(rope["factor"], rope["mscale_all_dim"]) ** 2
    second, blocks = dense_then_experts(hf)
    blocks["+"] = LatentAttentionConfig(
        heads=hf.num_attention_heads,
        nope_dim=hf.qk_nope_head_dim,
        rope_dim=hf.qk_rope_head_dim,
        value_dim=hf.v_head_dim,
        latent_size=hf.kv_lora_rank,
        query_latent_size=hf.q_lora_rank,
        rotary=rotary(hf, "full_attention"),
        interleaved=bool(hf.rope_interleave),
        bias=hf.attention_bias,
        scale=width**-0.5 * score_scale,
    )
    return model_config(hf, ["+" + block for block in second], blocks)


def dense_then_experts(hf: HFConfig) -> tuple[list[str], dict[str, BlockConfig]]:
    Bounds(least=0).check("first_k_dense_replace", hf.first_k_dense_replace)
    dense = min(hf.first_k_dense_replace, hf.num_hidden_layers)
    second = ["-"] * dense + ["E"] * (hf.num_hidden_layers - dense)
    blocks: dict[str, BlockConfig] = {}
    if "-" in second:
        blocks["-"] = MLPConfig(intermediate_size=hf.intermediate_size, activation=activation(hf))
    if "E" in second:
        shared = hf.moe_intermediate_size * hf.n_shared_experts
        blocks["E"] = replace(experts_by_groups(hf), activation=activation(hf), shared_intermediate_size=shared)
    return second, blocks


def experts_by_groups(hf: HFConfig) -> MoEConfig:
    """Returns experts chosen by sigmoid scores and a balancing bias, within the best groups."""
    return MoEConfig(
        experts=hf.n_routed_experts,
        top_k=hf.num_experts_per_tok,
        intermediate_size=hf.moe_intermediate_size,
        scores="sigmoid",
        normalise=hf.norm_topk_prob,
        weight_scale=hf.routed_scaling_factor,
        groups=hf.n_group,
        top_groups=hf.topk_group,
        group_best=2,
        selection_bias=True,
        router_fp32=True,
    )


MTP_NAMES = MTPNames(
    layers=lambda config: config.pattern.layers[-1:],
    layer="model.layers.{layer}",
    first_layer=lambda config: len(config.pattern),  # numbered after the trunk's
    names={
        "embedding_norm": f"{FIRST}.enorm",
        "hidden_norm": f"{FIRST}.hnorm",
        "proj": f"{FIRST}.eh_proj",
        "norm": f"{LAST}.shared_head.norm",
    },
    copies={"embedding": f"{FIRST}.embed_tokens", "head": f"{LAST}.shared_head.head"},
)
DEEPSEEK_V3 = Family(
    "deepseek_v3", to_model, LATENT_NAMES | MLP_NAMES | BIASED_MOE_NAMES, mtp=MTP_NAMES, peft_stacks_experts=True
)


def _glm4_moe(hf: HFConfig) -> ModelConfig:
    """Returns the model's config. Queries, keys and values have biases."""
    second, blocks = dense_then_experts(hf)
    return decoder_config(
        hf,
        qkv_bias=hf.attention_bias,
        qk_norm="head" if hf.use_qk_norm else None,
        rotary_dim=rotary_dim(hf),
        layers=second,
        blocks=blocks,
    )


GLM4_MOE = Family(
    "glm4_moe",
    _glm4_moe,
    ATTENTION_NAMES | QK_NORM_NAMES | MLP_NAMES | BIASED_MOE_NAMES,
    mtp=MTP_NAMES,
    peft_stacks_experts=True,
)
