"""Speculative decoding: completions are the same with and without drafts; drafts equal the MTP depth's."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from postlude import LanguageModel, pack
from postlude.generate.counter_rng import rng_key
from postlude.generate.cuda_graphs import DecodeGraphs, DecodeStep
from postlude.generate.decode_rows import COUNT, KEY, LENGTH, DecodeRows, sample_next
from postlude.generate.draft import Drafter
from postlude.generate.generator import Generator
from postlude.generate.protocol import Completion
from postlude.generate.sampler import SamplerSettings, sample
from postlude.generate.sampling_params import SamplingParams
from postlude.generate.scheduler import Scheduler
from postlude.hf.read_model import read_model
from postlude.model import OutputInputs
from postlude.model.pattern import Pattern
from postlude.ops.paged_attention import PAGE_SIZE
from tests.generate.test_sampler import chi_square_score
from tests.generate.test_scheduler import EagerGenerator, GraphGenerator, hybrid, uneven
from tests.model.small import small_model

TRANSFORMER, HYBRID, RECURRENT = "[*-]{2}/[*-]", "[M-][G-][SE]+[*E]/[*-]", "[*-]/[M-][GE]"
WAYS = pytest.mark.parametrize("generator_type", [EagerGenerator, GraphGenerator], ids=["eager", "recorded"])
LENGTHS = (7, 1, 13, 2, 9)
SAMPLINGS = {
    "greedy": SamplingParams(max_new_tokens=11, temperature=0.0),
    "sampled": SamplingParams(max_new_tokens=11, temperature=1.5, top_p=0.95, seed=3),
}


@pytest.fixture(scope="module", params=[TRANSFORMER, HYBRID, RECURRENT])
def model(request: pytest.FixtureRequest) -> LanguageModel:
    return small_model(request.param)


@pytest.fixture(scope="module", params=[TRANSFORMER, HYBRID, RECURRENT])
def paged_model(request: pytest.FixtureRequest) -> LanguageModel:
    return small_model(request.param)


def prompts(model: LanguageModel, lengths: Sequence[int] = LENGTHS) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(model.config.vocab_size, (length,), generator=generator).tolist() for length in lengths]


def assert_same(actual: list[list[Completion]], expected: list[list[Completion]]) -> None:
    for group, reference in zip(actual, expected, strict=True):
        for completion, expected_completion in zip(group, reference, strict=True):
            assert completion.tokens == expected_completion.tokens
            assert completion.finish_reason == expected_completion.finish_reason
            assert (completion.routing is None) == (expected_completion.routing is None)
            assert completion.routing is None or torch.equal(completion.routing, expected_completion.routing)
            assert completion.logprobs == pytest.approx(expected_completion.logprobs, abs=1e-4)
            assert completion.sampled_logprobs == pytest.approx(expected_completion.sampled_logprobs, abs=1e-4)


def rate(completions: list[list[Completion]]) -> float:
    results = [completion for group in completions for completion in group]
    return sum(answer.accepted for answer in results) / sum(answer.drafted for answer in results)


@pytest.mark.parametrize("sampling_name", SAMPLINGS)
def test_completions_equal_those_without_drafts(model: LanguageModel, sampling_name: str) -> None:
    prompt_list = prompts(model)
    free = Generator(model).generate(prompt_list, [SAMPLINGS[sampling_name]] * len(prompt_list))
    sampling = [
        replace(
            SAMPLINGS[sampling_name],
            max_new_tokens=1 + 4 * place,
            stop_tokens=(completion.tokens[2 + place],) * (place % 2),
        )
        for place, (completion,) in enumerate(free)
    ]
    routing = bool(model.config.routers)
    expected = Generator(model, record_routing=routing).generate(prompt_list, sampling, n=2)
    actual = Generator(model, record_routing=routing, draft="mtp", max_sequences=4).generate(prompt_list, sampling, n=2)
    assert_same(actual, expected)
    assert {completion.finish_reason for group in actual for completion in group} == {"stop", "length"}


@pytest.mark.parametrize("sampling_name", [pytest.param("greedy", marks=pytest.mark.thorough), "sampled"])
def test_graph_completions_equal_those_without_drafts(
    paged_model: LanguageModel, sampling_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows join and leave at any time, prompts end anywhere in a page, and steps of idle rows change nothing."""
    model = paged_model
    prompt_list = prompts(model, (*LENGTHS, PAGE_SIZE - 1, PAGE_SIZE, PAGE_SIZE + 1, 2 * PAGE_SIZE))
    sampling = [replace(SAMPLINGS[sampling_name], max_new_tokens=1 + 3 * place) for place in range(len(prompt_list))]
    free = EagerGenerator(model).generate(prompt_list, sampling)
    sampling = [
        replace(params, stop_tokens=(completion.tokens[params.max_new_tokens // 2],) * (place % 2))
        for place, (params, (completion,)) in enumerate(zip(sampling, free, strict=True))
    ]
    routing = bool(model.config.routers)
    expected = EagerGenerator(model, record_routing=routing).generate(prompt_list, sampling, n=3)
    run = DecodeGraphs.__call__

    def run_twice(graphs: DecodeGraphs, step: DecodeStep) -> None:
        """Runs a step as before a capture, with all rows idle, then the step itself."""
        lengths = graphs.rows.numbers[LENGTH]
        saved_lengths = lengths.clone()
        lengths.zero_()
        graphs._step(step)
        lengths.copy_(saved_lengths)
        run(graphs, step)

    monkeypatch.setattr(DecodeGraphs, "__call__", run_twice)
    actual = GraphGenerator(model, record_routing=routing, draft="mtp", max_sequences=10).generate(
        prompt_list, sampling, n=3
    )
    assert_same(actual, expected)
    assert {completion.finish_reason for group in actual for completion in group} == {"stop", "length"}
    assert 0.0 < rate(actual) < 1.0


def test_preempted_graph_completions_continue_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    model, preempted = small_model(HYBRID), []
    prompt_list = prompts(model, [PAGE_SIZE - 9] * 4 + [PAGE_SIZE + 1])
    sampling = replace(SAMPLINGS["sampled"], max_new_tokens=20)
    expected = EagerGenerator(model, record_routing=True).generate(prompt_list, sampling)
    monkeypatch.setattr("postlude.generate.pages.MARGIN", 1)
    preempt = Scheduler._preempt
    monkeypatch.setattr(Scheduler, "_preempt", lambda *arguments: (preempted.append(1), preempt(*arguments)))
    generator = GraphGenerator(model, record_routing=True, draft="mtp", max_batch_tokens=5 * PAGE_SIZE)
    assert_same(generator.generate(prompt_list, sampling), expected)
    assert preempted


@pytest.mark.gpu
@pytest.mark.parametrize("sampling_name", SAMPLINGS)
@pytest.mark.parametrize("pattern", ["[*-]{2}/[*-]", "[M-][G-][S-][*-]/[*-]", "[*-]/[M-][G-]"])
def test_graph_completions_equal_those_without_drafts_on_gpu(pattern: str, sampling_name: str) -> None:
    model = hybrid(pattern).to("cuda")
    prompt_list, sampling = uneven(
        12, 90, temperature=SAMPLINGS[sampling_name].temperature, stop_tokens=tuple(range(0, 256, 9))
    )
    prompt_list[1], prompt_list[2] = [3] * PAGE_SIZE, [5] * (PAGE_SIZE + 1)
    expected = EagerGenerator(model).generate(prompt_list, sampling, n=3)
    generator = Generator(model, draft="mtp", max_sequences=20)
    assert generator.why_no_cuda_graph() is None
    for _ in range(2):  # captured, then replayed
        actual = generator.generate(prompt_list, sampling, n=3)
        assert_same(actual, expected)
        if sampling_name == "sampled":  # the likeliest tokens of an untrained depth are hardly ever the model's
            assert 0.0 < rate(actual) < 1.0
    graphs = [graph for graphs in generator._buffers.graphs._graphs.values() for graph in graphs.values()]
    assert graphs
    assert all(graph is not None for graph in graphs)


@pytest.mark.gpu
def test_batch_invariant_graph_completions_are_bit_identical_without_drafts_on_gpu() -> None:
    """Also with experts in bf16: tokens, log-probs and the experts of every token."""
    config = replace(read_model("tiny-moe")[1], pattern=Pattern.parse("[*E]{2}/[*E]"))
    with torch.device("cuda"):
        model = LanguageModel(config, dtype=torch.bfloat16, batch_invariant=True)
    prompt_list, sampling = uneven(12, 90, seed=4, ignore_eos=True)
    plain, drafted = (
        Generator(model, record_routing=True, draft=draft, max_sequences=20).generate(prompt_list, sampling, n=3)
        for draft in (None, "mtp")
    )
    for group, expected_group in zip(drafted, plain, strict=True):
        for completion, expected in zip(group, expected_group, strict=True):
            assert completion.tokens == expected.tokens
            assert completion.logprobs == expected.logprobs
            assert torch.equal(completion.routing, expected.routing)
    assert 0.0 < rate(drafted) < 1.0


@pytest.mark.slow
@pytest.mark.parametrize("draft", [None, "mtp"])
def test_preempted_completions_continue_unchanged(draft: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, evicted = small_model("[M-][*-]/[*-]"), []
    prompt_list = [prompts(model)[place] for place in (1, 3, 0)]
    sampling = [replace(SAMPLINGS["sampled"], max_new_tokens=45 + place) for place in range(len(prompt_list))]
    expected = Generator(model).generate(prompt_list, sampling)
    evict = Scheduler._preempt
    monkeypatch.setattr(Scheduler, "_preempt", lambda *arguments: (evicted.append(1), evict(*arguments)))
    actual = Generator(model, draft=draft, max_batch_tokens=90).generate(prompt_list, sampling)
    assert_same(actual, expected)
    assert evicted


@pytest.mark.parametrize("sampling_name", [pytest.param("greedy", marks=pytest.mark.thorough), "sampled"])
@pytest.mark.parametrize(
    "kind", [*(pytest.param(kind, marks=pytest.mark.thorough) for kind in ("right", "wrong")), "now and then"]
)
@WAYS
def test_completions_do_not_depend_on_the_drafts(
    generator_type: type[Generator],
    model: LanguageModel,
    sampling_name: str,
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if generator_type is GraphGenerator and "+" in str(model.config.pattern):
        model = small_model(HYBRID)
    prompt_list, sampling = prompts(model), SAMPLINGS[sampling_name]
    expected = Generator(model).generate(prompt_list, sampling, n=2)
    known = {
        rng_key(sampling.seed, place, number): completion.tokens
        for place, group in enumerate(expected)
        for number, completion in enumerate(group)
    }

    def guess(drafter: Drafter, microbatch: Any, count: int, **options: Any) -> Tensor:
        shift = {"right": lambda _: 0, "wrong": lambda _: 1, "now and then": lambda place: place * place % 3 % 2}[kind]
        numbers = drafter.rows.numbers[:, :count].tolist()
        following = [
            (known[key][sampled], shift(length)) if length else (0, 0)
            for key, sampled, length in zip(numbers[KEY], numbers[COUNT], numbers[LENGTH], strict=True)
        ]
        return torch.tensor([(token + by) % model.config.vocab_size for token, by in following], dtype=torch.int64)

    monkeypatch.setattr(Drafter, "propose", guess)
    actual = generator_type(model, draft="mtp", max_sequences=3).generate(prompt_list, sampling, n=2)
    assert_same(actual, expected)
    assert rate(actual) == {"right": 1.0, "wrong": 0.0}.get(kind, pytest.approx(0.6, abs=0.25))
    if kind == "right":  # the first token comes with the prompt, then there are two a step
        assert {completion.drafted for group in actual for completion in group} == {5}


@torch.no_grad()
def depth_logits(model: LanguageModel, tokens: list[int]) -> Tensor:
    """Returns the logits of the first depth at every position of a whole sequence, [T, vocab]."""
    (microbatch,) = pack([tokens], budget=64, depths=1)
    depth: OutputInputs = model(microbatch, output_processor=lambda inputs, _: next(inputs.depths()))
    return depth.head.logits(depth.hidden)


@pytest.mark.parametrize("sampling_name", [pytest.param("greedy", marks=pytest.mark.thorough), "sampled"])
@WAYS
def test_drafts_equal_the_mtp_depth_sampled_with_the_same_noise(
    generator_type: type[Generator], model: LanguageModel, sampling_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if generator_type is GraphGenerator and "+" in str(model.config.pattern):
        model = small_model(HYBRID)
    prompt_list, sampling = prompts(model), SAMPLINGS[sampling_name]
    logit_rows: list[Tensor] = []  # by the depth, a row for each guess
    numbers: list[tuple[int, int]] = []  # and whose it was: the answer's key, and which of its tokens

    def recorded(logits: Tensor, token_rows: Tensor, state: DecodeRows, **options: Any) -> None:
        running = state.numbers[LENGTH, token_rows] > 0
        logit_rows.extend(logits[running])
        keys, counts = state.numbers[KEY, token_rows[running]], state.numbers[COUNT, token_rows[running]]
        numbers.extend(zip(keys.tolist(), counts.tolist(), strict=True))
        sample_next(logits, token_rows, state, **options)

    monkeypatch.setattr("postlude.generate.draft.sample_next", recorded)
    actual = generator_type(model, draft="mtp", max_sequences=4).generate(prompt_list, sampling, n=2)
    rows = dict(zip(numbers, logit_rows, strict=True))
    assert len(rows) == len(logit_rows) == sum(completion.drafted for group in actual for completion in group)
    for place, (prompt, group) in enumerate(zip(prompt_list, actual, strict=True)):
        for number, completion in enumerate(group):
            key, known, accepted = rng_key(sampling.seed, place, number), 1, 0
            expected = depth_logits(model, [*prompt, *completion.tokens])
            settings = SamplerSettings.of([sampling], [key], model.config.vocab_size, expected.device)
            while known < len(completion.tokens):
                logits = expected[len(prompt) + known - 2]  # where the depth has the newest token, and says the next
                torch.testing.assert_close(rows.pop((key, known)), logits, rtol=0, atol=1e-4)
                right = int(sample(logits[None], settings, torch.tensor([known]))[0]) == completion.tokens[known]
                known, accepted = known + 1 + right, accepted + right
            assert completion.accepted == accepted
    assert not rows
    if sampling_name == "sampled":
        assert 0.1 < rate(actual) < 0.9


def agreeing(pattern: str, sign: float) -> LanguageModel:
    """Returns a model whose next token depends only on the newest, and a depth that agrees with it or not."""
    model = small_model(pattern)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight", "down_proj")):
                parameter.zero_()  # blocks add nothing
        depth, size = model.mtp[0], model.config.hidden_size
        depth.proj.weight.zero_()
        depth.proj.weight[:, :size] = sign * torch.eye(size)
    return model


@pytest.mark.parametrize(
    ("pattern", "generator_type"),
    [
        (TRANSFORMER, EagerGenerator),
        (HYBRID, EagerGenerator),
        (TRANSFORMER, GraphGenerator),
        (HYBRID, GraphGenerator),
    ],
)
@pytest.mark.parametrize("sampling_name", SAMPLINGS)
def test_drafts_of_an_agreeing_depth_are_always_accepted(
    pattern: str, generator_type: type[Generator], sampling_name: str
) -> None:
    model = agreeing(pattern, 1.0)
    actual = generator_type(model, draft="mtp").generate(prompts(model), SAMPLINGS[sampling_name], n=2)
    assert rate(actual) == 1.0
    assert_same(actual, Generator(model).generate(prompts(model), SAMPLINGS[sampling_name], n=2))


def test_drafts_of_a_disagreeing_depth_are_never_accepted() -> None:
    model, sampling = agreeing(TRANSFORMER, -1.0), SAMPLINGS["greedy"]
    actual = Generator(model, draft="mtp").generate(prompts(model), sampling)
    assert rate(actual) == 0.0
    assert {completion.drafted for group in actual for completion in group} == {sampling.max_new_tokens - 1}
    assert_same(actual, Generator(model).generate(prompts(model), sampling))


@torch.no_grad()
def test_drafted_completions_have_the_models_distribution() -> None:
    """Three tokens of five: chi-square of all 125 completions against the product of their exact probabilities."""
    model, prompt, size, count = small_model(TRANSFORMER, vocab_size=5), [1, 4], 5, 6000
    sampling = SamplingParams(max_new_tokens=3, temperature=1.3, top_p=0.9, seed=8)
    everything = list(itertools.product(range(size), repeat=3))
    microbatches = pack([[*prompt, *answer] for answer in everything], budget=5 * len(everything))
    logits = torch.cat([model(microbatch) for microbatch in microbatches]).unflatten(0, (len(everything), 5))[:, 1:4]
    scaled = logits.double() / sampling.temperature
    ranked = scaled.softmax(-1).sort(descending=True)
    outside = ranked.values.cumsum(-1) - ranked.values >= sampling.top_p
    kept_mass = scaled.softmax(-1) * ~outside.gather(-1, ranked.indices.argsort(-1))
    kept_mass = kept_mass / kept_mass.sum(-1, keepdim=True)
    order = torch.tensor([microbatches[0].sequences.index(place) for place in range(len(everything))])
    chosen = kept_mass[order].gather(-1, torch.tensor(everything)[..., None])[..., 0]
    generator = Generator(model, draft="mtp", max_sequences=count, max_batch_tokens=6 * count)
    (results,) = generator.generate([prompt], sampling, n=count)
    numbers = torch.tensor([completion.tokens for completion in results]) @ torch.tensor([size * size, size, 1])
    assert abs(chi_square_score(torch.bincount(numbers, minlength=size**3), chosen.prod(-1))) < 4
    assert 0.1 < rate([results]) < 1.0


@WAYS
def test_stop_string_ends_a_completion_between_two_drafted_tokens(generator_type: type[Generator]) -> None:
    class Letters:
        eos_token_id = None
        chat_template = None

        def get_added_vocab(self) -> dict[str, int]:
            return {}

        def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
            return "".join(chr(ord("A") + token) for token in token_ids)

    model = agreeing(TRANSFORMER, 1.0)  # every guess is right, so every other token is a second one
    prompt_list = prompts(model)
    free = Generator(model, Letters()).generate(prompt_list, SAMPLINGS["sampled"])
    for place in range(2, 6):
        stops = [Letters().decode(completion.tokens[place - 1 : place + 1]) for (completion,) in free]
        sampling = [replace(SAMPLINGS["sampled"], stop=(stop,)) for stop in stops]
        expected = Generator(model, Letters()).generate(prompt_list, sampling)
        actual = generator_type(model, Letters(), draft="mtp").generate(prompt_list, sampling)
        assert_same(actual, expected)
        assert [completion.text for (completion,) in actual] == [completion.text for (completion,) in expected]


def test_a_model_without_a_depth_is_refused() -> None:
    with pytest.raises(ValueError, match=r'draft="mtp" needs a .* but pattern \[\*-\]\{2\} has none\.'):
        Generator(small_model("[*-]{2}"), draft="mtp")
    with pytest.raises(ValueError, match="draft='ngram': give \"mtp\""):
        Generator(small_model(TRANSFORMER), draft="ngram")  # type: ignore[arg-type]
