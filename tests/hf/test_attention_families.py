"""Loading of families with latent attention, sinks or scaled embeddings, besides parity with transformers."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from postlude import load_model
from tests.hf.families import CONFIGS, saved_model


@pytest.mark.parametrize("name", ["deepseek_v3", "glm4_moe"])
def test_skipped_mtp_layers_give_a_warning(name: str, tmp_path: Path) -> None:
    config = CONFIGS[name]()
    assert config.num_nextn_predict_layers == 1
    saved_model(config, tmp_path)
    expected = load_model(tmp_path).state_dict()
    file = tmp_path / "model.safetensors"
    extra = {"model.layers.3.eh_proj.weight": torch.ones(2, 2), "model.layers.3.enorm.weight": torch.ones(2)}
    save_file(load_file(file) | extra, file, metadata={"format": "pt"})
    with pytest.warns(UserWarning, match=r"2 tensor\(s\) .* named model\.layers\.3\.… \(multi-token prediction, "):
        state = load_model(tmp_path).state_dict()
    assert all(torch.equal(state[name], expected[name]) for name in expected)
    # A layer with nothing of a depth in it is one of a trunk that is longer than the config says.
    longer = {"model.layers.4.input_layernorm.weight": torch.ones(48)}
    save_file(load_file(file) | longer, file, metadata={"format": "pt"})
    with (
        pytest.warns(UserWarning, match="multi-token prediction"),
        pytest.raises(ValueError, match=r"no place for: model\.layers\.4\.input_layernorm\.weight"),
    ):
        load_model(tmp_path)


def test_gemma_embedding_scale_has_the_dtype_of_the_embedding(tmp_path: Path) -> None:
    hf_model = saved_model(CONFIGS["gemma3"](), tmp_path).bfloat16()
    model = load_model(tmp_path, dtype=torch.bfloat16)
    tokens = torch.arange(hf_model.config.vocab_size)
    assert torch.equal(model._embed(tokens), hf_model.model.embed_tokens(tokens))
    assert model.config.embedding_scale != torch.tensor(model.config.embedding_scale).bfloat16().item()
