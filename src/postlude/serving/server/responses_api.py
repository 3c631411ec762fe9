"""OpenAI's /responses: bodies of requests, and replies. None is stored, so a request has the whole conversation."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import Field

from postlude.generate.sampling_params import MAX_TOP_LOGPROBS
from postlude.serving.request_body import (
    MAX_MESSAGES,
    MAX_TOOLS,
    APIBody,
    TextPart,
    check_type,
    checked_parts,
    joined_text,
    read_arguments,
    schema_text,
    template_call,
    tool_schema,
)
from postlude.serving.server.chat_calls import ChatCall, ScoredTokens, assistant_message
from postlude.serving.server.chat_request import ChatRequest, ToolChoice, sampling_params
from postlude.serving.server.completion_reader import Piece, ReplyWriter, TokenUsage, Turn, written_call
from postlude.serving.server.openai_api import Effort, Limit, logprob_entries, scored
from postlude.serving.server.served_model import ServedModel

LOGPROBS = "message.output_text.logprobs"
ORDER = ("reasoning", "message", "function_call")  # of the items of one turn of the assistant
NEEDED = {  # fields of items, by type
    "message": ("role", "content"),
    "reasoning": (),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
}
TextItem: TypeAlias = Literal["reasoning", "message"]


class _Body(APIBody):
    no_effect: ClassVar = {
        "background": (False,),
        "service_tier": ("auto", "default"),
        "truncation": ("disabled",),
    }


class _Part(TextPart, _Body):
    types: ClassVar = ("input_text", "output_text", "reasoning_text", "summary_text")
    annotations: Any = None
    """Accepted and ignored, as the next one."""
    logprobs: Any = None


Parts = Annotated[str | tuple[_Part, ...] | None, Field(description="text, or a list of parts of text")]


class _Item(_Body):
    """An item of a conversation. Which fields it needs depends on its type."""

    type: str = "message"
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: Parts = None
    summary: tuple[_Part, ...] | None = None
    """A summary of reasoning: read if there is no content."""
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: Parts = None
    id: str | None = None
    """Accepted and ignored, as the next ones."""
    status: str | None = None
    phase: str | None = None
    encrypted_content: str | None = None

    def check_extra(self, prefix: str = "") -> None:
        """Refuses items of other types, and those that lack a field, too."""
        location = prefix.removesuffix(".")
        check_type(self, "an item", NEEDED, location)
        for parts in (self.content, self.summary, self.output):
            checked_parts(parts if isinstance(parts, tuple) else (), location)
        super().check_extra(prefix)

    @property
    def place(self) -> int | None:
        """The place in a turn of the assistant; None of other items."""
        is_others = self.type == "message" and self.role != "assistant"
        return ORDER.index(self.type) if self.type in ORDER and not is_others else None


class _Tool(_Body):
    type: str
    name: Annotated[str | None, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")] = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def check_extra(self, prefix: str = "") -> None:
        """Refuses tools that are no functions too."""
        if self.type != "function" or self.name is None:
            raise ValueError(
                f"{prefix}type is {self.type!r:.60}, but only functions are supported: give "
                '{"type": "function", "name": ..., "parameters": ...}.'
            )
        super().check_extra(prefix)


class _NamedTool(_Body):
    type: Literal["function"]
    name: str


class _Format(_Body):
    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any] | bool | None, Field(alias="schema", description="a JSON schema")] = None
    strict: bool | None = None
    """Accepted and ignored: the schema always holds."""


class _Text(_Body):
    format: _Format | None = None
    verbosity: str | None = None
    """Accepted and ignored."""


class _Reasoning(_Body):
    effort: Effort | None = None
    summary: str | None = None
    """Accepted and ignored, as the next one: a thought is returned as it is."""
    generate_summary: str | None = None


class ResponsesBody(_Body):
    model: str | None = None
    input: Annotated[str | tuple[_Item, ...], Field(description="text, or a list of items")]
    instructions: str | None = None
    max_output_tokens: Limit = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    include: tuple[str, ...] | None = None
    tools: Annotated[tuple[_Tool, ...], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Annotated[
        Literal["none", "auto", "required"] | _NamedTool | None,
        Field(description='"none", "auto", "required", or {"type": "function", "name": ...}'),
    ] = None
    parallel_tool_calls: bool | None = None
    text: _Text | None = None
    reasoning: _Reasoning | None = None
    stream: bool | None = None
    previous_response_id: str | None = None
    """Refused, as the next one: nothing is stored."""
    conversation: Annotated[str | dict[str, Any] | None, Field(description="null")] = None
    store: bool | None = None
    """Accepted and ignored, as the next ones."""
    stream_options: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None

    def request(self, client: tuple[str, ...], max_length: int) -> ChatRequest:
        """Returns what it asks for. `max_length` is the room for a prompt and a completion."""
        for name in ("previous_response_id", "conversation"):
            if getattr(self, name) is not None:
                raise ValueError(
                    f"{name} is {getattr(self, name)!r:.60}, but no response is stored here: send the whole "
                    "conversation as input."
                )
        for name in self.include or ():
            if name not in (LOGPROBS, "reasoning.encrypted_content"):
                raise ValueError(f"include has {name!r:.60}, which is not supported; there is {LOGPROBS!r}.")
        tools = [] if self.tool_choice == "none" else list(self._tools())
        form = _Format() if self.text is None or self.text.format is None else self.text.format
        schema = schema_text(form.type, form.schema_, "text.format.schema")
        call = ChatCall(
            messages=tuple(self._messages()),
            sampling=sampling_params(
                self.max_output_tokens or max_length,
                temperature=self.temperature,
                top_p=self.top_p,
                top_logprobs=self.top_logprobs,
                json_schema=schema,
            ),
            tools=tuple(tools),
            client=client,
        )
        has_logprobs = LOGPROBS in (self.include or ()) or self.top_logprobs is not None
        effort = None if self.reasoning is None else self.reasoning.effort
        return ChatRequest(
            call,
            self.model,
            self.max_output_tokens,
            self._choice(tools),
            (self.top_logprobs or 0) if has_logprobs else None,
            bool(self.stream),
            thinks=None if effort is None else effort != "none",
            effort=effort,
        )

    def settings(self) -> dict[str, Any]:
        """Returns the fields that a response repeats."""
        own = self.model_dump(include={"instructions", "max_output_tokens", "temperature", "top_p"})
        values = self.model_dump(mode="json", by_alias=True, exclude_none=True, exclude={"input"})
        return own | {
            "tools": values.get("tools", []),
            "tool_choice": values.get("tool_choice", "auto"),
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "text": values.get("text", {"format": {"type": "text"}}),
            "reasoning": values.get("reasoning"),
            "metadata": self.metadata or {},
            "background": False,
            "previous_response_id": None,
            "store": False,
            "truncation": "disabled",
        }

    def _messages(self) -> Iterator[dict[str, Any]]:
        """Yields the messages as a chat template takes them."""
        if self.instructions:
            yield {"role": "system", "content": self.instructions}
        if isinstance(self.input, str):
            yield {"role": "user", "content": self.input}
            return
        if not self.input:
            raise ValueError("input is []: give at least one item.")
        if len(self.input) > MAX_MESSAGES:
            raise ValueError(f"input has {len(self.input)} items; the limit is {MAX_MESSAGES}.")
        turn: list[_Item] = []
        for index, item in enumerate(self.input):
            last = turn[-1].place if turn else None
            if turn and (item.place is None or last is None or item.place < last or item.place == last == 1):
                yield _assistant(turn, index - len(turn))
                turn = []
            if item.place is not None:
                turn.append(item)
            elif item.type == "function_call_output":
                yield {"role": "tool", "content": joined_text(item.output), "tool_call_id": item.call_id}
            else:
                yield {"role": item.role, "content": joined_text(item.content)}
        if turn:
            yield _assistant(turn, len(self.input) - len(turn))

    def _tools(self) -> Iterator[dict[str, Any]]:
        for tool in self.tools or ():
            yield tool_schema(tool.name or "", tool.description, tool.parameters)

    def _choice(self, tools: Sequence[dict[str, Any]]) -> ToolChoice:
        return ToolChoice.of(
            tools,
            (tool.strict for tool in self.tools or ()),
            required=self.tool_choice == "required",
            name=self.tool_choice.name if isinstance(self.tool_choice, _NamedTool) else None,
            parallel=self.parallel_tool_calls is not False,
        )


def _assistant(items: Sequence[_Item], first: int) -> dict[str, Any]:
    """Returns the message of a turn, whose items begin with item `first` of the input."""
    calls, text, reasoning = list[dict[str, Any]](), "", ""
    for index, item in enumerate(items, first):
        if item.type == "function_call":
            arguments = read_arguments(item.arguments or "", f"input.{index}.arguments")
            calls.append(template_call(item.name or "", arguments, item.call_id))
        elif item.type == "reasoning":
            reasoning += joined_text(item.content) or joined_text(item.summary)
        else:
            text += joined_text(item.content)
    return assistant_message(text, reasoning, calls)


class ResponseWriter(ReplyWriter):
    """Writes a response. `settings` are the fields of the request that it repeats."""

    def __init__(self, model: ServedModel, settings: Mapping[str, Any], *, logprobs: bool) -> None:
        self.model, self._has_logprobs = model, logprobs
        self._head = {
            "id": f"resp_{secrets.token_hex(12)}",
            "object": "response",
            "created_at": int(time.time()),
            "model": model.name,
            "error": None,
            **settings,
        }
        self._ids = {"reasoning": f"rs_{secrets.token_hex(12)}", "message": f"msg_{secrets.token_hex(12)}"}
        self._events = self._items = 0  # of a stream so far
        self._open: TextItem | None = None  # what its last item is, unless it has ended
        self._text = ""  # of that item
        self._turn: Turn | None = None

    def reply(self, turns: Sequence[Turn], usage: TokenUsage) -> Any:
        (turn,) = turns
        output = []
        if turn.reasoning:
            output.append(self._text_item("reasoning", turn.reasoning, _status(turn)))
        if _has_message(turn):
            output.append(self._text_item("message", turn.text, _status(turn), scored(turn)))
        output += [_call_item(call, _status(turn)) for call in turn.calls]
        cut = {"reason": "max_output_tokens"} if turn.end == "length" else None
        details = {"input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0}}
        thought = self.model.count_thought(turn.completion.tokens) if turn.reasoning else 0
        counts = {
            "input_tokens": usage.prompt,
            **details,
            "output_tokens": usage.completion,
            "output_tokens_details": {"reasoning_tokens": thought},
            "total_tokens": usage.prompt + usage.completion,
        }
        return {**self._response(_status(turn), output), "incomplete_details": cut, "usage": counts}

    def begin(self, usage: TokenUsage) -> Iterator[Any]:
        for kind in ("created", "in_progress"):
            yield self._event(f"response.{kind}", response=self._response("in_progress", []))

    def progress(self, index: int, pieces: Sequence[Piece], tokens: ScoredTokens, turn: Turn | None) -> Iterator[Any]:
        for place, piece in enumerate(pieces, 1):
            yield from self._enter("reasoning" if piece.is_thought else "message")
            self._text += piece.text
            if piece.is_thought:
                yield self._part_event("reasoning_text.delta", delta=piece.text)
            else:
                entries = self._logprobs(tokens if place == len(pieces) else ScoredTokens())
                yield self._part_event("output_text.delta", delta=piece.text, logprobs=entries)
        if turn is None:
            return
        if _has_message(turn):
            yield from self._enter("message")
        yield from self._close(_status(turn), scored(turn))
        for call in turn.calls:
            yield from self._call(call, _status(turn))
        self._turn = turn

    def end(self, usage: TokenUsage) -> Iterator[Any]:
        assert self._turn is not None, "a stream ends with its completion"
        kind = "incomplete" if self._turn.end == "length" else "completed"
        yield self._event(f"response.{kind}", response=self.reply([self._turn], usage))

    def _enter(self, kind: TextItem) -> Iterator[Any]:
        """Yields the end of another item, and the beginning of one of this kind."""
        if self._open == kind:
            return
        yield from self._close("completed", ScoredTokens())
        self._open, self._text = kind, ""
        item = self._text_item(kind, "", "in_progress")
        yield self._item_event("added", item | {"content": []})
        yield self._part_event("content_part.added", part=item["content"][0])

    def _close(self, status: str, tokens: ScoredTokens) -> Iterator[Any]:
        if self._open is None:
            return
        item = self._text_item(self._open, self._text, status, tokens)
        (part,) = item["content"]
        logprobs = {"logprobs": part["logprobs"]} if self._open == "message" else {}
        yield self._part_event(f"{part['type']}.done", text=self._text, **logprobs)
        yield self._part_event("content_part.done", part=part)
        yield self._item_event("done", item)
        self._open = None

    def _call(self, call: dict[str, Any], status: str) -> Iterator[Any]:
        item = _call_item(call, status)
        yield self._item_event("added", item | {"arguments": "", "status": "in_progress"})
        place = {"item_id": item["id"], "output_index": self._items}
        yield self._event("response.function_call_arguments.delta", **place, delta=item["arguments"])
        done = {"name": item["name"], "arguments": item["arguments"]}
        yield self._event("response.function_call_arguments.done", **place, **done)
        yield self._item_event("done", item)

    def _text_item(self, kind: TextItem, text: str, status: str, tokens: ScoredTokens | None = None) -> dict[str, Any]:
        item = {"id": self._ids[kind], "type": kind, "status": status}
        if kind == "reasoning":
            return item | {"summary": [], "content": [{"type": "reasoning_text", "text": text}]}
        part = {"type": "output_text", "text": text, "annotations": [], "logprobs": self._logprobs(tokens)}
        return item | {"role": "assistant", "content": [part]}

    def _logprobs(self, tokens: ScoredTokens | None) -> list[dict[str, Any]]:
        return logprob_entries(self.model, tokens) if self._has_logprobs and tokens is not None else []

    def _response(self, status: str, output: Sequence[Any]) -> dict[str, Any]:
        return {**self._head, "status": status, "output": list(output), "incomplete_details": None, "usage": None}

    def _part_event(self, kind: str, **fields: Any) -> dict[str, Any]:
        assert self._open is not None, "a part belongs to an item"
        place = {"item_id": self._ids[self._open], "output_index": self._items, "content_index": 0}
        return self._event(f"response.{kind}", **place, **fields)

    def _item_event(self, kind: Literal["added", "done"], item: dict[str, Any]) -> dict[str, Any]:
        event = self._event(f"response.output_item.{kind}", output_index=self._items, item=item)
        self._items += kind == "done"
        return event

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        self._events += 1
        return {"type": kind, "sequence_number": self._events - 1, **fields}


def _has_message(turn: Turn) -> bool:
    """Whether a response has a message: it has some item."""
    return bool(turn.text) or not (turn.calls or turn.reasoning)


def _status(turn: Turn) -> str:
    return "incomplete" if turn.end == "length" else "completed"


def _call_item(call: dict[str, Any], status: str) -> dict[str, Any]:
    function = written_call(call)["function"]
    identity = {"id": f"fc_{call['id'].removeprefix('call_')}", "type": "function_call", "call_id": call["id"]}
    return {**identity, **function, "status": status}
