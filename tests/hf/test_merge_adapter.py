"""`postlude convert ADAPTER BASE DST`: the merged model equals peft's, rounded once; invalid adapters are refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from postlude import AdamW, Engine, export_hf, load_model, ranks
from postlude.cli import main
from postlude.engine.adapters import add_adapter, export_adapter
from postlude.hf.linear_layers import adapter_configs
from postlude.hf.peft import to_peft, write_adapter
from postlude.lora import LoRA
from tests.equality import assert_equal
from tests.hf.adapters import random_adapters, small_model
from tests.hf.families import CONFIGS

FAMILIES = ["llama-biases", "qwen3_moe", "gpt_oss", "nemotron_h"]


def weights(directory: Path) -> dict[str, Tensor]:
    return load_file(directory / "model.safetensors")


def make(name: str, directory: Path, dtype: torch.dtype = torch.float32, lora: LoRA | None = None) -> None:
    """Writes a base and an adapter of it."""
    family, config = small_model(name)
    export_hf(load_model(CONFIGS[name](), dtype=dtype), directory / "base")
    configs = adapter_configs(lora or LoRA(rank=3, alpha=5), config, family)
    write_adapter(directory / "adapter", *to_peft(random_adapters(config, configs), configs, config, family))


def convert(directory: Path, *words: str) -> int:
    return main(["convert", str(directory / "adapter"), str(directory / "base"), str(directory / "merged"), *words])


@pytest.mark.parametrize("name", FAMILIES)
def test_merged_model_equals_peft(name: str, tmp_path: Path, capsys: Any) -> None:
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    make(name, tmp_path)
    assert convert(tmp_path) == 0
    assert "merged " in capsys.readouterr().out
    hf_model = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    merged = peft.PeftModel.from_pretrained(hf_model, tmp_path / "adapter").merge_and_unload()
    merged_state = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32).state_dict()
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32).state_dict()
    assert merged_state.keys() == merged.state_dict().keys()
    for key, tensor in merged.state_dict().items():
        assert_equal(merged_state[key], tensor, key)
    changed = [key for key in merged_state if not torch.equal(merged_state[key], base[key])]
    assert any("q_proj" in key for key in changed)
    assert not any("norm" in key or "embed" in key for key in changed)


def test_a_bf16_base_is_merged_in_fp32_and_rounded_once(tmp_path: Path) -> None:
    make("qwen3", tmp_path, torch.bfloat16)
    assert convert(tmp_path) == 0
    rounded = weights(tmp_path / "merged")
    assert {tensor.dtype for tensor in rounded.values()} == {torch.bfloat16}
    assert (
        main(
            ["convert", str(tmp_path / "adapter"), str(tmp_path / "base"), str(tmp_path / "wide"), "--dtype", "float32"]
        )
        == 0
    )
    for name, tensor in weights(tmp_path / "wide").items():
        assert torch.equal(rounded[name], tensor.to(torch.bfloat16)), name


def test_run_checkpoint_merges_into_its_own_base_only(tmp_path: Path, capsys: Any) -> None:
    from tests.engine.training import batch, policy

    peft = pytest.importorskip("peft")
    config = CONFIGS["qwen3"]()
    config.vocab_size = 256
    for seed in (0, 1):
        export_hf(load_model(config, seed=seed), tmp_path / f"base{seed}")
    with ranks():
        engine = Engine(tmp_path / "base0", budget=64, optimizer=AdamW(lr=1e-2), lora=LoRA(rank=2))
        for seed in range(2):
            engine.forward_backward(batch(seed), policy)
            engine.optimizer_step()
        engine.save(tmp_path / "checkpoint")
        engine.export_hf(tmp_path / "exported")
        export_adapter(engine, tmp_path / "adapter", base=str(tmp_path / "base0"))
        add_adapter(engine, "other", LoRA(rank=3))
        engine.save(tmp_path / "several")
    assert main(["convert", str(tmp_path / "several"), str(tmp_path / "base0"), str(tmp_path / "other")]) == 2
    assert "has several adapters (other), and one can be merged" in capsys.readouterr().err
    assert not (tmp_path / "other").exists()
    by_peft = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter").merge_and_unload().state_dict()
    for name, tensor in weights(tmp_path / "exported").items():
        assert_equal(by_peft[name], tensor, name)
    for adapter in ("checkpoint", "adapter"):
        assert (
            main(["convert", str(tmp_path / adapter), str(tmp_path / "base0"), str(tmp_path / f"from-{adapter}")]) == 0
        )
        merged, expected = weights(tmp_path / f"from-{adapter}"), weights(tmp_path / "exported")
        assert all(torch.equal(merged[name], tensor) for name, tensor in expected.items())
        assert not all(torch.equal(merged[name], tensor) for name, tensor in weights(tmp_path / "base0").items())
    capsys.readouterr()
    assert main(["convert", str(tmp_path / "checkpoint"), str(tmp_path / "base1"), str(tmp_path / "other")]) == 2
    assert "has adapters of another base model: its weights have the fingerprint" in capsys.readouterr().err
    assert not (tmp_path / "other").exists()
    assert main(["convert", str(tmp_path / "checkpoint"), str(tmp_path / "other")]) == 2
    assert "is an adapter, which has no weights of a model: give its base too" in capsys.readouterr().err


def test_adapter_that_does_not_fit_is_refused_without_output(tmp_path: Path, capsys: Any) -> None:
    make("qwen3", tmp_path, lora=LoRA(rank=2, targets="q_proj,k_proj"))
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    adapter_tensors = load_file(file)

    def refusal(tensors: dict[str, Tensor], *words: str) -> str:
        save_file(tensors, file)
        assert convert(tmp_path, *words) == 2
        assert not (tmp_path / "merged").exists()
        return str(capsys.readouterr().err)

    incomplete = {name: tensor for name, tensor in adapter_tensors.items() if "layers.1.self_attn.k_proj" not in name}
    assert 'names "k_proj", but its file has no weights for 1 of 2 such modules' in refusal(incomplete)
    renamed = {name.replace("self_attn", "attention"): tensor for name, tensor in adapter_tensors.items()}
    message = refusal(renamed)
    assert "which takes no adapter here" in message
    assert "There are down_proj, embed_tokens, gate_proj" in message
    assert "--pattern changes the model that an adapter was made for" in refusal(
        adapter_tensors, "--pattern", "[*-]{2}"
    )
    (tmp_path / "merged").mkdir()
    (tmp_path / "merged" / "config.json").write_text("{}")
    save_file(adapter_tensors, file)
    assert convert(tmp_path) == 2
    assert "holds a model already" in capsys.readouterr().err


def test_info_describes_an_adapter_without_its_base(tmp_path: Path, capsys: Any) -> None:
    make("qwen3", tmp_path, lora=LoRA(rank=2, alpha=3, targets="q_proj,k_proj"))
    assert main(["info", str(tmp_path / "adapter")]) == 0
    shown_text = capsys.readouterr().out
    count = sum(tensor.numel() for tensor in load_file(tmp_path / "adapter" / "adapter_model.safetensors").values())
    assert f"a LORA adapter, {count:,} parameters in float32" in shown_text
    assert "rank     2, alpha 3, scaled by alpha / rank" in shown_text
    assert "targets  k_proj, q_proj: 4 matrices" in shown_text
