"""Qwen3-MoE: Qwen3 with experts in all layers but those the config keeps dense."""

from __future__ import annotations

from postlude.checks import Bounds
from postlude.hf.decoder import ATTENTION_NAMES, MLP_NAMES, MOE_NAMES, QK_NORM_NAMES, activation, decoder_config
from postlude.hf.family import Family, HFConfig
from postlude.model import ModelConfig
from postlude.model.blocks import BlockConfig, MoEConfig


def to_model(hf: HFConfig) -> ModelConfig:
    """Returns the model's config: Qwen3 with experts."""
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
    "qwen3_moe", to_model, ATTENTION_NAMES | QK_NORM_NAMES | MLP_NAMES | MOE_NAMES, peft_stacks_experts=True
)
