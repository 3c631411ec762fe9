"""GraphScheduler on fixed pages, captured on a GPU, equals EagerScheduler on one page per row, token by token."""

from __future__ import annotations

import importlib
import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from postlude import load_model, load_tokenizer
from postlude.generate.cuda_graphs import DecodeGraphs, DecodeStep
from postlude.generate.generator import Generator
from postlude.generate.graph_scheduler import GraphBuffers, GraphScheduler
from postlude.generate.protocol import Completion, Request
from postlude.generate.sampling_params import SamplingParams
from postlude.generate.scheduler import Scheduler
from postlude.generate.session import Session
from postlude.hf.builtin import tiny_hybrid
from postlude.model import LanguageModel
from postlude.model.pattern import Pattern
from postlude.ops import decode_linear
from postlude.ops.linear import adjacent_view
from postlude.ops.shared_pages import SharedPages
from tests.generate.test_generator import prompts, teacher_forced
from tests.hf.families import CONFIGS, saved_model

STOPS = tuple(range(0, 256, 9))
DEVICES = [pytest.param("cpu", id="cpu"), pytest.param("cuda", marks=pytest.mark.gpu, id="gpu")]


class GraphGenerator(Generator):
    """Uses a GraphScheduler on any device."""

    def why_no_cuda_graph(self) -> str | None:
        return None


class EagerGenerator(Generator):
    """Uses an EagerScheduler on any device."""

    def why_no_cuda_graph(self) -> str | None:
        return "for comparison"


def dense(device: str) -> LanguageModel:
    """A model with weights large enough that the next token depends on every earlier one."""
    model = load_model("tiny-dense")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.mul_(4.0)
    return model.to(device)


def hybrid(pattern: str, dtype: torch.dtype | None = None) -> LanguageModel:
    """A model with blocks of every kind."""
    config = tiny_hybrid()
    parsed = Pattern.parse(pattern)
    used = {symbol: block for symbol, block in config.blocks.items() if symbol in pattern}
    return LanguageModel(replace(config, pattern=parsed, blocks=used), dtype=dtype)


def latent(device: str) -> LanguageModel:
    return hybrid("[+-][+E]").to(device)


def assert_alike(actual: list[list[Completion]], expected: list[list[Completion]]) -> None:
    for group, others in zip(actual, expected, strict=True):
        for completion, other in zip(group, others, strict=True):
            assert completion.tokens == other.tokens
            assert completion.finish_reason == other.finish_reason
            assert completion.text == other.text
            assert completion.logprobs == pytest.approx(other.logprobs, abs=1e-4)
            assert completion.sampled_logprobs == pytest.approx(other.sampled_logprobs, abs=1e-4)


def uneven(count: int, longest: int, seed: int = 0, **common) -> tuple[list[list[int]], list[SamplingParams]]:
    source = random.Random(seed)
    prompts = [[source.randrange(256) for _ in range(source.randrange(1, longest))] for _ in range(count)]
    return prompts, [SamplingParams(max_new_tokens=source.randrange(1, longest), **common) for _ in prompts]


@pytest.mark.parametrize(
    ("model_of", "temperature", "device"),
    [
        *((dense, temperature, "cpu") for temperature in (0.0, 0.8)),
        *(pytest.param(dense, temperature, "cuda", marks=pytest.mark.gpu) for temperature in (0.0, 0.8)),
        (latent, 0.8, "cpu"),
    ],
)
def test_completions_of_uneven_lengths_equal_the_eager_scheduler(
    device: str, model_of: Any, temperature: float
) -> None:
    """They join and leave at any time, some end at stop tokens, and prompts, shared by two each, fill pages or not."""
    model = model_of(device)
    prompts, samplings = uneven(*((4, 30) if device == "cpu" else (12, 90)), temperature=temperature, stop_tokens=STOPS)
    prompts[1] = [3] * 64
    expected = EagerGenerator(model).generate(prompts, samplings, n=2)
    assert_alike(GraphGenerator(model).generate(prompts, samplings, n=2), expected)
    assert {completion.finish_reason for group in expected for completion in group} == {"stop", "length"}


@pytest.mark.parametrize("device", DEVICES)
def test_completions_of_a_prompt_share_its_pages(device: str, monkeypatch) -> None:
    """Some of a group end, some start later, and one is alone; some prompts fill no page."""
    model = dense(device)
    source = random.Random(1)
    prompts = [[source.randrange(256) for _ in range(length)] for length in (64, 130, 5, 70)]
    samplings = [
        SamplingParams(max_new_tokens=length, temperature=0.9, stop_tokens=STOPS[:4]) for length in (9, 30, 20, 6)
    ]
    expected = EagerGenerator(model).generate(prompts, samplings, n=3)
    monkeypatch.setattr(GraphScheduler, "min_saved_pages", 1)
    steps, run = [], DecodeGraphs.__call__

    def note(graphs: DecodeGraphs, step: DecodeStep) -> None:
        if step.tile_shape is not None:
            cache = graphs.cache
            shared, table = cache.shared.part(step.tile_shape, step.size), cache.table[: step.size].cpu()
            steps.append(shared.pages.tolist())
            assert torch.equal(SharedPages(shared.tiles.cpu(), shared.pages.cpu()).read_through(table), table)
        run(graphs, step)

    monkeypatch.setattr(DecodeGraphs, "__call__", note)
    assert_alike(GraphGenerator(model, max_sequences=5).generate(prompts, samplings, n=3), expected)
    patterns = {tuple(sorted(pages, reverse=True)[:4]) for pages in steps}
    assert {(1, 1, 1, 0), (2, 2, 1, 1), (2, 2, 0, 0)} <= patterns, patterns


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "limits",
    [
        {"max_batch_tokens": 260},  # four pages: answers are evicted and go on later
        pytest.param({"max_sequences": 2}, marks=pytest.mark.thorough),
        pytest.param({"max_prefill_tokens": 1}, marks=pytest.mark.thorough),
        pytest.param({"max_sequences": 3, "max_batch_tokens": 400}, marks=pytest.mark.thorough),
    ],
    ids=str,
)
def test_memory_limits_do_not_change_completions(device: str, limits: dict[str, int], monkeypatch) -> None:
    """Nor does the sampling: from all tokens, the top k, or top p."""
    model = dense(device)
    prompts, samplings = uneven(4, 60, seed=3, temperature=0.9, ignore_eos=True)
    for place, filtered in enumerate(({"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1, "top_p": 0.8, "top_k": 20})):
        samplings[place] = replace(samplings[place], **filtered)
    expected = EagerGenerator(model).generate(prompts, samplings, n=2)
    freed: list[int] = []
    make_room = Scheduler._free_pages
    monkeypatch.setattr(Scheduler, "_free_pages", lambda run: (freed.append(len(run.running)), make_room(run)))
    assert_alike(GraphGenerator(model, **limits).generate(prompts, samplings, n=2), expected)
    assert bool(freed) == (limits == {"max_batch_tokens": 260})


@pytest.mark.parametrize("device", DEVICES)
def test_recurrent_states_follow_their_rows(device: str) -> None:
    """Of recurrences and convolutions; with more completions than rows some start later from a cached prompt."""
    model = hybrid("[M-][G-][S-][*-]").to(device)
    prompts, samplings = uneven(3, 8, seed=1, temperature=1.0)
    expected = EagerGenerator(model).generate(prompts, samplings, n=3)
    assert_alike(GraphGenerator(model, max_sequences=2).generate(prompts, samplings, n=3), expected)


@pytest.mark.parametrize("device", ["cpu"])
@pytest.mark.parametrize("name", ["deepseek_v3", pytest.param("deepseek_v3-whole-queries", marks=pytest.mark.thorough)])
def test_greedy_tokens_from_pages_of_latents_equal_transformers(name: str, device: str, tmp_path) -> None:
    """Prompts end before, at and after the end of a page, and join while others run."""
    hf_model, model = saved_model(CONFIGS[name](), tmp_path), load_model(tmp_path).to(device)
    prompt_list = prompts(hf_model.config.vocab_size, (60, 1, 64, 65, 7))
    sampling = SamplingParams(max_new_tokens=10, temperature=0.0, ignore_eos=True)
    answered = GraphGenerator(model, max_sequences=3, context_length=128).generate(prompt_list, sampling)
    for prompt, (completion,) in zip(prompt_list, answered, strict=True):
        ids, common = torch.tensor([prompt]), {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}
        expected = hf_model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=10, **common)[0]
        assert completion.tokens == expected[len(prompt) :].tolist()


@pytest.mark.gpu
@pytest.mark.parametrize("pattern", ["[*-]{2}", "[*E]{2}", "[M-][G-][SE][*E]"])
def test_bf16_is_near_a_forward_of_the_full_completion(pattern: str) -> None:
    """bf16 keeps 8 bits, and log-probs here are about 5: 5e-2."""
    model = hybrid(pattern, torch.bfloat16).to("cuda")
    generator = Generator(model)
    prompts, samplings = uneven(12, 60, seed=2)
    answered = generator.generate(prompts, samplings, n=2)
    assert generator._buffers is not None
    flat = [completion for group in answered for completion in group]
    for completion, logprobs in zip(flat, teacher_forced(model, prompts, answered), strict=True):
        torch.testing.assert_close(torch.tensor(completion.logprobs), logprobs.cpu(), rtol=0, atol=5e-2)


@pytest.mark.gpu
def test_few_rows_use_decode_kernels_and_more_rows_add_in_place(monkeypatch) -> None:
    """Both stay near a forward of the whole answer, as above; four products a layer in every step of few."""
    model = hybrid("[*-]{2}", torch.bfloat16).to("cuda")
    kernels, calls = importlib.import_module("postlude.ops.kernels.decode_linear"), []
    product = kernels.product
    monkeypatch.setattr(
        kernels, "product", lambda *arguments, **options: (calls.append(1), product(*arguments, **options))[1]
    )
    for count, products in (
        (decode_linear.MAX_ROWS, 2 * 8),
        (decode_linear.MAX_ROWS + 1, 0),
    ):  # a step is made, and then recorded
        calls.clear()
        prompts = [[place, 5, 9] * 10 for place in range(count)]
        generator = Generator(model)
        answered = generator.generate(prompts, SamplingParams(max_new_tokens=40, ignore_eos=True))
        assert len(calls) == products
        for completion, logprobs in zip(
            [completion for (completion,) in answered], teacher_forced(model, prompts, answered), strict=True
        ):
            torch.testing.assert_close(torch.tensor(completion.logprobs), logprobs.cpu(), rtol=0, atol=5e-2)


@pytest.mark.parametrize("device", DEVICES)
def test_tokens_after_a_stop_string_are_dropped(device: str) -> None:
    model, tokenizer = dense(device), load_tokenizer("tiny-dense")
    prompts, common = [list(b"begin"), list(b"other")], {"max_new_tokens": 30, "ignore_eos": True, "seed": 3}
    (free,), _ = EagerGenerator(model, tokenizer).generate(prompts, SamplingParams(**common))
    letters = [place for place, token in enumerate(free.tokens) if 32 < token < 127]
    place = next(place for place in letters if place + 1 in letters)
    stop = bytes(free.tokens[place : place + 2]).decode()
    sampling = SamplingParams(**common, stop=(stop,))
    expected = EagerGenerator(model, tokenizer).generate(prompts, sampling)
    assert expected[0][0].finish_reason == "stop"
    # One at a time, so that another answer takes the row that was stopped.
    assert_alike(GraphGenerator(model, tokenizer, max_sequences=1).generate(prompts, sampling), expected)


@pytest.mark.parametrize("device", DEVICES)
def test_changed_weights_are_used_in_the_next_call(device: str, monkeypatch) -> None:
    """Changed in place, and replaced."""
    model = dense(device)
    generator, prompts, sampling = GraphGenerator(model), [[1, 2, 3]], SamplingParams(max_new_tokens=8, temperature=0.0)
    first = generator.generate(prompts, sampling)
    buffers = generator._buffers
    (attention, *_) = model.blocks
    assert adjacent_view([layer.weight for layer in attention.fused_projections()[0]]) is not None
    assert generator.generate(prompts, sampling)[0][0].tokens == first[0][0].tokens
    assert generator._buffers is buffers
    model.reset(seed=1)
    second = generator.generate(prompts, sampling)
    assert generator._buffers is buffers
    assert second[0][0].tokens != first[0][0].tokens
    assert_alike(second, EagerGenerator(model).generate(prompts, sampling))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.data = torch.randn_like(parameter) * 0.1
    assert_alike(generator.generate(prompts, sampling), EagerGenerator(model).generate(prompts, sampling))
    assert generator._buffers is not buffers
    generator.release(only_if_large=True)
    assert generator._buffers is not None
    monkeypatch.setattr(GraphBuffers, "is_small", False)
    generator.release(only_if_large=True)
    assert generator._buffers is None


@pytest.mark.parametrize("device", DEVICES)
def test_nan_logits_raise(device: str) -> None:
    model = load_model("tiny-dense").to(device)
    generator = GraphGenerator(model)
    with torch.no_grad():
        model.norm.weight.fill_(float("nan"))
    for temperature in (0.0, 1.0):
        with pytest.raises(FloatingPointError, match="after 3 tokens are NaN"):
            generator.generate([[1, 2, 3]], SamplingParams(temperature=temperature, max_new_tokens=9))
    model.reset()
    sampling = SamplingParams(max_new_tokens=9)
    assert_alike(generator.generate([[1, 2, 3]], sampling), EagerGenerator(model).generate([[1, 2, 3]], sampling))


def make_nan_after_token(model: LanguageModel, token: int) -> None:
    """Makes all logits NaN after this token."""
    model.embedding.register_forward_hook(
        lambda _, arguments, hidden: hidden.masked_fill((arguments[0] == token)[:, None], torch.nan)
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("generator_type", [EagerGenerator, GraphGenerator])
def test_failed_completion_affects_no_other_and_the_generator_stays_usable(
    generator_type: type[Generator], device: str
) -> None:
    """Its first token gives a NaN state; others run next to it and reuse its memory afterwards."""
    model = dense(device)
    prompts, samplings = uneven(4, 10, seed=5, ignore_eos=True, stop_tokens=(7,))
    prompts[2] = [1, 2, 3]
    expected = EagerGenerator(model).generate(prompts, samplings, n=2)
    make_nan_after_token(model, 7)
    session = Session(generator_type(model, max_sequences=3, max_batch_tokens=260))
    bad = {session.add(Request((5, 7, *prompts[2]), samplings[2], n=2)) for _ in range(3)}
    request_ids = [
        session.add(Request(tuple(prompt), sampling, n=2)) for prompt, sampling in zip(prompts, samplings, strict=True)
    ]
    finished = {}
    while session.busy:
        finished |= {(done.request_id, done.index): done for done in session.step()}
    assert_alike(
        [[finished[request_id, number].completion for number in range(2)] for request_id in request_ids], expected
    )
    for request_id in bad:  # a request ends with its first failure
        (failure,) = (done for (number, _), done in finished.items() if number == request_id)
        assert "after 5 tokens are NaN" in str(failure.error)
    generator = generator_type(model, max_sequences=3, max_batch_tokens=260)
    for _ in range(2):
        with pytest.raises(FloatingPointError, match="after 2 tokens are NaN"):
            generator.generate([[5, 7], *prompts], [samplings[0], *samplings], n=2)
        assert_alike(generator.generate(prompts, samplings, n=2), expected)


@pytest.mark.parametrize("generator_type", [EagerGenerator, GraphGenerator])
def test_tokenizer_error_in_one_completion_affects_no_other(generator_type: type[Generator]) -> None:
    model, tokenizer = dense("cpu"), load_tokenizer("tiny-dense")

    class Fails:
        eos_token_id = None
        chat_template = None

        def get_added_vocab(self) -> dict[str, int]:
            return {}

        def decode(self, tokens, **how) -> str:
            if len(tokens) == 2:
                raise ValueError("no text for two tokens")
            return tokenizer.decode(tokens, **how)

    session = Session(generator_type(model, Fails(), max_batch_tokens=130))
    bad = session.add(Request((1, 2), SamplingParams(max_new_tokens=6, stop=("zz",))))
    good = session.add(Request((3, 4), SamplingParams(max_new_tokens=6)))
    finished = {}
    while session.busy:
        finished |= {done.request_id: done for done in session.step()}
    assert str(finished[bad].error) == "no text for two tokens"
    assert len(finished[good].completion.tokens) == 6


@pytest.mark.gpu
def test_steps_are_captured_on_gpu_unless_unsupported() -> None:
    model = load_model("tiny-dense").to("cuda")
    generator = Generator(model)
    generator.generate([[1, 2, 3]], SamplingParams(max_new_tokens=4))
    assert generator._buffers is not None
    assert [list(recorded) for recorded in generator._buffers.graphs._graphs.values()] == [
        [DecodeStep(8, False, False, False, None)]
    ]
    assert generator.why_no_cuda_graph() is None
    assert "float64" in str(Generator(model.double()).why_no_cuda_graph())


def test_reason_against_cuda_graphs_is_reported() -> None:
    generator = Generator(load_model("tiny-dense"))
    assert generator.why_no_cuda_graph() == "the model is on cpu"
