"""Qwen3.5's text models, dense and with experts: Qwen3-Next with separate projections of z, b and a.

They are also read out of the published vision models; the export is the text model.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import cast

from postlude.hf.decoder import activation
from postlude.hf.family import OUTER, Family, HFConfig, Names, split_tensor
from postlude.hf.mtp_names import LAYER
from postlude.hf.qwen3_next import (
    MTP_NAMES,
    NAMES,
    gated_attention_names,
    gated_delta_names,
    hybrid_config,
    shared_experts,
)
from postlude.hf.stacked_experts import StackedExpertsSource
from postlude.model import ModelConfig
from postlude.model.blocks import GatedDeltaConfig, MLPConfig, MoEConfig


def to_dense(hf: HFConfig) -> ModelConfig:
    """Returns the model's config, with an MLP in every layer."""
    mlp = MLPConfig(intermediate_size=hf.intermediate_size, activation=activation(hf))
    return hybrid_config(hf, ["-"] * hf.num_hidden_layers, {"-": mlp})


def to_moe(hf: HFConfig) -> ModelConfig:
    """Returns the model's config, with experts in every layer, whose weights sum to one."""
    return hybrid_config(hf, ["E"] * hf.num_hidden_layers, {"E": shared_experts(hf, normalise=True)})


def names(config: ModelConfig) -> Names:
    """Returns the names: q, k and v are one matrix, one after another."""
    mapped = {**NAMES, **gated_attention_names(config), **gated_delta_names(config)}
    if "G" not in config.blocks:
        return mapped
    delta = cast(GatedDeltaConfig, config.blocks["G"])
    sizes = {"q": delta.keys, "k": delta.keys, "v": delta.values}
    shape = (sum(sizes.values()), config.hidden_size)
    return {
        **mapped,
        **split_tensor("gated_delta.{}_proj.weight", "linear_attn.in_proj_qkv.weight", sizes, shape),
        **{f"gated_delta.{name}_proj": f"linear_attn.in_proj_{name}" for name in "zba"},
    }


def text_config(hf: HFConfig) -> HFConfig:
    """Returns the config of the text model in a vision model, with the fields that only the whole has."""
    text = copy.deepcopy(hf.text_config)
    text.tie_word_embeddings = hf.tie_word_embeddings
    text.dtype = text.dtype or hf.dtype
    return text


def stacked_names(config: ModelConfig) -> Names:
    """Returns the names of the published files: experts are stacked, and each one's gate comes before its up."""
    moe = cast(MoEConfig, config.blocks["E"])
    inner = moe.intermediate_size
    halves, shape = {"gate": inner, "up": inner}, (moe.experts, 2 * inner, config.hidden_size)
    return {
        **names(config),
        **split_tensor("moe.experts.{}_proj.weight", "mlp.experts.gate_up_proj", halves, shape, dim=1),
        "moe.experts.down_proj.weight": "mlp.experts.down_proj",
    }


MTP_NAMES_3_5 = replace(MTP_NAMES, config_key="mtp_num_hidden_layers", default_count=0)
QWEN3_5 = Family("qwen3_5_text", to_dense, names, mtp=MTP_NAMES_3_5)
QWEN3_5_MOE = Family("qwen3_5_moe_text", to_moe, names, mtp=MTP_NAMES_3_5)

QWEN3_5_VISION = Family(
    "qwen3_5",
    lambda hf: to_dense(text_config(hf)),
    names,
    outer={module: name.replace("model.", "model.language_model.") for module, name in OUTER.items()},
    layer=f"model.language_model.layers.{LAYER}",
    mtp=MTP_NAMES_3_5,
    ignored={"model.visual.": "vision"},
)
QWEN3_5_MOE_VISION = replace(
    QWEN3_5_VISION,
    model_type="qwen3_5_moe",
    to_model=lambda hf: to_moe(text_config(hf)),
    names=stacked_names,
    adapt_source=StackedExpertsSource,  # some published files have the MTP experts one by one
)
