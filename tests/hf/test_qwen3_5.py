"""The text model of a Qwen3.5 vision-language model: read as published, equal on text, and exported as itself."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
)

from postlude import Engine, export_hf, load_model, pack, ranks
from tests.equality import assert_equal
from tests.hf.families import HYBRID, SHARED, SMALL, randomise
from tests.hf.published import publish, save

VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "patch_size": 4}
VISION |= {"out_hidden_size": SMALL["hidden_size"], "num_position_embeddings": 16}
MODELS: dict[str, Any] = {
    "dense": (Qwen3_5Config, Qwen3_5ForConditionalGeneration, {**SMALL, **HYBRID}),
    "moe": (Qwen3_5MoeConfig, Qwen3_5MoeForConditionalGeneration, {**SHARED, **HYBRID}),
}


@pytest.mark.filterwarnings("ignore:1 tensor")  # of multi-token prediction
@pytest.mark.parametrize(("kind", "tied"), [("dense", True), ("moe", False)])
def test_text_model_equals_the_vision_language_model(kind: str, tied: bool, tmp_path: Path) -> None:
    config, model, text = MODELS[kind]
    text = {key: value for key, value in text.items() if kind == "dense" or key != "intermediate_size"}
    hf_model = model(config(text_config=text, vision_config=VISION, tie_word_embeddings=tied)).eval()
    randomise(hf_model, seed=0)
    source = tmp_path / "seeing"
    hf_model.config.save_pretrained(source)
    # As they are published: the module's own names, experts stacked, and what predicts further beside them.
    tensors = {
        name: tensor for name, tensor in hf_model.state_dict().items() if not (tied and name == "lm_head.weight")
    }
    save_file({**tensors, "mtp.fc.weight": torch.zeros(2, 2)}, source / "model.safetensors")

    tokens = torch.arange(3, 20)
    expected = hf_model(tokens[None]).logits[0]
    with pytest.warns(UserWarning, match=r"named model\.visual\.… \(vision\), are left out"):
        loaded = load_model(source)
    (microbatch,) = pack([tokens], budget=32)
    assert_equal(loaded(microbatch), expected, "logits")

    exported = export_hf(loaded, tmp_path / "text")
    reloaded = AutoModelForCausalLM.from_pretrained(exported, attn_implementation="eager")
    assert reloaded.config.model_type == f"{hf_model.config.model_type}_text"
    assert_equal(reloaded(tokens[None]).logits[0], expected, "logits of the text model")
    with ranks():
        with pytest.warns(UserWarning, match="are left out"):
            engine = Engine(source)
        engine.export_hf(tmp_path / "engine")
        streamed = {name: tensor.clone() for name, tensor in engine.stream_weights()}
    first, second = (load_file(tmp_path / which / "model.safetensors") for which in ("text", "engine"))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    # What a server of the model that sees is given goes by its names, bit by bit.
    assert streamed.keys() == {name for name in tensors if "visual" not in name}
    assert all(torch.equal(streamed[name], tensors[name]) for name in streamed)


@pytest.mark.filterwarnings("ignore:.*vision")
@pytest.mark.parametrize(("kind", "stacked"), [("dense", True), ("moe", True), ("moe", False)])
def test_mtp_of_a_vision_language_model(kind: str, stacked: bool, tmp_path: Path) -> None:
    """MTP experts are published stacked and separately; a server gets them stacked."""
    config, model, text = MODELS[kind]
    text = {key: value for key, value in text.items() if kind == "dense" or key != "intermediate_size"}
    hf_model = model(config(text_config=text, vision_config=VISION)).eval()
    randomise(hf_model, seed=0)
    published = publish("qwen3_5_text" if kind == "dense" else "qwen3_5_moe_text", tmp_path / "text")
    ahead = dict(published.tensors) if not stacked else stacked_experts(published.tensors)
    hf_model.config.save_pretrained(tmp_path / "seeing")
    save(tmp_path / "seeing", {**hf_model.state_dict(), **ahead})
    with ranks():
        engine = Engine(tmp_path / "seeing", mtp=True)
        streamed = {name: tensor.clone() for name, tensor in engine.stream_weights()}
        engine.export_hf(tmp_path / "exported")
    expected = {**hf_model.state_dict(), **stacked_experts(published.tensors)}
    assert streamed.keys() == {name for name in expected if "visual" not in name}
    assert all(torch.equal(streamed[name], expected[name]) for name in streamed)
    exported = load_file(tmp_path / "exported" / "model.safetensors")
    assert all(torch.equal(exported[name], tensor) for name, tensor in published.tensors.items())
    reloaded = load_model(tmp_path / "exported", mtp=True)
    assert reloaded.config.family == f"{hf_model.config.model_type}_text"
    assert len(reloaded.config.pattern.mtp) == 1
    if not stacked:
        del ahead["mtp.layers.0.mlp.experts.2.up_proj.weight"]
        save(tmp_path / "seeing", {**hf_model.state_dict(), **ahead})
        with pytest.raises(ValueError, match=r"the source lacks mtp\.layers\.0\.mlp\.experts\.2\.up_proj\.weight, but"):
            load_model(tmp_path / "seeing", mtp=True)


def stacked_experts(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns the same tensors with the experts of a layer stacked, each expert's gate before its up."""
    fused_tensors = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    stem = "mtp.layers.0.mlp.experts"
    count = len(tensors) - len(fused_tensors)
    if count:
        gate, up, down = (
            torch.stack([tensors[f"{stem}.{expert}.{which}_proj.weight"] for expert in range(count // 3)])
            for which in ("gate", "up", "down")
        )
        fused_tensors |= {f"{stem}.gate_up_proj": torch.cat((gate, up), dim=1), f"{stem}.down_proj": down}
    return fused_tensors
