"""The context length of a model, as transformers and vLLM understand its config."""

from dataclasses import replace
from typing import Any

import pytest

from postlude.hf.builtin import BUILTIN
from postlude.hf.read_model import context_length, model_from_hf, read_model
from postlude.model import ModelConfig, Pattern

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}


def with_settings(**settings: Any) -> ModelConfig:
    _, config = read_model("tiny-dense")
    return replace(config, hf_config={**config.hf_config, **settings})


@pytest.mark.parametrize(
    ("rope", "expected"),
    [
        ({"rope_type": "default"}, 2048),
        ({"rope_type": "linear", "factor": 4.0}, 8192),
        ({"rope_type": "dynamic", "factor": 2.0}, 4096),
        (YARN, 4096),  # the factor multiplies the original length, whatever is stated
        ({**YARN, "factor": None}, 2048),  # transformers derives the factor from both lengths
        ({"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 256}, 2048),
        ({"rope_type": "longrope", "factor": 32.0, "original_max_position_embeddings": 64}, 2048),
        ({"sliding_attention": {"rope_type": "default"}, "full_attention": YARN}, 4096),
        ({}, 2048),
    ],
)
def test_context_length_follows_the_rope_scaling(rope: dict[str, Any], expected: int) -> None:
    assert context_length(with_settings(rope_parameters=rope)) == expected
    inside = {"max_position_embeddings": 2048, "rope_parameters": rope}
    assert context_length(with_settings(max_position_embeddings=None, text_config=inside)) == expected


def test_gemma3_states_its_length_as_extended() -> None:
    rope = {"full_attention": {"rope_type": "linear", "factor": 8.0}, "sliding_attention": {"rope_type": "default"}}
    assert context_length(with_settings(rope_parameters=rope, model_type="gemma3_text")) == 2048


def test_models_without_a_stated_position_limit_have_none() -> None:
    _, hybrid = read_model("tiny-hybrid")
    assert context_length(hybrid) is None
    assert context_length(with_settings(max_position_embeddings=None)) is None
    recurrent = replace(hybrid, pattern=Pattern.parse("M-"), hf_config={"max_position_embeddings": 16})
    assert context_length(recurrent) is None, "a scan has no positions"


def test_published_configs() -> None:
    transformers = pytest.importorskip("transformers")
    for model_type, expected in (("gpt_oss", 131072), ("mamba2", None)):
        config = transformers.AutoConfig.for_model(model_type, num_hidden_layers=2)
        assert context_length(model_from_hf(config)[1]) == expected
    assert context_length(model_from_hf(BUILTIN["tiny-moe"]())[1]) == 2048  # type: ignore[arg-type]
