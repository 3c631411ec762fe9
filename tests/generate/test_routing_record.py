"""GraphGenerator routing: a trainer that replays it uses the same experts and gets the same log-probs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from postlude import LanguageModel, load_model, pack, unpack
from postlude.generate.generator import Generator
from postlude.generate.protocol import Completion
from postlude.generate.sampling_params import SamplingParams
from postlude.generate.scheduler import Scheduler
from postlude.hf.read_model import read_model
from postlude.layout import Layout
from postlude.ops.paged_attention import PAGE_SIZE
from tests.generate.test_generator import prompts
from tests.generate.test_scheduler import EagerGenerator, GraphGenerator
from tests.meshes import mesh
from tests.model.small import VOCABULARY, small_config, small_model
from tests.model.test_replay import own_choices

PROMPTS = prompts(VOCABULARY, (7, 1, 13, 2, 9))
PATTERN = "[*E][*-][ME]{2}"
END = 2


def model(pattern: str = PATTERN, **changes: Any) -> LanguageModel:
    language_model = small_model(pattern, **changes)
    language_model.reset(0)
    return language_model


def answered(of: LanguageModel, generator_type: type[Generator] = Generator, **options: Any) -> list[list[Completion]]:
    """Runs three of twelve completions at a time, so that some reuse rows, and prompts are prefilled once."""
    generator = generator_type(of, eos_tokens=(END,), **{"max_sequences": 3, "record_routing": True, **options})
    return generator.generate(PROMPTS, SamplingParams(max_new_tokens=12, seed=4), n=3)


def replayed(language_model: LanguageModel, completions: list[list[Completion]], patch: pytest.MonkeyPatch) -> None:
    """Asserts that one forward over each full sequence with the recorded routing equals the sampler."""
    for prompt, group in zip(PROMPTS, completions, strict=True):
        for completion in group:
            tokens = [*prompt, *completion.tokens]
            assert completion.routing is not None
            assert completion.routing.shape == (len(tokens), 3, 2)
            assert completion.routing.dtype == torch.int16
            assert (completion.routing[-1] == -1).all()
            (microbatch,) = pack([tokens], budget=64, columns={"routing": [completion.routing]})
            choices = own_choices(language_model, microbatch, patch)
            assert torch.equal(choices[:-1], completion.routing[:-1].long())
            with torch.no_grad():
                logprob = language_model(
                    microbatch,
                    output_processor=lambda inputs, _: (
                        inputs.head.logprobs(inputs.hidden, inputs.microbatch.targets).logprob
                    ),
                )
            (row,) = unpack([microbatch], [logprob])
            assert row[len(prompt) :].tolist() == pytest.approx(completion.logprobs, abs=1e-5)


@pytest.mark.parametrize("generator_type", [EagerGenerator, GraphGenerator])
def test_recorded_routing_equals_a_forward(generator_type: type[Generator], monkeypatch: pytest.MonkeyPatch) -> None:
    moe = model()
    completions = answered(moe, generator_type)
    assert {len(completion.tokens) for group in completions for completion in group} > {12}  # some end before
    replayed(moe, completions, monkeypatch)


@pytest.fixture
def preempted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Runs with a small cache, so that completions are preempted and prefilled again. Returns their number."""
    monkeypatch.setattr("postlude.generate.pages.MARGIN", 1)
    numbers: list[int] = []
    preempt = Scheduler._preempt
    monkeypatch.setattr(Scheduler, "_preempt", lambda *arguments: (numbers.append(len(numbers)), preempt(*arguments)))
    return numbers


def test_preempted_completions_record_the_same_routing(preempted: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    moe = model()
    completions = answered(moe, max_batch_tokens=60, max_sequences=8)
    assert preempted
    replayed(moe, completions, monkeypatch)


def test_preempted_completions_of_several_pages_record_the_same_routing(preempted: list[int]) -> None:
    moe, sampling = model(), SamplingParams(max_new_tokens=20, seed=4)
    token_lists = prompts(VOCABULARY, [PAGE_SIZE - 9] * 4 + [PAGE_SIZE + 1])
    expected = EagerGenerator(moe, record_routing=True).generate(token_lists, sampling)
    assert not preempted
    groups = GraphGenerator(moe, record_routing=True, max_batch_tokens=5 * PAGE_SIZE).generate(token_lists, sampling)
    assert preempted
    for group, others in zip(groups, expected, strict=True):
        for completion, other in zip(group, others, strict=True):
            assert completion.tokens == other.tokens
            assert torch.equal(completion.routing, other.routing)


@pytest.mark.slow
def test_drafted_completions_record_the_same_routing(monkeypatch: pytest.MonkeyPatch) -> None:
    moe = model(f"{PATTERN}/[*E]")
    completions = answered(moe, draft="mtp")
    assert sum(completion.accepted for group in completions for completion in group) > 0
    replayed(moe, completions, monkeypatch)


@pytest.mark.gpu
def test_cuda_graphs_record_the_routing_of_a_forward_on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit-exact in batch-invariant mode, with more completions than rows and prompts of several pages."""
    with torch.device("cuda"):
        moe = LanguageModel(read_model("tiny-moe")[1], dtype=torch.bfloat16, batch_invariant=True)
    token_lists, sampling = prompts(256, (7, 130, 13, 64, 9, 65)), SamplingParams(max_new_tokens=90, seed=4)
    generator = Generator(moe, max_sequences=8, record_routing=True)
    assert generator.why_no_cuda_graph() is None
    for prompt, group in zip(token_lists, generator.generate(token_lists, sampling, n=4), strict=True):
        for completion in group:
            (microbatch,) = pack([[*prompt, *completion.tokens]], budget=256)
            with torch.no_grad():
                choices = own_choices(moe, microbatch.to("cuda"), monkeypatch)
            assert completion.routing is not None
            assert torch.equal(completion.routing[:-1].long(), choices[: len(microbatch.tokens) - 1].cpu())
            assert not completion.routing.is_pinned()
    generator.record_routing = False
    assert all(
        plain_completion.routing is None
        for group in generator.generate(token_lists, sampling)
        for plain_completion in group
    )


def test_routing_is_recorded_only_on_request_and_completions_are_the_same() -> None:
    moe = model()
    plain, recorded = answered(moe, record_routing=False), answered(moe)
    for plain_group, recorded_group in zip(plain, recorded, strict=True):
        assert [completion.tokens for completion in plain_group] == [completion.tokens for completion in recorded_group]
        assert [completion.logprobs for completion in plain_group] == [
            completion.logprobs for completion in recorded_group
        ]
        assert all(completion.routing is None for completion in plain_group)


def test_a_model_without_experts_has_nothing_to_record() -> None:
    with pytest.raises(ValueError, match=r"record_routing=True records which experts.*\[\*-\] has none"):
        Generator(model("[*-]"), record_routing=True)


def recorded(group: Any, layout: Layout) -> list[tuple[list[int], torch.Tensor | None]]:
    local_mesh = mesh(layout)
    groups = answered(load_model(small_config(PATTERN), mesh=local_mesh))
    return [(completion.tokens, completion.routing) for group in groups for completion in group]


@pytest.mark.slow
@pytest.mark.thorough
def test_tensor_parallel_routing_equals_one_rank(ranks: Any) -> None:
    expected = [
        (completion.tokens, completion.routing)
        for group in answered(load_model(small_config(PATTERN)))
        for completion in group
    ]
    for recorded_pairs in ranks(2, recorded, Layout(tp=2)):
        for (tokens, routing), (expected_tokens, expected_routing) in zip(recorded_pairs, expected, strict=True):
            assert tokens == expected_tokens
            assert torch.equal(routing, expected_routing)
