"""OpenAI routes: requests of OpenAI's client get the generator's completions; unsupported fields are refused."""

from __future__ import annotations

import asyncio
import json
import re
import sys
import urllib.request
from collections import deque
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import pytest

from postlude import load_tokenizer
from postlude.data.chat import Encoder
from postlude.generate.completion_state import CompletionState, PromptState
from postlude.generate.generator import Generator
from postlude.generate.protocol import Completion, Progress
from postlude.generate.sampling_params import SamplingParams
from postlude.generate.session import take_turns
from postlude.generate.text_stream import TextStream
from postlude.rollout.environments import SingleTurn
from postlude.rollout.judge import JudgeReward
from postlude.rollout.tasks import Task
from postlude.rollout.verdict import Verdict
from postlude.serving.http.replies import write_json
from postlude.serving.server.chat_calls import CompletionBackend
from postlude.serving.server.model_routes import ModelRoutes
from postlude.serving.server.served_model import ClientTurns, ServedModel
from tests.conftest import PATIENCE
from tests.generate.test_session import sharp
from tests.rollout.episodes import step
from tests.serving.test_generation_server import open_request, request_json, serving, until

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Say \N{SNOWMAN}."}]


TOOL = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}


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
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
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
    (other,) = request_json(f"{url}/v1/chat/completions", body | {"messages": parts})[1]["choices"]
    logprobs = [[token.pop("logprob") for token in reply["logprobs"]["content"]] for reply in (choice, other)]
    assert logprobs[1] == pytest.approx(logprobs[0], abs=1e-5)  # their last digits differ: the prompt is cached now
    assert other == choice


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
    body = {"prompt": "Once", "max_tokens": 12, "seed": 4, "logprobs": 1, "echo": True}
    _, full_reply = request_json(f"{url}/v1/completions", body)
    chunks = stream_chunks(f"{url}/v1/completions", body | {"stream": True})
    assert "".join(part["choices"][0]["text"] for part in chunks) == full_reply["choices"][0]["text"]
    for name in ("tokens", "text_offset"):
        streamed = [value for part in chunks for value in part["choices"][0]["logprobs"][name]]
        assert streamed == full_reply["choices"][0]["logprobs"][name]
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
        ("completions", {"prompt": "a", "logprobs": 21}, "logprobs is 21: give 20 or less."),
        ("completions", {"prompt": [9999], "echo": True, "logprobs": 1}, "the prompt has token 9999"),
        ("completions", {"prompt": "a", "frequency_penalty": 3}, "frequency_penalty=3.0: give a number from -2 to 2"),
        ("completions", {"prompt": "a", "suffix": "b"}, "suffix is 'b', which is not supported"),
        ("completions", {"prompt": "a", "suffix": {"b": None, "c": 1}}, "suffix is {'b': None, 'c': 1}, which is not"),
        (
            "completions",
            {"prompt": "a", "logit_bias": {"1": 500}},
            "logit_bias of token 1 is 500.0: give a number from",
        ),
        ("completions", {"prompt": "a", "logit_bias": {"a": 5}}, "a key of logit_bias is 'a': give a whole number."),
        ("completions", {"prompt": "a", "logit_bias": {"999": 5}}, "logit_bias of the prompt has token 999"),
        ("completions", {"prompt": "a", "max_tokens": 0}, "max_tokens is 0: give 1 or more."),
        ("chat/completions", {"messages": MESSAGES, "max_completion_tokens": 0}, "max_completion_tokens is 0: give 1"),
        ("completions", {"prompt": "a", "stop": 5}, "stop is 5: give text, or a list of texts."),
        ("completions", {"prompt": "a", "temperature": -1}, "temperature=-1"),
        ("completions", {"prompt": "a", "max_tokens": 9999}, "max_batch_tokens is 192"),
        ("completions", {"prompt": "a", "stream": True, "max_tokens": 9999}, "max_batch_tokens is 192"),
        ("completions", {"prompt": [[]]}, "the prompt is empty"),
        ("completions", {"prompt": "a", "echo": True, "stream": True, "max_tokens": 9999}, "max_batch_tokens is 192"),
        ("chat/completions", {"messages": MESSAGES, "stream": True, "max_tokens": 9999}, "max_batch_tokens is 192"),
        ("chat/completions", {"messages": []}, "give at least one message"),
        ("chat/completions", {"messages": "hi"}, "messages is 'hi': give a list."),
        ("chat/completions", {"messages": [{"role": "user"}]}, "messages.0.content is missing"),
        ("chat/completions", {"messages": MESSAGES, "tools": [{"type": "function"}]}, "has no 'tools.0.function'"),
        (
            "chat/completions",
            {"messages": MESSAGES, "tools": [TOOL]},
            "has tools, which the tokenizer's chat template does not write. Use a tokenizer whose template does, or "
            "leave them out.",
        ),
        ("chat/completions", {"messages": MESSAGES, "tools": [TOOL] * 129}, "tools has 129 items; the limit is 128."),
        ("chat/completions", {"messages": MESSAGES, "tool_choice": "required"}, "tool_choice is given without tools"),
        (
            "chat/completions",
            {"messages": MESSAGES, "tools": [TOOL], "tool_choice": {"type": "function"}},
            "the request has no 'tool_choice.function', which it needs.",
        ),
        (
            "chat/completions",
            {"messages": MESSAGES, "tool_choice": "any"},
            'give "none", "auto", "required", or {"type"',
        ),
        (
            "chat/completions",
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": "[1]"}}]}]},
            "messages.0.tool_calls.0.function.arguments is '[1]': give a JSON object.",
        ),
        (
            "chat/completions",
            {"messages": MESSAGES, "top_logprobs": 2},
            "top_logprobs is 2, which needs logprobs: true",
        ),
        ("chat/completions", {"messages": MESSAGES, "response_format": {"type": "json_schema"}}, "schema is missing"),
        (
            "chat/completions",
            {"messages": MESSAGES, "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": 5}}}},
            "the JSON schema cannot be enforced",
        ),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]},
            "messages.0.content.0 is a part of type 'image_url', but only text is supported",
        ),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]},
            "messages.0.content.0.text is 5: give text.",
        ),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": 5}]},
            "messages.0.content is 5: give text, or a list of parts of text.",
        ),
    ],
)
def test_unsupported_requests_are_refused(url: str, path: str, body: dict[str, Any], sentence: str) -> None:
    status, reply = request_json(f"{url}/v1/{path}", body)
    assert (status, sentence in reply["error"]["message"]) == (400, True), reply
    assert reply["error"]["type"] == "invalid_request_error"


def test_unsupported_fields_without_effect_are_accepted(url: str) -> None:
    neutral = {
        "presence_penalty": 0,
        "frequency_penalty": 0.0,
        "logit_bias": {},
        "functions": [],
        "tools": None,
        "suffix": None,
    }
    assert request_json(f"{url}/v1/completions", {"prompt": "a", "max_tokens": 1, "echo": False} | neutral)[0] == 200
    own_message = {"role": "assistant", "content": "Yes.", "refusal": None, "tool_calls": None}
    own_message["provider_specific_fields"] = {"refusal": None}  # as LiteLLM sends it
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


def test_a_model_is_described_by_its_name_and_an_unknown_one_is_404(url: str) -> None:
    assert request_json(f"{url}/v1/models/tiny")[1] == request_json(f"{url}/v1/models")[1]["data"][0]
    for path, body in (
        ("models/gpt%2F4", None),
        ("completions", {"prompt": "a", "model": "gpt/4"}),
        ("chat/completions", {"messages": MESSAGES, "model": "gpt/4", "stream": True}),
    ):
        status, reply = request_json(f"{url}/v1/{path}", body)
        assert (status, reply["error"]["code"]) == (404, "model_not_found")
        assert reply["error"]["message"] == "model is 'gpt/4', but 'tiny' is served here."
    status, reply = request_json(f"{url}/nothing")
    assert (status, set(reply["error"])) == (404, {"message", "type", "param", "code"})


class Scripted(CompletionBackend):
    """Generates a text, as tokens one by one."""

    def __init__(self, text: str) -> None:
        self.tokens = [*text.encode(), 257]

    def adapter_of(self, name: str | None) -> str | None:
        return "adapter" if name == "adapter" else None

    def completion(self) -> Completion:
        text = bytes(self.tokens[:-1]).decode()
        return Completion(self.tokens, [0.0] * len(self.tokens), [], "stop", text)

    async def generate(self, requests: Any) -> list[list[Completion]]:
        self.prompt = requests[0].prompt
        return [[self.completion()]]

    async def stream(self, requests: Any) -> AsyncGenerator[Progress, None]:
        for token in self.tokens:
            yield Progress(0, 0, [token], [0.0], None)
        yield Progress(0, 0, [], [], self.completion())


HERMES = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for message in messages %}<{{ message.role }}>"
    "{{ message.content or '' }}{% for call in message.tool_calls or [] %}<tool_call>"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</tool_call>'
    "{% endfor %}<|end|>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
CALL = '<tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call>'


def ask_with_tools(text: str, **fields: Any) -> tuple[Any, str]:
    """Returns the reply (of a stream, its chunks) to a request with tools, and the prompt."""
    tokenizer = load_tokenizer("tiny-dense")
    tokenizer.chat_template = HERMES
    backend = Scripted(text)
    routes = ModelRoutes(ServedModel("tiny", tokenizer, 4096), backend)

    async def ask() -> Any:
        body = {"messages": [MESSAGES[1]], "tools": [TOOL]} | fields
        reply = await routes.chat(json.dumps(body).encode(), ())
        return reply if isinstance(reply, dict) else [chunk async for chunk in reply]

    reply = asyncio.run(ask())
    prompt = getattr(backend, "prompt", ())
    return reply, tokenizer.decode(prompt)


def test_tool_calls_are_read_from_a_completion_and_written_into_the_prompt() -> None:
    reply, prompt = ask_with_tools(f"<think>{CALL}</think>I add.\n{CALL}{CALL}")
    assert '"name": "add"' in prompt
    (choice,) = reply["choices"]
    assert choice["finish_reason"] == "tool_calls"
    message = choice["message"]
    assert (message["content"], message["reasoning_content"]) == ("I add.", CALL)
    assert [call["function"] for call in message["tool_calls"]] == [{"name": "add", "arguments": '{"a": 2}'}] * 2
    assert len({call["id"] for call in message["tool_calls"]}) == 2
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "4"}
    _, prompt = ask_with_tools("4", messages=[MESSAGES[1], message, result])
    assert f"{CALL}{CALL}<|end|><tool>4<|end|><assistant>" in prompt
    assert (
        len(ask_with_tools(f"{CALL}{CALL}", parallel_tool_calls=False)[0]["choices"][0]["message"]["tool_calls"]) == 1
    )


@pytest.mark.parametrize("name", ["tiny", "adapter"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_reply_names_the_adapter_that_completed_it(name: str, *, stream: bool) -> None:
    routes = ModelRoutes(ServedModel("tiny", load_tokenizer("tiny-dense"), 4096), Scripted("a"))
    bodies = {"completions": {"prompt": "a"}, "chat": {"messages": MESSAGES}, "responses": {"input": "a"}}
    bodies["messages"] = {"messages": [MESSAGES[1]], "max_tokens": 4}

    async def names(route: str) -> set[str]:
        body = {"model": name, "stream": stream, **bodies[route]}
        reply = await getattr(routes, route)(json.dumps(body).encode(), ())
        text = json.dumps(reply if isinstance(reply, dict) else [event async for event in reply], default=vars)
        return set(re.findall(r'"model": "(\w+)"', text))

    for route in bodies:
        assert asyncio.run(names(route)) == {name}


@pytest.mark.parametrize("text", ["Just 4.", '<tool_call>{"name": 3}</tool_call>'])
def test_completion_without_a_readable_call_is_text(text: str) -> None:
    (choice,) = ask_with_tools(text)[0]["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == (text, "stop")
    assert "tool_calls" not in choice["message"]
    (choice,) = ask_with_tools(CALL, tool_choice="none")[0]["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == (CALL, "stop")


def test_streamed_tool_calls_equal_those_of_the_completion() -> None:
    full = ask_with_tools(f"Yes. {CALL}")[0]["choices"][0]
    chunks = [chunk["choices"][0] for chunk in ask_with_tools(f"Yes. {CALL}", stream=True)[0]]
    assert "".join(chunk["delta"].get("content", "") for chunk in chunks) == full["message"]["content"] == "Yes."
    begun, rest = (call for chunk in chunks for call in chunk["delta"].get("tool_calls", ()))
    function = full["message"]["tool_calls"][0]["function"]
    assert (begun["index"], begun["type"], begun["function"]) == (0, "function", function | {"arguments": ""})
    assert rest == {"index": 0, "function": {"arguments": function["arguments"]}}
    assert chunks[-1]["finish_reason"] == "tool_calls"
    text = [chunk["choices"][0] for chunk in ask_with_tools("Just 4.", stream=True)[0]]
    assert "".join(chunk["delta"]["content"] for chunk in text) == "Just 4."


def test_logprobs_have_the_bytes_of_parts_of_characters(url: str) -> None:
    body = {"messages": MESSAGES, "max_tokens": 30, "seed": 4, "logprobs": True, "temperature": 2, "ignore_eos": True}
    choice = request_json(f"{url}/v1/chat/completions", body)[1]["choices"][0]
    entries = choice["logprobs"]["content"]
    written = b"".join(bytes(entry["bytes"]) for entry in entries if not entry["token"].startswith("<|"))
    assert written.decode(errors="replace") == choice["message"]["content"]
    assert any(entry["token"].startswith("bytes:\\x") for entry in entries)


@pytest.mark.parametrize("prompt", [["Once", "Twice"], [79, 110]])
def test_echo_puts_the_prompt_before_each_completion(url: str, prompt: Any) -> None:
    body = {"prompt": prompt, "max_tokens": 6, "seed": 3, "n": 2}
    prompts = ["On"] if prompt == [79, 110] else prompt
    alone = [choice["text"] for choice in request_json(f"{url}/v1/completions", body)[1]["choices"]]
    expected = [prompts[index // 2] + text for index, text in enumerate(alone)]
    choices = request_json(f"{url}/v1/completions", body | {"echo": True})[1]["choices"]
    assert [choice["text"] for choice in choices] == expected
    streamed = [""] * len(expected)
    for chunk in stream_chunks(f"{url}/v1/completions", body | {"echo": True, "stream": True}):
        streamed[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert streamed == expected


def test_penalties_are_those_of_the_generator(url: str) -> None:
    penalties = {"presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.2}
    body = {"prompt": "Once", "max_tokens": 20, "seed": 3, "ignore_eos": True}
    reply = request_json(f"{url}/v1/completions", body | penalties)[1]["choices"][0]
    sampling = SamplingParams(max_new_tokens=20, seed=3, ignore_eos=True, **penalties)
    assert reply["text"] == generate_directly(encoded("Once"), sampling)[0].text


def test_likeliest_tokens_are_returned_with_each_token(url: str) -> None:
    body: dict[str, Any] = {"max_tokens": 8, "seed": 3, "ignore_eos": True}
    sampling = SamplingParams(max_new_tokens=8, seed=3, ignore_eos=True, top_logprobs=5)
    chat = body | {"messages": MESSAGES, "logprobs": True, "top_logprobs": 5}
    entries = request_json(f"{url}/v1/chat/completions", chat)[1]["choices"][0]["logprobs"]["content"]
    (expected,) = generate_directly(encoded(MESSAGES), sampling)
    values = [[other["logprob"] for other in entry["top_logprobs"]] for entry in entries]
    assert values == [pytest.approx([value for _, value in place], abs=1e-4) for place in expected.top_logprobs]
    chunks = stream_chunks(f"{url}/v1/chat/completions", chat | {"stream": True})
    parts = [chunk["choices"][0]["logprobs"]["content"] for chunk in chunks]
    assert [entry for part in parts for entry in part] == entries
    plain = request_json(f"{url}/v1/completions", body | {"prompt": "Once", "logprobs": 2})[1]["choices"][0]["logprobs"]
    assert {len(place) for place in plain["top_logprobs"]} <= {1, 2}  # two parts of characters may have one text
    assert len(plain["top_logprobs"]) == len(plain["tokens"]) == 8


def test_response_format_gives_json_of_the_schema(url: str) -> None:
    pytest.importorskip("llguidance")
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    schema["additionalProperties"] = False
    form = {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": schema}}
    body = {"messages": [MESSAGES[1]], "max_tokens": 100, "n": 2, "temperature": 2, "response_format": form}
    for choice in request_json(f"{url}/v1/chat/completions", body)[1]["choices"]:
        assert json.loads(choice["message"]["content"])["a"] in (True, False)
        assert choice["finish_reason"] == "stop"
    body |= {"response_format": {"type": "json_object"}, "temperature": 0, "n": 1, "max_tokens": 5}
    assert request_json(f"{url}/v1/chat/completions", body)[1]["choices"][0]["message"]["content"][0] == "{"


def test_logit_bias_is_added_to_the_logits(url: str) -> None:
    body: dict[str, Any] = {"prompt": "Once", "max_tokens": 12, "seed": 3, "ignore_eos": True}
    reply = request_json(f"{url}/v1/completions", body | {"logit_bias": {"120": 4.5, "97": -100}})[1]["choices"][0]
    sampling = SamplingParams(max_new_tokens=12, seed=3, ignore_eos=True, logit_bias=((120, 4.5), (97, -100.0)))
    assert reply["text"] == generate_directly(encoded("Once"), sampling)[0].text
    always = request_json(f"{url}/v1/completions", body | {"logit_bias": {"120": 100}})[1]["choices"][0]
    assert always["text"] == "x" * 12


STRICT_TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "boolean"}, "b": {"enum": ["x", "y"]}},
            "required": ["a", "b"],
            "additionalProperties": False,
        },
        "strict": True,
    },
}


@pytest.fixture(scope="module")
def hermes_url() -> Iterator[str]:
    tokenizer = load_tokenizer("tiny-dense")
    tokenizer.chat_template = HERMES
    with serving(Generator(sharp(), tokenizer)) as (_, address):
        yield address


def joined(chunks: list[Any]) -> list[tuple[dict[str, Any], str]]:
    """Returns the message of each choice of a stream, and why it ended."""
    messages: dict[int, dict[str, Any]] = {}
    reasons: dict[int, str] = {}
    for chunk in chunks:
        message = messages.setdefault(chunk["index"], {"content": None, "tool_calls": []})
        message["content"] = (message["content"] or "") + chunk["delta"].get("content", "") or None
        for call in chunk["delta"].get("tool_calls", ()):
            if "id" in call:
                message["tool_calls"].append(call)
            else:
                message["tool_calls"][call["index"]]["function"]["arguments"] += call["function"]["arguments"]
        reasons[chunk["index"]] = chunk["finish_reason"]
    return [(messages[index], reasons[index]) for index in sorted(messages)]


@pytest.mark.parametrize(
    ("choice", "stream"), [("required", True), ({"type": "function", "function": {"name": "add"}}, False)], ids=str
)
def test_forced_tool_calls_follow_the_schema(hermes_url: str, choice: Any, stream: bool) -> None:
    pytest.importorskip("llguidance")
    other = {"type": "function", "function": {"name": "never"}}
    body: dict[str, Any] = {"messages": [MESSAGES[1]], "tools": [other, STRICT_TOOL], "tool_choice": choice}
    body |= {"parallel_tool_calls": False, "temperature": 2, "n": 4, "max_tokens": 400, "stream": stream, "seed": 5}
    if stream:
        chunks = [chunk["choices"][0] for chunk in stream_chunks(f"{hermes_url}/v1/chat/completions", body)]
        ends = joined(chunks)
    else:
        _, reply = request_json(f"{hermes_url}/v1/chat/completions", body)
        ends = [(place["message"], place["finish_reason"]) for place in reply["choices"]]
    assert len(ends) == 4
    for message, reason in ends:
        (call,) = message["tool_calls"]
        assert (message["content"], reason) == (None, "tool_calls")
        arguments = json.loads(call["function"]["arguments"])
        if call["function"]["name"] == "add":
            assert arguments["a"] in (True, False)
            assert arguments["b"] in ("x", "y")
        else:
            assert (choice, call["function"]["name"], arguments) == ("required", "never", {})


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        (
            {"tool_choice": {"type": "function", "function": {"name": "subtract"}}},
            "tool_choice.function.name is 'subtract', but tools has add.",
        ),
        (
            {"tool_choice": "required", "response_format": {"type": "json_object"}},
            "the reply is to be JSON, but tool_choice or a strict tool asks for calls",
        ),
        ({"tool_choice": "required", "ignore_eos": True}, "grammar needs an end-of-sequence token or a stop token"),
    ],
)
def test_forced_tool_calls_that_cannot_be_are_refused(hermes_url: str, fields: dict[str, Any], sentence: str) -> None:
    pytest.importorskip("llguidance")
    body = {"messages": [MESSAGES[1]], "tools": [STRICT_TOOL], "max_tokens": 9} | fields
    status, reply = request_json(f"{hermes_url}/v1/chat/completions", body)
    assert (status, sentence in reply["error"]["message"]) == (400, True), reply


def test_forced_tool_calls_of_an_unknown_format_are_refused() -> None:
    tokenizer = load_tokenizer("tiny-dense")
    tokenizer.chat_template = HERMES.replace('<tool_call>{"name"', '<call>{"name"')
    with serving(Generator(sharp(), tokenizer)) as (_, address):
        body = {"messages": [MESSAGES[1]], "tools": [STRICT_TOOL], "tool_choice": "required"}
        status, reply = request_json(f"{address}/v1/chat/completions", body)
    assert (status, "writes calls in a format that is not known here" in reply["error"]["message"]) == (400, True)


def test_without_the_grammar_library_json_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with serving(Generator(sharp(), load_tokenizer("tiny-dense"))) as (_, address):
        body = {"messages": MESSAGES, "response_format": {"type": "json_object"}}
        status, reply = request_json(f"{address}/v1/chat/completions", body)
    assert (status, "pip install 'postlude[grammar]'" in reply["error"]["message"]) == (400, True)


def test_a_stream_of_a_disconnected_client_ends() -> None:
    with serving(Generator(sharp(), load_tokenizer("tiny-dense"), context_length=65_536)) as (served, address):
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
    assert stream.add([ord("D")]) == "", "the stop string is no text"
    assert stream.add([], text[:-2]) == ""


def test_reply_has_null_for_numbers_that_json_lacks() -> None:
    assert write_json({"a": [float("inf"), (float("nan"), 1.5)], "b": -float("inf")}) == (
        b'{"a": [null, [null, 1.5]], "b": null}'
    )


@pytest.mark.parametrize(
    ("path", "body", "sentence"),
    [
        ("completions", {"prompt": "a", "stop": ["x"] * 120_000, "n": 64}, "stop has 120000; the limit is 64 strings."),
        (
            "completions",
            {"prompt": "a", "stop_token_ids": [1] * 2000},
            "stop_token_ids has 2000 items; the limit is 1024.",
        ),
        ("completions", {"prompt": ["a"] * 2000}, "give from 1 to 1024 completions in all."),
        ("completions", {"prompt": "a" * 900_000}, "the prompt has 900000 characters"),
        (
            "completions",
            {"prompt": "a", "n": 1024, "max_tokens": 100, "logprobs": 20},
            "have 2150400 log-probs; the limit is 1048576.",
        ),
        ("chat/completions", {"messages": [MESSAGES[0]] * 5000}, "messages has 5000 items; the limit is 4096."),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * 2000}]},
            "1024",
        ),
        (
            "chat/completions",
            {"messages": MESSAGES, "chat_template_kwargs": {str(i): 1 for i in range(99)}},
            "chat_template_kwargs has too many items; the limit is 64.",
        ),
        (
            "chat/completions",
            {
                "messages": MESSAGES,
                "response_format": {"type": "json_schema", "json_schema": {"schema": {"a": "b" * 70_000}}},
            },
            "json_schema has",
        ),
    ],
)
def test_every_list_and_text_has_a_limit(url: str, path: str, body: dict[str, Any], sentence: str) -> None:
    status, reply = request_json(f"{url}/v1/{path}", body)
    assert (status, sentence in reply["error"]["message"]) == (400, True), reply


def test_clients_that_wait_take_turns() -> None:
    order: list[str] = []
    waiting = deque(CompletionState(PromptState([1], SamplingParams(), 1), 0, frozenset(), None) for _ in range(6))
    for completion, client in zip(waiting, "aaaabb", strict=True):
        completion.client = (client, str(len(order)))
        order.append(client)
    waiting[3].tokens.append(1)
    assert [completion.client[0] for completion in take_turns(waiting)] == ["a", "a", "b", "a", "b", "a"]
    for completion, connection in zip(waiting, "112111", strict=True):
        completion.client = (completion.client[0], connection)
    assert [waiting.index(completion) for completion in take_turns(waiting)] == [3, 0, 4, 2, 5, 1]
    assert [waiting.index(completion) for completion in take_turns(waiting)] == [3, 0, 4, 2, 5, 1], "as before"
    order.clear()

    async def enter(turns: ClientTurns, client: str) -> None:
        async with turns.turn(client):
            order.append(client)
            await asyncio.sleep(0)

    async def run() -> None:
        turns = ClientTurns()
        tasks = [asyncio.create_task(enter(turns, client)) for client in "aaaabb"]
        await asyncio.sleep(0)
        tasks[1].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.wait_for(enter(turns, "c"), PATIENCE)

    asyncio.run(run())
    assert "".join(order) == "ababac"


@pytest.mark.parametrize("stream", [False, True])
def test_echo_with_logprobs_scores_the_prompt(url: str, stream: bool) -> None:
    """As lm-eval reads it: the sum of a continuation's log-probs, and whether it is the greedy one."""
    first, other = encoded("Once upon"), encoded("a")
    (greedy,) = generate_directly(first, SamplingParams(max_new_tokens=6, temperature=0.0, ignore_eos=True))
    sampling = {"max_tokens": 1, "temperature": 0, "logprobs": 2, "echo": True, "stream": stream}
    body = {"prompt": [[*first, *greedy.tokens], other]} | sampling
    if stream:
        chunks = [chunk["choices"][0] for chunk in stream_chunks(f"{url}/v1/completions", body)]
        choices = [choice for choice in chunks if choice["finish_reason"] is None][:2]
    else:
        choices = request_json(f"{url}/v1/completions", body)[1]["choices"]
    scored, short = (choice["logprobs"] for choice in choices)
    place = slice(len(first), len(first) + 6)
    assert scored["token_logprobs"][0] is scored["top_logprobs"][0] is None
    assert scored["token_logprobs"][place] == pytest.approx(greedy.logprobs, abs=1e-4)
    assert scored["token_logprobs"][place] == [max(top.values()) for top in scored["top_logprobs"][place]]
    assert len(scored["tokens"]) == len(first) + 6 + (not stream)
    assert len(short["token_logprobs"]) == len(other) + (not stream)
