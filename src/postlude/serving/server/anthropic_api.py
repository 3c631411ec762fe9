"""Anthropic's routes, /messages and /messages/count_tokens: the bodies of requests, and the replies."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import Field

from postlude.generate.sampling_params import MAX_STOPS
from postlude.serving.request_body import (
    MAX_MESSAGES,
    MAX_TOOLS,
    APIBody,
    TextPart,
    check_type,
    checked_parts,
    joined_text,
    template_call,
    tool_schema,
)
from postlude.serving.server.chat_calls import ChatCall, ScoredTokens, assistant_message
from postlude.serving.server.chat_request import ChatRequest, ToolChoice, sampling_params
from postlude.serving.server.completion_reader import Piece, ReplyWriter, TokenUsage, Turn
from postlude.serving.server.served_model import ServedModel

BLOCKS = {"user": ("text", "tool_result"), "assistant": ("text", "thinking", "tool_use"), "system": ("text",)}
SIGNATURE = "unsigned"  # of thoughts; clients need one


class _Body(APIBody):
    no_effect: ClassVar = {
        "caller": ({"type": "direct"},),
        "citations": ([],),
        "container": ("",),
        "defer_loading": (False,),
        "mcp_servers": ([],),
        "speed": ("standard",),
    }
    cache_control: Any = None
    """Accepted and ignored: what is cached changes no reply."""


class _TextBlock(TextPart, _Body):
    noun: ClassVar = "block"


Text: TypeAlias = Annotated[str | tuple[_TextBlock, ...] | None, Field(description="text, or a list of blocks of text")]


class _Block(_Body):
    """A block of a message. Which fields it needs depends on its type."""

    type: str
    text: str | None = None
    thinking: str | None = None
    signature: str | None = None
    """Accepted and ignored."""
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: Text = None
    is_error: bool | None = None
    """Accepted and ignored: a chat template has no place for it."""

    NEEDED: ClassVar = {
        "text": ("text",),
        "thinking": ("thinking",),
        "tool_use": ("id", "name", "input"),
        "tool_result": ("tool_use_id",),
    }

    def check_extra(self, prefix: str = "") -> None:
        """Refuses blocks of other types, and those that lack a field, too."""
        check_type(self, "a block", self.NEEDED, prefix.removesuffix("."))
        super().check_extra(prefix)


class _Message(_Body):
    role: Literal["user", "assistant", "system"]
    content: Annotated[str | tuple[_Block, ...], Field(description="text, or a list of blocks")]

    def plain(self, location: str) -> Iterator[dict[str, Any]]:
        """Yields the messages as a chat template takes them: each result of a tool is one."""
        blocks = (_Block(type="text", text=self.content),) if isinstance(self.content, str) else self.content
        for place, block in enumerate(checked_parts(blocks, f"{location}.content")):
            if block.type not in BLOCKS[self.role]:
                allowed = ", ".join(BLOCKS[self.role])
                raise ValueError(
                    f"{location}.content.{place} is a block of type {block.type!r}, but a message of the role "
                    f"{self.role!r} has {allowed}."
                )
        if self.role == "assistant":
            calls = [
                template_call(block.name or "", block.input or {}, block.id)
                for block in blocks
                if block.type == "tool_use"
            ]
            yield assistant_message(
                "".join(block.text or "" for block in blocks), "".join(block.thinking or "" for block in blocks), calls
            )
            return
        if not blocks:
            raise ValueError(f"{location}.content is []: give at least one block.")
        texts: list[str] = []
        for block in blocks:
            if block.type == "tool_result":
                yield from self._text(texts)
                texts = []
                yield {"role": "tool", "content": joined_text(block.content), "tool_call_id": block.tool_use_id}
            else:
                texts.append(block.text or "")
        yield from self._text(texts)

    def _text(self, texts: Sequence[str]) -> Iterator[dict[str, Any]]:
        if texts:
            yield {"role": self.role, "content": "".join(texts)}


class _Tool(_Body):
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    type: str | None = None
    strict: bool | None = None
    eager_input_streaming: bool | None = None
    """Accepted and ignored, as the next one."""
    input_examples: tuple[dict[str, Any], ...] | None = None

    def check_extra(self, prefix: str = "") -> None:
        """Refuses tools that Anthropic has defined too."""
        if self.type not in (None, "custom") or self.input_schema is None:
            raise ValueError(
                f"{prefix}type is {self.type!r:.60}, but only tools of yours are supported: give name, description "
                "and input_schema."
            )
        super().check_extra(prefix)


class _ToolChoice(_Body):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class _Thinking(_Body):
    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Annotated[int | None, Field(ge=1)] = None
    """Accepted and ignored: a thought ends where the model ends it, or with max_tokens."""
    display: Literal["summarized", "omitted"] | None = None
    """Accepted and ignored: a thought is returned as it is."""


class _Format(_Body):
    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any] | bool, Field(alias="schema", description="a JSON schema")]


class _OutputConfig(_Body):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: _Format | None = None


class CountTokensBody(_Body):
    model: str | None = None
    messages: Annotated[tuple[_Message, ...], Field(max_length=MAX_MESSAGES)]
    system: Text = None
    tools: Annotated[tuple[_Tool, ...], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: _ToolChoice | None = None
    thinking: _Thinking | None = None
    output_config: _OutputConfig | None = None

    def request(self, client: tuple[str, ...]) -> ChatRequest:
        return self._request(client, 1)

    def _request(self, client: tuple[str, ...], max_tokens: int, *, stream: bool = False, **values: Any) -> ChatRequest:
        config = self.output_config or _OutputConfig()
        schema = None if config.format is None else json.dumps(config.format.schema_)
        tools = self._tools()
        call = ChatCall(
            messages=tuple(self._messages()),
            sampling=sampling_params(max_tokens, json_schema=schema, **values),
            tools=tuple(tools),
            client=client,
        )
        return ChatRequest(
            call,
            self.model,
            max_tokens,
            self._choice(tools),
            stream=stream,
            limit_to_room=True,
            thinks=None if self.thinking is None else self.thinking.type != "disabled",
            effort=config.effort,
        )

    def _messages(self) -> Iterator[dict[str, Any]]:
        if not self.messages:
            raise ValueError("messages is []: give at least one message.")
        if self.messages[-1].role == "assistant":
            raise ValueError(
                "the last of messages is the assistant's, which is not continued here: end with one of the user."
            )
        if self.system:
            yield {"role": "system", "content": joined_text(self.system)}
        for index, message in enumerate(self.messages):
            yield from message.plain(f"messages.{index}")

    def _tools(self) -> list[dict[str, Any]]:
        if self.tool_choice is not None and self.tool_choice.type == "none":
            return []
        return [tool_schema(tool.name, tool.description, tool.input_schema) for tool in self.tools or ()]

    def _choice(self, tools: Sequence[dict[str, Any]]) -> ToolChoice:
        asked = self.tool_choice or _ToolChoice(type="auto")
        if (asked.type == "tool") != (asked.name is not None):
            raise ValueError(
                f"tool_choice.type is {asked.type!r} and tool_choice.name {asked.name!r:.60}: a name is given with the "
                'type "tool", and with no other.'
            )
        return ToolChoice.of(
            tools,
            (tool.strict for tool in self.tools or ()),
            required=asked.type == "any",
            name=asked.name,
            parallel=not asked.disable_parallel_tool_use,
        )


class MessagesBody(CountTokensBody):
    max_tokens: Annotated[int, Field(ge=1)]
    """More than fits behind the prompt is what fits."""
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: Annotated[tuple[str, ...], Field(max_length=MAX_STOPS)] | None = None
    stream: bool | None = None
    metadata: dict[str, Any] | None = None
    """Accepted and ignored, as the next ones."""
    service_tier: str | None = None
    inference_geo: str | None = None
    diagnostics: dict[str, Any] | None = None

    def request(self, client: tuple[str, ...]) -> ChatRequest:
        return self._request(
            client,
            self.max_tokens,
            stream=bool(self.stream),
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            stop=self.stop_sequences,
        )


class MessageWriter(ReplyWriter):
    """Writes the reply to a request for a completion of at most `max_tokens`."""

    def __init__(self, model: ServedModel, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._head = {
            "id": f"msg_{secrets.token_hex(12)}",
            "type": "message",
            "role": "assistant",
            "model": model.name,
        }
        self._blocks = 0  # that were begun in a stream
        self._open: bool | None = None  # whether the last one is a thought; None if it has ended
        self._end: dict[str, Any] = {}

    def reply(self, turns: Sequence[Turn], usage: TokenUsage) -> Any:
        (turn,) = turns
        content: list[dict[str, Any]] = []
        if turn.reasoning:
            content.append({"type": "thinking", "thinking": turn.reasoning, "signature": SIGNATURE})
        if turn.text:
            content.append({"type": "text", "text": turn.text})
        for call in turn.calls:
            content.append(_tool_use(call) | {"input": call["function"]["arguments"]})
        return {**self._head, "content": content, **self._reason(turn), "usage": _usage(usage)}

    def begin(self, usage: TokenUsage) -> Iterator[Any]:
        reason = {"stop_reason": None, "stop_sequence": None}
        yield {"type": "message_start", "message": {**self._head, "content": [], **reason, "usage": _usage(usage)}}

    def progress(
        self, index: int, pieces: Sequence[Piece], tokens: ScoredTokens, turn: Turn | None
    ) -> Iterator[dict[str, Any]]:
        for piece in pieces:
            if self._open is not piece.is_thought:
                yield from self._close()
                empty = {"thinking": "", "signature": ""} if piece.is_thought else {"text": ""}
                yield self._start({"type": "thinking" if piece.is_thought else "text", **empty})
                self._open = piece.is_thought
            name = "thinking" if piece.is_thought else "text"
            yield self._delta({"type": f"{name}_delta", name: piece.text})
        if turn is None:
            return
        yield from self._close()
        for call in turn.calls:
            yield self._start(_tool_use(call) | {"input": {}})
            arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
            yield self._delta({"type": "input_json_delta", "partial_json": arguments})
            yield self._stop()
        self._end = self._reason(turn)

    def end(self, usage: TokenUsage) -> Iterator[Any]:
        yield {"type": "message_delta", "delta": self._end, "usage": _usage(usage)}
        yield {"type": "message_stop"}

    def _close(self) -> Iterator[dict[str, Any]]:
        """Yields the end of the block of thought or text that is open."""
        if self._open:
            yield self._delta({"type": "signature_delta", "signature": SIGNATURE})
        if self._open is not None:
            yield self._stop()
        self._open = None

    def _start(self, block: dict[str, Any]) -> dict[str, Any]:
        self._blocks += 1
        return {"type": "content_block_start", "index": self._blocks - 1, "content_block": block}

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": self._blocks - 1, "delta": delta}

    def _stop(self) -> dict[str, Any]:
        return {"type": "content_block_stop", "index": self._blocks - 1}

    def _reason(self, turn: Turn) -> dict[str, Any]:
        """Returns why a completion ended."""
        reasons = {"tool_calls": "tool_use", "stop": "end_turn", "length": "max_tokens"}
        reason = reasons[turn.end]
        if turn.end == "stop" and turn.stop is not None:
            reason = "stop_sequence"
        elif turn.end == "length" and len(turn.completion.tokens) < self._max_tokens:
            reason = "model_context_window_exceeded"
        return {"stop_reason": reason, "stop_sequence": turn.stop if reason == "stop_sequence" else None}


def _tool_use(call: dict[str, Any]) -> dict[str, Any]:
    return {"type": "tool_use", "id": call["id"], "name": call["function"]["name"]}


def _usage(usage: TokenUsage) -> dict[str, int]:
    cached = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
    return {"input_tokens": usage.prompt, "output_tokens": usage.completion, **cached}
