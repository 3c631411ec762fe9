"""Generators on several ranks equal one rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from postlude import load_model
from postlude.generate.generator import Generator
from postlude.generate.sampling_params import SamplingParams
from postlude.layout import Layout
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
def test_expert_parallel_ranks_step_together(ranks) -> None:
    """One rank has less to do, and keeps stepping for the other."""
    prompts = [PROMPTS, PROMPTS[1:2]]
    samplings = [SamplingParams(max_new_tokens=12, seed=1), SamplingParams(max_new_tokens=3, seed=5)]
    by_rank = ranks(2, generated, "tiny-moe", Layout(dp_shard=2, ep=2), prompts, samplings)
    for actual, rank_prompt, sampling in zip(by_rank, prompts, samplings, strict=True):
        assert_same(actual, results(load_model("tiny-moe"), rank_prompt, sampling))


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tp=2", pytest.param("dp_shard=2,ep=2", marks=pytest.mark.thorough)])
def test_expert_parallel_drafting_equals_one_rank_without_drafts(ranks, layout: str) -> None:
    """A rank without requests keeps drafting for the other."""
    parsed_layout = Layout.parse(layout)
    prompts = [PROMPTS, PROMPTS[1:2]]
    samplings = [SamplingParams(max_new_tokens=8, seed=1), SamplingParams(max_new_tokens=3, seed=5)]
    by_rank = ranks(2, generated, "tiny-hybrid", parsed_layout, prompts, samplings, "mtp")
    for rank, actual in enumerate(by_rank):
        place = rank if parsed_layout.dp_shard > 1 else 0
        assert_same(actual, results(load_model("tiny-hybrid"), prompts[place], samplings[place]))


def refused(group) -> str:
    from postlude.layout import Stage

    model = load_model("tiny-dense", stage=Stage(dist.get_rank(), 2))
    try:
        Generator(model)
    except ValueError as error:
        return str(error)
    return ""


def test_a_pipeline_is_refused(ranks) -> None:
    assert all("Use a layout with pp=1" in sentence for sentence in ranks(2, refused))
