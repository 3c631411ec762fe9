"""OpenAI's /v1/completions and /v1/chat/completions.

Log-probs are those of `Completion.logprobs`: of the sampled token, at the sampling temperature. An unsupported field is
refused with a sentence, unless its value requests nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
import threading
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Protocol

from pydantic import BaseModel, ConfigDict, Field

from postlude.data.chat import Encoder
from postlude.data.chat_tokenizer import ChatTokenizer
from postlude.generate.protocol import Completion, Progress, Request
from postlude.generate.sampling_params import SamplingParams
from postlude.generate.text_stream import TextStream
from postlude.serving.request_body import Texts, TokenLists, Tokens, parse
from postlude.serving.server.http_server import HTTPError, HTTPRequest, bad_request_on_error

COMPLETIONS, CHAT, MODELS = "/v1/completions", "/v1/chat/completions", "/v1/models"
MAX_CHOICES = 1024  # completions of one request
MIN_LOGPROB = -9999.0  # replaces minus infinity, which JSON does not have
NO_EFFECT: Mapping[str, tuple[Any, ...]] = {  # values of unsupported fields that ask for nothing
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "functions": ([],),
    "logit_bias": ({},),
    "metadata": ({},),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "suffix": ("",),
    "tool_choice": ("none",),
    "tools": ([],),
    "top_logprobs": (0,),
    "tool_calls": ([],),
    "annotations": ([],),
}


class CompletionBackend(Protocol):
    """Generates completions for the routes."""

    def adapter_of(self, name: str | None) -> str | None:
        """Returns the adapter that a request with this model uses. Raises ValueError for an unknown name."""

    async def generate(self, requests: Sequence[Request], is_gone: Callable[[], bool]) -> list[list[Completion]]:
        """Returns the completions of each request."""

    def stream(self, requests: Sequence[Request], is_gone: Callable[[], bool]) -> AsyncGenerator[Progress, None]:
        """Yields their tokens as they come."""


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, frozen=True)

    def check_extra(self, prefix: str = "") -> None:
        """Refuses unsupported fields, unless they ask for nothing."""
        for name, value in (self.model_extra or {}).items():
            if value is not None and value not in NO_EFFECT.get(name, ()):
                known = ", ".join(type(self).model_fields)
                raise ValueError(f"{prefix}{name} is {value!r:.60}, which is not supported; there are {known}.")


class _StreamOptions(_Body):
    include_usage: bool = False


class _Common(_Body):
    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = None
    stop: Annotated[str | tuple[str, ...] | None, Field(description="text, or a list of texts")] = None
    seed: int | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    user: str | None = None
    """Accepted and ignored."""
    # vLLM's additional fields
    top_k: int | None = None
    min_p: float | None = None
    stop_token_ids: tuple[int, ...] | None = None
    ignore_eos: bool | None = None

    def sampling(self, max_new_tokens: int) -> SamplingParams:
        """Returns the sampling parameters. Without a seed, each request gets a random one."""
        values: dict[str, Any] = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": 0 if self.top_k == -1 else self.top_k,
            "min_p": self.min_p,
            "stop": (self.stop,) if isinstance(self.stop, str) else self.stop,
            "stop_tokens": self.stop_token_ids,
            "ignore_eos": self.ignore_eos,
            "seed": secrets.randbits(48) if self.seed is None else self.seed,
            "max_new_tokens": max_new_tokens,
        }
        return SamplingParams(**{name: value for name, value in values.items() if value is not None})


class CompletionsBody(_Common):
    """The body of a request to COMPLETIONS."""

    prompt: Annotated[str | Texts | Tokens | TokenLists, Field(description="text, token ids, or a list of either")]
    logprobs: int | None = None


class _TextPart(_Body):
    type: str
    text: str


class _Message(_Body):
    role: str
    content: Annotated[str | tuple[_TextPart, ...] | None, Field(description="text, or a list of parts of text")] = None

    def plain(self, index: int) -> dict[str, str]:
        """Returns the message as a chat template takes it."""
        prefix = f"messages.{index}."
        self.check_extra(prefix)
        if self.content is None:
            raise ValueError(f"{prefix}content is missing: give text.")
        if isinstance(self.content, str):
            return {"role": self.role, "content": self.content}
        for part in self.content:
            part.check_extra(f"{prefix}content.")
            if part.type != "text":
                raise ValueError(f"{prefix}content has a part of type {part.type!r}, but only text is supported.")
        return {"role": self.role, "content": "".join(part.text for part in self.content)}


class ChatBody(_Common):
    """The body of a request to CHAT."""

    messages: tuple[_Message, ...]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    """Passed to the chat template, such as enable_thinking; vLLM's field."""


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


class OpenAIRoutes:
    """Both routes. `max_length` is the maximum number of tokens of prompt and completion together."""

    def __init__(self, backend: CompletionBackend, name: str, tokenizer: ChatTokenizer | None, max_length: int) -> None:
        self.backend, self.name, self.max_length = backend, name, max_length
        self._tokenizer = tokenizer
        self._encoding = threading.Lock()  # a tokenizer is not thread-safe

    async def completions(self, request: HTTPRequest) -> Any:
        """Returns the reply to a request to COMPLETIONS."""
        with bad_request_on_error():
            body = parse(CompletionsBody, request.body)
            self._check(body)
            if body.logprobs:
                raise ValueError(
                    f"logprobs is {body.logprobs}, but only the log-probs of sampled tokens are known. Give 0 for "
                    "those."
                )
            sampling = body.sampling(16 if body.max_tokens is None else body.max_tokens)
            single = isinstance(body.prompt, str) or (body.prompt and isinstance(body.prompt[0], int))
            prompts: list[Any] = [body.prompt] if single else list(body.prompt)
            n = self._count(body, len(prompts))
        encoded = [await self._encode(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]
        with bad_request_on_error():
            adapter = self.backend.adapter_of(body.model)
            requests = [
                Request(tuple(tokens), sampling, n=n, first_index=index * n, adapter=adapter)
                for index, tokens in enumerate(encoded)
            ]
        call = self._call(requests, body, chat=False, logprobs=body.logprobs is not None)
        return await self._reply(call, request)

    async def chat(self, request: HTTPRequest) -> Any:
        """Returns the reply to a request to CHAT."""
        with bad_request_on_error():
            body = parse(ChatBody, request.body)
            self._check(body)
            if body.max_tokens is not None and body.max_completion_tokens is not None:
                raise ValueError(
                    "max_tokens and max_completion_tokens are both given; they are two names of one limit."
                )
            if not body.messages:
                raise ValueError("messages is []: give at least one message.")
            messages = [message.plain(index) for index, message in enumerate(body.messages)]
            n = self._count(body, 1)
        tokens = await self._encode(messages, body.chat_template_kwargs or {})
        limit = body.max_completion_tokens if body.max_tokens is None else body.max_tokens
        with bad_request_on_error():
            room = max(1, self.max_length - len(tokens))  # the generator refuses a prompt that leaves no room
            sampling, adapter = body.sampling(room if limit is None else limit), self.backend.adapter_of(body.model)
            generation = Request(tuple(tokens), sampling, n=n, adapter=adapter)
        return await self._reply(self._call([generation], body, chat=True, logprobs=bool(body.logprobs)), request)

    def _check(self, body: _Common) -> None:
        body.check_extra()
        if body.stream_options is not None:
            body.stream_options.check_extra("stream_options.")
        self.backend.adapter_of(body.model)
        if self._tokenizer is None:
            raise ValueError("this server has no tokenizer; send token ids to /generate.")

    def _count(self, body: _Common, prompts: int) -> int:
        n = 1 if body.n is None else body.n
        if n < 1 or not 1 <= prompts * n <= MAX_CHOICES:
            raise ValueError(
                f"{prompts} prompt(s) of n={n} completions: give from 1 to {MAX_CHOICES} completions in all."
            )
        return n

    def _call(self, requests: Sequence[Request], body: _Common, *, chat: bool, logprobs: bool) -> _Call:
        usage = body.stream_options is not None and body.stream_options.include_usage
        identity = f"{'chatcmpl' if chat else 'cmpl'}-{secrets.token_hex(12)}"
        return _Call(requests, chat, logprobs, bool(body.stream), usage, identity, int(time.time()))

    async def _encode(self, prompt: str | list[dict[str, str]], options: Mapping[str, Any] | None = None) -> list[int]:
        """Returns the tokens of a prompt. A thread encodes it, so that a long prompt does not block the event loop."""
        assert self._tokenizer is not None
        encoder = Encoder(tokenizer=self._tokenizer, options=options or {})

        def encode() -> list[int]:
            with self._encoding:
                return encoder.prompt(prompt)

        try:
            return await asyncio.to_thread(encode)
        except Exception as error:  # a template may raise anything
            raise HTTPError(400, f"the prompt cannot be encoded: {error}") from error

    async def _reply(self, call: _Call, request: HTTPRequest) -> Any:
        if call.stream:
            return self._events(call, request)
        groups = await self.backend.generate(call.requests, request.is_gone)
        completions = [completion for group in groups for completion in group]
        choices = []
        for index, completion in enumerate(completions):
            message = {"role": "assistant", "content": completion.text, "refusal": None}
            content = {"message": message} if call.chat else {"text": completion.text}
            choices.append(
                self._choice(call, index, content, completion.tokens, completion.logprobs, completion.finish_reason)
            )
        total = sum(len(completion.tokens) for completion in completions)
        kind = "chat.completion" if call.chat else "text_completion"
        return self._body(call, kind, choices) | {"usage": _usage(call, total)}

    async def _events(self, call: _Call, request: HTTPRequest) -> AsyncGenerator[Any, None]:
        """Yields a chunk for each piece of text, a last one for each completion, and then the usage, if requested."""
        assert self._tokenizer is not None
        stops = call.requests[0].sampling.stop
        n, total = call.requests[0].n, 0
        texts = [TextStream(self._tokenizer, stops) for _ in range(n * len(call.requests))]
        unsent: list[tuple[list[int], list[float]]] = [([], []) for _ in texts]  # tokens without their text yet
        if call.chat:
            for index in range(len(texts)):
                delta = {"delta": {"role": "assistant", "content": ""}}
                yield self._chunk(call, [self._choice(call, index, delta, [], [], None)])
        async with contextlib.aclosing(self.backend.stream(call.requests, request.is_gone)) as stream:
            async for progress in stream:
                index = progress.request_index * n + progress.index
                total += len(progress.tokens)
                unsent[index][0].extend(progress.tokens)
                unsent[index][1].extend(progress.logprobs)
                text, reason = None, None
                if progress.completion is not None:
                    text, reason = progress.completion.text, progress.completion.finish_reason
                piece = texts[index].add(progress.tokens, text)
                if not piece and progress.completion is None:
                    continue
                content = {"delta": {"content": piece}} if call.chat else {"text": piece}
                yield self._chunk(call, [self._choice(call, index, content, *unsent[index], reason)])
                unsent[index] = ([], [])
        if call.usage:
            yield self._chunk(call, []) | {"usage": _usage(call, total)}

    def _choice(
        self,
        call: _Call,
        index: int,
        content: Mapping[str, Any],
        tokens: Sequence[int],
        logprobs: Sequence[float],
        reason: str | None,
    ) -> dict[str, Any]:
        stated = self._logprobs(tokens, logprobs, chat=call.chat) if call.logprobs else None
        return {"index": index, **content, "logprobs": stated, "finish_reason": reason}

    def _chunk(self, call: _Call, choices: list[dict[str, Any]]) -> dict[str, Any]:
        kind = "chat.completion.chunk" if call.chat else "text_completion"
        return self._body(call, kind, choices) | ({"usage": None} if call.usage else {})

    def _body(self, call: _Call, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": call.identity, "object": kind, "created": call.created, "model": self.name, "choices": choices}

    def _logprobs(self, tokens: Sequence[int], logprobs: Sequence[float], *, chat: bool) -> dict[str, Any]:
        assert self._tokenizer is not None
        texts = [self._tokenizer.decode([token]) for token in tokens]
        values = [max(logprob, MIN_LOGPROB) for logprob in logprobs]
        if chat:
            entries = [
                {"token": text, "logprob": value, "bytes": list(text.encode()), "top_logprobs": []}
                for text, value in zip(texts, values, strict=True)
            ]
            return {"content": entries, "refusal": None}
        offsets = [0, *itertools.accumulate(map(len, texts))][: len(texts)]
        return {"tokens": texts, "token_logprobs": values, "top_logprobs": None, "text_offset": offsets}


def _usage(call: _Call, completion_tokens: int) -> dict[str, int]:
    prompt = sum(len(request.prompt) for request in call.requests)
    total = prompt + completion_tokens
    return {"prompt_tokens": prompt, "completion_tokens": completion_tokens, "total_tokens": total}
