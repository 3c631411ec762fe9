"""Adapters in PEFT's file format: round trips, refusals, and peft itself."""

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from postlude.hf.builtin import tiny_hybrid
from postlude.hf.export import export_hf
from postlude.hf.linear_layers import adapter_configs
from postlude.hf.load import load_model
from postlude.hf.peft import base_entries, read_adapter, to_peft, write_adapter
from postlude.hf.read_peft import READ, WITHOUT_EFFECT, check_supported, from_peft
from postlude.lora import AdapterConfig, LoRA
from tests.hf.adapters import Pair, random_adapters, small_model
from tests.hf.families import CONFIGS, saved_model

FAMILIES = [
    "llama-biases",
    "qwen3",
    "qwen3_moe",
    "gpt_oss",
    "deepseek_v3",
    "nemotron_h",
    "qwen3_next",
    "granitemoehybrid",
]


@pytest.mark.parametrize("experts", ["shared_outer", "per_expert"])
@pytest.mark.parametrize("name", [*FAMILIES, "nemotron_h-latent", "qwen3_5_moe_text", "mamba2"])
def test_adapters_round_trip_bit_exactly(name, experts, tmp_path):
    family, config = small_model(name)
    configs = adapter_configs(LoRA(rank=3, alpha=5, experts=experts), config, family)
    adapters = random_adapters(config, configs)
    written = to_peft(adapters, configs, config, family)
    write_adapter(tmp_path, *written)
    found_configs, adapters_read = from_peft(*read_adapter(tmp_path), config, family)
    assert found_configs == configs
    assert adapters_read.keys() == adapters.keys()
    for layer, (a, b) in adapters.items():
        assert torch.equal(adapters_read[layer][0], a), layer
        assert torch.equal(adapters_read[layer][1], b), layer
    written_again = to_peft(adapters_read, found_configs, config, family)
    assert written_again[0] == written[0]
    assert written_again[1].keys() == written[1].keys()
    assert all(torch.equal(written_again[1][key], tensor) for key, tensor in written[1].items())


def test_base_model_revision_is_stored_separately(tmp_path):
    assert base_entries("org/base@v2") == {"base_model_name_or_path": "org/base", "revision": "v2"}
    directory = tmp_path / "base@v2"
    directory.mkdir()
    assert base_entries(str(directory)) == {"base_model_name_or_path": str(directory)}
    assert base_entries(None) == {"base_model_name_or_path": None}


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3", "nemotron_h"])
def test_router_embedding_and_head_are_written_and_read(name, tmp_path):
    family, config = small_model(name)
    configs = adapter_configs(LoRA(rank=3, targets="router,embedding,head"), config, family)
    adapters = random_adapters(config, configs)
    write_adapter(tmp_path, *to_peft(adapters, configs, config, family))
    found_configs, adapters_read = from_peft(*read_adapter(tmp_path), config, family)
    assert found_configs == configs
    assert all(
        torch.equal(first, second)
        for layer in adapters
        for first, second in zip(adapters_read[layer], adapters[layer], strict=True)
    )


@pytest.mark.parametrize("separate", [False, True])
def test_stacked_and_separate_experts_are_read(separate):
    family, config = small_model("nemotron_h")
    configs = adapter_configs(LoRA(rank=2, targets="experts"), config, family)
    adapters = random_adapters(config, configs)
    adapter_config, tensors = to_peft(adapters, configs, config, family, separate_experts=separate)
    assert any(".experts.3.up_proj." in key for key in tensors) == separate
    found_configs, adapters_read = from_peft(adapter_config, tensors, config, family)
    assert found_configs == configs
    assert all(
        torch.equal(*sides) for name in adapters for sides in zip(adapters_read[name], adapters[name], strict=True)
    )


def test_different_ranks_are_written_with_their_scales():
    family, config = small_model("deepseek_v3")
    ranks = {"experts": 2, "experts.down_proj": 5, "q_b_proj": 1, "1.mlp.shared_experts.up_proj": 6}
    lora = LoRA(rank=3, alpha=7, rslora=True, ranks=ranks, alphas={"mlp": 11})
    configs = adapter_configs(lora, config, family)
    assert from_peft(*to_peft(random_adapters(config, configs), configs, config, family), config, family)[0] == configs


def test_adapter_of_a_fused_module_is_split_by_rows():
    family, config = small_model("nemotron_h")
    lora = LoRA(rank=4, alpha=8, targets="in_proj")
    configs = adapter_configs(lora, config, family)
    adapter_config, tensors = to_peft(random_adapters(config, configs), configs, config, family)
    adapter_config |= {"r": 5, "lora_alpha": 10, "rank_pattern": {}, "alpha_pattern": {}}
    a, b = torch.randn(5, 48), torch.randn(tensors[next(key for key in tensors if "lora_B" in key)].shape[0], 5)
    tensors = {key: a if "lora_A" in key else b for key in tensors}
    found_configs, adapters_read = from_peft(adapter_config, tensors, config, family)
    parts = [adapters_read[f"layers.0.mamba.{name}_proj"] for name in ("z", "x", "b", "c", "dt")]
    assert all(torch.equal(part_a, a) for part_a, _ in parts)
    assert torch.equal(torch.cat([part_b for _, part_b in parts]), b)
    assert {config.scale for config in found_configs.values()} == {2.0}


@pytest.mark.parametrize(
    ("change", "rename", "message"),
    [
        ({"use_dora": True}, None, "use_dora=True"),
        ({"alora_invocation_tokens": [11, 12]}, None, r"alora_invocation_tokens=\[11, 12\]"),
        ({"lora_bias": True}, None, "lora_bias=True"),
        ({"modules_to_save": ["lm_head"]}, None, "modules_to_save="),
        ({"init_lora_weights": "pissa"}, None, "changes the model's own weights"),
        ({"peft_type": "IA3"}, None, "peft_type IA3"),
        ({"r": None}, None, "r=None, but it is a number above 0"),
        ({"lora_alpha": "8"}, None, "lora_alpha='8', but it is a number above 0"),
        ({"r": 4}, None, r"has A \(3, 48\).* ask for \(4, 48\)"),
        ({"target_modules": ["q_proj", "k_proj"]}, None, 'names "k_proj", but its file has no weights for 2 of 2'),
        ({"target_modules": ["q_proj", "query"]}, None, 'names "query", which takes no adapter.* There are down_proj'),
        ({}, ("self_attn.q_proj", "self_attn.query_proj"), 'query_proj, .*did you mean "q_proj"'),
        ({}, ("layers.1.", "layers.7."), r"layers\.7\.self_attn\.q_proj"),
        ({}, ("1.self_attn.q_proj.lora_B", "1.self_attn.q_proj.lora_C"), "lora_C"),
        ({}, ("1.self_attn.q_proj", "0.self_attn.q_proj"), "1 of 2 such modules: model.layers.1"),
    ],
)
def test_an_adapter_that_cannot_be_read_is_refused(change, rename, message):
    family, config = small_model("qwen3")
    configs = adapter_configs(LoRA(rank=3, targets="q_proj"), config, family)
    adapter_config, tensors = to_peft(random_adapters(config, configs), configs, config, family)
    renamed = {key.replace(*rename) if rename else key: tensor for key, tensor in tensors.items()}
    with pytest.raises(ValueError, match=message):
        from_peft(adapter_config | change, renamed, config, family)


def test_every_field_of_pefts_config_is_read_refused_or_known_to_have_no_effect():
    """The fields that are refused at other values than peft's default are those of other kinds of adapters."""
    default = pytest.importorskip("peft").LoraConfig(r=3, target_modules=["q_proj"]).to_dict()
    check_supported(default)
    refused = set()
    for name in default.keys() - READ - WITHOUT_EFFECT:
        with pytest.raises(ValueError, match=f"the adapter has {name}=.* is not supported"):
            check_supported(default | {name: [11, 12]})
        refused.add(name)
    assert {"alora_invocation_tokens", "use_dora", "use_qalora", "modules_to_save", "layer_replication"} <= refused


def test_missing_experts_matrices_and_files_are_refused(tmp_path):
    family, config = small_model("qwen3_moe")
    configs = adapter_configs(LoRA(rank=2, targets="experts"), config, family)
    adapter_config, tensors = to_peft(random_adapters(config, configs), configs, config, family)
    expert = "base_model.model.model.layers.0.mlp.experts.2.up_proj.lora_"
    incomplete = {key: tensor for key, tensor in tensors.items() if not key.startswith(expert)}
    with pytest.raises(ValueError, match=r"4 of the 5 experts of layers.0.moe.experts.up_proj: 2 is missing"):
        from_peft(adapter_config, incomplete, config, family)
    with pytest.raises(ValueError, match="lora_A alone"):
        from_peft(adapter_config, {key: t for key, t in tensors.items() if key != f"{expert}B.weight"}, config, family)
    with pytest.raises(ValueError, match="only one of adapter and config"):
        to_peft({}, configs, config, family)
    with pytest.raises(FileNotFoundError, match=r"no adapter_config.json and no adapter_model.safetensors"):
        read_adapter(tmp_path)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("adapter_model.safetensors", b"", r"adapter_model\.safetensors is not a readable safetensors file"),
        ("adapter_model.safetensors", b"\x08" + bytes(9), r"adapter_model\.safetensors is not a readable safetensors"),
        ("adapter_config.json", b"{", r"adapter_config\.json is not JSON .*Fetch it again"),
        ("adapter_config.json", b"[]", r"adapter_config\.json holds a JSON list, but a config is an object"),
    ],
)
def test_error_names_damaged_adapter_files(tmp_path, file, content, message):
    write_adapter(tmp_path, {"r": 1}, {"a": torch.zeros(2)})
    (tmp_path / file).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_adapter(tmp_path)


TOKENS = torch.arange(22).view(2, 11) * 37 % 61
TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}  # logits of about 10, in fp32


@torch.no_grad()
def merged_logits(base: Path, configs: Mapping[str, AdapterConfig], adapters: Mapping[str, Pair]) -> Tensor:
    """Returns transformers' logits of our exported model with W + scale · B · A for every weight."""
    model = load_model(base)
    for name, (a, b) in adapters.items():
        model.get_submodule(name).weight += configs[name].scale * (b @ a)
    export_hf(model, base.parent / "merged")
    merged = AutoModelForCausalLM.from_pretrained(
        base.parent / "merged", dtype=torch.float32, attn_implementation="eager"
    )
    logits: Tensor = merged.eval()(TOKENS).logits
    return logits


MIXED = {"rank": 4, "alpha": 5, "rslora": True, "ranks": {"attention": 2}, "alphas": {"attention": 7}}
SOME_LAYERS = {"targets": ("2.mlp.experts", "1.mlp.shared_experts.up_proj", "0.mlp.gate_proj"), "ranks": {"experts": 2}}
EVERY_LAYER = {"rank": 3, "targets": "all,router,embedding,head", "ranks": {"lm_head": 2, "embedding": 5, "router": 4}}
DIFFERENT_LAYERS = {"rank": 4, "ranks": {"1.mlp.experts": 2, "experts.down_proj": 3, "1.mlp.experts.down_proj": 5}}


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        *((name, MIXED) for name in (*FAMILIES, "mamba2", "qwen3_5_moe_text", "glm4_moe")),
        *((name, EVERY_LAYER) for name in ("qwen3_moe", "nemotron_h", "granitemoehybrid")),
        ("gpt_oss", {"rank": 3, "targets": "router,head"}),
        ("deepseek_v3", SOME_LAYERS),
        ("deepseek_v3", DIFFERENT_LAYERS),
    ],
)
@torch.no_grad()
def test_peft_logits_equal_the_merged_model(name, settings, tmp_path):
    peft = pytest.importorskip("peft")
    family, config = small_model(name)
    hf_model = saved_model(CONFIGS[name](), tmp_path / "base")
    plain = hf_model(TOKENS).logits
    configs = adapter_configs(LoRA(**settings), config, family)
    adapters = random_adapters(config, configs)
    write_adapter(tmp_path / "adapter", *to_peft(adapters, configs, config, family))
    logits = peft.PeftModel.from_pretrained(hf_model, tmp_path / "adapter").eval()(TOKENS).logits
    expected = merged_logits(tmp_path / "base", configs, adapters)
    assert (expected - plain).abs().max() > 0.5
    torch.testing.assert_close(logits, expected, **TOLERANCE)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("llama-biases", {"target_modules": "all-linear", "use_rslora": True}),
        ("qwen3_moe", {"target_modules": ["q_proj", "gate_proj", "up_proj", "down_proj"]}),
        ("deepseek_v3", {"target_modules": ["kv_b_proj"], "target_parameters": ["mlp.experts.down_proj"]}),
        (
            "nemotron_h",
            {
                "target_modules": ["in_proj", "v_proj"],
                "target_parameters": ["mixer.experts.up_proj", "mixer.experts.down_proj"],
                "rank_pattern": {"in_proj": 5},
            },
        ),
        ("qwen3_moe", {"target_modules": ["lm_head", "embed_tokens", "q_proj"], "target_parameters": ["gate.weight"]}),
        ("gpt_oss", {"target_modules": ["o_proj"], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}),
    ],
)
@torch.no_grad()
def test_adapter_written_by_peft_is_read(name, settings, tmp_path):
    peft = pytest.importorskip("peft")
    family, config = small_model(name)
    hf_model = saved_model(CONFIGS[name](), tmp_path / "base")
    torch.manual_seed(0)
    adapter = peft.LoraConfig(r=4, lora_alpha=9, init_lora_weights=False, task_type="CAUSAL_LM", **settings)
    model = peft.get_peft_model(hf_model, adapter).eval()
    model.save_pretrained(tmp_path / "adapter")
    configs, adapters = from_peft(*read_adapter(tmp_path / "adapter"), config, family)
    torch.testing.assert_close(model(TOKENS).logits, merged_logits(tmp_path / "base", configs, adapters), **TOLERANCE)


def test_mtp_depths_are_in_the_file():
    family, config = small_model("deepseek_v3")
    config = family.with_mtp(config, 1)
    configs = adapter_configs(LoRA(rank=2), config, family)
    assert "mtp.0.layers.0.latent_attention.o_proj" in configs
    adapter_config, tensors = to_peft(random_adapters(config, configs), configs, config, family)
    assert from_peft(adapter_config, tensors, config, family)[0] == configs
    trunk = {name: adapter for name, adapter in configs.items() if not name.startswith("mtp.")}
    adapter_config, tensors = to_peft(random_adapters(config, trunk), trunk, config, family)
    assert "o_proj" in adapter_config["target_modules"]
    assert from_peft(adapter_config, tensors, config, family)[0] == trunk


def test_file_without_a_family_has_postlude_names():
    config = tiny_hybrid()
    configs = adapter_configs(LoRA(rank=2), config, None)
    adapters = random_adapters(config, configs)
    found_configs, adapters_read = from_peft(*to_peft(adapters, configs, config, None), config, None)
    assert found_configs == configs
    assert all(
        torch.equal(*sides) for name in adapters for sides in zip(adapters_read[name], adapters[name], strict=True)
    )
