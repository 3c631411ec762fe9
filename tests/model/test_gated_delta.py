"""Gated delta net: layouts equal one rank, packed sequences equal each alone, decode steps equal a full forward."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from postlude import LanguageModel, Layout, ModelConfig, pack
from postlude.generate.generator import Generator
from postlude.generate.sampling_params import SamplingParams
from postlude.model.blocks import GatedDeltaConfig
from postlude.verify.cases import Case
from tests.equality import assert_equal
from tests.generate.test_generator import prompts, teacher_forced, tokens
from tests.meshes import verify
from tests.model.small import assert_packed_equals_alone, sequences, small_config

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


def test_chunk_size_does_not_change_the_result() -> None:
    (microbatch,) = pack(sequences(*LENGTHS), budget=64)
    results = []
    for chunk in (1, 5, 64):
        model = LanguageModel(small_config("GG", blocks={"G": replace(KINDS["shared"], chunk=chunk)}))
        results.append(model(microbatch))
    assert_equal(results[0], results[2], "logits")
    assert_equal(results[1], results[2], "logits")


def test_sizes_that_do_not_fit_each_other_are_refused() -> None:
    with pytest.raises(ValueError, match=r"key_heads=3, value_heads=4.*key_heads divide value_heads"):
        GatedDeltaConfig(key_heads=3, value_heads=4, key_dim=4, value_dim=4)


# --- layouts


def layouts() -> list[Any]:
    """Heads and tokens sharded in `make test`, by kind in turn; tests/verify has these blocks in the other layouts."""
    results = []
    kinds = ("shared", "alone", "three")
    for turn, layout in enumerate(("tp=2", "cp=2", "pp=2", "dp_shard=2", "cp=2,tp=2", "cp=4", "pp=2,vpp=2,tp=2")):
        for kind in kinds[:2] if Layout.parse(layout).cp * Layout.parse(layout).tp > 2 else kinds:
            quick = layout in ("tp=2", "cp=2") and kind == kinds[turn % 3]
            results.append(pytest.param(kind, layout, marks=() if quick else pytest.mark.thorough))
    return results


@pytest.mark.parametrize(("kind", "layout"), layouts())
@pytest.mark.slow
def test_a_layout_equals_one_rank(ranks: Any, kind: str, layout: str) -> None:
    case = Case(config(kind), layout=Layout.parse(layout), objective=("sft", "grpo")[len(layout) % 2])
    report = ranks(case.layout.world_size, verify, case)[0]
    assert set(report.gradients) == set(LanguageModel(case.source).state_dict())
    assert report.passes(), (report.loss, report.logprob, report.entropy, report.worst)


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["selective", pytest.param("full", marks=pytest.mark.thorough)])
def test_recompute_in_a_layout_changes_no_result(ranks: Any, recompute: Any) -> None:
    case = Case(config("shared", "[GE]G"), layout=Layout(dp_shard=2), objective="sft", recompute=recompute)
    report = ranks(2, verify, case)[0]
    assert report.passes(), (report.loss, report.logprob, report.entropy, report.worst)


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
