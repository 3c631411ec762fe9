"""Every layout equals one rank: loss, per-token log-probs and entropy, and every parameter's gradient."""

from typing import Any

import pytest
import torch
from transformers import (
    DeepseekV3Config,
    GptOssConfig,
    MistralConfig,
    NemotronHConfig,
    Olmo3Config,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

from postlude import Layout
from postlude.hf.read_model import read_model
from postlude.model.blocks import BLOCKS, MoEConfig
from postlude.verify.cases import Case
from postlude.verify.choices import GRID
from tests.engine.training import config
from tests.meshes import equal_to_one_rank, verify
from tests.model.small import small_config


def label(value: Any) -> str:
    return str(value) if not isinstance(value, Layout) else str(value)[7:-1].replace(" ", "")


def cases() -> list[Any]:
    """Every layout with both models, the objectives in turn. Two ranks are quick; the others take minutes."""
    parameters = []
    for place, layout in enumerate(GRID):
        for turn, model in enumerate(("tiny-moe",) if layout.ep > 1 else ("tiny-moe", "tiny-dense")):
            objective = ("grpo", "dpo", "gspo", "sft")[(place + turn) % 4]
            quick = layout.world_size == 2 and model == "tiny-moe"
            is_slow = layout.world_size > 2 and model == "tiny-dense"  # whose blocks are in the other as well
            is_slow = is_slow or layout == Layout(tp=2, pp=2, cp=2)  # in which the hybrid below has all of its blocks
            is_slow = is_slow or 4 in (layout.tp, layout.cp, layout.dp_shard)  # as two are
            is_slow = is_slow or layout in (Layout(pp=4), Layout(tp=2, cp=2), Layout(pp=2, cp=2))  # as the hybrid
            is_slow = is_slow or layout.world_size > 4  # as the hybrid and the adapters of test_lora.py are
            is_slow = is_slow or (model == "tiny-dense" and (layout.cp, layout.dp_shard) != (1, 1))  # as with experts
            name = f"{label(layout)}-{model}-{objective}"
            case = Case(
                config(model, num_hidden_layers=max(2, layout.pp * layout.vpp)), layout=layout, objective=objective
            )
            mark = pytest.mark.thorough if is_slow else pytest.mark.slow
            parameters.append(pytest.param(case, id=name, marks=() if quick else mark))
    return parameters


@pytest.mark.parametrize("case", cases())
@pytest.mark.slow
def test_a_layout_equals_one_rank(ranks: Any, case: Case) -> None:
    equal_to_one_rank(ranks, case)


def hybrids() -> list[Any]:
    """Every kind of block and an MTP depth in every kind of layout, the objectives in turn."""
    layouts = ("tp=2", "cp=2", "pp=2", "dp_shard=2,ep=2", "dp_shard=2", "pp=2,vpp=2", "pp=2,cp=2", "tp=2,pp=2,cp=2")
    parameters = []
    for place, layout in enumerate(map(Layout.parse, layouts)):
        for turn, objective in enumerate(("grpo", "dpo", "sft")):
            others = layout not in (Layout(dp_shard=2, ep=2), Layout(pp=2, vpp=2), Layout(tp=2, pp=2, cp=2))  # all axes
            mark = pytest.mark.slow if turn == place % 3 and not others else pytest.mark.thorough
            case = Case("tiny-hybrid", layout=layout, objective=objective, initializer_range=0.1)
            parameters.append(pytest.param(case, id=f"{label(layout)}-{objective}", marks=mark))
    return parameters


@pytest.mark.parametrize("case", hybrids())
def test_a_hybrid_of_all_blocks_equals_one_rank(ranks: Any, case: Case) -> None:
    kinds, expected = set(read_model("tiny-hybrid")[1].symbols), set(BLOCKS)
    assert kinds == expected
    assert any(name.startswith("mtp.0.") for name in equal_to_one_rank(ranks, case).gradients)


HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6}
SIZES = {"vocab_size": 37, "hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 2, "initializer_range": 0.3}
MILDER = {**SIZES, "initializer_range": 0.2}  # the experts of these scale what they add, and so its rounding
VARIANTS = {
    "mistral": MistralConfig(**SIZES, **HEADS, sliding_window=5),
    "qwen2": Qwen2Config(**SIZES, num_attention_heads=4, num_key_value_heads=1, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SIZES, **HEADS, tie_word_embeddings=False),
    "olmo3": Olmo3Config(
        **SIZES,
        num_attention_heads=4,
        num_key_value_heads=2,
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=5,
        pad_token_id=0,
    ),
    "nemotron_h": NemotronHConfig(
        **{name: size for name, size in SIZES.items() if name != "num_hidden_layers"} | {"initializer_range": 0.1},
        **HEADS,
        layers_block_type=["linear_attention", "moe", "full_attention", "mlp"],
        mamba_num_heads=8,
        mamba_head_dim=4,
        ssm_state_size=6,
        n_groups=2,
        chunk_size=5,
        time_step_min=0.2,
        time_step_max=0.9,
        layer_norm_epsilon=1e-3,
        n_routed_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=12,
        moe_shared_expert_intermediate_size=10,
        moe_latent_size=8,
    ),
    "qwen3_moe": Qwen3MoeConfig(
        **SIZES,
        **HEADS,
        moe_intermediate_size=12,
        num_experts=6,
        num_experts_per_tok=3,
        norm_topk_prob=False,
        mlp_only_layers=[1],
        output_router_logits=True,
        router_aux_loss_coef=0.5,
        tie_word_embeddings=True,
    ),
    "qwen3_next": Qwen3NextConfig(
        **SIZES | {"initializer_range": 0.2},
        **HEADS,
        rms_norm_eps=1e-3,
        rope_parameters={"rope_type": "default", "rope_theta": 1e3, "partial_rotary_factor": 0.4},
        layer_types=["linear_attention", "full_attention"],
        linear_num_key_heads=4,
        linear_num_value_heads=8,
        linear_key_head_dim=5,
        linear_value_head_dim=3,
        num_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=12,
        shared_expert_intermediate_size=10,
        mlp_only_layers=[1],
    ),
    "deepseek_v3": DeepseekV3Config(
        **MILDER,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=10,
        kv_lora_rank=7,
        qk_nope_head_dim=5,
        qk_rope_head_dim=4,
        v_head_dim=3,
        moe_intermediate_size=12,
        n_routed_experts=6,
        num_experts_per_tok=3,
        n_group=3,
        topk_group=2,
        first_k_dense_replace=1,
    ),
    "gpt_oss": GptOssConfig(**MILDER, **HEADS, sliding_window=5, num_local_experts=6, num_experts_per_tok=2),
}


def odd_models() -> list[Any]:
    """Every family in every layout. `make test` has the others of them with adapters, in test_lora.py."""
    quick = ("olmo3", "qwen3_next")
    layouts = (Layout(tp=2), Layout(cp=2, tp=2), Layout(pp=2, tp=2), Layout(tp=4), Layout(dp_shard=2, cp=2))
    parameters = []
    for layout in (*layouts, Layout(tp=2, cp=2, ep=2)):
        for family in VARIANTS:
            mark = pytest.mark.slow if layout == Layout(pp=2, tp=2) and family in quick else pytest.mark.thorough
            parameters.append(pytest.param(layout, family, id=f"{label(layout)}-{family}", marks=mark))
    return parameters


@pytest.mark.parametrize(("layout", "family"), odd_models())
def test_odd_models_equal_one_rank(ranks: Any, layout: Layout, family: str) -> None:
    """Sizes that divide unevenly, fewer key heads than ranks, windows, and norms per head and over all heads."""
    equal_to_one_rank(ranks, Case(VARIANTS[family], layout=layout, objective="gspo"))


def with_options() -> list[Any]:
    """Tied and untied heads, recompute, overlapped and deferred passes, and router losses."""
    dense, moe = config("tiny-dense", num_hidden_layers=2), config("tiny-moe", num_hidden_layers=2)
    # Balance and z losses that dominate the router's gradient, in an MTP depth too.
    experts = MoEConfig(experts=6, top_k=2, intermediate_size=12, balance_coefficient=0.5, z_coefficient=0.1)
    auxiliary = small_config("[*E]{2}/[*E]", blocks={"E": experts})
    often = [
        *((dense, "pp=2", {"objective": "sft", "tied": tied}) for tied in (True, False)),
        (moe, "pp=2,cp=2", {"recompute": "full"}),
        ("tiny-moe", "dp_shard=2,ep=2", {"overlap": True, "initializer_range": 0.1}),
        (auxiliary, "tp=2,ep=2", {"objective": "sft"}),
    ]
    thorough = [
        *((auxiliary, layout, {"objective": "sft"}) for layout in ("dp_shard=2", "cp=2")),
        (moe, "dp_shard=2,ep=2", {"recompute": "selective"}),
        *(
            (model, layout, {"overlap": overlap, "initializer_range": 0.1})
            for model, layout, overlap in (
                ("tiny-hybrid", "dp_replicate=2,dp_shard=2,ep=2", True),
                ("tiny-hybrid", "tp=2,pp=2,cp=2,ep=2", True),
                ("tiny-moe", "pp=2,vpp=2", True),
                ("tiny-moe", "pp=4", "zero_bubble"),
                ("tiny-hybrid", "tp=2,pp=2,cp=2,ep=2", "zero_bubble"),
            )
        ),
    ]
    return [
        *(pytest.param(*case, marks=pytest.mark.slow, id=f"{case[1]}-{case[2]}") for case in often),
        *(pytest.param(*case, marks=pytest.mark.thorough) for case in thorough),
    ]


@pytest.mark.parametrize(("source", "layout", "options"), with_options())
def test_options_change_no_result(ranks: Any, source: Any, layout: str, options: dict[str, Any]) -> None:
    equal_to_one_rank(ranks, Case(source, layout=Layout.parse(layout), **options))


@pytest.mark.slow
def test_bf16_layout_equals_one_rank_with_replayed_routing(ranks: Any) -> None:
    """Without replay, rounding would send a few tokens to other experts."""
    case = Case("tiny-moe", layout=Layout(tp=2), compute_dtype=torch.bfloat16, initializer_range=0.1)
    report = ranks(2, verify, case)[0]
    loads = {name: off for name, off in report.layer_metrics.items() if name.endswith("/load")}
    assert len(loads) == 4
    assert set(loads.values()) == {0.0}
    assert not any("routing_changed" in name for name in report.layer_metrics)
