"""What a generator records of its routers, a trainer that replays it computes: the same experts, the same log-probs."""

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
from tests.generate.test_scheduler import Recorded, Stepped
from tests.meshes import mesh
from tests.model.small import VOCABULARY, small_config, small_model
from tests.model.test_replay import own_choices

PROMPTS = prompts(VOCABULARY, (7, 1, 13, 2, 9))
PATTERN = "[*E][*-][ME]{2}"
END = 2


def model(pattern: str = PATTERN, **changes: Any) -> LanguageModel:
    made = small_model(pattern, **changes)
    made.reset(0)
    return made


def answered(of: LanguageModel, way: type[Generator] = Generator, **options: Any) -> list[list[Completion]]:
    """Three of the twelve at a time, so that some join others, inherit their rows, and prompts pass the model once."""
    generator = way(of, eos_tokens=(END,), **{"max_sequences": 3, "routing": True, **options})
    return generator.generate(PROMPTS, SamplingParams(max_new_tokens=12, seed=4), n=3)


def replayed(of: LanguageModel, found: list[list[Completion]], patch: pytest.MonkeyPatch) -> None:
    """One forward over each whole sequence, with what was recorded, agrees with the sampler."""
    for prompt, group in zip(PROMPTS, found, strict=True):
        for completion in group:
            tokens = [*prompt, *completion.tokens]
            assert completion.routing is not None
            assert completion.routing.shape == (len(tokens), 3, 2)
            assert completion.routing.dtype == torch.int16
            assert (completion.routing[-1] == -1).all()
            (microbatch,) = pack([tokens], budget=64, columns={"routing": [completion.routing]})
            own = own_choices(of, microbatch, patch)
            assert torch.equal(own[:-1], completion.routing[:-1].long())
            with torch.no_grad():
                logprob = of(
                    microbatch,
                    output_processor=lambda inputs, _: (
                        inputs.head.logprobs(inputs.hidden, inputs.microbatch.targets).logprob
                    ),
                )
            (row,) = unpack([microbatch], [logprob])
            assert row[len(prompt) :].tolist() == pytest.approx(completion.logprobs, abs=1e-5)


@pytest.mark.parametrize("way", [Stepped, Recorded])
def test_recorded_choices_are_those_of_a_forward(way: type[Generator], monkeypatch: pytest.MonkeyPatch) -> None:
    moe = model()
    found = answered(moe, way)
    assert {len(completion.tokens) for group in found for completion in group} > {12}  # some end before
    replayed(moe, found, monkeypatch)


@pytest.fixture
def preempted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A number for each completion that outgrew the cache, and is prefilled again when there is room."""
    monkeypatch.setattr("postlude.generate.pages.MARGIN", 1)
    numbers: list[int] = []
    preempt = Scheduler._preempt
    monkeypatch.setattr(Scheduler, "_preempt", lambda *given: (numbers.append(len(numbers)), preempt(*given)))
    return numbers


def test_preempted_completions_are_recorded_alike(preempted: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    moe = model()
    found = answered(moe, max_batch_tokens=60, max_sequences=8)
    assert preempted
    replayed(moe, found, monkeypatch)


def test_preempted_completions_of_several_pages_are_recorded_alike(preempted: list[int]) -> None:
    moe, sampling = model(), SamplingParams(max_new_tokens=20, seed=4)
    asked = prompts(VOCABULARY, [PAGE_SIZE - 9] * 4 + [PAGE_SIZE + 1])
    expected = Stepped(moe, routing=True).generate(asked, sampling)
    assert not preempted
    groups = Recorded(moe, routing=True, max_batch_tokens=5 * PAGE_SIZE).generate(asked, sampling)
    assert preempted
    for group, others in zip(groups, expected, strict=True):
        for completion, other in zip(group, others, strict=True):
            assert completion.tokens == other.tokens
            assert torch.equal(completion.routing, other.routing)


@pytest.mark.slow
def test_drafted_answers_are_recorded_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    moe = model(f"{PATTERN}/[*E]")
    found = answered(moe, draft="mtp")
    assert sum(completion.accepted for group in found for completion in group) > 0
    replayed(moe, found, monkeypatch)


@pytest.mark.gpu
def test_on_a_gpu_cuda_graphs_record_the_choices_of_a_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """To the bit in the batch-invariant mode, with more completions than rows and prompts of several pages."""
    with torch.device("cuda"):
        moe = LanguageModel(read_model("tiny-moe")[1], dtype=torch.bfloat16, batch_invariant=True)
    asked, sampling = prompts(256, (7, 130, 13, 64, 9, 65)), SamplingParams(max_new_tokens=90, seed=4)
    generator = Generator(moe, max_sequences=8, routing=True)
    assert generator.why_no_cuda_graph() is None
    for prompt, group in zip(asked, generator.generate(asked, sampling, n=4), strict=True):
        for completion in group:
            (microbatch,) = pack([[*prompt, *completion.tokens]], budget=256)
            with torch.no_grad():
                choices = own_choices(moe, microbatch.to("cuda"), monkeypatch)
            assert completion.routing is not None
            assert torch.equal(completion.routing[:-1].long(), choices[: len(microbatch.tokens) - 1].cpu())
            assert not completion.routing.is_pinned()
    generator.routing = False
    assert all(one.routing is None for group in generator.generate(asked, sampling) for one in group)


def test_nothing_is_recorded_unasked_and_answers_are_the_same() -> None:
    moe = model()
    plain, recorded = answered(moe, routing=False), answered(moe)
    for one, other in zip(plain, recorded, strict=True):
        assert [each.tokens for each in one] == [each.tokens for each in other]
        assert [each.logprobs for each in one] == [each.logprobs for each in other]
        assert all(each.routing is None for each in one)


def test_a_model_without_experts_has_nothing_to_record() -> None:
    with pytest.raises(ValueError, match=r"routing=True records which experts.*\[\*-\] has none"):
        Generator(model("[*-]"), routing=True)


def recorded(group: Any, layout: Layout) -> list[tuple[list[int], torch.Tensor | None]]:
    here = mesh(layout)
    found = answered(load_model(small_config(PATTERN), mesh=here))
    return [(each.tokens, each.routing) for group in found for each in group]


@pytest.mark.slow
@pytest.mark.thorough
def test_tensor_parallel_ranks_record_what_one_does(ranks: Any) -> None:
    expected = [(each.tokens, each.routing) for group in answered(load_model(small_config(PATTERN))) for each in group]
    for found in ranks(2, recorded, Layout(tp=2)):
        for (tokens, routing), (other, own) in zip(found, expected, strict=True):
            assert tokens == other
            assert torch.equal(routing, own)
