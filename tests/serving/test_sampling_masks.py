"""The tokens that could be sampled come over HTTP from `postlude serve` and, in each of its forms, from vLLM."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest

from postlude import load_tokenizer
from postlude.generate.generator import Generator
from postlude.generate.sampling_params import SamplingParams
from postlude.serving.clients.client import GenerationClient
from postlude.serving.errors import ServerError
from tests.serving.fake_vllm import FakeVLLM
from tests.serving.test_generation_server import serving, sharp

SAMPLING = SamplingParams(max_new_tokens=6, temperature=0.9, top_k=7, top_p=0.8, seed=4, return_sampling_mask=True)
TOKENS, LOGPROBS, MASKS = [5, 7], [math.log(0.25), 0.0], [[3, 5], [7]]
LIKELIEST = [[(5, LOGPROBS[0]), (3, math.log(0.75)), (9, -9999.0)], [(7, 0.0), (1, -9999.0)]]


def test_postlude_serve_returns_the_generators_masks() -> None:
    tokenizer, prompts = load_tokenizer("tiny-dense"), [list(b"over the wire"), list(b"x")]
    expected = Generator(sharp(), tokenizer).generate(prompts, [SAMPLING] * 2, n=2)
    with serving(Generator(sharp(), tokenizer)) as (_, url), closing(GenerationClient(url)) as client:
        actual = client.generate(prompts, [SAMPLING] * 2, n=2)
        ((unmasked,), _) = client.generate(prompts, replace(SAMPLING, return_sampling_mask=False))
    assert unmasked.sampling_mask is None
    for one_group, other_group in zip(actual, expected, strict=True):
        for one, other in zip(one_group, other_group, strict=True):
            assert one.tokens == other.tokens
            assert one.sampling_mask == other.sampling_mask
            assert one.policy_logprobs == pytest.approx(other.sampled_logprobs, abs=1e-6)


def masks_of(
    sampling: SamplingParams, change: Callable[[dict[str, Any]], object], vocab_size: int | None = None
) -> tuple[Any, list[Any]]:
    """Returns the masks of a completion by a server whose choices are changed, and the log-probs asked for."""
    with closing(FakeVLLM(lambda body: (TOKENS, LOGPROBS))) as server:
        known, asked = server.choice, []

        def choice(body: Any) -> Any:
            asked.append(body.get("sampling_params", body)["logprobs"])
            reply = known(body)
            change(reply["choices"][0])
            return reply

        server.choice = choice  # type: ignore[method-assign]
        with closing(GenerationClient(server.url, "tiny", retries=0, vocab_size=vocab_size)) as client:
            for _ in range(2):
                ((completion,),) = client.generate([[1, 2]], sampling)
                assert completion.policy_logprobs == LOGPROBS
    assert completion.sampling_mask is not None
    return [sorted(mask) for mask in completion.sampling_mask], asked


def add_likeliest(choice: dict[str, Any], name: str = "token_id", write: Callable[[int], Any] = int) -> None:
    for place, likeliest in zip(choice["logprobs"]["content"], LIKELIEST, strict=True):
        place["top_logprobs"] = [{name: write(token), "logprob": logprob} for token, logprob in likeliest]


def test_vllm_reports_masks_or_the_likeliest_tokens() -> None:
    """Its own masks once it is known to give them; else twice top_k of the likeliest, as several may be the last."""
    assert masks_of(SAMPLING, lambda choice: choice.update(sampling_mask=MASKS)) == (MASKS, [14, 0])
    assert masks_of(SAMPLING, add_likeliest) == (MASKS, [14, 14])
    assert masks_of(SAMPLING, lambda choice: add_likeliest(choice, "token", "token_id:{}".format)) == (MASKS, [14, 14])

    def add_named(choice: dict[str, Any]) -> None:
        places = [{f"token_id:{token}": logprob for token, logprob in place} for place in LIKELIEST]
        choice["logprobs"]["top_logprobs"] = places

    assert masks_of(replace(SAMPLING, stop=("never",)), add_named) == (MASKS, [14, 14]), "/v1/completions"
    assert masks_of(SAMPLING, add_likeliest, vocab_size=10) == (MASKS, [10, 10]), "vLLM refuses more than there are"
    assert masks_of(replace(SAMPLING, top_k=0), add_likeliest, vocab_size=10) == (MASKS, [10, 10])


def test_masks_that_are_not_whole_are_refused() -> None:
    def of_all_tokens(choice: dict[str, Any]) -> None:
        add_likeliest(choice)
        choice["logprobs"]["content"][0]["top_logprobs"][1]["logprob"] = math.log(0.5)

    with pytest.raises(ServerError, match=r"gave 2 likeliest tokens with 0\.750000 of the probability, where .* all"):
        masks_of(SAMPLING, of_all_tokens)
    with pytest.raises(ServerError, match="gave no sampling masks that can be read"):
        masks_of(SAMPLING, lambda choice: None)
    with pytest.raises(ServerError, match="gave 1 sampling masks for 2 tokens"):
        masks_of(SAMPLING, lambda choice: choice.update(sampling_mask=MASKS[:1]))
    with pytest.raises(ServerError, match="gave token 7, which is not in its sampling mask of 2"):
        masks_of(SAMPLING, lambda choice: choice.update(sampling_mask=[[3, 5], [8, 9]]))


def test_a_server_of_another_kind_is_not_asked_for_masks() -> None:
    with (
        closing(FakeVLLM()) as server,
        closing(GenerationClient(server.url, "tiny", api="openai")) as client,
        pytest.raises(ValueError, match=r"which openai does not return\. Leave these out, set sampling_mask to false"),
    ):
        client.generate([[1, 2]], SAMPLING)
