"""Prompts that begin as earlier sequences did prefill only the rest, and get the completions of a full prefill."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from postlude import LanguageModel
from postlude.generate.generator import Generator
from postlude.generate.model_step import ModelStep
from postlude.generate.pages import ROW_PAGE_SIZE
from postlude.generate.protocol import Completion, Request
from postlude.generate.sampling_params import SamplingParams
from postlude.generate.scheduler import CACHED_PER_PREFILLED
from postlude.generate.session import Session
from postlude.layout import Layout
from postlude.lora import LoRA
from postlude.model.blocks import AttentionConfig
from postlude.ops.paged_attention import PAGE_SIZE
from tests.generate.test_adapters import adapted, base_of, named
from tests.generate.test_generator import prompts, teacher_forced
from tests.generate.test_scheduler import EagerGenerator, GraphGenerator, assert_alike, hybrid
from tests.meshes import mesh
from tests.model.small import VOCABULARY, small_config, small_model

GENERATORS = pytest.mark.parametrize(
    ("generator_type", "device"),
    [(EagerGenerator, "cpu"), (GraphGenerator, "cpu"), pytest.param(Generator, "cuda", marks=pytest.mark.gpu)],
    ids=["stepped", "recorded", "gpu"],
)
ODD_ATTENTION = AttentionConfig(heads=4, kv_heads=2, head_dim=6, softcap=2.0, sinks=True)


def make(generator_type: type[Generator], model: LanguageModel, **options: Any) -> Generator:
    """Returns a generator of short sequences: on a CPU, attention over pages reads as many as the longest has."""
    return generator_type(model, **{"context_length": 5 * PAGE_SIZE, "max_batch_tokens": 40 * PAGE_SIZE, **options})


def reset(pattern: str, device: str = "cpu", **changes: Any) -> LanguageModel:
    model = small_model(pattern, **changes)
    model.reset(0)
    return model.to(device)


def run(session: Session, requests: list[Request]) -> list[list[Completion]]:
    """Returns the completions of requests that are added together."""
    request_ids, results = [session.add(request) for request in requests], {}
    while session.busy:
        results |= {(done.request_id, done.index): done.completion for done in session.step()}
    return [
        [results[request_id, index] for index in range(request.n)]
        for request_id, request in zip(request_ids, requests, strict=True)
    ]


def sampling(seed: int, length: int = 8, **others: Any) -> SamplingParams:
    return SamplingParams(max_new_tokens=length, seed=seed, ignore_eos=True, **others)


def page_size(generator_type: type[Generator]) -> int:
    return ROW_PAGE_SIZE if generator_type is EagerGenerator else PAGE_SIZE


def two_turns(generator: Generator) -> list[list[list[Completion]]]:
    """Returns the completions of two prompts, and of each continued by three tokens, two times each."""
    session, length = Session(generator), page_size(type(generator)) + 5
    first_prompts = prompts(VOCABULARY, (length, 2 * length))
    first = run(session, [Request(tuple(prompt), sampling(1), n=2) for prompt in first_prompts])
    following = [
        Request((*prompt, *completion.tokens, 1, 2, 3), sampling(2 + index), n=2)
        for prompt, completions in zip(first_prompts, first, strict=True)
        for index, completion in enumerate(completions)
    ]
    return [first, run(session, following)]


def reused(turns: list[list[list[Completion]]]) -> list[list[int]]:
    """Returns the reused tokens of the first completion of each request of each turn."""
    return [[group[0].reused_prompt_tokens for group in groups] for groups in turns]


def flat(groups: list[list[Completion]]) -> list[Completion]:
    return list(itertools.chain(*groups))


def assert_reused_alike(model: LanguageModel, generator_type: type[Generator], **options: Any) -> None:
    """Asserts that turns which reuse pages of the first have the completions of those which do not."""
    expected = two_turns(make(generator_type, model, prefix_cache=False, **options))
    actual = two_turns(make(generator_type, model, **options))
    size = page_size(generator_type)
    # The cache does not have the newest token, nor, with drafts, two more; a page then depends on a token after it.
    kept = [(length + 7 - 3 * ("draft" in options)) // size * size for length in (size + 5, 2 * (size + 5))]
    assert reused(expected) == [[0] * 2, [0] * 4]
    assert reused(actual) == [[0] * 2, [kept[0]] * 2 + [kept[1]] * 2]
    for turn, expected_turn in zip(actual, expected, strict=True):
        assert_alike(turn, expected_turn)


@GENERATORS
@pytest.mark.parametrize(
    "pattern", ["[*-][S-]", "[+-][*E]", pytest.param("[*-]odd", id="softcap and sinks"), "[+-]/[+-]"]
)
def test_next_turns_equal_a_full_prefill(pattern: str, generator_type: type[Generator], device: str) -> None:
    """With windows, latents, experts, a softcap and sinks, and drafts."""
    changes = {"blocks": {"*": ODD_ATTENTION}} if "odd" in pattern else {}
    model = reset(pattern.removesuffix("odd"), device, **changes)
    assert_reused_alike(model, generator_type, **({"draft": "mtp"} if "/" in pattern else {}))


@pytest.mark.gpu
def test_bf16_turns_are_near_a_forward_of_all_tokens() -> None:
    """bf16 keeps 8 bits, and log-probs here are about 5: 5e-2."""
    model = hybrid("[*-][SE]", torch.bfloat16).to("cuda")
    session, (prompt,) = Session(Generator(model)), prompts(256, (2 * PAGE_SIZE + 9,))
    ((first,),) = run(session, [Request(tuple(prompt), sampling(1, 40))])
    following = [*prompt, *first.tokens, 1, 2, 3]
    groups = run(session, [Request(tuple(following), sampling(2, 40), n=3)])
    assert groups[0][0].reused_prompt_tokens == 2 * PAGE_SIZE
    for completion, logprobs in zip(flat(groups), teacher_forced(model, [following], groups), strict=True):
        torch.testing.assert_close(torch.tensor(completion.logprobs), logprobs.cpu(), rtol=0, atol=5e-2)


@GENERATORS
def test_fp8_keys_are_reused_as_they_were_rounded(generator_type: type[Generator], device: str) -> None:
    assert_reused_alike(reset("[*-][S-]", device), generator_type, kv_cache_dtype="fp8")


@GENERATORS
def test_recorded_routing_has_the_reused_tokens(generator_type: type[Generator], device: str) -> None:
    model = reset("[*E][S-][+E]", device)
    options: dict[str, Any] = {"record_routing": True}
    expected = two_turns(make(generator_type, model, prefix_cache=False, **options))
    actual = two_turns(make(generator_type, model, **options))
    assert min(reused(actual)[1]) > 0
    for groups, expected_groups in zip(actual, expected, strict=True):
        for completion, other in zip(flat(groups), flat(expected_groups), strict=True):
            assert completion.tokens == other.tokens
            assert torch.equal(completion.routing, other.routing)


@pytest.mark.parametrize("generator_type", [EagerGenerator, GraphGenerator])
def test_batch_invariant_completions_keep_their_bits(generator_type: type[Generator]) -> None:
    model = reset("[*-][S-]")
    model.batch_invariant = True
    expected = two_turns(make(generator_type, model, prefix_cache=False))
    actual = two_turns(make(generator_type, model))
    assert min(reused(actual)[1]) > 0
    for groups, expected_groups in zip(actual, expected, strict=True):
        for completion, other in zip(flat(groups), flat(expected_groups), strict=True):
            assert (completion.tokens, completion.logprobs) == (other.tokens, other.logprobs)


@pytest.mark.parametrize("generator_type", [EagerGenerator, GraphGenerator])
def test_recurrent_models_reuse_nothing(generator_type: type[Generator]) -> None:
    model = reset("[M-][*-]")
    actual = two_turns(make(generator_type, model))
    assert reused(actual) == [[0] * 2, [0] * 4]


@pytest.mark.parametrize("generator_type", [EagerGenerator, GraphGenerator])
def test_adapters_share_no_pages_and_a_new_one_of_a_name_starts_without(generator_type: type[Generator]) -> None:
    lora = LoRA(rank=3)
    models = [adapted(small_config("[*-][S-]"), lora, seed) for seed in (1, 2)]
    base = base_of(models[0])

    def loaded(**options: Any) -> Generator:
        generator = make(generator_type, base, **options)
        for name, model in zip("ab", models, strict=True):
            generator.load_adapter(name, *named(model, lora))
        return generator

    shared, alone = loaded(), loaded(prefix_cache=False)
    session, (prompt,) = Session(shared), prompts(VOCABULARY, (2 * PAGE_SIZE + 9,))

    def check(adapter: str | None, expected_reuse: int) -> None:
        request = Request(tuple(prompt), sampling(1, temperature=0.0), adapter=adapter)
        ((completion,),) = run(session, [request])
        assert_alike([[completion]], run(Session(alone), [request]))
        assert completion.reused_prompt_tokens == expected_reuse

    size = page_size(generator_type)
    most = len(prompt) // size * size
    for adapter in (None, "a", "b"):
        check(adapter, 0)
    for adapter in (None, "a", "b"):
        check(adapter, most)
    for generator in (shared, alone):
        generator.load_adapter("a", *named(adapted(small_config("[*-][S-]"), lora, 3), lora))
    check("a", 0)
    check("b", most)
    session.update_weights(lambda: None, "new")
    check("b", 0)
    check(None, 0)


def tensor_parallel_turns(group: Any, layout: Layout, prefix_cache: bool) -> tuple[Any, Any]:
    model = LanguageModel(small_config("[*-][SE]"), mesh=mesh(layout))
    model.reset(0)
    turns = two_turns(make(EagerGenerator, model, prefix_cache=prefix_cache))
    return reused(turns), [[(c.tokens, c.logprobs) for c in flat(groups)] for groups in turns]


@pytest.mark.slow
def test_tensor_parallel_ranks_reuse_the_same_pages(ranks) -> None:
    _, expected = tensor_parallel_turns(None, Layout(), False)
    for counts, actual in ranks(2, tensor_parallel_turns, Layout(tp=2), True):
        assert counts == [[0] * 2, [ROW_PAGE_SIZE] * 2 + [3 * ROW_PAGE_SIZE] * 2]
        for groups, expected_groups in zip(actual, expected, strict=True):
            for (tokens, logprobs), (expected_tokens, expected_logprobs) in zip(groups, expected_groups, strict=True):
                assert tokens == expected_tokens
                assert logprobs == pytest.approx(expected_logprobs, abs=1e-4)


def test_few_cached_tokens_are_gathered_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Conversations with long histories and short new turns join over several steps."""
    model, gathered, run_step = reset("[*-]"), [], ModelStep.__call__

    def note(step: ModelStep, count: int, sequences: Any, **options: Any) -> torch.Tensor:
        gathered.append([sequence.cached for sequence in sequences])
        return run_step(step, count, sequences, **options)

    monkeypatch.setattr(ModelStep, "__call__", note)
    session = Session(make(EagerGenerator, model, max_prefill_tokens=20))
    token_lists = prompts(VOCABULARY, [5 * ROW_PAGE_SIZE + 1] * 6)
    for _ in range(2):
        run(session, [Request(tuple(tokens), sampling(1)) for tokens in token_lists])
    limit = CACHED_PER_PREFILLED * 20
    assert all(sum(lengths[:-1]) < limit for lengths in gathered)
    assert sorted(filter(None, map(sum, gathered))) == [160, 160, 160]


def test_one_call_starts_without_pages_of_earlier_calls() -> None:
    """Weights may have changed in between, without a word."""
    model, sampled = reset("[*-]"), sampling(1, temperature=0.0)
    generator, (prompt,) = EagerGenerator(model), prompts(VOCABULARY, (70,))
    generator.generate([prompt], sampled)
    with torch.no_grad():
        model.embedding.weight.mul_(-2.0)
    expected = EagerGenerator(model, prefix_cache=False).generate([prompt], sampled)
    assert_alike(generator.generate([prompt], sampled), expected)


@pytest.mark.parametrize(
    ("generator_type", "tight"),
    [
        (EagerGenerator, False),
        (EagerGenerator, True),
        pytest.param(GraphGenerator, True, marks=pytest.mark.slow),
        pytest.param(GraphGenerator, False, marks=pytest.mark.thorough),
    ],
)
@settings(max_examples=4, deadline=None)
@given(data=st.data())
def test_random_conversations_equal_full_prefills(
    generator_type: type[Generator], tight: bool, data: st.DataObject
) -> None:
    """Conversations begin alike, branch, and continue; pages are evicted, completions preempted, weights change."""
    model = reset("[*-][S-]")
    size = page_size(generator_type)
    limit, longest = (6 if tight else 40) * size, 5 * size
    session = Session(make(generator_type, model, max_batch_tokens=limit, context_length=longest, max_sequences=4))
    plain = make(generator_type, model, context_length=longest, prefix_cache=False)
    (head,) = prompts(VOCABULARY, (size + 3,))
    transcripts = [tuple(head)]
    for step in range(data.draw(st.integers(2, 3))):
        if data.draw(st.integers(0, 4)) == 0:
            session.update_weights(lambda seed=step + 1: model.reset(seed), str(step))
        requests = []
        for _ in range(data.draw(st.integers(1, 3))):
            start = data.draw(st.sampled_from(transcripts))
            start = start[: data.draw(st.integers(1, len(start)))] if data.draw(st.booleans()) else start
            more = data.draw(st.lists(st.integers(0, VOCABULARY - 1), max_size=size))
            length = data.draw(st.integers(1, size + 2))
            tokens = (*start, *more)[: longest - length]
            requests.append(
                Request(tokens, sampling(data.draw(st.integers(0, 9)), length), n=data.draw(st.integers(1, 2)))
            )
        actual = run(session, requests)
        assert_alike(actual, run(Session(plain), requests))
        for request, group in zip(requests, actual, strict=True):
            transcripts += [(*request.prompt, *completion.tokens) for completion in group]
