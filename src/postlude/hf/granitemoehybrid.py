"""Granite 4 hybrids: Mamba-2 or attention, then a shared MLP with or without experts, and multipliers."""

from __future__ import annotations

from dataclasses import replace

from postlude.checks import Bounds
from postlude.hf.decoder import ATTENTION_NAMES, activation, head_dim, model_config, rotary
from postlude.hf.family import Family, HFConfig, Names, TensorMapping, split_tensor
from postlude.hf.mamba2 import check_activation, mamba_names, time_step_limit
from postlude.model import ModelConfig
from postlude.model.blocks import AttentionConfig, BlockConfig, MambaConfig, MLPConfig, MoEConfig

SYMBOLS = {"linear_attention": "M", "full_attention": "*"}


def to_model(hf: HFConfig) -> ModelConfig:
    """Returns the model's config. It has a balance loss if transformers adds one: with `output_router_logits`."""
    Bounds(above=0).check("logits_scaling", hf.logits_scaling)
    second = "E" if hf.num_local_experts else "-"
    layers = [SYMBOLS[kind] + second for kind in hf.layer_types]
    makers = {"M": _mamba, "*": _attention, "-": _mlp, "E": _moe}
    blocks = {symbol: makers[symbol](hf) for symbol in dict.fromkeys("".join(layers))}
    scaled = {symbol: replace(block, residual_scale=hf.residual_multiplier) for symbol, block in blocks.items()}
    return replace(
        model_config(hf, layers, scaled),
        embedding_scale=hf.embedding_multiplier,
        logit_scale=1.0 / hf.logits_scaling,
    )


def _mamba(hf: HFConfig) -> BlockConfig:
    check_activation(hf.hidden_act)
    return MambaConfig(
        heads=hf.mamba_n_heads,
        head_dim=hf.mamba_d_head,
        state_size=hf.mamba_d_state,
        groups=hf.mamba_n_groups,
        norm_groups=hf.mamba_n_groups,
        conv_kernel=hf.mamba_d_conv,
        conv_bias=hf.mamba_conv_bias,
        bias=hf.mamba_proj_bias,
        time_step_limit=time_step_limit(hf),
        chunk=hf.mamba_chunk_size,
    )


def _attention(hf: HFConfig) -> BlockConfig:
    return AttentionConfig(
        heads=hf.num_attention_heads,
        kv_heads=hf.num_key_value_heads,
        head_dim=head_dim(hf),
        rotary=rotary(hf, "full_attention") if hf.position_embedding_type == "rope" else None,
        qkv_bias=hf.attention_bias,
        output_bias=hf.attention_bias,
        scale=hf.attention_multiplier,
    )


def _mlp(hf: HFConfig) -> BlockConfig:
    return MLPConfig(intermediate_size=hf.shared_intermediate_size, activation=activation(hf))


def _moe(hf: HFConfig) -> BlockConfig:
    """Returns the MoE's config. A softmax over the chosen experts equals a renormalised softmax over all."""
    return MoEConfig(
        experts=hf.num_local_experts,
        top_k=hf.num_experts_per_tok,
        intermediate_size=hf.intermediate_size,
        activation=activation(hf),
        shared_intermediate_size=hf.shared_intermediate_size,
        # transformers counts each of the top_k choices separately.
        balance_coefficient=hf.router_aux_loss_coef * hf.num_experts_per_tok if hf.output_router_logits else 0.0,
    )


def names(config: ModelConfig) -> Names:
    """Returns the names: gate and up are one tensor, one after the other; those of all experts are stacked."""
    size, second = config.hidden_size, config.blocks.get("-") or config.blocks["E"]
    mapped: dict[str, str | TensorMapping] = {**ATTENTION_NAMES, "mamba.norm": "input_layernorm"}
    if "M" in config.blocks:
        mapped |= mamba_names("mamba", config)
    if isinstance(second, MLPConfig):
        mapped |= {"mlp.norm": "post_attention_layernorm", **_halves("mlp", second.intermediate_size, size)}
    elif isinstance(second, MoEConfig):
        inner, stacked = second.intermediate_size, "block_sparse_moe.input_linear.weight"
        halves, shape = {"gate": inner, "up": inner}, (second.experts, 2 * inner, size)
        mapped |= {
            "moe.norm": "post_attention_layernorm",
            "moe.router": "block_sparse_moe.router.layer",
            **split_tensor("moe.experts.{}_proj.weight", stacked, halves, shape, dim=1),
            "moe.experts.down_proj": "block_sparse_moe.output_linear",
            **_halves("moe.shared", second.shared_intermediate_size, size),
        }
    return mapped


def _halves(module: str, inner: int, size: int) -> Names:
    halves, fused = {"gate": inner, "up": inner}, "shared_mlp.input_linear.weight"
    return {
        **split_tensor(f"{module}.{{}}_proj.weight", fused, halves, (2 * inner, size)),
        f"{module}.down_proj": "shared_mlp.output_linear",
    }


GRANITEMOEHYBRID = Family(
    "granitemoehybrid",
    to_model,
    names,
    module_renames={
        "block_sparse_moe.experts.gate_up_proj": "block_sparse_moe.input_linear.weight",
        "block_sparse_moe.experts.down_proj": "block_sparse_moe.output_linear.weight",
        "block_sparse_moe.router.weight": "block_sparse_moe.router.layer.weight",
    },
)
