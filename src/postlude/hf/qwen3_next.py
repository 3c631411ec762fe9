"""Qwen3-Next: three gated delta nets to one gated attention, experts with a shared one, norms stored around zero."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import cast

from postlude.hf.decoder import (
    ATTENTION_NAMES,
    MLP_NAMES,
    MOE_NAMES,
    PROJECTIONS,
    QK_NORM_NAMES,
    activation,
    head_dim,
    model_config,
    rotary,
    rotary_dim,
)
from postlude.hf.family import Family, HFConfig, MTPNames, Names, TensorMapping, split_tensor
from postlude.hf.llama import experts, experts_or_dense
from postlude.model import ModelConfig
from postlude.model.blocks import AttentionConfig, BlockConfig, GatedDeltaConfig, MLPConfig, MoEConfig

LAYER_TYPES = {"linear_attention": "G", "full_attention": "*"}
SHARED_NAMES = {
    **{f"moe.shared.{name}": f"mlp.shared_expert.{name}" for name in PROJECTIONS},
    "moe.shared.token_gate": "mlp.shared_expert_gate",
}
NAMES = ATTENTION_NAMES | QK_NORM_NAMES | MLP_NAMES | MOE_NAMES | SHARED_NAMES


def to_model(hf: HFConfig) -> ModelConfig:
    """Returns the model's config: Qwen3-MoE with other token mixers."""
    second = experts_or_dense(hf)
    blocks: dict[str, BlockConfig] = {}
    if "E" in second:
        blocks["E"] = shared_experts(hf, normalise=hf.norm_topk_prob)
    if "-" in second:
        blocks["-"] = MLPConfig(intermediate_size=hf.intermediate_size, activation=activation(hf))
    return hybrid_config(hf, second, blocks)


def hybrid_config(hf: HFConfig, second: Sequence[str], blocks: Mapping[str, BlockConfig]) -> ModelConfig:
    """Returns a ModelConfig whose first blocks follow `layer_types`; `second` are the other blocks of the layers."""
    unknown = sorted(set(hf.layer_types) - set(LAYER_TYPES))
    if unknown:
        raise ValueError(f"layer_types holds {', '.join(unknown)}, which {hf.model_type} has no block for.")
    if hf.hidden_act not in ("silu", "swish"):
        raise ValueError(f"hidden_act {hf.hidden_act!r} is not supported by {hf.model_type}'s convolutions, only silu.")
    first = [LAYER_TYPES[kind] for kind in hf.layer_types]
    configs = dict(blocks)
    if "*" in first:
        configs["*"] = AttentionConfig(
            heads=hf.num_attention_heads,
            kv_heads=hf.num_key_value_heads,
            head_dim=head_dim(hf),
            rotary=rotary(hf, "full_attention", partial=True),
            rotary_dim=rotary_dim(hf),
            qkv_bias=hf.attention_bias,
            output_bias=hf.attention_bias,
            qk_norm="head",
            output_gate=True,
        )
    if "G" in first:
        configs["G"] = GatedDeltaConfig(
            key_heads=hf.linear_num_key_heads,
            value_heads=hf.linear_num_value_heads,
            key_dim=hf.linear_key_head_dim,
            value_dim=hf.linear_value_head_dim,
            conv_kernel=hf.linear_conv_kernel_dim,
        )
    layers = [mixer + feed_forward for mixer, feed_forward in zip(first, second, strict=True)]
    return replace(model_config(hf, layers, configs), norm_offset=1.0)


def shared_experts(hf: HFConfig, *, normalise: bool) -> MoEConfig:
    """Returns experts with a shared expert that has its own gate."""
    shared = hf.shared_expert_intermediate_size
    return replace(experts(hf, normalise=normalise), shared_intermediate_size=shared, shared_gate=True)


def names(config: ModelConfig) -> Names:
    """Returns the names: q, k, v and z are one matrix and b and a another, key head by key head."""
    mapped = {**NAMES, **gated_attention_names(config), **gated_delta_names(config)}
    if "G" not in config.blocks:
        return mapped
    delta = cast(GatedDeltaConfig, config.blocks["G"])
    keys, values, heads = delta.key_dim, delta.group * delta.value_dim, delta.key_heads
    for fused, sizes in {
        "linear_attn.in_proj_qkvz.weight": {"q": keys, "k": keys, "v": values, "z": values},
        "linear_attn.in_proj_ba.weight": {"b": delta.group, "a": delta.group},
    }.items():
        rows, size = sum(sizes.values()), config.hidden_size
        shape, view = (heads * rows, size), (heads, rows, size)
        mapped |= split_tensor("gated_delta.{}_proj.weight", fused, sizes, shape, view=view, dim=1)
    return mapped


def gated_attention_names(config: ModelConfig) -> Names:
    """Returns the names of attention: each head's queries come before its gate in one matrix."""
    if "*" not in config.blocks:
        return {}
    attention = cast(AttentionConfig, config.blocks["*"])
    heads, width = attention.heads, attention.head_dim
    mapped: dict[str, str | TensorMapping] = {}
    for leaf, columns in (("weight", (config.hidden_size,)), ("bias", ())):
        shape, view = (heads * 2 * width, *columns), (heads, 2, width, *columns)
        name, fused = f"attention.{{}}_proj.{leaf}", f"self_attn.q_proj.{leaf}"
        mapped |= split_tensor(name, fused, {"q": 1, "gate": 1}, shape, view=view, dim=1)
    return mapped


def gated_delta_names(config: ModelConfig) -> Names:
    """Returns the names of a gated delta net but for its input projections. The convolutions of q, k and v are one."""
    if "G" not in config.blocks:
        return {}
    delta = cast(GatedDeltaConfig, config.blocks["G"])
    sizes = {"q": delta.keys, "k": delta.keys, "v": delta.values}
    channels, width = sum(sizes.values()), delta.conv_kernel
    shape, view = (channels, 1, width), (channels, width)
    return {
        **split_tensor("gated_delta.{}_conv.weight", "linear_attn.conv1d.weight", sizes, shape, view=view),
        "gated_delta.norm": "input_layernorm",
        "gated_delta.vectors.A_log": "linear_attn.A_log",
        "gated_delta.vectors.dt_bias": "linear_attn.dt_bias",
        "gated_delta.head_norm": "linear_attn.norm",
        "gated_delta.out_proj": "linear_attn.out_proj",
    }


MTP_NAMES = MTPNames(
    layers=lambda config: ("*E" if "E" in config.blocks else "*-",),
    layer="mtp.layers.{layer}",
    names={
        "embedding_norm": "mtp.pre_fc_norm_embedding",
        "hidden_norm": "mtp.pre_fc_norm_hidden",
        "proj": "mtp.fc",
        "norm": "mtp.norm",
    },
    max_depths=1,  # more would share all but their layers
    default_count=1,
    prefix="mtp.",
)
QWEN3_NEXT = Family("qwen3_next", to_model, names, mtp=MTP_NAMES, peft_stacks_experts=True)
