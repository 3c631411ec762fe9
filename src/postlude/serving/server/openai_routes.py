"""/v1/completions and /v1/chat/completions: OpenAI's requests as ours, and our answers as OpenAI's.

Log-probs are those of `Completion.logprobs`: at the temperature of the sampling, of the token that was sampled alone.
What is not supported is refused with a sentence, unless it is given the value that means nothing.
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
from postlude.serving.server.http_server import Problem, Question, mistakes_refused

COMPLETIONS, CHAT, MODELS = "/v1/completions", "/v1/chat/completions", "/v1/models"
MAX_CHOICES = 1024  # answers that one request may ask for
LOWEST = -9999.0  # stands for a log-prob of minus infinity, which JSON has no word for
NOTHING: Mapping[str, tuple[Any, ...]] = {  # values of what is not supported by which nothing is asked for
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


class Server(Protocol):
    """What answers requests."""

    def check_model(self, name: str | None) -> None:
        """Refuse the name of another model."""
        ...

    async def answers(self, requests: Sequence[Request], gone: Callable[[], bool]) -> list[list[Completion]]:
        """The answers to each request."""
        ...

    def stream(self, requests: Sequence[Request], gone: Callable[[], bool]) -> AsyncGenerator[Progress, None]:
        """The same as they come."""
        ...


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, frozen=True)

    def check_rest(self, where: str = "") -> None:
        """Refuse fields that are not supported, unless they ask for nothing."""
        for name, value in (self.model_extra or {}).items():
            if value is not None and value not in NOTHING.get(name, ()):
                known = ", ".join(type(self).model_fields)
                raise ValueError(f"{where}{name} is {value!r:.60}, which is not supported; there are {known}.")


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
    """Taken, and of no use here."""
    # vLLM's words for what OpenAI has none for
    top_k: int | None = None
    min_p: float | None = None
    stop_token_ids: tuple[int, ...] | None = None
    ignore_eos: bool | None = None

    def sampling(self, max_new_tokens: int) -> SamplingParams:
        """How answers are drawn. Without a seed no two requests are answered alike."""
        given: dict[str, Any] = {
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
        return SamplingParams(**{name: value for name, value in given.items() if value is not None})


class CompletionsBody(_Common):
    """What is posted to COMPLETIONS."""

    prompt: Annotated[str | Texts | Tokens | TokenLists, Field(description="text, token ids, or a list of either")]
    logprobs: int | None = None


class _TextPart(_Body):
    type: str
    text: str


class _Message(_Body):
    role: str
    content: Annotated[str | tuple[_TextPart, ...] | None, Field(description="text, or a list of parts of text")] = None

    def plain(self, place: int) -> dict[str, str]:
        """The message as a chat template takes it."""
        where = f"messages.{place}."
        self.check_rest(where)
        if self.content is None:
            raise ValueError(f"{where}content is missing: give text.")
        if isinstance(self.content, str):
            return {"role": self.role, "content": self.content}
        for part in self.content:
            part.check_rest(f"{where}content.")
            if part.type != "text":
                raise ValueError(f"{where}content has a part of type {part.type!r}, but text alone is supported.")
        return {"role": self.role, "content": "".join(part.text for part in self.content)}


class ChatBody(_Common):
    """What is posted to CHAT."""

    messages: tuple[_Message, ...]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    """Handed to the chat template, such as enable_thinking; vLLM's word."""


@dataclass(frozen=True)
class _Asked:
    """A request of either kind, as both are answered."""

    requests: Sequence[Request]
    chat: bool
    logprobs: bool
    stream: bool
    usage: bool
    """Whether a stream ends with how many tokens there were."""
    identity: str
    created: int


class OpenAIRoutes:
    """Both routes of one server. `longest` is the most tokens of prompt and answer together."""

    def __init__(self, server: Server, name: str, tokenizer: ChatTokenizer | None, longest: int) -> None:
        self.server, self.name, self.longest = server, name, longest
        self._tokenizer = tokenizer
        self._encoding = threading.Lock()  # a tokenizer may not be used twice at once

    async def completions(self, question: Question) -> Any:
        """The answer to a request at COMPLETIONS."""
        with mistakes_refused():
            body = parse(CompletionsBody, question.body)
            self._check(body)
            if body.logprobs:
                raise ValueError(
                    f"logprobs is {body.logprobs}, but likelier tokens than the sampled one are not known. Give 0 for "
                    "the log-probs of the sampled tokens."
                )
            sampling = body.sampling(16 if body.max_tokens is None else body.max_tokens)
            one = isinstance(body.prompt, str) or (body.prompt and isinstance(body.prompt[0], int))
            given: list[Any] = [body.prompt] if one else list(body.prompt)
            n = self._count(body, len(given))
        prompts = [await self._tokens(each) if isinstance(each, str) else each for each in given]
        with mistakes_refused():
            requests = [Request(tuple(tokens), sampling, n=n, first=place * n) for place, tokens in enumerate(prompts)]
        return await self._answer(self._asked(requests, body, chat=False, logprobs=body.logprobs is not None), question)

    async def chat(self, question: Question) -> Any:
        """The answer to a request at CHAT."""
        with mistakes_refused():
            body = parse(ChatBody, question.body)
            self._check(body)
            if body.max_tokens is not None and body.max_completion_tokens is not None:
                raise ValueError("max_tokens and max_completion_tokens are both given; they are two names of one.")
            if not body.messages:
                raise ValueError("messages is []: give at least one message.")
            messages = [message.plain(place) for place, message in enumerate(body.messages)]
            n = self._count(body, 1)
        tokens = await self._tokens(messages, body.chat_template_kwargs or {})
        most = body.max_completion_tokens if body.max_tokens is None else body.max_tokens
        with mistakes_refused():
            room = max(1, self.longest - len(tokens))  # a prompt that leaves none is refused with all others
            request = Request(tuple(tokens), body.sampling(room if most is None else most), n=n)
        return await self._answer(self._asked([request], body, chat=True, logprobs=bool(body.logprobs)), question)

    def _check(self, body: _Common) -> None:
        body.check_rest()
        if body.stream_options is not None:
            body.stream_options.check_rest("stream_options.")
        self.server.check_model(body.model)
        if self._tokenizer is None:
            raise ValueError("this server has no tokenizer; send token ids to /generate.")

    def _count(self, body: _Common, prompts: int) -> int:
        n = 1 if body.n is None else body.n
        if n < 1 or not 1 <= prompts * n <= MAX_CHOICES:
            raise ValueError(f"{prompts} prompt(s) of n={n} answers: give from 1 to {MAX_CHOICES} answers in all.")
        return n

    def _asked(self, requests: Sequence[Request], body: _Common, *, chat: bool, logprobs: bool) -> _Asked:
        usage = body.stream_options is not None and body.stream_options.include_usage
        identity = f"{'chatcmpl' if chat else 'cmpl'}-{secrets.token_hex(12)}"
        return _Asked(requests, chat, logprobs, bool(body.stream), usage, identity, int(time.time()))

    async def _tokens(self, prompt: str | list[dict[str, str]], options: Mapping[str, Any] | None = None) -> list[int]:
        """Encoded in a thread: a long prompt must not hold up the loop."""
        assert self._tokenizer is not None
        encoder = Encoder(tokenizer=self._tokenizer, options=options or {})

        def encode() -> list[int]:
            with self._encoding:
                return encoder.prompt(prompt)

        try:
            return await asyncio.to_thread(encode)
        except Exception as error:  # whatever a template or a tokenizer raises
            raise Problem(400, f"the prompt cannot be encoded: {error}") from error

    async def _answer(self, asked: _Asked, question: Question) -> Any:
        if asked.stream:
            return self._events(asked, question)
        groups = await self.server.answers(asked.requests, question.gone)
        found = [completion for group in groups for completion in group]
        kind = "chat.completion" if asked.chat else "text_completion"
        choices = [self._choice(asked, index, each) for index, each in enumerate(found)]
        total = sum(len(each.tokens) for each in found)
        return self._envelope(asked, kind, choices) | {"usage": _usage(asked, total)}

    def _choice(self, asked: _Asked, index: int, found: Completion) -> dict[str, Any]:
        said: dict[str, Any] = {"text": found.text}
        if asked.chat:
            said = {"message": {"role": "assistant", "content": found.text, "refusal": None}}
        logprobs = self._logprobs(asked, found.tokens, found.logprobs)
        return {"index": index, **said, "logprobs": logprobs, "finish_reason": found.finish_reason}

    async def _events(self, asked: _Asked, question: Question) -> AsyncGenerator[Any, None]:
        """One chunk for each piece of text, and a last one for each answer; then the number of tokens, if asked."""
        assert self._tokenizer is not None
        kind = "chat.completion.chunk" if asked.chat else "text_completion"
        stops = asked.requests[0].sampling.stop
        n, total = asked.requests[0].n, 0
        texts = [TextStream(self._tokenizer, stops) for _ in range(n * len(asked.requests))]
        kept: list[tuple[list[int], list[float]]] = [([], []) for _ in texts]  # tokens whose text has not come yet
        if asked.chat:
            for index in range(len(texts)):
                yield self._chunk(asked, kind, index, {"role": "assistant", "content": ""}, ([], []), None)
        async with contextlib.aclosing(self.server.stream(asked.requests, question.gone)) as stream:
            async for news in stream:
                index = news.place * n + news.number
                total += len(news.tokens)
                kept[index][0].extend(news.tokens)
                kept[index][1].extend(news.logprobs)
                piece = texts[index].add(news.tokens, None if news.completion is None else news.completion.text)
                if not piece and news.completion is None:
                    continue
                reason = None if news.completion is None else news.completion.finish_reason
                yield self._chunk(asked, kind, index, {"content": piece}, kept[index], reason)
                kept[index] = ([], [])
        if asked.usage:
            yield self._envelope(asked, kind, []) | {"usage": _usage(asked, total)}

    def _chunk(
        self,
        asked: _Asked,
        kind: str,
        index: int,
        delta: dict[str, str],
        tokens: tuple[list[int], list[float]],
        reason: str | None,
    ) -> dict[str, Any]:
        said: dict[str, Any] = {"delta": delta} if asked.chat else {"text": delta["content"]}
        choice = {"index": index, **said, "logprobs": self._logprobs(asked, *tokens), "finish_reason": reason}
        return self._envelope(asked, kind, [choice]) | ({"usage": None} if asked.usage else {})

    def _envelope(self, asked: _Asked, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": asked.identity, "object": kind, "created": asked.created, "model": self.name, "choices": choices}

    def _logprobs(self, asked: _Asked, tokens: Sequence[int], logprobs: Sequence[float]) -> dict[str, Any] | None:
        if not asked.logprobs:
            return None
        assert self._tokenizer is not None
        texts = [self._tokenizer.decode([token]) for token in tokens]
        values = [max(each, LOWEST) for each in logprobs]
        if asked.chat:
            content = [
                {"token": text, "logprob": value, "bytes": list(text.encode()), "top_logprobs": []}
                for text, value in zip(texts, values, strict=True)
            ]
            return {"content": content, "refusal": None}
        offsets = [0, *itertools.accumulate(map(len, texts))][: len(texts)]
        return {"tokens": texts, "token_logprobs": values, "top_logprobs": None, "text_offset": offsets}


def _usage(asked: _Asked, completion_tokens: int) -> dict[str, int]:
    prompt = sum(len(request.prompt) for request in asked.requests)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt + completion_tokens,
    }
