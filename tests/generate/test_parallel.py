"""Generators on several ranks equal one rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from postlude import load_model
from postlude.generate.generator import Generator
from postlude.generate.sampling_params import SamplingParams
from postlude.layout import Layout, Stage
from tests.meshes import mesh

PROMPTS = [list(b"packed"), list(b"a"), list(b"batches have no padding"), list(b"at all"), list(b"!?")]
Answers = list[list[tuple[list[int], list[float]]]]


def generated(
    group, name: str, layout: Layout, prompts: list[list[list[int]]], samplings: list[SamplingParams], draft: Any = None
) -> Answers:
    """Each rank generates its share of `prompts` and `samplings`, by its data-parallel rank."""
    local_mesh = mesh(layout)
    return results(load_model(name, mesh=local_mesh), prompts[local_mesh.dp.rank], samplings[local_mesh.dp.rank], draft)


def results(model, prompts: list[list[int]], sampling: SamplingParams, draft: Any = None) -> Answers:
    for name, parameter in model.named_parameters():
        if "norm" not in name:
            torch.no_grad()(parameter.mul_)(3.0)
    completions = Generator(model, max_sequences=4, draft=draft).generate(prompts, sampling, n=2)
    return [[(completion.tokens, completion.logprobs) for completion in group] for group in completions]


def assert_same(actual: Answers, expected: Answers) -> None:
    for group, reference in zip(actual, expected, strict=True):
        for (tokens, logprobs), (expected_tokens, expected_logprobs) in zip(group, reference, strict=True):
            assert tokens == expected_tokens
            assert logprobs == pytest.approx(expected_logprobs, abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tiny-dense", "tiny-moe"])
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.thorough)])
def test_tensor_parallel_ranks_equal_one_rank(ranks, name: str, size: int) -> None:
    sampling = SamplingParams(max_new_tokens=9, top_p=0.9, seed=2)
    expected = results(load_model(name), PROMPTS, sampling)
    layout = Layout(tp=size, ep=size if name == "tiny-moe" else 1)
    for actual in ranks(size, generated, name, layout, [PROMPTS], [sampling]):
        assert_same(actual, expected)


@pytest.mark.slow
def test_tensor_parallel_drafting_equals_one_rank_without_drafts(ranks) -> None:
    sampling = SamplingParams(max_new_tokens=8, seed=1)
    expected = results(load_model("tiny-hybrid"), PROMPTS, sampling)
    for actual in ranks(2, generated, "tiny-hybrid", Layout(tp=2), [PROMPTS], [sampling], "mtp"):
        assert_same(actual, expected)


def refused(group) -> list[str]:
    """Returns why models cannot generate: a stage of a pipeline, and experts of several data-parallel ranks."""
    stage = load_model("tiny-dense", stage=Stage(dist.get_rank(), 2))
    experts = load_model("tiny-moe", mesh=mesh(Layout(dp_shard=2, ep=2)))
    reasons = []
    for model in (stage, experts):
        with pytest.raises(ValueError, match=r"(pp|dp_shard)=1") as raised:
            Generator(model)
        reasons.append(str(raised.value))
    return reasons


def test_models_of_which_a_rank_has_a_part_are_refused(ranks) -> None:
    for stage, experts in ranks(2, refused):
        assert "Use a layout with pp=1" in stage
        assert "(dp_shard=2, ep=2), but each generates by itself. Use a layout with dp_shard=1" in experts
