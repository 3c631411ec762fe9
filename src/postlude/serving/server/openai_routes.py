"""OpenAI's /v1/completions and /v1/chat/completions.

Log-probs are those of `Completion.logprobs`: of the sampled token, at the sampling temperature.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import secrets
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

from postlude.data.chat import Encoder
from postlude.data.chat_template import ChatTemplate
from postlude.data.chat_tokenizer import ChatTokenizer
from postlude.data.text_tokens import TokenBytes
from postlude.data.thoughts import ThoughtMarkers
from postlude.data.tool_calls import (
    MalformedCall,
    ParameterTypes,
    ToolCall,
    ToolCallFormat,
    detect_format,
)
from postlude.data.tool_grammar import ToolGrammar
from postlude.generate.protocol import Completion, Progress, Request
from postlude.generate.text_stream import TextStream
from postlude.serving.http.errors import HTTPError, bad_request_on_error
from postlude.serving.request_body import parse
from postlude.serving.server.client_turns import ClientTurns
from postlude.serving.server.openai_bodies import ChatBody, CommonBody, CompletionsBody, parameter_types

COMPLETIONS, CHAT, MODELS = "/v1/completions", "/v1/chat/completions", "/v1/models"
MAX_CHOICES = 1024  # completions of one request
MAX_LOGPROBS = 1 << 20  # log-probs in one reply
PROMPT_END = 16  # tokens in which a template may open a thought
MIN_LOGPROB = -9999.0  # replaces minus infinity, which JSON does not have


class CompletionBackend(Protocol):
    """Generates completions for the routes."""

    def adapter_of(self, name: str | None) -> str | None:
        """Returns the adapter that a request with this model uses. An unknown name is status 404."""

    async def generate(self, requests: Sequence[Request]) -> list[list[Completion]]:
        """Returns the completions of each request. Generating them ends when this is cancelled."""

    async def score_prompts(self, requests: Sequence[Request], top: int) -> list[ScoredTokens]:
        """Returns the tokens of each prompt with their log-probs, at temperature 1, and `top` likeliest ones."""

    def stream(self, requests: Sequence[Request]) -> AsyncGenerator[Progress, None]:
        """Yields their tokens as they come. Generating them ends with the generator."""


@dataclass(frozen=True)
class ScoredTokens:
    """Tokens, their log-probs, and the likeliest ones at their places, if they are asked for.

    The first token of a prompt has no log-prob.
    """

    ids: Sequence[int] = ()
    logprobs: Sequence[float | None] = ()
    top: Sequence[Sequence[tuple[int, float]] | None] = ()

    def __add__(self, other: ScoredTokens) -> ScoredTokens:
        return ScoredTokens([*self.ids, *other.ids], [*self.logprobs, *other.logprobs], [*self.top, *other.top])


@dataclass(frozen=True)
class _Tools:
    """The tools of a request."""

    format: ToolCallFormat
    types: ParameterTypes
    parallel: bool
    """Whether a completion may have several calls."""
    thoughts: ThoughtMarkers
    in_thought: bool
    """Whether the prompt ended inside a thought."""

    def read(self, text: str) -> tuple[str | None, list[dict[str, Any]]]:
        """Returns the text of a completion before its calls, and these; no calls if one of them cannot be read."""
        answer = self.thoughts.answer(text, in_thought=self.in_thought)
        calls = self.format.parse(answer, self.types)
        if any(isinstance(call, MalformedCall) for call in calls):
            return None, []
        reasoning = text.removesuffix(answer) if text.endswith(answer) else ""
        before = (reasoning + self.format.text_before_calls(answer)).strip()
        kept = calls if self.parallel else calls[:1]
        return before or None, [_call_body(call) for call in kept if isinstance(call, ToolCall)]


@dataclass(frozen=True)
class _Call:
    """A request of either route."""

    requests: Sequence[Request]
    chat: bool
    logprobs: bool
    stream: bool
    usage: bool
    """Whether a stream ends with the number of tokens."""
    identity: str
    created: int
    tools: _Tools | None
    echo: Sequence[str]
    """The text of each prompt, which comes before its completions; none for completions alone."""
    echo_tokens: Sequence[ScoredTokens]
    """The same as tokens, if log-probs are asked for."""

    def echoed(self, index: int) -> tuple[str, ScoredTokens]:
        """Returns what is before completion `index` of all."""
        prompt = index // self.requests[0].n
        return self.echo[prompt] if self.echo else "", self.echo_tokens[prompt] if self.echo_tokens else ScoredTokens()


class OpenAIRoutes:
    """Both routes. `max_length` is the maximum number of tokens of prompt and completion together."""

    def __init__(self, backend: CompletionBackend, name: str, tokenizer: ChatTokenizer | None, max_length: int) -> None:
        self.backend, self.name, self.max_length = backend, name, max_length
        self._tokenizer = tokenizer
        self._encoding = ClientTurns()  # a tokenizer is not thread-safe

    async def completions(self, raw: bytes, client: tuple[str, ...]) -> Any:
        """Returns the reply to a request to COMPLETIONS: a JSON value, or a generator of them for a stream."""
        with bad_request_on_error():
            body = parse(CompletionsBody, raw)
            self._check(body)
            sampling = body.sampling(16 if body.max_tokens is None else body.max_tokens, body.logprobs or 0)
            single = isinstance(body.prompt, str) or (body.prompt and isinstance(body.prompt[0], int))
            prompts: list[Any] = [body.prompt] if single else list(body.prompt)
            n = self._count(body, len(prompts))
            _check_logprobs(n * len(prompts), sampling.max_new_tokens, body.logprobs)
        encoded = [await self._encode(client, prompt) if isinstance(prompt, str) else prompt for prompt in prompts]
        with bad_request_on_error():
            adapter = self.backend.adapter_of(body.model)
            requests = [
                Request(tuple(tokens), sampling, n=n, first_index=index * n, adapter=adapter, client=client)
                for index, tokens in enumerate(encoded)
            ]
        echo = [self._text(prompt) for prompt in prompts] if body.echo else []
        scores: Sequence[ScoredTokens] = ()
        if body.echo and body.logprobs is not None:
            with bad_request_on_error():
                length = max(len(tokens) for tokens in encoded) + sampling.max_new_tokens
                _check_logprobs(n * len(prompts), length, body.logprobs)
            scores = await self.backend.score_prompts(requests, body.logprobs)
        call = self._call(requests, body, chat=False, logprobs=body.logprobs is not None, echo=echo, echo_tokens=scores)
        return await self._reply(call)

    async def chat(self, raw: bytes, client: tuple[str, ...]) -> Any:
        """Returns the reply to a request to CHAT, as `completions` does."""
        with bad_request_on_error():
            body = parse(ChatBody, raw)
            self._check(body)
            if body.max_tokens is not None and body.max_completion_tokens is not None:
                raise ValueError(
                    "max_tokens and max_completion_tokens are both given; they are two names of one limit."
                )
            if body.top_logprobs and not body.logprobs:
                raise ValueError(f"top_logprobs is {body.top_logprobs}, which needs logprobs: true.")
            if not body.messages:
                raise ValueError("messages is []: give at least one message.")
            messages = [message.plain(index) for index, message in enumerate(body.messages)]
            n, declared = self._count(body, 1), body.plain_tools()
        tokens = await self._encode(client, messages, body.chat_template_kwargs or {}, declared)
        limit = body.max_completion_tokens if body.max_tokens is None else body.max_tokens
        with bad_request_on_error():
            room = max(1, self.max_length - len(tokens))  # the generator refuses a prompt that leaves no room
            tools, grammar = None, None
            if declared:
                end = self._tokenizer.decode(tokens[-PROMPT_END:], skip_special_tokens=False) if self._tokenizer else ""
                thoughts, parallel = self._template.thoughts, body.parallel_tool_calls is not False
                in_thought = thoughts.opened(end) is not None
                tools = _Tools(self._tool_format, parameter_types(declared), parallel, thoughts, in_thought)
                grammar = body.grammar(declared, self._tool_grammar, in_thought=in_thought)
            sampling = body.sampling(room if limit is None else limit, body.top_logprobs or 0, grammar)
            _check_logprobs(n, sampling.max_new_tokens, body.top_logprobs or 0 if body.logprobs else None)
            adapter = self.backend.adapter_of(body.model)
            generation = Request(tuple(tokens), sampling, n=n, adapter=adapter, client=client)
        call = self._call([generation], body, chat=True, logprobs=bool(body.logprobs), tools=tools)
        return await self._reply(call)

    @cached_property
    def _tool_format(self) -> ToolCallFormat:
        return detect_format(self._template)

    def _tool_grammar(self) -> ToolGrammar:
        return ToolGrammar(self._template, self._tool_format)

    @cached_property
    def _template(self) -> ChatTemplate:
        assert self._tokenizer is not None
        return ChatTemplate(self._tokenizer, {})

    @cached_property
    def _token_bytes(self) -> TokenBytes:
        assert self._tokenizer is not None
        return TokenBytes(self._tokenizer)

    def _check(self, body: CommonBody) -> None:
        body.check_extra()
        if body.stream_options is not None:
            body.stream_options.check_extra("stream_options.")
        self.backend.adapter_of(body.model)
        if self._tokenizer is None:
            raise ValueError("this server has no tokenizer; send token ids to /generate.")

    def _text(self, prompt: str | Sequence[int]) -> str:
        assert self._tokenizer is not None
        return prompt if isinstance(prompt, str) else self._tokenizer.decode(prompt, skip_special_tokens=True)

    def _count(self, body: CommonBody, prompts: int) -> int:
        n = 1 if body.n is None else body.n
        if n < 1 or not 1 <= prompts * n <= MAX_CHOICES:
            raise ValueError(
                f"{prompts} prompt(s) of n={n} completions: give from 1 to {MAX_CHOICES} completions in all."
            )
        return n

    @cached_property
    def _max_characters(self) -> int:
        """The length of a text that has more tokens than fit, whatever they are."""
        assert self._tokenizer is not None
        return self.max_length * max(map(len, self._tokenizer.get_vocab()))

    def _call(
        self,
        requests: Sequence[Request],
        body: CommonBody,
        *,
        chat: bool,
        logprobs: bool,
        tools: _Tools | None = None,
        echo: Sequence[str] = (),
        echo_tokens: Sequence[ScoredTokens] = (),
    ) -> _Call:
        usage = body.stream_options is not None and body.stream_options.include_usage
        identity = f"{'chatcmpl' if chat else 'cmpl'}-{secrets.token_hex(12)}"
        created = int(time.time())
        return _Call(requests, chat, logprobs, bool(body.stream), usage, identity, created, tools, echo, echo_tokens)

    async def _encode(
        self,
        client: tuple[str, ...],
        prompt: str | list[dict[str, Any]],
        options: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> list[int]:
        """Returns the tokens of a prompt. A thread encodes it, so that a long prompt does not block the event loop."""
        assert self._tokenizer is not None
        encoder = Encoder(tokenizer=self._tokenizer, options=options or {})
        length = len(prompt) if isinstance(prompt, str) else sum(len(message["content"] or "") for message in prompt)
        if length > self._max_characters:
            raise HTTPError(
                400, f"the prompt has {length} characters, which are more than {self.max_length} tokens: shorten it."
            )
        try:
            async with self._encoding.turn(client[0] if client else ""):
                encoding = asyncio.ensure_future(asyncio.to_thread(encoder.prompt, prompt, tools=list(tools)))
                try:
                    return await asyncio.shield(encoding)
                except asyncio.CancelledError:
                    await asyncio.wait([encoding])  # it has the tokenizer
                    raise
        except Exception as error:  # a template may raise anything
            raise HTTPError(400, f"the prompt cannot be encoded: {error}") from error

    async def _reply(self, call: _Call) -> Any:
        if call.stream:
            return self._events(call)
        groups = await self.backend.generate(call.requests)
        completions = [completion for group in groups for completion in group]
        choices = await asyncio.to_thread(self._choices, call, completions)
        total = sum(len(completion.tokens) for completion in completions)
        kind = "chat.completion" if call.chat else "text_completion"
        return self._body(call, kind, choices) | {"usage": _usage(call, total)}

    def _choices(self, call: _Call, completions: Sequence[Completion]) -> list[dict[str, Any]]:
        """Returns the completions as they are sent. A thread decodes them."""
        choices = []
        for index, completion in enumerate(completions):
            text, calls, reason = self._read(call, completion)
            message = {"role": "assistant", "content": text, "refusal": None} | ({"tool_calls": calls} if calls else {})
            before, tokens = call.echoed(index)
            content = {"message": message} if call.chat else {"text": before + (text or "")}
            tokens += ScoredTokens(completion.tokens, completion.logprobs, completion.top_logprobs)
            choices.append(self._choice(call, index, content, tokens, reason))
        return choices

    def _read(self, call: _Call, completion: Completion) -> tuple[str | None, list[dict[str, Any]], str]:
        """Returns the text of a completion, its tool calls, and why it ended."""
        assert self._tokenizer is not None
        if call.tools is not None:
            text = completion.text or ""
            if not call.requests[0].sampling.stop:  # a format may have special tokens, which the text lacks
                written = completion.tokens[:-1] if completion.finish_reason == "stop" else completion.tokens
                text = self._tokenizer.decode(written, skip_special_tokens=False)
            before, calls = call.tools.read(text)
            if calls:
                return before, calls, "tool_calls" if completion.finish_reason == "stop" else completion.finish_reason
        return completion.text, [], completion.finish_reason

    async def _events(self, call: _Call) -> AsyncGenerator[Any, None]:
        """Yields a chunk for each piece of text, a last one for each completion, and then the usage, if requested."""
        assert self._tokenizer is not None
        stops = call.requests[0].sampling.stop
        n, total = call.requests[0].n, 0
        texts = [TextStream(self._tokenizer, stops) for _ in range(n * len(call.requests))]
        unsent = [ScoredTokens()] * len(texts)  # tokens without their text yet
        echoed = [call.echoed(index) for index in range(len(texts) if call.echo else 0)]
        starts: list[tuple[dict[str, Any], ScoredTokens]] = [({"text": text}, tokens) for text, tokens in echoed]
        if call.chat:
            starts = [({"delta": {"role": "assistant", "content": ""}}, ScoredTokens())] * len(texts)
        async with contextlib.aclosing(self.backend.stream(call.requests)) as stream:
            async for progress in stream:
                for index, (start, tokens) in enumerate(starts):  # now that the request is accepted
                    yield self._chunk(call, [self._choice(call, index, start, tokens, None)])
                starts = []
                index = progress.request_index * n + progress.index
                total += len(progress.tokens)
                unsent[index] += ScoredTokens(progress.tokens, progress.logprobs, progress.top_logprobs)
                text: str | None = None
                calls: list[dict[str, Any]] = []
                reason: str | None = None
                if progress.completion is not None:
                    text, calls, reason = self._read(call, progress.completion)
                elif call.tools is not None:
                    continue  # what begins a call is known when it is whole
                piece = text if calls else texts[index].add(progress.tokens, text)
                if not piece and progress.completion is None:
                    continue
                numbered = [{"index": place, **each} for place, each in enumerate(calls)]
                change = {"content": piece} | ({"tool_calls": numbered} if calls else {})
                content = {"delta": change} if call.chat else {"text": piece}
                yield self._chunk(call, [self._choice(call, index, content, unsent[index], reason)])
                unsent[index] = ScoredTokens()
        if call.usage:
            yield self._chunk(call, []) | {"usage": _usage(call, total)}

    def _choice(
        self,
        call: _Call,
        index: int,
        content: Mapping[str, Any],
        tokens: ScoredTokens,
        reason: str | None,
    ) -> dict[str, Any]:
        stated = self._logprobs(tokens, chat=call.chat) if call.logprobs else None
        return {"index": index, **content, "logprobs": stated, "finish_reason": reason}

    def _chunk(self, call: _Call, choices: list[dict[str, Any]]) -> dict[str, Any]:
        kind = "chat.completion.chunk" if call.chat else "text_completion"
        return self._body(call, kind, choices) | ({"usage": None} if call.usage else {})

    def _body(self, call: _Call, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": call.identity, "object": kind, "created": call.created, "model": self.name, "choices": choices}

    def _logprobs(self, tokens: ScoredTokens, *, chat: bool) -> dict[str, Any]:
        texts = [self._token_bytes.text(token) for token in tokens.ids]
        if chat:
            entries = [
                self._token(token, value) | {"top_logprobs": [self._token(*other) for other in top or ()]}
                for token, value, top in zip(
                    tokens.ids, tokens.logprobs, tokens.top or [()] * len(tokens.ids), strict=True
                )
            ]
            return {"content": entries, "refusal": None}
        values = [None if logprob is None else max(logprob, MIN_LOGPROB) for logprob in tokens.logprobs]
        top = [
            None
            if place is None
            else {self._token_bytes.text(other): max(value, MIN_LOGPROB) for other, value in place}
            for place in tokens.top
        ]
        offsets = [0, *itertools.accumulate(map(len, texts))][: len(texts)]
        return {"tokens": texts, "token_logprobs": values, "top_logprobs": top or None, "text_offset": offsets}

    def _token(self, token: int, logprob: float | None) -> dict[str, Any]:
        text, value = self._token_bytes.text(token), self._token_bytes.of(token)
        assert logprob is not None, "a prompt's, which is not echoed in chats"
        return {"token": text, "logprob": max(logprob, MIN_LOGPROB), "bytes": list(value)}


def _check_logprobs(choices: int, tokens: int, top: int | None) -> None:
    """Refuses a request whose reply could be too large to be written while others wait."""
    count = 0 if top is None else choices * tokens * (1 + top)
    if count > MAX_LOGPROBS:
        raise ValueError(
            f"{choices} completion(s) of up to {tokens} tokens with {top} likeliest ones have {count} log-probs; the "
            f"limit is {MAX_LOGPROBS}. Ask for fewer, or set max_tokens."
        )


def _call_body(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)}
    return {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}


def _usage(call: _Call, completion_tokens: int) -> dict[str, int]:
    prompt = sum(len(request.prompt) for request in call.requests)
    total = prompt + completion_tokens
    return {"prompt_tokens": prompt, "completion_tokens": completion_tokens, "total_tokens": total}
