"""OpenAI's routes /chat/completions and /completions: the bodies of requests, and the replies.

An unsupported field is refused, unless its value requests nothing. Log-probs are those of `Completion.logprobs`: of the
sampled token, at the sampling temperature.
"""

from __future__ import annotations

import itertools
import secrets
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from postlude.generate.sampling_params import MAX_BIASES, MAX_STOP_TOKENS, MAX_TOP_LOGPROBS, SamplingParams
from postlude.serving.request_body import (
    MAX_MESSAGES,
    MAX_OPTIONS,
    MAX_TOOLS,
    APIBody,
    TextPart,
    Texts,
    TokenLists,
    Tokens,
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
from postlude.serving.server.served_model import ServedModel

MIN_LOGPROB = -9999.0  # replaces minus infinity, which JSON does not have


class _Body(APIBody):
    no_effect: ClassVar = {
        "best_of": (1,),
        "functions": ([],),
        "modalities": (["text"],),
        "service_tier": ("auto", "default"),
        "store": (False,),
        "suffix": ("",),
        "annotations": ([],),
    }


class _StreamOptions(_Body):
    include_usage: bool = False


class _JSONSchema(_Body):
    name: str | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any] | bool | None, Field(alias="schema", description="a JSON schema")] = None
    strict: bool | None = None
    """Accepted and ignored: the schema always holds."""


class _ResponseFormat(_Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: _JSONSchema | None = None

    def schema_text(self) -> str | None:
        """Returns the JSON schema that a completion must have; None for text."""
        schema = None if self.json_schema is None else self.json_schema.schema_
        return schema_text(self.type, schema, "response_format.json_schema.schema")


Limit = Annotated[int | None, Field(ge=1)]
Effort = Annotated[str, Field(pattern=r"^[a-z]{1,16}$")]


class CommonBody(_Body):
    """What requests to both routes have."""

    model: str | None = None
    max_tokens: Limit = None
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = None
    stop: Annotated[str | tuple[str, ...] | None, Field(description="text, or a list of texts")] = None
    seed: int | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Annotated[dict[int, float], Field(max_length=MAX_BIASES)] | None = None
    response_format: _ResponseFormat | None = None
    user: str | None = None
    """Accepted and ignored, as the next three."""
    metadata: dict[str, Any] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    # vLLM's additional fields
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop_token_ids: Annotated[tuple[int, ...], Field(max_length=MAX_STOP_TOKENS)] | None = None
    ignore_eos: bool | None = None

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with the number of tokens."""
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling(self, max_new_tokens: int, top_logprobs: int) -> SamplingParams:
        """Returns the sampling parameters. Without a seed, each request gets a random one."""
        schema = None if self.response_format is None else self.response_format.schema_text()
        return sampling_params(
            max_new_tokens,
            seed=self.seed,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=0 if self.top_k == -1 else self.top_k,
            min_p=self.min_p,
            stop=(self.stop,) if isinstance(self.stop, str) else self.stop,
            stop_tokens=self.stop_token_ids,
            ignore_eos=self.ignore_eos,
            top_logprobs=top_logprobs,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias=tuple((self.logit_bias or {}).items()),
            json_schema=schema,
        )


class CompletionsBody(CommonBody):
    prompt: Annotated[str | Texts | Tokens | TokenLists, Field(description="text, token ids, or a list of either")]
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None


class _TextPart(TextPart, _Body):
    pass


class _CalledFunction(_Body):
    name: str
    arguments: str = "{}"
    """A JSON object, as text."""


class _ToolCall(_Body):
    function: _CalledFunction
    id: str | None = None
    type: Literal["function"] = "function"
    index: int | None = None
    """The index of a streamed call."""

    def plain(self, prefix: str) -> dict[str, Any]:
        """Returns the call as a chat template takes it: with its arguments as an object."""
        arguments = read_arguments(self.function.arguments, f"{prefix}function.arguments")
        return template_call(self.function.name, arguments, self.id)


class _Message(_Body):
    role: str
    content: Annotated[str | tuple[_TextPart, ...] | None, Field(description="text, or a list of parts of text")] = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    """vLLM's other name of it."""
    tool_calls: Annotated[tuple[_ToolCall, ...], Field(max_length=MAX_TOOLS)] | None = None
    tool_call_id: str | None = None

    def plain(self, index: int) -> dict[str, Any]:
        """Returns the message as a chat template takes it."""
        prefix = f"messages.{index}."
        reasoning = self.reasoning if self.reasoning_content is None else self.reasoning_content
        if self.content is None and not self.tool_calls and not reasoning:
            raise ValueError(f"{prefix}content is missing: give text.")
        checked_parts(self.content if isinstance(self.content, tuple) else (), f"{prefix}content")
        calls = [call.plain(f"{prefix}tool_calls.{place}.") for place, call in enumerate(self.tool_calls or ())]
        message = assistant_message(joined_text(self.content), reasoning, calls) | {"role": self.role}
        named = {"name": self.name, "tool_call_id": self.tool_call_id}
        return message | {key: value for key, value in named.items() if value is not None}


class _Function(_Body):
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """A JSON schema of an object."""
    strict: bool | None = None


class _Tool(_Body):
    type: Literal["function"]
    function: _Function

    def plain(self) -> dict[str, Any]:
        """Returns the tool as a chat template takes it."""
        return tool_schema(self.function.name, self.function.description, self.function.parameters)


class _FunctionName(_Body):
    name: str


class _NamedTool(_Body):
    type: Literal["function"]
    function: _FunctionName


class ChatBody(CommonBody):
    messages: Annotated[tuple[_Message, ...], Field(max_length=MAX_MESSAGES)]
    max_completion_tokens: Limit = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    tools: Annotated[tuple[_Tool, ...], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Annotated[
        Literal["none", "auto", "required"] | _NamedTool | None,
        Field(description='"none", "auto", "required", or {"type": "function", "function": {"name": ...}}'),
    ] = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = None
    chat_template_kwargs: Annotated[dict[str, Any], Field(max_length=MAX_OPTIONS)] | None = None
    """Passed to the chat template, such as enable_thinking; vLLM's field."""

    def request(self, client: tuple[str, ...], max_length: int) -> ChatRequest:
        """Returns what it asks for. `max_length` is the room for a prompt and a completion."""
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise ValueError("max_tokens and max_completion_tokens are both given; they are two names of one limit.")
        if self.top_logprobs and not self.logprobs:
            raise ValueError(f"top_logprobs is {self.top_logprobs}, which needs logprobs: true.")
        if not self.messages:
            raise ValueError("messages is []: give at least one message.")
        limit = self.max_completion_tokens if self.max_tokens is None else self.max_tokens
        tools = [] if self.tool_choice == "none" else [tool.plain() for tool in self.tools or ()]
        choice = self._choice(tools)
        call = ChatCall(
            messages=tuple(message.plain(index) for index, message in enumerate(self.messages)),
            sampling=self.sampling(limit or max_length, self.top_logprobs or 0),
            tools=tuple(tools),
            options=self.chat_template_kwargs or {},
            n=1 if self.n is None else self.n,
            client=client,
        )
        logprobs = self.top_logprobs or 0 if self.logprobs else None
        return ChatRequest(
            call,
            self.model,
            limit,
            choice,
            logprobs,
            bool(self.stream),
            thinks=None if self.reasoning_effort is None else self.reasoning_effort != "none",
            effort=self.reasoning_effort,
        )

    def _choice(self, tools: Sequence[dict[str, Any]]) -> ToolChoice:
        return ToolChoice.of(
            tools,
            (tool.function.strict for tool in self.tools or ()),
            required=self.tool_choice == "required",
            name=self.tool_choice.function.name if isinstance(self.tool_choice, _NamedTool) else None,
            field="tool_choice.function.name",
            parallel=self.parallel_tool_calls is not False,
        )


class _OpenAIWriter(ReplyWriter):
    """What both have in common. `usage` says whether a stream ends with the number of tokens."""

    prefix: str
    kind: str
    chunk_kind: str

    def __init__(self, model: ServedModel, *, logprobs: bool, usage: bool) -> None:
        self.model = model
        self._has_logprobs, self._usage = logprobs, usage
        self._identity, self._created = f"{self.prefix}-{secrets.token_hex(12)}", int(time.time())

    def end(self, usage: TokenUsage) -> Iterator[Any]:
        if self._usage:
            yield self._chunk([]) | {"usage": _usage(usage)}

    def _reply(self, choices: list[dict[str, Any]], usage: TokenUsage) -> dict[str, Any]:
        return self._body(self.kind, choices) | {"usage": _usage(usage)}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return self._body(self.chunk_kind, choices) | ({"usage": None} if self._usage else {})

    def _body(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        head = {"id": self._identity, "object": kind, "created": self._created, "model": self.model.name}
        return {**head, "choices": choices}

    def _choice(
        self, index: int, content: Mapping[str, Any], tokens: ScoredTokens, reason: str | None
    ) -> dict[str, Any]:
        logprobs = self._logprobs(index, tokens) if self._has_logprobs else None
        return {"index": index, **content, "logprobs": logprobs, "finish_reason": reason}

    def _logprobs(self, index: int, tokens: ScoredTokens) -> dict[str, Any]:
        raise NotImplementedError


class ChatWriter(_OpenAIWriter):
    """Writes the replies of /v1/chat/completions."""

    prefix, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, model: ServedModel, choices: int, *, logprobs: bool, usage: bool) -> None:
        super().__init__(model, logprobs=logprobs, usage=usage)
        self._choices = choices

    def reply(self, turns: Sequence[Turn], usage: TokenUsage) -> Any:
        choices = []
        for index, turn in enumerate(turns):
            content = turn.text or None if turn.calls or turn.reasoning else turn.text
            message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
            if turn.reasoning:
                message["reasoning_content"] = turn.reasoning
            if turn.calls:
                message["tool_calls"] = list(map(written_call, turn.calls))
            choices.append(self._choice(index, {"message": message}, scored(turn), turn.end))
        return self._reply(choices, usage)

    def begin(self, usage: TokenUsage) -> Iterator[Any]:
        for index in range(self._choices):
            delta = {"role": "assistant", "content": ""}
            yield self._chunk([self._choice(index, {"delta": delta}, ScoredTokens(), None)])

    def progress(self, index: int, pieces: Sequence[Piece], tokens: ScoredTokens, turn: Turn | None) -> Iterator[Any]:
        deltas: list[dict[str, Any]] = [
            {"reasoning_content": piece.text} if piece.is_thought else {"content": piece.text} for piece in pieces
        ]
        if turn is not None:
            for place, call in enumerate(turn.calls):
                written = written_call(call)
                name, arguments = written["function"]["name"], written["function"]["arguments"]
                begun = {"index": place, **written, "function": {"name": name, "arguments": ""}}
                rest = {"index": place, "function": {"arguments": arguments}}
                deltas += [{"tool_calls": [begun]}, {"tool_calls": [rest]}]
            if not turn.calls and (not deltas or "content" not in deltas[-1]):
                deltas.append({"content": ""})
        for place, delta in enumerate(deltas, 1):
            is_last = place == len(deltas)
            reason = turn.end if turn is not None and is_last else None
            choice = self._choice(index, {"delta": delta}, tokens if is_last else ScoredTokens(), reason)
            yield self._chunk([choice])

    def _logprobs(self, index: int, tokens: ScoredTokens) -> dict[str, Any]:
        return {"content": logprob_entries(self.model, tokens), "refusal": None}


class CompletionsWriter(_OpenAIWriter):
    """Writes the replies of /v1/completions.

    `echo` are the texts of the prompts, if completions come after them, and `echo_tokens` their log-probs, if they are
    asked for.
    """

    prefix, kind, chunk_kind = "cmpl", "text_completion", "text_completion"

    def __init__(
        self,
        model: ServedModel,
        n: int,
        *,
        logprobs: bool,
        usage: bool,
        echo: Sequence[str] = (),
        echo_tokens: Sequence[ScoredTokens] = (),
    ) -> None:
        super().__init__(model, logprobs=logprobs, usage=usage)
        self._n, self._echo, self._echo_tokens = n, echo, echo_tokens
        self._offsets = Counter[int]()  # characters of each completion so far, as its tokens write them

    def reply(self, turns: Sequence[Turn], usage: TokenUsage) -> Any:
        choices = []
        for index, turn in enumerate(turns):
            before, tokens = self._echoed(index)
            content = {"text": before + turn.text}
            choices.append(self._choice(index, content, tokens + scored(turn), turn.end))
        return self._reply(choices, usage)

    def begin(self, usage: TokenUsage) -> Iterator[Any]:
        """Yields the prompt of each completion, if it is asked for."""
        for index in range(len(self._echo) * self._n):
            text, tokens = self._echoed(index)
            yield self._chunk([self._choice(index, {"text": text}, tokens, None)])

    def progress(self, index: int, pieces: Sequence[Piece], tokens: ScoredTokens, turn: Turn | None) -> Iterable[Any]:
        content = {"text": "".join(piece.text for piece in pieces)}
        yield self._chunk([self._choice(index, content, tokens, None if turn is None else turn.end)])

    def _echoed(self, index: int) -> tuple[str, ScoredTokens]:
        """Returns what is before completion `index`."""
        prompt = index // self._n
        return (
            self._echo[prompt] if self._echo else "",
            self._echo_tokens[prompt] if self._echo_tokens else ScoredTokens(),
        )

    def _logprobs(self, index: int, tokens: ScoredTokens) -> dict[str, Any]:
        text_of = self.model.token_bytes.text
        texts = [text_of(token) for token in tokens.ids]
        values = [None if logprob is None else max(logprob, MIN_LOGPROB) for logprob in tokens.logprobs]
        top = [
            None if place is None else {text_of(other): max(value, MIN_LOGPROB) for other, value in place}
            for place in tokens.top
        ]
        *offsets, self._offsets[index] = itertools.accumulate(map(len, texts), initial=self._offsets[index])
        return {"tokens": texts, "token_logprobs": values, "top_logprobs": top or None, "text_offset": offsets}


def logprob_entries(model: ServedModel, tokens: ScoredTokens) -> list[dict[str, Any]]:
    """Returns what replies to chats have for each token of a completion."""

    def entry(token: int, logprob: float | None) -> dict[str, Any]:
        assert logprob is not None, "a prompt's, which is not echoed in chats"
        text, value = model.token_bytes.text(token), model.token_bytes.of(token)
        return {"token": text, "logprob": max(logprob, MIN_LOGPROB), "bytes": list(value)}

    places = zip(tokens.ids, tokens.logprobs, tokens.top or [()] * len(tokens.ids), strict=True)
    return [
        entry(token, value) | {"top_logprobs": [entry(*other) for other in top or ()]} for token, value, top in places
    ]


def scored(turn: Turn) -> ScoredTokens:
    """Returns the tokens of a completion with their log-probs."""
    return ScoredTokens(turn.completion.tokens, turn.completion.logprobs, turn.completion.top_logprobs)


def _usage(usage: TokenUsage) -> dict[str, int]:
    total = usage.prompt + usage.completion
    return {"prompt_tokens": usage.prompt, "completion_tokens": usage.completion, "total_tokens": total}
