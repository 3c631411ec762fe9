"""The generator equals transformers and the model's forward, whatever else is in the batch."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch

from postlude import load_model, load_tokenizer, pack, unpack
from postlude.generate.generator import Generator
from postlude.generate.protocol import Completion, RolloutEngine
from postlude.generate.sampling_params import SamplingParams
from postlude.model import LanguageModel
from tests.hf.families import CONFIGS, saved_model

LENGTHS = (7, 1, 13, 2, 19, 10)
END = 2


def prompts(vocabulary: int, lengths: tuple[int, ...] = LENGTHS, seed: int = 1) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(vocabulary, (length,), generator=generator).tolist() for length in lengths]


def tokens(completions: list[list[Completion]]) -> list[list[list[int]]]:
    return [[completion.tokens for completion in group] for group in completions]


@torch.no_grad()
def teacher_forced(
    model: LanguageModel, prompt_list: list[list[int]], answered: list[list[Completion]], temperature: float = 1.0
) -> list[torch.Tensor]:
    """Returns log-probs of every completion's tokens from one forward, in the order of the completions."""
    wholes, starts = [], []
    for prompt, group in zip(prompt_list, answered, strict=True):
        for completion in group:
            wholes.append([*prompt, *completion.tokens])
            starts.append(len(prompt))
    microbatches = [
        microbatch.to(model.embedding.weight.device) for microbatch in pack(wholes, budget=max(map(len, wholes)))
    ]

    def processor(inputs, context):
        return inputs.head.logprobs(inputs.hidden, inputs.microbatch.targets, temperature=temperature).logprob

    rows = unpack(microbatches, [model(microbatch, output_processor=processor) for microbatch in microbatches])
    return [row[start:] for row, start in zip(rows, starts, strict=True)]


@pytest.fixture(scope="module")
def dense() -> LanguageModel:
    """A model with weights large enough that the next token depends on every earlier one."""
    model = load_model("tiny-dense")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.mul_(4.0)
    return model


def families() -> list[Any]:
    """Every config. `make test` has the first of each family: tests/hf/test_parity.py has the forward of the others."""
    first = {name.partition("-")[0]: name for name in reversed(CONFIGS)}.values()
    return [pytest.param(name, marks=() if name in first else pytest.mark.thorough) for name in CONFIGS]


@pytest.mark.parametrize("name", families())
@pytest.mark.slow
def test_greedy_equals_transformers(name: str, tmp_path) -> None:
    hf_model = saved_model(CONFIGS[name](), tmp_path)
    prompt_list = prompts(hf_model.config.vocab_size)
    # Three at a time, so that prompts join while others are half way.
    generator = Generator(load_model(tmp_path), eos_tokens=(END,), max_sequences=3)
    answered = generator.generate(prompt_list, SamplingParams(max_new_tokens=10, temperature=0.0))
    for prompt, (completion,) in zip(prompt_list, answered, strict=True):
        ids = torch.tensor([prompt])
        expected = hf_model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=10, do_sample=False, pad_token_id=0
        )[0]
        assert completion.tokens == expected[len(prompt) :].tolist()
        assert completion.finish_reason == ("stop" if completion.tokens[-1] == END else "length")
        assert completion.sampled_logprobs == [0.0] * len(completion.tokens)


@pytest.mark.parametrize("name", ["tiny-dense", "tiny-moe", "olmo3", "mistral-sliding", "deepseek_v3", "gpt_oss"])
@pytest.mark.parametrize("temperature", [pytest.param(1.0, marks=pytest.mark.thorough), 0.7])
@pytest.mark.slow
def test_logprobs_equal_a_forward_of_the_whole_completion(name: str, temperature: float, tmp_path) -> None:
    if name in CONFIGS:
        saved_model(CONFIGS[name](), tmp_path)
    model = load_model(tmp_path if name in CONFIGS else name)
    prompt_list = prompts(model.config.vocab_size)
    generator = Generator(model, max_sequences=5)
    answered = generator.generate(prompt_list, SamplingParams(max_new_tokens=25, temperature=temperature, seed=5), n=2)
    expected = teacher_forced(model, prompt_list, answered, temperature)
    for completion, logprobs in zip((completion for group in answered for completion in group), expected, strict=True):
        torch.testing.assert_close(torch.tensor(completion.logprobs), logprobs, rtol=0, atol=1e-4)
        assert completion.sampled_logprobs == completion.logprobs


SAMPLINGS = [SamplingParams(max_new_tokens=5 + 7 * place, temperature=0.8, top_p=0.95, seed=9) for place in range(6)]


@pytest.fixture(scope="module")
def without_limits(dense: LanguageModel) -> list[list[Completion]]:
    return Generator(dense).generate(prompts(256), SAMPLINGS, n=3)


@pytest.mark.slow
@pytest.mark.parametrize(
    "limits",
    [
        {"max_sequences": 1},
        pytest.param({"max_sequences": 5}, marks=pytest.mark.thorough),
        {"max_batch_tokens": 60},  # one or two at a time, the rest evicted when answers grow
        pytest.param({"max_batch_tokens": 200, "max_sequences": 9}, marks=pytest.mark.thorough),
        {"max_prefill_tokens": 1},
    ],
    ids=str,
)
def test_completion_does_not_depend_on_the_batch(
    limits: dict[str, int], dense: LanguageModel, without_limits: list[list[Completion]]
) -> None:
    answered = Generator(dense, **limits).generate(prompts(256), SAMPLINGS, n=3)
    assert tokens(answered) == tokens(without_limits)
    for group, reference in zip(answered, without_limits, strict=True):
        for completion, expected_completion in zip(group, reference, strict=True):
            assert completion.logprobs == pytest.approx(expected_completion.logprobs, abs=1e-4)
            assert completion.sampled_logprobs == pytest.approx(expected_completion.sampled_logprobs, abs=1e-4)
    assert len({tuple(answer) for group in tokens(without_limits) for answer in group}) == 18


def test_each_seed_and_index_gives_another_completion(dense: LanguageModel) -> None:
    generator = Generator(dense)
    prompt_list = [list(b"once")] * 2
    first = tokens(generator.generate(prompt_list, SamplingParams(max_new_tokens=8, seed=1), n=2))
    assert first == tokens(generator.generate(prompt_list, SamplingParams(max_new_tokens=8, seed=1), n=2))
    other_seed_tokens = tokens(generator.generate(prompt_list, SamplingParams(max_new_tokens=8, seed=2), n=2))
    assert len({tuple(answer) for group in first + other_seed_tokens for answer in group}) == 8


def test_shared_prompt_is_prefilled_once(dense: LanguageModel) -> None:
    batch_sizes: list[int] = []
    hook = dense.register_forward_pre_hook(lambda module, arguments: batch_sizes.append(len(arguments[0])))
    try:
        Generator(dense, max_sequences=3).generate(
            [list(b"a prompt of 21 tokens")], SamplingParams(max_new_tokens=4), n=7
        )
    finally:
        hook.remove()
    # Seven answers of four tokens, of which the first comes from the prompt's own logits.
    assert sum(batch_sizes) == 21 + 7 * 3


@pytest.mark.slow
def test_completions_joining_and_leaving_equal_each_alone(dense: LanguageModel) -> None:
    source = random.Random(0)
    prompt_list = [[source.randrange(256) for _ in range(source.randrange(1, 40))] for _ in range(24)]
    sampling = [SamplingParams(max_new_tokens=source.randrange(1, 60), temperature=0.0) for _ in prompt_list]
    in_one_batch = Generator(dense, max_batch_tokens=300, max_sequences=6).generate(prompt_list, sampling)
    alone = [
        Generator(dense).generate([prompt], params)[0] for prompt, params in zip(prompt_list, sampling, strict=True)
    ]
    assert tokens(in_one_batch) == tokens(alone)


def test_stop_tokens_end_a_completion_and_stay_in_it(dense: LanguageModel) -> None:
    free = Generator(dense).generate([list(b"begin")], SamplingParams(max_new_tokens=20))[0][0]
    stop = free.tokens[6]
    first = free.tokens.index(stop)
    for generator, sampling in (
        (Generator(dense), SamplingParams(max_new_tokens=20, stop_tokens=(stop,))),
        (Generator(dense, eos_tokens=(stop,)), SamplingParams(max_new_tokens=20)),
        (Generator(dense, eos_tokens=(stop,)), SamplingParams(max_new_tokens=20, ignore_eos=True, stop_tokens=(stop,))),
    ):
        (answer,) = generator.generate([list(b"begin")], sampling)[0]
        assert answer.tokens == free.tokens[: first + 1]
        assert answer.finish_reason == "stop"
    ignored = Generator(dense, eos_tokens=(stop,)).generate(
        [list(b"begin")], SamplingParams(max_new_tokens=20, ignore_eos=True)
    )
    assert ignored[0][0].tokens == free.tokens


def test_stop_strings_end_a_completion_where_they_are_complete(dense: LanguageModel) -> None:
    generator = Generator(dense, load_tokenizer("tiny-dense"))
    prompt_list, common = [list(b"begin")], {"max_new_tokens": 200, "ignore_eos": True, "seed": 3}
    (free,) = generator.generate(prompt_list, SamplingParams(**common))[0]
    letters = [place for place, token in enumerate(free.tokens) if 32 < token < 127]
    place = next(place for place in letters[5:] if place + 1 in letters)  # two plain letters in a row
    stop = bytes(free.tokens[place : place + 2]).decode()
    (answer,) = generator.generate(prompt_list, SamplingParams(**common, stop=("never appears", stop)))[0]
    assert answer.tokens == free.tokens[: place + 2]
    assert answer.finish_reason == "stop"
    assert answer.text is not None
    assert answer.text + stop == load_tokenizer("tiny-dense").decode(answer.tokens, skip_special_tokens=True)


def test_training_mode_and_gradients_are_unchanged(dense: LanguageModel) -> None:
    dense.train()
    Generator(dense).generate([[1, 2]], SamplingParams(max_new_tokens=2))
    assert dense.training
    assert all(parameter.requires_grad for parameter in dense.parameters())


def test_changed_weights_are_used_in_the_next_call() -> None:
    model = load_model("tiny-dense")
    generator = Generator(model)
    before = tokens(generator.generate([[1, 2, 3]], SamplingParams(max_new_tokens=12, temperature=0.0)))
    model.reset(seed=1)
    after = tokens(generator.generate([[1, 2, 3]], SamplingParams(max_new_tokens=12, temperature=0.0)))
    assert before != after
    assert after == tokens(
        Generator(load_model("tiny-dense", seed=1)).generate(
            [[1, 2, 3]], SamplingParams(max_new_tokens=12, temperature=0.0)
        )
    )


def test_generator_implements_the_rollout_engine_protocol(dense: LanguageModel) -> None:
    generator = Generator(dense)
    assert isinstance(generator, RolloutEngine)
    assert generator.generate([], SamplingParams()) == []


@pytest.mark.parametrize(
    ("prompt_list", "sampling", "sentence"),
    [
        ([[1], []], SamplingParams(max_new_tokens=9), "prompt 1 is empty"),
        ([[1, 264]], SamplingParams(), "prompt 0 has token 264, but the vocabulary goes from 0 to 263"),
        ([[1, -1]], SamplingParams(), "prompt 0 has token -1"),
        ([[1] * 90], SamplingParams(max_new_tokens=20), "90 tokens and may get 20 more, but max_batch_tokens is 100"),
        (
            [[1]],
            SamplingParams(max_new_tokens=9, stop_tokens=(999,)),
            "stop token 999 of prompt 0 is not in the vocabulary",
        ),
        ([[1]], SamplingParams(max_new_tokens=9, stop=("x",)), "give the Generator a tokenizer"),
        ([[1]], [SamplingParams()] * 2, "1 prompts, but 2 samplings"),
    ],
)
def test_invalid_requests_are_refused(prompt_list, sampling, sentence: str, dense: LanguageModel) -> None:
    with pytest.raises(ValueError, match=sentence):
        Generator(dense, max_batch_tokens=100).generate(prompt_list, sampling)


def test_limits_are_checked(dense: LanguageModel) -> None:
    with pytest.raises(ValueError, match="n=0"):
        Generator(dense).generate([[1]], SamplingParams(), n=0)
    with pytest.raises(ValueError, match="max_sequences=0: the minimum is 1"):
        Generator(dense, max_sequences=0)


def test_nan_logits_raise() -> None:
    model = load_model("tiny-dense")
    with torch.no_grad():
        model.norm.weight.fill_(math.nan)
    for temperature in (0.0, 1.0):
        with pytest.raises(FloatingPointError, match="after 3 tokens are NaN"):
            Generator(model).generate([[1, 2, 3]], SamplingParams(temperature=temperature))
