"""Anthropic's client works with what replies at /v1/messages: chat, tools, thoughts, streams and errors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from tests.serving.api_endpoint import CONTEXT, ENDPOINTS, Endpoint
from tests.serving.test_generation_server import request_json

ASK: list[Any] = [{"role": "user", "content": "How warm is Oslo?"}]
TOOL: Any = {
    "name": "weather",
    "description": "How warm it is.",
    "input_schema": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
}
CALL = '<tool_call>{"name": "weather", "arguments": {"place": "Oslo"}}</tool_call>'


@pytest.fixture(scope="module", params=ENDPOINTS)
def endpoint(request: pytest.FixtureRequest) -> Iterator[Endpoint]:
    with ENDPOINTS[request.param]() as endpoint:
        yield endpoint


@pytest.fixture
def client(endpoint: Endpoint) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=endpoint.url, api_key=endpoint.key, max_retries=0) as client:
        yield client


def ask(client: anthropic.Anthropic, endpoint: Endpoint, text: str, *, stream: bool, **fields: Any) -> Any:
    """Returns the message for which the model writes a text; of a stream, what the client puts together."""
    endpoint.script.texts[:] = [text]
    body = {"model": endpoint.model, "max_tokens": 500, "messages": ASK} | fields
    if not stream:
        return client.messages.create(**body)
    with client.messages.stream(**body) as events:
        return events.get_final_message()


@pytest.mark.parametrize("stream", [False, True])
def test_a_message_has_thought_text_and_calls_in_this_order(
    client: anthropic.Anthropic, endpoint: Endpoint, stream: bool
) -> None:
    text = f"<think>Ask for it.</think>I look.{CALL}{CALL}"
    message = ask(client, endpoint, text, stream=stream, tools=[TOOL], system="Be brief.")
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use", "tool_use"]
    thought, said, *calls = message.content
    assert (thought.thinking, said.text) == ("Ask for it.", "I look.")
    assert [(call.name, call.input) for call in calls] == [("weather", {"place": "Oslo"})] * 2
    assert len({call.id for call in calls}) == 2
    assert (message.role, message.model, message.stop_reason) == ("assistant", endpoint.model, "tool_use")
    usage = message.usage
    assert (usage.input_tokens, usage.output_tokens) == (len(endpoint.script.requests[-1].prompt), len(text) + 1)
    assert endpoint.script.prompt.startswith('[{"type": "function", "function": {"name": "weather"')
    assert endpoint.script.prompt.endswith("<system>Be brief.<|end|><user>How warm is Oslo?<|end|><assistant>")


def test_a_reply_that_is_sent_back_is_written_as_the_model_wrote_it(
    client: anthropic.Anthropic, endpoint: Endpoint
) -> None:
    written = f"<think>Ask for it.</think>I look.{CALL}"
    message = ask(client, endpoint, written, stream=False, tools=[TOOL])
    result = {"type": "tool_result", "tool_use_id": message.content[-1].id, "content": [{"type": "text", "text": "4"}]}
    reply = {"role": "assistant", "content": message.content}
    last = {"role": "user", "content": [result, {"type": "text", "text": "Go"}, {"type": "text", "text": " on."}]}
    answer = ask(client, endpoint, "4.", stream=False, tools=[TOOL], messages=[*ASK, reply, last])
    assert answer.content[0].text == "4."
    history = f"<user>How warm is Oslo?<|end|><assistant>{written}<|end|><tool>4<|end|><user>Go on.<|end|><assistant>"
    assert endpoint.script.prompt.endswith(history)


def test_events_come_in_the_order_of_the_api(client: anthropic.Anthropic, endpoint: Endpoint) -> None:
    endpoint.script.texts[:] = [f"<think>ab</think>c{CALL}"]
    events = client.messages.create(
        model=endpoint.model, max_tokens=500, messages=ASK, tools=[TOOL], stream=True, extra_headers={"a": "b"}
    )
    found = dict.fromkeys((event.type.removeprefix("content_"), getattr(event, "index", None)) for event in events)
    assert list(found) == [
        ("message_start", None),
        *[(kind, index) for index in range(3) for kind in ("block_start", "block_delta", "block_stop")],
        ("message_delta", None),
        ("message_stop", None),
    ]


@pytest.mark.parametrize("stream", [False, True])
def test_why_a_message_ended(client: anthropic.Anthropic, endpoint: Endpoint, stream: bool) -> None:
    def end(text: str, **fields: Any) -> tuple[Any, ...]:
        message = ask(client, endpoint, text, stream=stream, **fields)
        return message.stop_reason, message.stop_sequence, "".join(block.text for block in message.content)

    assert end("Warm.") == ("end_turn", None, "Warm.")
    assert end("Warm. END it", stop_sequences=["it", "END"]) == ("stop_sequence", "END", "Warm. ")
    assert end("Warm.", max_tokens=3) == ("max_tokens", None, "War")
    room = CONTEXT - len(endpoint.script.requests[-1].prompt)
    assert end("a" * 5000, max_tokens=20_000) == ("model_context_window_exceeded", None, "a" * room)
    assert end("", max_tokens=3) == ("end_turn", None, "")


def test_sampling_is_as_the_request_says(client: anthropic.Anthropic, endpoint: Endpoint) -> None:
    ask(client, endpoint, "a", stream=False, extra_body={"temperature": 0.5, "top_p": 0.75, "top_k": 7})
    sampling = endpoint.script.requests[-1].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.max_new_tokens) == (0.5, 0.75, 7, 500)
    schema = {"type": "object", "properties": {}, "additionalProperties": False}
    ask(client, endpoint, "{}", stream=False, output_config={"format": {"type": "json_schema", "schema": schema}})
    assert endpoint.script.requests[-1].sampling.json_schema == (
        '{"type": "object", "properties": {}, "additionalProperties": false}'
    )


def test_thinking_is_the_option_of_the_chat_template(client: anthropic.Anthropic, endpoint: Endpoint) -> None:
    for thinking, ending in (
        ({"type": "disabled"}, "<assistant><think></think>"),
        ({"type": "adaptive"}, "<assistant>"),
        ({"type": "enabled", "budget_tokens": 2000}, "<assistant>"),
    ):
        ask(client, endpoint, "a", stream=False, thinking=thinking)
        assert endpoint.script.prompt.endswith(f"<|end|>{ending}")


def test_tool_choice(client: anthropic.Anthropic, endpoint: Endpoint) -> None:
    for choice, calls, grammar in (
        ({"type": "auto"}, 2, False),
        ({"type": "auto", "disable_parallel_tool_use": True}, 1, False),
        ({"type": "any"}, 2, True),
        ({"type": "tool", "name": "weather"}, 2, True),
        ({"type": "none"}, 0, False),
    ):
        message = ask(client, endpoint, f"{CALL}{CALL}", stream=False, tools=[TOOL], tool_choice=choice)
        assert sum(block.type == "tool_use" for block in message.content) == calls
        assert (endpoint.script.requests[-1].sampling.grammar is not None) == grammar
    assert endpoint.script.prompt.startswith("<user>"), "none has no tools"


def test_tokens_are_counted_without_a_completion(client: anthropic.Anthropic, endpoint: Endpoint) -> None:
    message = ask(client, endpoint, "a", stream=False, tools=[TOOL], system=[{"type": "text", "text": "Be brief."}])
    before = len(endpoint.script.requests)
    count = client.messages.count_tokens(model=endpoint.model, messages=ASK, tools=[TOOL], system="Be brief.")
    assert (count.input_tokens, len(endpoint.script.requests)) == (message.usage.input_tokens, before)


def test_errors_are_those_of_the_api(client: anthropic.Anthropic, endpoint: Endpoint) -> None:
    if not endpoint.any_model:
        with pytest.raises(anthropic.NotFoundError) as missing:
            ask(client, endpoint, "a", stream=False, model="claude")
        assert missing.value.body == {
            "type": "error",
            "error": {"type": "not_found_error", "message": "model is 'claude', but 'tiny' is served here."},
        }
    with pytest.raises(anthropic.BadRequestError, match="temperature=-1"):
        ask(client, endpoint, "a", stream=True, extra_body={"temperature": -1})
    with (
        anthropic.Anthropic(base_url=endpoint.url, api_key="other", max_retries=0) as stranger,
        pytest.raises(anthropic.AuthenticationError) as refused,
    ):
        ask(stranger, endpoint, "a", stream=False)
    assert isinstance(refused.value.body, dict)
    assert refused.value.body["error"]["type"] == "authentication_error"
    assert [model.display_name for model in client.models.list()] == [endpoint.model]
    with anthropic.Anthropic(base_url=endpoint.url, auth_token=endpoint.key, max_retries=0) as bearer:
        assert ask(bearer, endpoint, "a", stream=False).content[0].text == "a"


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aa"}}


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        (
            {"messages": [{"role": "user", "content": [IMAGE]}]},
            "messages.0.content.0 is a block of type 'image', which",
        ),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content is 5: give text, or a list of blocks."),
        ({"messages": [{"role": "user", "content": []}]}, "messages.0.content is []: give at least one block."),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "of type 'text', which needs 'text'."),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages.0.role is 'tool': give 'user', 'assistant' or"),
        ({"messages": []}, "messages is []: give at least one message."),
        ({"messages": [*ASK, {"role": "assistant", "content": "It"}]}, "the last of messages is the assistant's"),
        (
            {"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": "a"}]}]},
            "of type 'thinking', but a message of the role 'user' has text, tool_result.",
        ),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": [IMAGE]}]}
                ]
            },
            "messages.0.content.0.content.0 is a block of type 'image', but only text is supported here",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": 5}]}]},
            "messages.0.content.0.content is 5: give text, or a list of blocks of text.",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * 1025}]},
            "has 1025 parts; the limit",
        ),
        ({"messages": ASK * 5000}, "messages has 5000 items; the limit is 4096."),
        ({"system": 5}, "system is 5: give text, or a list of blocks of text."),
        ({"system": [IMAGE]}, "system.0 is a block of type 'image', but only text is supported here"),
        ({"max_tokens": 0}, "max_tokens is 0: give 1 or more."),
        ({"max_tokens": None}, "max_tokens is None: give a whole number."),
        (
            {"tools": [{"type": "bash_20250124", "name": "bash"}]},
            "tools.0.type is 'bash_20250124', but only tools of yours",
        ),
        ({"tools": [TOOL] * 129}, "tools has 129 items; the limit is 128."),
        ({"tool_choice": {"type": "any"}}, "tool_choice is given without tools"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "a"}},
            "tool_choice.name is 'a', but tools has weather.",
        ),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.type is 'tool' and tool_choice.name None"),
        ({"container": "c"}, "container is 'c', which is not supported; there are"),
        ({"thinking": {"type": "always"}}, "thinking.type is 'always': give 'enabled', 'disabled'"),
        ({"stop_sequences": ["a"] * 65}, "stop_sequences has"),
        ({"a": 1}, "a is 1, which is not supported; there are"),
    ],
)
def test_what_is_not_supported_is_refused_in_a_sentence(
    endpoint: Endpoint, fields: dict[str, Any], sentence: str
) -> None:
    body = {"model": endpoint.model, "max_tokens": 5, "messages": ASK} | fields
    status, reply = request_json(f"{endpoint.url}/v1/messages", body, x_api_key=endpoint.key)
    assert (status, reply["type"], reply["error"]["type"]) == (400, "error", "invalid_request_error"), reply
    assert sentence in reply["error"]["message"], reply


@pytest.mark.parametrize(
    "body", [b"[" * 100_000, b'{"messages": ' + b'{"a":' * 9999, b"[]", b"", b'{"max_tokens": 1e999}']
)
def test_bodies_that_are_no_request_are_refused(endpoint: Endpoint, body: bytes) -> None:
    for route in ("messages", "messages/count_tokens"):
        status, reply = request_json(f"{endpoint.url}/v1/{route}", body, x_api_key=endpoint.key)
        assert (status, reply["error"]["type"]) == (400, "invalid_request_error")
