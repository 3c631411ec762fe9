"""Qwen3.5's text models, dense and with experts: Qwen3-Next with separate projections of z, b and a.

They are also read out of the published vision models; the export is the text model.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from postlude.hf.decoder import activation
from postlude.hf.family import LAYER, OUTER, Family, HFConfig, Names, TensorSource, split_tensor
from postlude.hf.qwen3_next import (
    MTP_NAMES,
    NAMES,
    gated_attention_names,
    gated_delta_names,
    hybrid_config,
    shared_experts,
)
from postlude.model import ModelConfig
from postlude.model.blocks import GatedDeltaConfig, MLPConfig, MoEConfig

ONE = re.compile(r"(mtp\..+\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")
FUSED, DOWN = ".gate_up_proj", ".down_proj"


class StackedExpertsSource:
    """The tensors of another source, with each depth's experts as [experts, 2 · inner, H] and [experts, H, inner].

    The gate of an expert comes before its up projection. Experts that are stacked already stay as they are.
    """

    def __init__(self, single: TensorSource) -> None:
        self._single = single
        self._experts: dict[str, int] = {}  # the number of experts by the prefix of their names
        for name in single.names():
            if match := ONE.fullmatch(name):
                self._experts[match[1]] = max(self._experts.get(match[1], 0), int(match[2]) + 1)

    def names(self) -> Iterable[str]:
        yield from (name for name in self._single.names() if not ONE.fullmatch(name))
        for stem in self._experts:
            yield from (stem + FUSED, stem + DOWN)

    def take(self, name: str) -> Tensor:
        parts = self._parts(name)
        if parts is None:
            return self._single.take(name)
        return torch.stack([torch.cat([self._single.take(part) for part in expert]) for expert in parts])

    def shape(self, name: str) -> tuple[int, ...]:
        parts = self._parts(name)
        if parts is None:
            return self._single.shape(name)
        rows, *other_sizes = zip(*(self._single.shape(part) for part in parts[0]), strict=True)
        return (len(parts), sum(rows), *(sizes[0] for sizes in other_sizes))

    def _parts(self, name: str) -> list[list[str]] | None:
        """Returns the tensors of a stacked one, expert by expert; None if it is not stacked here."""
        stem, dot, leaf = name.rpartition(".")
        if stem not in self._experts or dot + leaf not in (FUSED, DOWN):
            return None
        projections = ("gate", "up") if dot + leaf == FUSED else ("down",)
        experts = range(self._experts[stem])
        parts = [[f"{stem}.{expert}.{projection}_proj.weight" for projection in projections] for expert in experts]
        available = set(self._single.names())
        for missing in (name for expert in parts for name in expert if name not in available):
            raise ValueError(f"the source lacks {missing}, but has other experts of {stem}; fetch it again.")
        return parts


def to_dense(hf: HFConfig) -> ModelConfig:
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
