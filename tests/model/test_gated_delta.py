"""Gated delta net: layouts equal one rank, packed sequences equal each alone, decode steps equal a full forward."""

from typing import Any

import pytest
import torch

from postlude import LanguageModel, Layout, ModelConfig
from postlude.generate.generator import Generator
from postlude.generate.sampling_params import SamplingParams
from postlude.model.blocks import GatedDeltaConfig
from postlude.verify.cases import Case
from tests.generate.test_generator import prompts, teacher_forced, tokens
from tests.meshes import equal_to_one_rank
from tests.model.small import assert_packed_equals_alone, small_config

LENGTHS = (9, 1, 14, 2, 3, 30)
KINDS = {
    "shared": GatedDeltaConfig(key_heads=4, value_heads=8, key_dim=5, value_dim=3, chunk=4),
    "alone": GatedDeltaConfig(key_heads=4, value_heads=4, key_dim=4, value_dim=6, conv_kernel=2),
    "three": GatedDeltaConfig(key_heads=2, value_heads=6, key_dim=6, value_dim=4, conv_kernel=1, chunk=16),
}


def config(kind: str, pattern: str = "[G-][*-]G[GE]", **changes: Any) -> ModelConfig:
    """Returns a config whose weights are large enough that states matter."""
    return small_config(pattern, blocks={"G": KINDS[kind]}, **{"initializer_range": 0.2, "norm_eps": 1e-3, **changes})


@pytest.mark.parametrize("kind", KINDS)
def test_packed_sequences_equal_each_alone(kind: str) -> None:
    assert_packed_equals_alone(LanguageModel(config(kind)), *LENGTHS)


def test_sizes_that_do_not_fit_each_other_are_refused() -> None:
    with pytest.raises(ValueError, match=r"key_heads=3, value_heads=4.*key_heads divide value_heads"):
        GatedDeltaConfig(key_heads=3, value_heads=4, key_dim=4, value_dim=4)


# --- layouts


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        ("shared", "tp=2"),  # tests/verify has these blocks in the other layouts
        ("alone", "cp=2"),
        pytest.param("three", "tp=2", marks=pytest.mark.thorough),
        *(pytest.param(kind, "cp=2,tp=2", marks=pytest.mark.thorough) for kind in ("shared", "alone")),
        *(pytest.param(kind, "pp=2,vpp=2,tp=2", marks=pytest.mark.thorough) for kind in ("shared", "alone")),
    ],
)
@pytest.mark.slow
def test_a_layout_equals_one_rank(ranks: Any, kind: str, layout: str) -> None:
    case = Case(config(kind), layout=Layout.parse(layout), objective=("sft", "grpo")[len(layout) % 2])
    report = equal_to_one_rank(ranks, case)
    assert set(report.gradients) == set(LanguageModel(case.source).state_dict())


@pytest.mark.parametrize(("layout", "best"), [("tp=3", 2), ("cp=3", 2), ("tp=2,cp=3", 4), ("tp=8", 4)])
def test_layout_that_does_not_divide_the_heads_is_refused(layout: str, best: int) -> None:
    parsed = Layout.parse(layout)
    with pytest.raises(ValueError, match=f"tp={parsed.tp}, cp={parsed.cp} cannot share: .*Use tp · cp = {best}"):
        config("shared", "G").check_layout(parsed)


def test_a_model_made_in_bf16_keeps_its_decays_in_fp32() -> None:
    model = LanguageModel(config("shared", "[G-]"), dtype=torch.bfloat16)
    wide = {name for name, tensor in model.state_dict().items() if tensor.dtype == torch.float32}
    assert wide == {"layers.0.gated_delta.vectors.A_log", "layers.0.gated_delta.vectors.dt_bias"}


# --- generation


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.slow
def test_completions_equal_a_full_forward(kind: str) -> None:
    """Several completions per prompt, so that states are copied; little cache, so that completions are preempted."""
    model = LanguageModel(config(kind))
    prompt_list = prompts(model.config.vocab_size)
    sampling = SamplingParams(max_new_tokens=20, seed=5)
    roomy = Generator(model).generate(prompt_list, sampling, n=3)
    for completion, logprobs in zip(
        (completion for group in roomy for completion in group), teacher_forced(model, prompt_list, roomy), strict=True
    ):
        torch.testing.assert_close(torch.tensor(completion.logprobs), logprobs, rtol=0, atol=1e-5)
    tight = Generator(model, max_batch_tokens=80, max_sequences=3).generate(prompt_list, sampling, n=3)
    assert tokens(tight) == tokens(roomy)
    assert len({tuple(answer) for group in tokens(roomy) for answer in group}) == 18
