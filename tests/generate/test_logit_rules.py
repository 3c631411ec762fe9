"""Penalties, JSON schemas and the likeliest tokens: as computed from the logits, in every batch and way of stepping."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from jsonschema import validate
from torch import Tensor

from postlude import LanguageModel, load_tokenizer, pack
from postlude.generate.generator import Generator
from postlude.generate.protocol import Completion
from postlude.generate.sampling_params import SamplingParams
from tests.generate.test_batch_invariant import bits, config, model_of, requests
from tests.generate.test_scheduler import EagerGenerator, GraphGenerator
from tests.model.small import small_model

WAYS = pytest.mark.parametrize("way", [EagerGenerator, GraphGenerator], ids=["eager", "graph"])
DRAFTS = pytest.mark.parametrize("draft", [None, "mtp"], ids=["one token", "drafts"])
PATTERN = "[*-]{2}/[*-]"
PROMPTS = [[5, 9, 5, 7], [3], [8, 8, 2, 11, 6], [4, 1]]
PLAIN = SamplingParams(max_new_tokens=12, temperature=0.8, seed=2)
PENALIZED = replace(PLAIN, presence_penalty=1.5, frequency_penalty=0.7, repetition_penalty=1.8, top_logprobs=3)
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "boolean"}, "b": {"enum": ["x", "\N{SNOWMAN}", 3]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


def penalized(logits: Tensor, prompt: list[int], tokens: list[int], sampling: SamplingParams) -> Tensor:
    """Returns the logits [vocab] after some tokens, token by token."""
    logits, counts = logits.clone(), Counter(tokens)
    for token in {*prompt, *tokens}:
        repetition = sampling.repetition_penalty
        logits[token] = logits[token] / repetition if logits[token] > 0 else logits[token] * repetition
        if counts[token]:
            logits[token] -= sampling.frequency_penalty * counts[token] + sampling.presence_penalty
    for token, bias in sampling.logit_bias:
        logits[token] += bias
    return logits


def check(model: LanguageModel, prompt: list[int], sampling: SamplingParams, completion: Completion) -> None:
    """Compares both log-probs of each token, and the likeliest ones, with one forward of all tokens."""
    tokens = completion.tokens
    with torch.no_grad():
        logits = model(pack([prompt + tokens], budget=64)[0]).double()[len(prompt) - 1 :]
    for place, token in enumerate(tokens):
        raw = (logits[place] / sampling.temperature).log_softmax(-1)
        adjusted = penalized(logits[place], prompt, tokens[:place], sampling) / sampling.temperature
        assert completion.logprobs[place] == pytest.approx(float(raw[token]), abs=1e-4)
        assert completion.sampled_logprobs[place] == pytest.approx(float(adjusted.log_softmax(-1)[token]), abs=1e-4)
        if sampling.top_logprobs:
            likeliest = completion.top_logprobs[place]
            expected = raw.topk(sampling.top_logprobs).values.tolist()
            assert [value for _, value in likeliest] == pytest.approx(expected, abs=1e-4)
            assert [float(raw[other]) for other, _ in likeliest] == pytest.approx(expected, abs=1e-4)


@WAYS
@DRAFTS
def test_penalties_and_likeliest_tokens_equal_those_of_the_logits(way: type[Generator], draft: Any) -> None:
    """Rows with and without penalties join, move and leave, and some are preempted."""
    model = small_model(PATTERN)
    biased = replace(PENALIZED, temperature=1.4, logit_bias=((0, -1.5), (7, 2.0), (9, -3.0)))
    samplings = [PENALIZED, PLAIN, replace(PENALIZED, max_new_tokens=5), biased]
    for limits in ({}, {"max_sequences": 3, "max_batch_tokens": 40}):
        groups = way(model, draft=draft, **limits).generate(PROMPTS, samplings, n=2)
        for prompt, sampling, group in zip(PROMPTS, samplings, groups, strict=True):
            for completion in group:
                check(model, prompt, sampling, completion)
                assert len(completion.top_logprobs) == (len(completion.tokens) if sampling.top_logprobs else 0)
    (plain,) = way(model, draft=draft).generate(PROMPTS[1:2], [PLAIN], n=2)
    assert [completion.tokens for completion in groups[1]] == [completion.tokens for completion in plain]


@WAYS
@DRAFTS
def test_completion_with_a_schema_is_json_of_it(way: type[Generator], draft: Any) -> None:
    pytest.importorskip("llguidance")
    model, tokenizer = small_model(PATTERN, vocab_size=264), load_tokenizer("tiny-dense")
    sampling = SamplingParams(max_new_tokens=256, temperature=1.5, json_schema=json.dumps(SCHEMA))
    samplings = [replace(sampling, seed=1), PLAIN, replace(sampling, seed=2, temperature=0.0), PENALIZED]
    limits = {"max_sequences": 3, "max_batch_tokens": 600}
    groups = way(model, tokenizer, draft=draft, **limits).generate(PROMPTS, samplings, n=2)
    for index in (0, 2):
        for completion in groups[index]:
            assert completion.finish_reason == "stop"
            validate(json.loads(str(completion.text)), SCHEMA)
            check_logprobs(model, PROMPTS[index], samplings[index], completion)
    for index in (1, 3):
        for completion in groups[index]:
            check(model, PROMPTS[index], samplings[index], completion)


def check_logprobs(model: LanguageModel, prompt: list[int], sampling: SamplingParams, completion: Completion) -> None:
    with torch.no_grad():
        logits = model(pack([prompt + completion.tokens], budget=512)[0])[len(prompt) - 1 : -1]
    raw = (logits / (sampling.temperature or 1.0)).log_softmax(-1)
    expected = raw.gather(-1, torch.tensor(completion.tokens)[:, None])[:, 0].tolist()
    assert completion.logprobs == pytest.approx(expected, abs=1e-3)


@WAYS
def test_bits_do_not_depend_on_penalties_of_others(way: type[Generator]) -> None:
    model = model_of(config("tiny-dense", num_hidden_layers=2), "cpu", torch.float32)
    prompts, samplings = requests(4, 8, 256)
    rules = replace(samplings[1], repetition_penalty=1.5, top_logprobs=2)
    alone = bits(way(model).generate(prompts, samplings))
    mixed = bits(way(model).generate(prompts, [samplings[0], rules, *samplings[2:]]))
    assert [mixed[index] for index in (0, 2, 3)] == [alone[index] for index in (0, 2, 3)]
    assert mixed[1] == bits(way(model).generate(prompts[1:2], [rules]))[0]


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"presence_penalty": 2.5}, "presence_penalty=2.5: give a number from -2 to 2"),
        ({"repetition_penalty": 0.0}, "repetition_penalty=0.0: give a number from 0.01 to 100"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty=nan"),
        ({"logit_bias": ((3, 101.0),)}, "logit_bias of token 3 is 101.0: give a number from -100 to 100"),
        ({"logit_bias": ((3, float("nan")),)}, "logit_bias of token 3 is nan"),
        ({"logit_bias": ((3, 1.0),) * 301}, "logit_bias has 301; the limit is 300 tokens"),
        ({"json_schema": "{}", "grammar": "start: /a/"}, "json_schema and grammar are both given"),
        ({"top_logprobs": 21}, "top_logprobs=21: give 0 to 20"),
    ],
)
def test_values_out_of_bounds_are_refused(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        SamplingParams(**fields)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"json_schema": '{"type": "nonsense"}'}, "the JSON schema cannot be enforced"),
        ({"json_schema": "{"}, "the JSON schema cannot be enforced"),
        ({"grammar": "start: ("}, "the grammar cannot be enforced"),
        ({"logit_bias": ((264, 1.0),)}, "logit_bias of prompt 0 has token 264; the vocabulary goes from 0 to 263"),
        ({"json_schema": "{}", "ignore_eos": True}, "needs an end-of-sequence token"),
    ],
)
def test_schema_that_cannot_be_enforced_is_refused(fields: dict[str, Any], sentence: str) -> None:
    pytest.importorskip("llguidance")
    generator = Generator(small_model(PATTERN, vocab_size=264), load_tokenizer("tiny-dense"))
    with pytest.raises(ValueError, match=sentence):
        generator.generate([[1]], SamplingParams(**fields))
