"""Which layers LoRA targets select, and the adapter of each."""

import pytest

from postlude.hf.builtin import tiny_hybrid
from postlude.hf.linear_layers import adapter_configs
from postlude.lora import AdapterConfig, LoRA
from tests.hf.adapters import small_model


def adapted(name, targets, **settings):
    family, config = small_model(name)
    return adapter_configs(LoRA(targets=targets, **settings), config, family)


def leaves(configs):
    return {name.split(".", 2)[2] for name in configs}


MLP = {f"mlp.{name}_proj" for name in ("gate", "up", "down")}
SHARED = {f"moe.shared.{name}_proj" for name in ("gate", "up", "down")}
EXPERTS = {f"moe.experts.{name}_proj" for name in ("gate", "up", "down")}
LATENT = {f"latent_attention.{name}" for name in ("q_a_proj", "q_b_proj", "kv_a_proj", "kv_b_proj", "o_proj")}
MAMBA_IN = {f"mamba.{name}_proj" for name in ("z", "x", "b", "c", "dt")}
DELTA = {f"gated_delta.{name}_proj" for name in "qkvzba"}


@pytest.mark.parametrize(
    ("name", "targets", "layers"),
    [
        ("deepseek_v3", "attention", LATENT),
        ("deepseek_v3", "mlp", MLP | SHARED),
        ("deepseek_v3", "experts", EXPERTS),
        ("deepseek_v3", "all", LATENT | MLP | SHARED | EXPERTS),
        ("deepseek_v3", "mlp.experts", EXPERTS),
        ("deepseek_v3", ("experts.gate_proj", "experts.up_proj"), EXPERTS - {"moe.experts.down_proj"}),
        ("deepseek_v3", "experts.gate_up_proj", EXPERTS - {"moe.experts.down_proj"}),
        ("deepseek_v3", "down_proj", {"mlp.down_proj", "moe.shared.down_proj", "moe.experts.down_proj"}),
        ("deepseek_v3", "shared_experts.down_proj", {"moe.shared.down_proj"}),
        ("deepseek_v3", ("mlp.down_proj", "kv_a_proj_with_mqa"), {"mlp.down_proj", "latent_attention.kv_a_proj"}),
        ("gpt_oss", "mlp.experts.gate_up_proj", EXPERTS - {"moe.experts.down_proj"}),
        ("nemotron_h", "mixer.in_proj", MAMBA_IN),
        ("nemotron_h", "backbone.layers.0.mixer.in_proj", MAMBA_IN),
        ("nemotron_h", ("in_proj", "out_proj"), MAMBA_IN | {"mamba.out_proj"}),
        (
            "nemotron_h-latent",
            "mlp",
            {"moe.latent_down", "moe.latent_up", "moe.shared.up_proj", "moe.shared.down_proj"},
        ),
        ("qwen3_next", "in_proj_qkvz", {f"gated_delta.{name}_proj" for name in "qkvz"}),
        ("qwen3_next", "linear_attn.out_proj", {"gated_delta.out_proj"}),
        ("qwen3_next", "q_proj", {"attention.q_proj", "attention.gate_proj"}),
        ("qwen3_next", "shared_expert_gate", {"moe.shared.token_gate"}),
        ("qwen3_next", "mlp", SHARED),
        ("granitemoehybrid", "experts.gate_up_proj", EXPERTS - {"moe.experts.down_proj"}),
        ("granitemoehybrid", "shared_mlp.input_linear", SHARED - {"moe.shared.down_proj"}),
    ],
)
def test_targets_accept_hugging_face_layer_names(name, targets, layers):
    assert leaves(adapted(name, targets)) == layers


def test_full_name_selects_one_layer():
    assert list(adapted("qwen3", "model.layers.1.self_attn.q_proj")) == ["layers.1.attention.q_proj"]


def test_targets_without_a_family_use_postlude_names():
    configs = adapter_configs(LoRA(targets="all"), tiny_hybrid(), None)
    assert {name.rpartition(".")[0] for name in configs} == {
        *("layers.0.mamba", "layers.0.mlp", "layers.1.gated_delta", "layers.1.mlp", "layers.2.attention"),
        *("layers.2.moe.experts", "layers.3.latent_attention", "layers.4.attention", "layers.4.moe.experts"),
        *("mtp.0.layers.0.attention", "mtp.0.layers.0.mlp"),
    }
    assert list(adapter_configs(LoRA(targets="mtp.0.proj"), tiny_hybrid(), None)) == ["mtp.0.proj"]


def test_most_specific_rank_and_alpha_take_precedence():
    ranks = {"all": 2, "attention": 3, "q_proj": 4, "0.self_attn.q_proj": 5}
    configs = adapted("qwen3", "all", alpha=6.0, ranks=ranks, alphas={"v_proj": 12})
    assert configs["layers.0.mlp.up_proj"] == AdapterConfig(2, 3.0)
    assert configs["layers.0.attention.k_proj"] == AdapterConfig(3, 2.0)
    assert configs["layers.0.attention.v_proj"] == AdapterConfig(3, 4.0)
    assert configs["layers.1.attention.q_proj"] == AdapterConfig(4, 1.5)
    assert configs["layers.0.attention.q_proj"] == AdapterConfig(5, 1.2)


def test_expert_adapters_are_shared_as_configured():
    outer = {name.rpartition(".")[2]: config.shared for name, config in adapted("qwen3_moe", "experts").items()}
    assert outer == {"gate_proj": "a", "up_proj": "a", "down_proj": "b"}
    assert {config.shared for config in adapted("qwen3_moe", "experts", experts="per_expert").values()} == {""}
    assert {config.shared for config in adapted("qwen3_moe", "attention").values()} == {""}


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("qwen3", {"targets": "q_prj"}, 'targets names "q_prj", which is not a module .* did you mean "q_proj"'),
        (
            "qwen3",
            {"targets": "experts"},
            'names "experts", which is not a module .*There are all, attention, down_proj',
        ),
        ("qwen3", {"targets": ("q_proj", "k_projection")}, "k_projection"),
        ("qwen3", {"targets": "proj"}, 'names "proj"'),
        ("qwen3-tied-biases", {"targets": "lm_head"}, "the head is the embedding here"),
        ("qwen3-tied-biases", {"targets": "embed_tokens"}, "the head is the embedding here"),
        ("qwen3", {"targets": "router"}, "which is not a module"),
        ("qwen3", {"targets": "q_proj", "ranks": {"k_prj": 2}}, "ranks names .*k_prj"),
        ("qwen3", {"targets": "q_proj", "alphas": {"k_proj": 2}}, "alphas names .*does not adapt"),
        ("qwen3_moe", {"targets": "gate_proj"}, "gate_proj and up_proj are one matrix"),
        ("qwen3_moe", {"targets": "all", "ranks": {"experts.up_proj": 2}}, "give them the same rank"),
    ],
)
def test_target_that_cannot_be_adapted_is_refused(name, settings, message):
    with pytest.raises(ValueError, match=message):
        adapted(name, **settings)
