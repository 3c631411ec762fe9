"""Qwen3.5's text models, dense and with experts: Qwen3-Next whose z, b and a have projections of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from postlude.hf.decoder import activation
from postlude.hf.family import Family, Names, rows
from postlude.hf.qwen3_next import (
    LEFT_OUT,
    NAMES,
    gated_attention_names,
    gated_delta_names,
    hybrid_config,
    shared_experts,
)
from postlude.model import ModelConfig
from postlude.model.blocks import GatedDeltaConfig, MLPConfig

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def to_dense(hf: PretrainedConfig) -> ModelConfig:
    """An MLP in every layer."""
    mlp = MLPConfig(intermediate_size=hf.intermediate_size, activation=activation(hf))
    return hybrid_config(hf, ["-"] * hf.num_hidden_layers, {"-": mlp})


def to_moe(hf: PretrainedConfig) -> ModelConfig:
    """Experts in every layer, whose weights sum to one."""
    return hybrid_config(hf, ["E"] * hf.num_hidden_layers, {"E": shared_experts(hf, normalise=True)})


def names(config: ModelConfig) -> Names:
    """q, k and v stand in one matrix, one after another."""
    found = {**NAMES, **gated_attention_names(config), **gated_delta_names(config)}
    if "G" not in config.blocks:
        return found
    delta = cast(GatedDeltaConfig, config.blocks["G"])
    ends = (delta.keys, 2 * delta.keys, 2 * delta.keys + delta.values)
    shape = (ends[-1], config.hidden_size)
    for name, start, stop in zip("qkv", (0, *ends), ends, strict=False):
        found[f"gated_delta.{name}_proj.weight"] = rows("linear_attn.in_proj_qkv.weight", start, stop, shape)
    return found | {f"gated_delta.{name}_proj": f"linear_attn.in_proj_{name}" for name in "zba"}


QWEN3_5 = Family("qwen3_5_text", to_dense, names, left_out=LEFT_OUT)
QWEN3_5_MOE = Family("qwen3_5_moe_text", to_moe, names, left_out=LEFT_OUT)
