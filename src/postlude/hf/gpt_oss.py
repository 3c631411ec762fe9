"""GPT-OSS: attention with sinks, a sliding window in every other layer, experts with biases and a clamped SwiGLU."""

from __future__ import annotations

from postlude.hf.decoder import ATTENTION_NAMES, decoder_config
from postlude.hf.family import Family, HFConfig, Names, TensorMapping
from postlude.hf.mxfp4 import Mxfp4Source
from postlude.model import ModelConfig
from postlude.model.blocks import MoEConfig


def to_model(hf: HFConfig) -> ModelConfig:
    """Returns the model's config. A softmax over the chosen experts equals a renormalised softmax over all."""
    experts = MoEConfig(
        experts=hf.num_local_experts,
        top_k=hf.num_experts_per_tok,
        intermediate_size=hf.intermediate_size,
        alpha=getattr(hf, "swiglu_alpha", 1.702),  # transformers before 5.22 has constants in their place
        limit=getattr(hf, "swiglu_limit", 7.0),
        up_offset=1.0,
        expert_bias=True,
        router_bias=True,
        # transformers counts each of the top_k choices separately.
        balance_coefficient=hf.router_aux_loss_coef * hf.num_experts_per_tok if hf.output_router_logits else 0.0,
    )
    return decoder_config(
        hf,
        qkv_bias=hf.attention_bias,
        output_bias=hf.attention_bias,
        sinks=True,
        layers=["E"] * hf.num_hidden_layers,
        blocks={"E": experts},
    )


def names(config: ModelConfig) -> Names:
    """Returns the names: all experts are one transposed tensor, with gate and up interleaved."""
    moe = config.blocks["E"]
    assert isinstance(moe, MoEConfig)
    count, outer, inner = moe.experts, config.hidden_size, moe.intermediate_size

    def every_other(first: int) -> slice:
        return slice(first, 2 * inner, 2)

    everything = slice(None)
    return {
        **ATTENTION_NAMES,
        "attention.sinks": "self_attn.sinks",
        "moe.norm": "post_attention_layernorm",
        "moe.router": "mlp.router",
        "moe.experts.down_proj.weight": TensorMapping(
            "mlp.experts.down_proj", (count, inner, outer), permute=(0, 2, 1)
        ),
        "moe.experts.down_proj.bias": "mlp.experts.down_proj_bias",
        **{
            f"moe.experts.{name}_proj.weight": TensorMapping(
                "mlp.experts.gate_up_proj",
                (count, outer, 2 * inner),
                index=(everything, everything, every_other(first)),
                permute=(0, 2, 1),
            )
            for first, name in enumerate(("gate", "up"))
        },
        **{
            f"moe.experts.{name}_proj.bias": TensorMapping(
                "mlp.experts.gate_up_proj_bias", (count, 2 * inner), index=(everything, every_other(first))
            )
            for first, name in enumerate(("gate", "up"))
        },
    }


GPT_OSS = Family("gpt_oss", to_model, names, dequantize={"mxfp4": Mxfp4Source})
