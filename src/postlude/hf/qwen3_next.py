"""Qwen3-Next: three gated delta nets to one gated attention, experts with a shared one, norms stored around zero."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import cast

from postlude.hf.decoder import (
    ATTENTION_NAMES,
    MLP_NAMES,
    QK_NORM_NAMES,
    activation,
    head_dim,
    model_config,
    rotary,
    rotary_dim,
)
from postlude.hf.family import Family, HFConfig, Names, TensorMapping
from postlude.hf.mtp_names import MTPNames
from postlude.hf.qwen3_moe import MOE_NAMES, experts, experts_or_dense
from postlude.model import ModelConfig
from postlude.model.blocks import AttentionConfig, BlockConfig, GatedDeltaConfig, MLPConfig, MoEConfig

LAYER_TYPES = {"linear_attention": "G", "full_attention": "*"}
SHARED_NAMES = {
    "moe.shared.gate_proj": "mlp.shared_expert.gate_proj",
    "moe.shared.up_proj": "mlp.shared_expert.up_proj",
    "moe.shared.down_proj": "mlp.shared_expert.down_proj",
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
    heads, size, group = delta.key_heads, config.hidden_size, delta.group
    sizes = (delta.key_dim, delta.key_dim, group * delta.value_dim, group * delta.value_dim)
    qkvz = _by_head("linear_attn.in_proj_qkvz.weight", heads, size, sizes)
    ba = _by_head("linear_attn.in_proj_ba.weight", heads, size, (group, group))
    for name, mapping in zip("qkvzba", (*qkvz, *ba), strict=True):
        mapped[f"gated_delta.{name}_proj.weight"] = mapping
    return mapped


def gated_attention_names(config: ModelConfig) -> Names:
    """Returns the names of attention: each head's queries come before its gate in one matrix."""
    if "*" not in config.blocks:
        return {}
    attention = cast(AttentionConfig, config.blocks["*"])
    heads, width = attention.heads, attention.head_dim
    mapped = {}
    for leaf, shape in (("weight", (config.hidden_size,)), ("bias", ())):
        for half, name in enumerate(("q_proj", "gate_proj")):
            mapped[f"attention.{name}.{leaf}"] = TensorMapping(
                f"self_attn.q_proj.{leaf}",
                (heads * 2 * width, *shape),
                view=(heads, 2, width, *shape),
                index=(slice(None), slice(half, half + 1)),
            )
    return mapped


def gated_delta_names(config: ModelConfig) -> Names:
    """Returns the names of a gated delta net but for its input projections. The convolutions of q, k and v are one."""
    if "G" not in config.blocks:
        return {}
    delta = cast(GatedDeltaConfig, config.blocks["G"])
    channels, width = 2 * delta.keys + delta.values, delta.conv_kernel
    ends = (delta.keys, 2 * delta.keys, channels)
    mapped: dict[str, str | TensorMapping] = {
        f"gated_delta.{name}_conv.weight": TensorMapping(
            "linear_attn.conv1d.weight", (channels, 1, width), view=(channels, width), index=(slice(start, stop),)
        )
        for name, start, stop in zip("qkv", (0, *ends), ends, strict=False)
    }
    return mapped | {
        "gated_delta.norm": "input_layernorm",
        "gated_delta.vectors.A_log": "linear_attn.A_log",
        "gated_delta.vectors.dt_bias": "linear_attn.dt_bias",
        "gated_delta.head_norm": "linear_attn.norm",
        "gated_delta.out_proj": "linear_attn.out_proj",
    }


def _by_head(hf_name: str, heads: int, size: int, sizes: Sequence[int]) -> list[TensorMapping]:
    """Maps matrices that one Hugging Face matrix interleaves by head; `sizes` are their rows per head."""
    rows_of_head, mapped, start = sum(sizes), [], 0
    for rows in sizes:
        index = (slice(None), slice(start, start + rows))
        mapped.append(
            TensorMapping(hf_name, (heads * rows_of_head, size), view=(heads, rows_of_head, size), index=index)
        )
        start += rows
    return mapped


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
