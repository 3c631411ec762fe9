"""GPT-OSS's MXFP4 files are read as the bf16 weights that transformers dequantises."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import GptOssConfig
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from postlude import export_hf, load_model
from postlude.hf.gpt_oss import dequantise
from postlude.hf.load import check_weights
from tests.hf.attention_families import SINKS
from tests.hf.families import saved_model

CONFIG = GptOssConfig(
    **SINKS | {"hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2},
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=10,
    dtype="bfloat16",
)


def packed_blocks(experts: int, out: int, width: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Returns random bytes with every exponent that is finite in bf16, including the extremes."""
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(256, (experts, out, width // 32, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(252, (experts, out, width // 32), generator=generator, dtype=torch.uint8)
    scales.view(-1)[:2] = torch.tensor([0, 252])
    return blocks, scales


def test_dequantisation_equals_transformers_for_every_byte_and_exponent() -> None:
    blocks, scales = packed_blocks(3, 50, 320)
    assert blocks.unique().numel() == 256
    assert scales.unique().numel() > 200
    dequantised = dequantise(blocks, scales)
    assert dequantised.shape == (3, 320, 50)
    assert dequantised.dtype == torch.bfloat16
    assert torch.equal(dequantised, convert_moe_packed_tensors(blocks, scales))


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A model as OpenAI publishes it: packed experts, the rest in bf16."""
    directory = tmp_path / "packed"
    saved_model(CONFIG, directory)
    file = directory / "model.safetensors"
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(file).items()}
    for seed, name in enumerate([name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]):
        experts, width, out = tensors.pop(name).shape
        blocks, scales = packed_blocks(experts, out, width, seed)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": (scales % 12) + 117}  # numbers of a weight's size
    save_file(tensors, file, metadata={"format": "pt"})
    settings = json.loads((directory / "config.json").read_text())
    settings |= {"quantization_config": {"quant_method": "mxfp4"}, "dtype": "bfloat16"}
    (directory / "config.json").write_text(json.dumps(settings))
    return directory


def test_packed_files_are_loaded_and_exported_unpacked(directory: Path, tmp_path: Path) -> None:
    hf_tensors = load_file(directory / "model.safetensors")
    model = load_model(directory)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert check_weights(directory) == len(hf_tensors) - 4  # blocks and scales are one
    exported = export_hf(model, tmp_path / "exported")
    assert "quantization_config" not in json.loads((exported / "config.json").read_text())
    exported_tensors = load_file(exported / "model.safetensors")
    for name, tensor in exported_tensors.items():
        if f"{name}_blocks" in hf_tensors:
            tensor_of_theirs = convert_moe_packed_tensors(hf_tensors[f"{name}_blocks"], hf_tensors[f"{name}_scales"])
        else:
            tensor_of_theirs = hf_tensors[name]
        assert torch.equal(tensor, tensor_of_theirs), name
    reloaded = load_model(exported)
    assert all(
        torch.equal(a, b) for a, b in zip(model.state_dict().values(), reloaded.state_dict().values(), strict=True)
    )


def test_error_names_a_missing_block(directory: Path) -> None:
    file = directory / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.experts.down_proj_scales"]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"lacks 1 tensor\(s\) .*: model\.layers\.1\.mlp\.experts\.down_proj\."):
        load_model(directory)


def test_other_packings_are_refused(directory: Path) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": {"quant_method": "awq"}}))
    with pytest.raises(ValueError, match=r"quantised by 'awq' .* load a version in bf16, fp32 or mxfp4"):
        load_model(directory)
