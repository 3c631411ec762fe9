"""Session: requests that join at any time get the completions of one call; weights may change in between."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from postlude import load_model, load_tokenizer
from postlude.generate.cuda_graphs import bucket
from postlude.generate.generator import Generator
from postlude.generate.protocol import Completion, Request, VersionSpan
from postlude.generate.sampling_params import SamplingParams
from postlude.generate.session import Session
from postlude.model import LanguageModel
from tests.generate.test_generator import teacher_forced
from tests.generate.test_scheduler import EagerGenerator, GraphGenerator, assert_alike

WAYS = pytest.mark.parametrize(
    ("way", "device"),
    [(EagerGenerator, "cpu"), (GraphGenerator, "cpu"), pytest.param(Generator, "cuda", marks=pytest.mark.gpu)],
    ids=["stepped", "recorded", "gpu"],
)


def sharp(seed: int = 0, device: str = "cpu") -> LanguageModel:
    """Returns a model with weights large enough that the next token depends on every earlier one."""
    model = load_model("tiny-dense", seed=seed, device=device)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.mul_(4.0)
    return model


N = 2  # answers a request


def make_requests(count: int) -> list[Request]:
    """Requests of uneven lengths, each prompt twice."""
    source = random.Random(1)
    prompts = [tuple(source.randrange(256) for _ in range(source.randrange(1, 16))) for _ in range(count // 2)] * 2
    return [
        Request(prompt, SamplingParams(max_new_tokens=source.randrange(1, 14), seed=place, temperature=0.8), n=N)
        for place, prompt in enumerate(prompts)
    ]


def generated(generator: Generator, requests: list[Request]) -> list[list[Completion]]:
    """Returns the same completions from one call."""
    return generator.generate([request.prompt for request in requests], [request.sampling for request in requests], n=N)


def finished(session: Session, requests: list[Request], seed: int = 2) -> list[list[Completion]]:
    """Returns all completions, with requests joining at random times."""
    source, waiting, request_ids, results = random.Random(seed), list(requests), [], {}
    while waiting or session.busy:
        while waiting and source.random() < 0.4:
            request_ids.append(session.add(waiting.pop(0)))
        results |= done(session)
    return [
        [results[request_id, number] for number in range(request.n)]
        for request_id, request in zip(request_ids, requests, strict=True)
    ]


def done(session: Session) -> dict[tuple[int, int], Completion]:
    """Returns the completions finished by a step, by request id and index."""
    return {
        (finished_completion.request_id, finished_completion.index): finished_completion.completion
        for finished_completion in session.step()
        if finished_completion.completion is not None
    }


@WAYS
def test_completions_equal_one_call_whenever_requests_join(way: type[Generator], device: str) -> None:
    model, requests = sharp(device=device), make_requests(6)
    expected = generated(way(model), requests)
    assert_alike(finished(Session(way(model, max_sequences=4, max_batch_tokens=256)), requests), expected)
    assert_alike(finished(Session(way(model, max_batch_tokens=50)), requests, seed=3), expected)


def test_a_session_that_does_not_grow_has_room_for_its_first_completions() -> None:
    """Later ones join as those end, also if they are longer."""
    model = sharp()
    requests = [replace(request, sampling=replace(request.sampling, max_new_tokens=12)) for request in make_requests(6)]
    generator = GraphGenerator(model, context_length=64)
    session = Session(generator, grows=False)
    first, results = [session.add(request) for request in requests[:2]], done(session)
    joined = [session.add(request) for request in requests[2:]]
    while session.busy:
        results |= done(session)
    expected = generated(GraphGenerator(model), requests)
    actual = [[results[request_id, number] for number in range(N)] for request_id in (*first, *joined)]
    assert_alike(actual, expected)
    assert generator._buffers is not None
    capacity = generator._buffers.capacity
    assert capacity.rows == bucket(2 * N) < bucket(generator.max_sequences)
    assert capacity.pages == 2 * N * (capacity.pages_per_row + 1) + 1


def test_single_request_is_bit_identical_to_generate() -> None:
    model, session = sharp(), Session(Generator(sharp()))
    for request in make_requests(4):
        assert finished(session, [request]) == generated(Generator(model), [request])


def test_completion_requested_by_index_equals_that_of_the_full_request() -> None:
    generator = Generator(sharp())
    (three,) = generator.generate([[1, 2, 3]], [SamplingParams(max_new_tokens=6, seed=4)], n=3)
    separate_requests = [
        Request((1, 2, 3), SamplingParams(max_new_tokens=6, seed=4), first_index=number) for number in range(3)
    ]
    assert [completion.tokens for (completion,) in finished(Session(generator), separate_requests)] == [
        completion.tokens for completion in three
    ]


@WAYS
def test_prompt_of_several_requests_is_prefilled_once(way: type[Generator], device: str) -> None:
    model, batch_sizes = sharp(device=device), []
    hook = model.register_forward_pre_hook(lambda module, arguments: batch_sizes.append(len(arguments[0].tokens)))
    session = Session(way(model, max_batch_tokens=128))
    for number in range(3):
        session.add(Request(tuple(range(40)), SamplingParams(max_new_tokens=2), first_index=number))
    while session.busy:
        session.step()
    hook.remove()
    assert batch_sizes[0] == 40


@WAYS
def test_new_weights_are_used_from_the_next_token(way: type[Generator], device: str) -> None:
    old, new, model = (sharp(seed, device) for seed in (0, 1, 0))
    session = Session(way(model, max_batch_tokens=128), "a.1")
    requests = [Request((place, 7), SamplingParams(max_new_tokens=12, seed=place)) for place in range(3)]
    request_ids = [session.add(request) for request in requests[:2]]
    for _ in range(6):
        session.step()
    session.update_weights(lambda: model.load_state_dict(new.state_dict()) and None, "a.2")
    request_ids.append(session.add(requests[2]))
    results = {}
    while session.busy:
        results |= done(session)
    first, second, third = (results[request_id, 0] for request_id in request_ids)
    assert third.versions == (VersionSpan("a.2", 0, 12),)
    for prompt, completion in (((0, 7), first), ((1, 7), second)):
        before, after = completion.versions
        assert (before.version, after.version, before.start, after.end) == ("a.1", "a.2", 0, 12)
        assert 0 < before.end == after.start < 12
        sampled_logprobs, cut = torch.tensor(completion.logprobs), after.start
        by_old, by_new = (teacher_forced(model, [list(prompt)], [[completion]])[0].cpu() for model in (old, new))
        torch.testing.assert_close(sampled_logprobs[:cut], by_old[:cut], rtol=0, atol=1e-4)
        torch.testing.assert_close(sampled_logprobs[cut:], by_new[cut:], rtol=0, atol=1e-4)
        assert (sampled_logprobs - by_old)[cut:].abs().max() > 0.1, "the two differ"


@WAYS
def test_aborted_completions_leave_the_others_unchanged(way: type[Generator], device: str) -> None:
    model, requests = sharp(device=device), make_requests(6)
    expected = generated(way(model), requests)
    session = Session(way(model, max_sequences=4, max_batch_tokens=256))
    request_ids = [session.add(request) for request in requests]
    actual = done(session)
    cancelled = request_ids[1::2]
    for request_id in cancelled:
        session.abort(request_id)
    while session.busy:
        actual |= done(session)
    remaining = range(0, len(request_ids), 2)
    answered = [[actual[request_ids[place], number] for number in range(requests[place].n)] for place in remaining]
    assert_alike(answered, [expected[place] for place in remaining])


def test_invalid_request_gives_clear_error_and_affects_no_other() -> None:
    session = Session(Generator(sharp(), load_tokenizer("tiny-dense"), max_batch_tokens=64))
    session.add(Request((1,), SamplingParams(max_new_tokens=2)))
    for request, sentence in (
        (Request((9999,), SamplingParams(max_new_tokens=2)), "the prompt has token 9999"),
        (Request((1,), SamplingParams(max_new_tokens=64)), "max_batch_tokens is 64"),
        (Request((), SamplingParams()), "the prompt is empty"),
    ):
        with pytest.raises(ValueError, match=sentence):
            session.add(request)
    results = []
    while session.busy:
        results += session.step()
    assert len(results) == 1
