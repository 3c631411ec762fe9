"""GLM-4.5 and models that share its code: rotary on half of a head, and DeepSeek-V3's experts."""

from __future__ import annotations

from postlude.hf.decoder import ATTENTION_NAMES, MLP_NAMES, QK_NORM_NAMES, decoder_config, rotary_dim
from postlude.hf.deepseek_v3 import BIASED_MOE_NAMES, MTP_NAMES, dense_then_experts
from postlude.hf.family import Family, HFConfig
from postlude.model import ModelConfig


def to_model(hf: HFConfig) -> ModelConfig:
    """Returns the model's config. Queries, keys and values have biases."""
    second, blocks = dense_then_experts(hf)
    return decoder_config(
        hf,
        qkv_bias=hf.attention_bias,
        qk_norm="head" if hf.use_qk_norm else None,
        rotary_dim=rotary_dim(hf),
        layers=second,
        blocks=blocks,
    )


GLM4_MOE = Family(
    "glm4_moe",
    to_model,
    ATTENTION_NAMES | QK_NORM_NAMES | MLP_NAMES | BIASED_MOE_NAMES,
    mtp=MTP_NAMES,
    peft_stacks_experts=True,
)
