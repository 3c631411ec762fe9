"""GPT-OSS: attention with sinks, a sliding window in every other layer, experts with biases and a clamped SwiGLU.

Its files have the experts in MXFP4, 4-bit numbers of which 32 share an exponent; `Mxfp4Source` dequantises them.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from postlude.hf.decoder import ATTENTION_NAMES, decoder_config
from postlude.hf.family import Family, HFConfig, Names, TensorMapping, TensorSource
from postlude.model import ModelConfig
from postlude.model.blocks import MoEConfig

BLOCKS, SCALES = "_blocks", "_scales"
EXPONENT_BIAS = 127  # of the shared exponent
# By its four bits: a sign, two bits of exponent, one of mantissa.
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


class Mxfp4Source:
    """The tensors of another source, with `…_blocks` and `…_scales` dequantised to one bf16 tensor.

    Blocks are [experts, out, groups, 16] bytes, each of two numbers, the lower bits first, and scales [experts, out,
    groups]. The result is [experts, 32 · groups, out].
    """

    def __init__(self, quantised: TensorSource) -> None:
        self._quantised = quantised

    def names(self) -> Iterable[str]:
        names = set(self._quantised.names())
        for name in names:
            full = name.removesuffix(BLOCKS)
            if full != name and full + SCALES in names:
                yield full
            elif not (name.endswith(SCALES) and name.removesuffix(SCALES) + BLOCKS in names):
                yield name

    def take(self, name: str) -> Tensor:
        if name in self._quantised.names():
            return self._quantised.take(name)
        return dequantise(self._quantised.take(name + BLOCKS), self._quantised.take(name + SCALES))

    def shape(self, name: str) -> tuple[int, ...]:
        if name in self._quantised.names():
            return self._quantised.shape(name)
        experts, out, groups, bytes_of_one = self._quantised.shape(name + BLOCKS)
        return experts, 2 * groups * bytes_of_one, out


def dequantise(blocks: Tensor, scales: Tensor) -> Tensor:
    """Dequantises [experts, out, groups, bytes], scales [experts, out, groups]: bf16 [experts, 2·groups·bytes, out]."""
    values = torch.tensor((*VALUES, *(-value for value in VALUES)), dtype=torch.bfloat16)
    experts, out, groups, bytes_per_group = blocks.shape
    full = torch.empty(experts, 2 * groups * bytes_per_group, out, dtype=torch.bfloat16)
    for expert_weight, block, scale in zip(full, blocks, scales, strict=True):  # one by one, to save memory
        pairs = torch.stack((values[(block & 15).int()], values[(block >> 4).int()]), dim=-1)  # [out, groups, bytes, 2]
        expert_weight.copy_(torch.ldexp(pairs, (scale.int() - EXPONENT_BIAS)[..., None, None]).flatten(1).T)
    return full


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
