"""Latent attention, sinks, and experts with biases: layouts equal one rank and stream the loaded weights."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from postlude import Layout, ModelConfig, Pattern
from postlude.model.blocks import AttentionConfig, LatentAttentionConfig, MLPConfig, MoEConfig, SlidingAttentionConfig
from postlude.verify.cases import Case
from tests.engine.training import bitwise_equal, build, weights
from tests.hf.families import CONFIGS, saved_model
from tests.meshes import equal_to_one_rank

HEADS = {"heads": 4, "kv_heads": 2, "head_dim": 6, "sinks": True, "qkv_bias": True, "output_bias": True}
LATENT = LatentAttentionConfig(
    heads=4, nope_dim=5, rope_dim=4, value_dim=3, latent_size=7, query_latent_size=9, bias=True, interleaved=True
)
CONFIG = ModelConfig(
    pattern=Pattern.parse("[+-][SE][*-][+E]"),
    hidden_size=16,
    vocab_size=37,
    initializer_range=0.2,
    blocks={
        "+": LATENT,
        "*": AttentionConfig(**HEADS),
        "S": SlidingAttentionConfig(**HEADS, sliding_window=3),
        "-": MLPConfig(intermediate_size=20),
        "E": MoEConfig(
            experts=4, top_k=2, intermediate_size=12, alpha=1.7, limit=0.3, up_offset=1.0,
            expert_bias=True, router_bias=True, router_fp32=True,
        ),
    },
)  # fmt: skip
WHOLE_QUERIES = replace(CONFIG, blocks={**CONFIG.blocks, "+": replace(LATENT, query_latent_size=None, bias=False)})


@pytest.mark.parametrize(
    ("layout", "config", "recompute"),
    [
        ("tp=2", CONFIG, "none"),
        pytest.param("pp=2", WHOLE_QUERIES, "full", marks=pytest.mark.slow),
        pytest.param("tp=2,cp=2,ep=4", WHOLE_QUERIES, "selective", marks=pytest.mark.thorough),
        pytest.param("pp=2,dp_shard=2,ep=2", CONFIG, "none", marks=pytest.mark.thorough),
    ],
)
@pytest.mark.slow
def test_a_layout_equals_one_rank(ranks: Any, layout: str, config: ModelConfig, recompute: Any) -> None:
    case = Case(config, layout=Layout.parse(layout), objective="gspo", recompute=recompute)
    equal_to_one_rank(ranks, case)


def streamed(group: Any, layout: str, directory: str) -> dict[str, Any]:
    return weights(build(layout, directory))


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("gpt_oss", "dp_shard=2,ep=2"),
        pytest.param("gpt_oss", "tp=2", marks=pytest.mark.slow),
        pytest.param("deepseek_v3", "pp=2", marks=pytest.mark.slow),
    ],
)
def test_loaded_weights_are_streamed_bit_exactly(ranks: Any, name: str, layout: str, tmp_path: Path) -> None:
    config = CONFIGS[name]()
    if name == "gpt_oss":
        config.num_local_experts = 6
    saved_model(config, tmp_path)
    expected = load_file(tmp_path / "model.safetensors")
    for actual in ranks(2, streamed, layout, str(tmp_path)):
        assert bitwise_equal(dict(sorted(actual.items())), dict(sorted(expected.items())))
