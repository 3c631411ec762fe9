"""Small models and batches for tests that need no specific family."""

from typing import Any

import torch
from torch import Tensor

from postlude import LanguageModel, Microbatch, ModelConfig, Pattern, Stage, pack, unpack
from postlude.model.blocks import (
    AttentionConfig,
    BlockConfig,
    GatedDeltaConfig,
    LatentAttentionConfig,
    MambaConfig,
    MLPConfig,
    MoEConfig,
    SlidingAttentionConfig,
)
from tests.equality import assert_equal

VOCABULARY = 37
REPLAYED_EXPERTS = MoEConfig(
    experts=4,
    top_k=2,
    intermediate_size=12,
    shared_intermediate_size=8,
    selection_bias=True,
    selection_bias_rate=1e-3,
    balance_coefficient=0.01,
    router_fp32=True,
)


def small_config(pattern: str = "[*-][S-][*E]*", **changes: Any) -> ModelConfig:
    """Returns a config with every kind of block, in sizes that do not divide each other."""
    attention: dict[str, Any] = {"heads": 4, "kv_heads": 2, "head_dim": 6}
    blocks: dict[str, BlockConfig] = {
        "*": AttentionConfig(**attention),
        "S": SlidingAttentionConfig(**attention, sliding_window=3),
        "M": MambaConfig(heads=4, head_dim=3, state_size=6, groups=2, chunk=5),
        "G": GatedDeltaConfig(key_heads=2, value_heads=4, key_dim=5, value_dim=3, chunk=5),
        "+": LatentAttentionConfig(heads=4, nope_dim=6, rope_dim=4, value_dim=5, latent_size=7, query_latent_size=9),
        "-": MLPConfig(intermediate_size=20),
        "E": MoEConfig(experts=5, top_k=2, intermediate_size=12),
    }
    blocks |= changes.pop("blocks", {})
    settings = {"hidden_size": 16, "vocab_size": VOCABULARY, "initializer_range": 0.3} | changes
    return ModelConfig(pattern=Pattern.parse(pattern), blocks=blocks, **settings)


def small_model(pattern: str = "[*-][S-][*E]*", *, stage: Stage | None = None, **changes: Any) -> LanguageModel:
    return LanguageModel(small_config(pattern, **changes), stage=stage)


def sequences(*lengths: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(VOCABULARY, (length,), generator=generator) for length in lengths]


def small_microbatch(*lengths: int, **columns: Any) -> Microbatch:
    batch = sequences(*(lengths or (5, 1, 8, 3)))
    (microbatch,) = pack(batch, budget=64, columns=columns or None)
    return microbatch


def assert_packed_equals_alone(model: LanguageModel, *lengths: int) -> None:
    batch = sequences(*lengths)
    (packed_batch,) = pack(batch, budget=64)
    packed = unpack([packed_batch], [model(packed_batch)], shifted=False)
    for sequence, rows in zip(batch, packed, strict=True):
        (alone,) = pack([sequence], budget=64)
        assert_equal(rows, model(alone), "logits")
