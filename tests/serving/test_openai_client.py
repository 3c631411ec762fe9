"""OpenAI's client works with /v1/chat/completions and /v1/responses: tools, thoughts, streams, log-probs and errors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from tests.serving.api_endpoint import ENDPOINTS, Endpoint
from tests.serving.test_generation_server import request_json

ASK: list[Any] = [{"role": "user", "content": "How warm is Oslo?"}]
FUNCTION: Any = {
    "name": "weather",
    "description": "How warm it is.",
    "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
}
CHAT_TOOL: Any = {"type": "function", "function": FUNCTION}
TOOL: Any = {"type": "function", **FUNCTION}
CALL = '<tool_call>{"name": "weather", "arguments": {"place": "Oslo"}}</tool_call>'
HISTORY = "<user>How warm is Oslo?<|end|><assistant>"


class Answer(BaseModel):
    degrees: int


@pytest.fixture(scope="module", params=ENDPOINTS)
def endpoint(request: pytest.FixtureRequest) -> Iterator[Endpoint]:
    with ENDPOINTS[request.param]() as endpoint:
        yield endpoint


@pytest.fixture
def client(endpoint: Endpoint) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{endpoint.url}/v1", api_key=endpoint.key, max_retries=0) as client:
        yield client


def chat(client: openai.OpenAI, endpoint: Endpoint, text: str, *, stream: bool = False, **fields: Any) -> Any:
    """Returns the completion for which the model writes a text; of a stream, what the client puts together."""
    endpoint.script.texts[:] = [text]
    body = {"model": endpoint.model, "messages": ASK} | fields
    if not stream:
        return client.chat.completions.create(**body)
    with client.chat.completions.stream(**body, stream_options={"include_usage": True}) as events:
        return events.get_final_completion()


def respond(client: openai.OpenAI, endpoint: Endpoint, text: str, *, stream: bool = False, **fields: Any) -> Any:
    """Returns the response for which the model writes a text; of a stream, its last event's."""
    endpoint.script.texts[:] = [text]
    body = {"model": endpoint.model, "input": "How warm is Oslo?"} | fields
    if not stream:
        return client.responses.create(**body)
    *_, last = client.responses.create(**body, stream=True)
    return last.response


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_completion_has_thought_text_and_calls(client: openai.OpenAI, endpoint: Endpoint, stream: bool) -> None:
    text = f"<think>Ask for it.</think>I look.{CALL}{CALL}"
    completion = chat(client, endpoint, text, stream=stream, tools=[CHAT_TOOL], logprobs=True, top_logprobs=2)
    (choice,) = completion.choices
    message = choice.message
    assert (message.role, message.content, message.reasoning_content) == ("assistant", "I look.", "Ask for it.")
    assert [(call.type, call.function.name) for call in message.tool_calls] == [("function", "weather")] * 2
    assert [json.loads(call.function.arguments) for call in message.tool_calls] == [{"place": "Oslo"}] * 2
    assert len({call.id for call in message.tool_calls}) == 2
    assert choice.finish_reason == "tool_calls"
    assert b"".join(bytes(token.bytes) for token in choice.logprobs.content).startswith(text.encode())
    assert {len(token.top_logprobs) for token in choice.logprobs.content} == {2}
    prompt, written = len(endpoint.script.requests[-1].prompt), len(text) + 1
    usage = completion.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (prompt, written, prompt + written)


def test_calls_are_streamed_name_first(client: openai.OpenAI, endpoint: Endpoint) -> None:
    endpoint.script.texts[:] = [f"<think>ab</think>c{CALL}"]
    chunks = list(client.chat.completions.create(model=endpoint.model, messages=ASK, tools=[CHAT_TOOL], stream=True))
    deltas = [chunk.choices[0].delta.model_dump(exclude_none=True) for chunk in chunks]
    begun, rest = (delta["tool_calls"][0] for delta in deltas if "tool_calls" in delta)
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "ab"
    assert (begun["index"], begun["type"], begun["function"]) == (0, "function", {"name": "weather", "arguments": ""})
    assert rest == {"index": 0, "function": {"arguments": '{"place": "Oslo"}'}}
    assert [chunk.choices[0].finish_reason for chunk in chunks[-2:]] == [None, "tool_calls"]
    assert {chunk.usage for chunk in chunks} == {None}, "usage is not asked for"


def test_a_chat_that_is_sent_back_is_written_as_the_model_wrote_it(client: openai.OpenAI, endpoint: Endpoint) -> None:
    written = f"<think>Ask for it.</think>I look.{CALL}"
    message = chat(client, endpoint, written, tools=[CHAT_TOOL]).choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "4"}
    chat(client, endpoint, "4.", tools=[CHAT_TOOL], messages=[*ASK, message, result])
    assert endpoint.script.prompt.endswith(f"{HISTORY}{written}<|end|><tool>4<|end|><assistant>")
    chat(client, endpoint, "4.", messages=[{"role": "developer", "content": "Be brief."}, *ASK])
    assert endpoint.script.prompt == f"<system>Be brief.<|end|>{HISTORY}", "the template knows no developer"


def test_effort_is_an_option_of_the_chat_template(client: openai.OpenAI, endpoint: Endpoint) -> None:
    for effort, ending in (("none", "<assistant><think></think>"), ("high", "<assistant>")):
        chat(client, endpoint, "a", reasoning_effort=effort)
        assert endpoint.script.prompt.endswith(f"<|end|>{ending}")
        respond(client, endpoint, "a", reasoning={"effort": effort})
        assert endpoint.script.prompt.endswith(f"<|end|>{ending}")


def test_json_of_a_model_is_parsed(client: openai.OpenAI, endpoint: Endpoint) -> None:
    endpoint.script.texts[:] = ['{"degrees": 4}', '{"degrees": 5}', '{"degrees": 6}']
    completion = client.chat.completions.parse(model=endpoint.model, messages=ASK, response_format=Answer)
    response = client.responses.parse(model=endpoint.model, input="?", text_format=Answer)
    with client.responses.stream(model=endpoint.model, input="?", text_format=Answer) as events:
        streamed = events.get_final_response()
    parsed = (completion.choices[0].message.parsed, response.output_parsed, streamed.output_parsed)
    assert [answer.degrees for answer in parsed if answer is not None] == [4, 5, 6]
    for request in endpoint.script.requests[-3:]:
        schema = json.loads(request.sampling.json_schema or "")
        assert schema["properties"]["degrees"]["type"] == "integer"


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_has_reasoning_message_and_calls_in_this_order(
    client: openai.OpenAI, endpoint: Endpoint, stream: bool
) -> None:
    text = f"<think>Ask for it.</think>I look.{CALL}{CALL}"
    fields: Any = {"tools": [TOOL], "instructions": "Be brief.", "metadata": {"run": "a"}}
    response = respond(client, endpoint, text, stream=stream, **fields)
    reasoning, message, *calls = response.output
    assert [item.type for item in response.output] == ["reasoning", "message", "function_call", "function_call"]
    assert (reasoning.content[0].text, message.content[0].text) == ("Ask for it.", "I look.")
    assert response.output_text == "I look."
    assert [(call.name, json.loads(call.arguments)) for call in calls] == [("weather", {"place": "Oslo"})] * 2
    assert (response.status, response.model, response.metadata) == ("completed", endpoint.model, {"run": "a"})
    usage, prompt = response.usage, len(endpoint.script.requests[-1].prompt)
    assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (
        prompt,
        len(text) + 1,
        prompt + len(text) + 1,
    )
    assert usage.output_tokens_details.reasoning_tokens == len("<think>Ask for it.</think>")
    assert endpoint.script.prompt.endswith("<system>Be brief.<|end|><user>How warm is Oslo?<|end|><assistant>")


def test_response_events_put_together_are_the_response(client: openai.OpenAI, endpoint: Endpoint) -> None:
    endpoint.script.texts[:] = [f"<think>ab</think>cd{CALL}"]
    fields: Any = {"tools": [TOOL], "include": ["message.output_text.logprobs"]}
    events = list(client.responses.create(model=endpoint.model, input="?", stream=True, **fields))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    item = ["output_item.added", "content_part.added"]
    done = ["content_part.done", "output_item.done"]
    assert list(dict.fromkeys(zip(kinds, (getattr(event, "output_index", None) for event in events), strict=True))) == [
        ("created", None),
        ("in_progress", None),
        *[(kind, 0) for kind in (*item, "reasoning_text.delta", "reasoning_text.done", *done)],
        *[(kind, 1) for kind in (*item, "output_text.delta", "output_text.done", *done)],
        ("output_item.added", 2),
        *[(f"function_call_arguments.{kind}", 2) for kind in ("delta", "done")],
        ("output_item.done", 2),
        ("completed", None),
    ]
    final = events[-1].response
    assert [event.item for event in events if event.type == "response.output_item.done"] == final.output
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == "cd"
    entries = final.output[1].content[0].logprobs
    assert b"".join(bytes(entry.bytes) for entry in entries).startswith(b"<think>ab</think>cd")
    endpoint.script.texts[:] = [f"cd{CALL}"]
    with client.responses.stream(model=endpoint.model, input="?", tools=[TOOL]) as helper:
        assert [item.type for item in helper.get_final_response().output] == ["message", "function_call"]


def test_a_response_that_is_sent_back_is_written_as_the_model_wrote_it(
    client: openai.OpenAI, endpoint: Endpoint
) -> None:
    written = f"<think>Ask for it.</think>I look.{CALL}"
    output = respond(client, endpoint, written, tools=[TOOL]).output
    result = {"type": "function_call_output", "call_id": output[-1].call_id, "output": "4"}
    respond(client, endpoint, "4.", tools=[TOOL], input=[*ASK, *output, result])
    assert endpoint.script.prompt.endswith(f"{HISTORY}{written}<|end|><tool>4<|end|><assistant>")
    says = [{"role": "assistant", "content": text} for text in "ab"]
    user = {"role": "user", "content": [{"type": "input_text", "text": "c"}]}
    respond(client, endpoint, "4.", input=[*ASK, *says, user])
    assert endpoint.script.prompt == f"{HISTORY}a<|end|><assistant>b<|end|><user>c<|end|><assistant>"


@pytest.mark.parametrize("stream", [False, True])
def test_why_a_reply_ended(client: openai.OpenAI, endpoint: Endpoint, stream: bool) -> None:
    choice = chat(client, endpoint, "Warm. END it", stop=["it", "END"], stream=stream).choices[0]
    assert (choice.finish_reason, choice.message.content) == ("stop", "Warm. ")
    if not stream:  # the helper for streams raises
        choice = chat(client, endpoint, "Warm.", max_completion_tokens=3).choices[0]
        assert (choice.finish_reason, choice.message.content) == ("length", "War")
    response = respond(client, endpoint, "Warm.", max_output_tokens=3, stream=stream)
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (response.output_text, response.output[0].status) == ("War", "incomplete")
    assert respond(client, endpoint, "", stream=stream).output_text == ""


def test_responses_with_forced_calls(client: openai.OpenAI, endpoint: Endpoint) -> None:
    for choice, calls, grammar in (
        ("auto", 2, False),
        ("required", 2, True),
        ({"type": "function", "name": "weather"}, 2, True),
        ("none", 0, False),
    ):
        response = respond(client, endpoint, f"{CALL}{CALL}", tools=[TOOL], tool_choice=choice)
        assert sum(item.type == "function_call" for item in response.output) == calls
        assert (endpoint.script.requests[-1].sampling.grammar is not None) == grammar
    assert len(respond(client, endpoint, f"{CALL}{CALL}", tools=[TOOL], parallel_tool_calls=False).output) == 1


def test_errors_are_those_of_the_api(client: openai.OpenAI, endpoint: Endpoint) -> None:
    for ask in (chat, respond):
        for stream in () if endpoint.any_model else (False, True):
            with pytest.raises(openai.NotFoundError, match="model is 'gpt', but 'tiny' is served here") as missing:
                ask(client, endpoint, "a", stream=stream, model="gpt")
            assert (missing.value.code, missing.value.type) == ("model_not_found", "invalid_request_error")
        with pytest.raises(openai.BadRequestError, match="temperature=-1"):
            ask(client, endpoint, "a", temperature=-1)
        with (
            openai.OpenAI(base_url=f"{endpoint.url}/v1", api_key="other", max_retries=0) as stranger,
            pytest.raises(openai.AuthenticationError),
        ):
            ask(stranger, endpoint, "a")
    assert endpoint.model in [model.id for model in client.models.list()]


IMAGE = {"role": "user", "content": [{"type": "input_image", "image_url": "data:"}]}


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"input": [IMAGE]}, "input.0.content.0 is a part of type 'input_image', but only text is supported"),
        ({"input": 5}, "input is 5: give text, or a list of items."),
        ({"input": []}, "input is []: give at least one item."),
        ({"input": ASK * 5000}, "input has 5000 items; the limit is 4096."),
        ({"input": [{"role": "user", "content": 5}]}, "input.0.content is 5: give text, or a list of parts of text."),
        ({"input": [{"role": "user"}]}, "input.0 is an item of type 'message', which needs 'content'."),
        ({"input": [{"role": "tool", "content": "a"}]}, "input.0.role is 'tool': give 'user', 'assistant'"),
        ({"input": [{"type": "item_reference", "id": "a"}]}, "input.0 is an item of type 'item_reference', which"),
        (
            {"input": [*ASK, {"type": "function_call", "call_id": "a", "name": "b", "arguments": "[1]"}]},
            "input.1.arguments is '[1]': give a JSON object.",
        ),
        ({"previous_response_id": "resp_1"}, "previous_response_id is 'resp_1', but no response is stored here"),
        ({"conversation": {"id": "a"}}, "conversation is {'id': 'a'}, but no response is stored here"),
        ({"background": True}, "background is True, which is not supported; there are"),
        ({"truncation": "auto"}, "truncation is 'auto', which is not supported; there are"),
        ({"include": ["file_search_call.results"]}, "include has 'file_search_call.results', which is not supported"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type is 'web_search', but only functions are supported"),
        ({"tool_choice": "required"}, "tool_choice is given without tools"),
        ({"tool_choice": {"type": "function", "name": "a"}, "tools": [TOOL]}, "tool_choice.name is 'a', but tools has"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema is missing: give a JSON schema."),
        ({"max_output_tokens": 0}, "max_output_tokens is 0: give 1 or more."),
        ({"top_logprobs": 21}, "top_logprobs is 21: give 20 or less."),
        ({"n": 3}, "n is 3, which is not supported; there are"),
    ],
)
def test_what_is_not_supported_is_refused_in_a_sentence(
    endpoint: Endpoint, fields: dict[str, Any], sentence: str
) -> None:
    body = {"model": endpoint.model, "input": "?"} | fields
    status, reply = request_json(f"{endpoint.url}/v1/responses", body, Authorization=f"Bearer {endpoint.key}")
    assert (status, reply["error"]["type"]) == (400, "invalid_request_error"), reply
    assert sentence in reply["error"]["message"], reply


@pytest.mark.parametrize("body", [b"[" * 100_000, b'{"input": ' + b'[{"a":' * 9999, b"[]", b"", b'{"top_p": 1e999}'])
def test_bodies_that_are_no_request_are_refused(endpoint: Endpoint, body: bytes) -> None:
    for route in ("responses", "chat/completions"):
        status, reply = request_json(f"{endpoint.url}/v1/{route}", body, Authorization=f"Bearer {endpoint.key}")
        assert (status, reply["error"]["type"]) == (400, "invalid_request_error")
