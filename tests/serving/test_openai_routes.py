"""OpenAI routes: requests of OpenAI's client get the generator's completions; unsupported fields are refused."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from postlude import load_tokenizer
from postlude.data.chat import Encoder
from postlude.generate.generator import Generator
from postlude.generate.protocol import Completion
from postlude.generate.sampling_params import SamplingParams
from postlude.generate.text_stream import TextStream
from postlude.rollout.environments import SingleTurn
from postlude.rollout.judge import JudgeReward
from postlude.rollout.tasks import Task
from postlude.rollout.verdict import Verdict
from postlude.serving.json_reply import write_json
from tests.generate.test_session import sharp
from tests.rollout.episodes import step
from tests.serving.test_generation_server import open_request, request_json, serving, until

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Say \N{SNOWMAN}."}]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving(Generator(sharp(), load_tokenizer("tiny-dense"), max_batch_tokens=192)) as (_, address):
        yield address


def generate_directly(
    prompt: list[int], sampling: SamplingParams, n: int = 1, first_index: int = 0
) -> list[Completion]:
    """Returns the generator's completion."""
    completions = Generator(sharp(), load_tokenizer("tiny-dense")).generate([prompt], [sampling], n=first_index + n)[0]
    return completions[first_index:]


def encoded(prompt: Any) -> list[int]:
    return Encoder(tokenizer=load_tokenizer("tiny-dense")).prompt(prompt)


def stream_chunks(url: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the chunks of a properly ended stream."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Accept": "text/event-stream"})
    with urllib.request.urlopen(request, timeout=60) as reply:
        assert reply.headers["Content-Type"] == "text/event-stream"
        *chunks, last = [part.removeprefix("data: ") for part in reply.read().decode().split("\n\n")[:-1]]
    assert last == "[DONE]"
    return [json.loads(chunk) for chunk in chunks]


def test_completion_equals_the_generator(url: str) -> None:
    body = {"model": "tiny", "prompt": "Once", "max_tokens": 9, "temperature": 0.7, "top_p": 0.9, "seed": 3, "n": 2}
    status, reply = request_json(f"{url}/v1/completions", body | {"logprobs": 0, "user": "me"})
    assert status == 200
    expected = generate_directly(
        encoded("Once"), SamplingParams(max_new_tokens=9, temperature=0.7, top_p=0.9, seed=3), n=2
    )
    assert [choice["text"] for choice in reply["choices"]] == [completion.text for completion in expected]
    assert [choice["logprobs"]["token_logprobs"] for choice in reply["choices"]] == [
        pytest.approx(completion.logprobs, abs=1e-4) for completion in expected
    ]
    assert [choice["finish_reason"] for choice in reply["choices"]] == [
        completion.finish_reason for completion in expected
    ]
    count = sum(len(completion.tokens) for completion in expected)
    assert reply["usage"] == {"prompt_tokens": 4, "completion_tokens": count, "total_tokens": 4 + count}
    assert (reply["object"], reply["model"], reply["id"][:5]) == ("text_completion", "tiny", "cmpl-")


@pytest.mark.parametrize(
    "prompt", [["Once", "Twice"], [[79, 110], [84]], [79, 110]], ids=["texts", "lists of ids", "ids"]
)
def test_prompt_formats(url: str, prompt: Any) -> None:
    _, reply = request_json(f"{url}/v1/completions", {"prompt": prompt, "max_tokens": 4, "seed": 1, "temperature": 1})
    prompts = [prompt] if isinstance(prompt[0], int) else prompt
    expected = [
        generate_directly(
            encoded(one_prompt) if isinstance(one_prompt, str) else one_prompt,
            SamplingParams(max_new_tokens=4, seed=1),
            first_index=place,
        )[0].text
        for place, one_prompt in enumerate(prompts)
    ]
    assert [choice["text"] for choice in reply["choices"]] == expected


def test_a_judge_reads_its_score_from_the_completion_of_the_generator(url: str) -> None:
    (answer,) = generate_directly(
        encoded([{"role": "user", "content": "Grade 4."}]), SamplingParams(max_new_tokens=6, temperature=0)
    )
    text = str(answer.text)
    verdict = Verdict(r"(?s)\A(.*)\Z", {text.strip().lower(): 5.0})
    reward = JudgeReward(f"{url}/v1", "tiny", "Grade {completion}.", max_new_tokens=6, verdict=verdict)
    task = Task("2+2=", {}, "line 1")
    environment = SingleTurn([task], reward)
    results = step(environment, [environment.reset(task), environment.reset(task)], ["4", "another"])
    environment.close()
    assert [result.score and result.score.reward for result in results] == [5.0, 0.0]
    assert results[1].score is not None
    assert results[1].score.excluded, "another question has another answer"


def test_chat_completion_equals_the_generator(url: str) -> None:
    body = {"model": "tiny", "messages": MESSAGES, "max_completion_tokens": 7, "seed": 5, "logprobs": True}
    status, reply = request_json(f"{url}/v1/chat/completions", body)
    assert status == 200
    (expected,) = generate_directly(encoded(MESSAGES), SamplingParams(max_new_tokens=7, seed=5))
    (choice,) = reply["choices"]
    assert choice["message"] == {"role": "assistant", "content": expected.text, "refusal": None}
    assert [token["logprob"] for token in choice["logprobs"]["content"]] == pytest.approx(expected.logprobs, abs=1e-4)
    assert reply["object"] == "chat.completion"
    parts = [
        {"role": message["role"], "content": [{"type": "text", "text": message["content"]}]} for message in MESSAGES
    ]
    assert request_json(f"{url}/v1/chat/completions", body | {"messages": parts})[1]["choices"] == reply["choices"]


def test_chat_without_max_tokens_may_fill_the_context(url: str) -> None:
    _, reply = request_json(f"{url}/v1/chat/completions", {"messages": MESSAGES, "seed": 1, "ignore_eos": True})
    assert reply["usage"]["total_tokens"] == 192


def test_stop_is_a_string_or_a_list_of_strings(url: str) -> None:
    body = {"prompt": "Once", "max_tokens": 40, "seed": 2, "ignore_eos": True}
    full_text = request_json(f"{url}/v1/completions", body)[1]["choices"][0]["text"]
    for stop in ("zzhzz", ["zzhzz"]):
        assert request_json(f"{url}/v1/completions", body | {"stop": stop})[1]["choices"][0]["text"] == full_text
    cut = request_json(f"{url}/v1/completions", body | {"stop": full_text[5:7]})[1]["choices"][0]
    assert (cut["text"], cut["finish_reason"]) == (full_text.partition(full_text[5:7])[0], "stop")


@pytest.mark.parametrize("stop", [None, "late"])
def test_streamed_chat_equals_the_completion(url: str, stop: str | None) -> None:
    body: dict[str, Any] = {"messages": MESSAGES, "max_tokens": 30, "seed": 4, "n": 2, "logprobs": True}
    if stop:
        text = request_json(f"{url}/v1/chat/completions", body)[1]["choices"][0]["message"]["content"]
        body["stop"] = text[9:12]
    _, full_reply = request_json(f"{url}/v1/chat/completions", body)
    chunks = stream_chunks(
        f"{url}/v1/chat/completions", body | {"stream": True, "stream_options": {"include_usage": True}}
    )
    *chunks, usage = chunks
    assert (usage["choices"], usage["usage"]) == ([], full_reply["usage"])
    for index, choice in enumerate(full_reply["choices"]):
        own_chunks = [part["choices"][0] for part in chunks if part["choices"][0]["index"] == index]
        assert own_chunks[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(part["delta"]["content"] for part in own_chunks) == choice["message"]["content"]
        assert [part["finish_reason"] for part in own_chunks][-1] == choice["finish_reason"]
        logprobs = [token for part in own_chunks for token in part["logprobs"]["content"]]
        assert [token["token"] for token in logprobs] == [token["token"] for token in choice["logprobs"]["content"]]
    assert len(chunks) > 6


def test_streamed_completion_equals_the_completion(url: str) -> None:
    body = {"prompt": "Once", "max_tokens": 12, "seed": 4}
    _, full_reply = request_json(f"{url}/v1/completions", body)
    chunks = stream_chunks(f"{url}/v1/completions", body | {"stream": True})
    assert "".join(part["choices"][0]["text"] for part in chunks) == full_reply["choices"][0]["text"]
    assert {part["object"] for part in chunks} == {"text_completion"}


@pytest.mark.parametrize(
    ("path", "body", "sentence"),
    [
        ("completions", {}, "the request has no 'prompt'"),
        ("completions", {"prompt": 5}, "prompt is 5: give text, token ids, or a list of either."),
        ("completions", {"prompt": [1, "a"]}, "give text, token ids, or a list of either."),
        ("completions", {"prompt": []}, "give from 1 to 1024 completions in all"),
        ("completions", {"prompt": "a", "n": 10**9}, "give from 1 to 1024 completions in all"),
        ("completions", {"prompt": "a", "n": 0}, "give from 1 to 1024 completions in all"),
        ("completions", {"prompt": "a", "logprobs": 5}, "logprobs is 5, but only the log-probs of sampled tokens"),
        ("completions", {"prompt": "a", "echo": True}, "echo is True, which is not supported"),
        ("completions", {"prompt": "a", "frequency_penalty": 0.5}, "frequency_penalty is 0.5, which is not supported"),
        ("completions", {"prompt": "a", "model": "gpt"}, "model is 'gpt', but 'tiny' is served here."),
        ("completions", {"prompt": "a", "stop": 5}, "stop is 5: give text, or a list of texts."),
        ("completions", {"prompt": "a", "temperature": -1}, "temperature=-1"),
        ("completions", {"prompt": "a", "max_tokens": 9999}, "max_batch_tokens is 192"),
        ("completions", {"prompt": "a", "stream": True, "max_tokens": 9999}, "max_batch_tokens is 192"),
        ("completions", {"prompt": [[]]}, "the prompt is empty"),
        ("chat/completions", {"messages": []}, "give at least one message"),
        ("chat/completions", {"messages": "hi"}, "messages is 'hi': give a list."),
        ("chat/completions", {"messages": [{"role": "user"}]}, "messages.0.content is missing"),
        ("chat/completions", {"messages": MESSAGES, "tools": [{"type": "function"}]}, "which is not supported"),
        ("chat/completions", {"messages": MESSAGES, "top_logprobs": 2}, "top_logprobs is 2, which is not supported"),
        ("chat/completions", {"messages": MESSAGES, "response_format": {"type": "json_object"}}, "not supported"),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url", "text": "x"}]}]},
            "has a part of type 'image_url', but only text is supported",
        ),
    ],
)
def test_unsupported_requests_are_refused(url: str, path: str, body: dict[str, Any], sentence: str) -> None:
    status, reply = request_json(f"{url}/v1/{path}", body)
    assert (status, sentence in reply["error"]["message"]) == (400, True), reply
    assert reply["error"]["type"] == "invalid_request_error"


def test_unsupported_fields_without_effect_are_accepted(url: str) -> None:
    neutral = {"presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": {}, "tools": None, "suffix": None}
    assert request_json(f"{url}/v1/completions", {"prompt": "a", "max_tokens": 1, "echo": False} | neutral)[0] == 200
    own_message = {"role": "assistant", "content": "Yes.", "refusal": None, "tool_calls": None}
    assert (
        request_json(
            f"{url}/v1/chat/completions", {"messages": [*MESSAGES, own_message, MESSAGES[1]], "max_tokens": 1}
        )[0]
        == 200
    )


def test_models_route_lists_the_model(url: str) -> None:
    status, reply = request_json(f"{url}/v1/models")
    assert (status, [model["id"] for model in reply["data"]]) == (200, ["tiny"])
    assert {"id", "object", "created", "owned_by"} <= set(reply["data"][0])


def test_a_stream_of_a_disconnected_client_ends() -> None:
    with serving(Generator(sharp(), load_tokenizer("tiny-dense"))) as (served, address):
        body = {"prompt": "Once", "stream": True, "max_tokens": 60_000, "ignore_eos": True}
        connection = open_request(address, body, path="/v1/completions")
        assert connection.recv(10)
        connection.close()
        until(lambda: not served._session.busy)


def test_streamed_text_holds_back_partial_characters_and_stop_strings() -> None:
    tokenizer = load_tokenizer("tiny-dense")
    stream, pieces = TextStream(tokenizer, ["END"]), []
    text = "a\N{SNOWMAN}bENxEN"
    for count in range(1, len(text.encode()) + 1):
        pieces.append(stream.add(list(text.encode()[count - 1 : count])))
        assert "".join(pieces) == text.encode()[:count].decode(errors="ignore")[:-2], "the rest may begin END"
    assert "".join(pieces) == text[:-2]
    assert stream.add([], text[:-2] + "EN") == "EN"


def test_reply_has_null_for_numbers_that_json_lacks() -> None:
    assert write_json({"a": [float("inf"), (float("nan"), 1.5)], "b": -float("inf")}) == (
        b'{"a": [null, [null, 1.5]], "b": null}'
    )
