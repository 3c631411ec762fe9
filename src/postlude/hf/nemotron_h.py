"""Nemotron-H and Nemotron 3: Mamba-2, attention without positions, ReLU² MLPs and experts, one block per layer."""

from __future__ import annotations

from dataclasses import replace

from postlude.hf.decoder import activation, model_config
from postlude.hf.deepseek_v3 import experts_by_groups
from postlude.hf.family import EXPERT, FIRST, LAST, Family, HFConfig, MTPNames, Names
from postlude.hf.mamba2 import BACKBONE, check_activation, mamba_config, mamba_names
from postlude.model import ModelConfig
from postlude.model.blocks import AttentionConfig, BlockConfig, MLPConfig

SYMBOLS = {"linear_attention": "M", "full_attention": "*", "mlp": "-", "moe": "E"}
NAMES = {
    **{f"{block}.norm": "norm" for block in ("mamba", "attention", "mlp", "moe")},
    **{f"attention.{name}": f"mixer.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj")},
    **{f"mlp.{name}": f"mixer.{name}" for name in ("up_proj", "down_proj")},
    "moe.router": "mixer.gate",
    "moe.selection_bias": "mixer.gate.e_score_correction_bias",
    "moe.latent_down": "mixer.fc1_latent_proj",
    "moe.latent_up": "mixer.fc2_latent_proj",
    **{f"moe.experts.{name}": f"mixer.experts.{EXPERT}.{name}" for name in ("up_proj", "down_proj")},
    **{f"moe.shared.{name}": f"mixer.shared_experts.{name}" for name in ("up_proj", "down_proj")},
}


def to_model(hf: HFConfig) -> ModelConfig:
    """Returns the model's config. Time steps are clamped to `time_step_limit`, as in NVIDIA's code.

    transformers 5 takes the minimum from `time_step_min`, which is for initialisation (its pull request 48989 fixes
    that).
    """
    layers = [SYMBOLS[kind] for kind in hf.layers_block_type]
    makers = {"M": _mamba, "*": _attention, "-": _mlp, "E": _moe}
    blocks = {symbol: makers[symbol](hf) for symbol in dict.fromkeys(layers)}
    return model_config(hf, layers, blocks, norm_eps=hf.layer_norm_epsilon)


def _mamba(hf: HFConfig) -> BlockConfig:
    check_activation(hf.mamba_hidden_act)
    heads, head_dim, state_size = hf.mamba_num_heads, hf.mamba_head_dim, hf.ssm_state_size
    return mamba_config(hf, heads=heads, head_dim=head_dim, state_size=state_size)


def _attention(hf: HFConfig) -> BlockConfig:
    return AttentionConfig(
        heads=hf.num_attention_heads, kv_heads=hf.num_key_value_heads, head_dim=hf.head_dim, rotary=None
    )


def _mlp(hf: HFConfig) -> BlockConfig:
    return MLPConfig(
        intermediate_size=hf.intermediate_size,
        activation=activation(hf, "mlp_hidden_act"),
        gated=False,
        bias=hf.mlp_bias,
    )


def _moe(hf: HFConfig) -> BlockConfig:
    if hf.mlp_bias:
        raise ValueError("nemotron_h experts with mlp_bias=True are not supported; there is no bias for them.")
    return replace(
        experts_by_groups(hf),
        activation=activation(hf, "mlp_hidden_act"),
        gated=False,
        shared_intermediate_size=hf.moe_shared_expert_intermediate_size,
        latent_size=hf.moe_latent_size or 0,
    )


def names(config: ModelConfig) -> Names:
    """Returns the names: every block's module is `mixer`."""
    return {**NAMES, **(mamba_names("mixer", config) if "M" in config.blocks else {})}


MTP_NAMES = MTPNames(
    layers=lambda config: tuple(SYMBOLS[kind] for kind in config.hf_config["mtp_layers_block_type"]),
    layer="mtp.layers.{layer}",
    names={
        "embedding_norm": f"{FIRST}.enorm",
        "hidden_norm": f"{FIRST}.hnorm",
        "proj": f"{FIRST}.eh_proj",
        "norm": f"{LAST}.final_layernorm",
    },
    prefix="mtp.",
)
NEMOTRON_H = Family(
    "nemotron_h",
    to_model,
    names,
    outer=BACKBONE,
    layer="backbone.layers.{layer}",
    module_renames={"model.": "backbone."},
    mtp=MTP_NAMES,
)
