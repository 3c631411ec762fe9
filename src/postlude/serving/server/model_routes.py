"""ModelRoutes: the routes of OpenAI's and Anthropic's APIs for a model, a backend that samples, and who records chats.

Each route turns the body of a request into the same call, and a `ReplyWriter` writes the completions for its API.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, TypeAlias, TypeVar

from postlude.generate.protocol import Completion, Request
from postlude.generate.text_stream import TextStream
from postlude.serving.http.errors import bad_request_on_error
from postlude.serving.request_body import parse
from postlude.serving.server.anthropic_api import CountTokensBody, MessagesBody, MessageWriter
from postlude.serving.server.api_routes import API_ROUTES, PREFIX, APIRoute
from postlude.serving.server.chat_calls import ChatCall, ChatRecorder, CompletionBackend, ScoredTokens
from postlude.serving.server.chat_request import ChatRequest
from postlude.serving.server.completion_reader import (
    CompletionReader,
    Reader,
    ReplyWriter,
    TextReader,
    TokenUsage,
    Turn,
)
from postlude.serving.server.openai_api import ChatBody, ChatWriter, CommonBody, CompletionsBody, CompletionsWriter
from postlude.serving.server.responses_api import ResponsesBody, ResponseWriter
from postlude.serving.server.served_model import ServedModel, TemplatePrompts

MAX_CHOICES = 1024  # completions of one request
MAX_LOGPROBS = 1 << 20  # log-probs in one reply
SHORT_TOKENS = 512  # of completions that are read in less time than a thread needs to take over
Result = TypeVar("Result")
PostHandler: TypeAlias = Callable[[bytes, tuple[str, ...]], Awaitable[Any]]
"""Replies to a request with this body, of a client with these names, by which clients take turns."""


@dataclass(frozen=True)
class _Job:
    """What is sampled for a request, and what becomes of it."""

    requests: Sequence[Request]
    new_reader: Callable[[], Reader]
    record: Callable[[Request, Turn], None]
    writer: ReplyWriter
    stream: bool

    def usage(self, completion_tokens: int = 0) -> TokenUsage:
        """Returns the numbers of tokens so far."""
        return TokenUsage(sum(len(request.prompt) for request in self.requests), completion_tokens)


class ModelRoutes:
    """The routes. Objects that share a model are cheap: one may serve a single client.

    `stops` are strings that end completions besides those of a request. Without `strict_grammar`, strict tools are
    sampled under a grammar only if a request forces a call.
    """

    def __init__(
        self,
        model: ServedModel,
        backend: CompletionBackend,
        recorder: ChatRecorder | None = None,
        *,
        stops: Sequence[str] = (),
        strict_grammar: bool = True,
    ) -> None:
        self.model, self.backend, self.stops, self.strict_grammar = model, backend, stops, strict_grammar
        self.recorder = recorder or TemplatePrompts(model)

    @cached_property
    def posts(self) -> dict[str, PostHandler]:
        """What replies to requests, by path: the frequent ones first."""
        return {f"{PREFIX}{route.path}": self.handler(route) for route in API_ROUTES}

    def handler(self, route: APIRoute) -> PostHandler:
        """Returns what replies to requests of a route: with a JSON value, or a generator of them for a stream."""
        handler: PostHandler = getattr(self, route.method)
        return handler

    async def completions(self, raw: bytes, client: tuple[str, ...]) -> Any:
        with bad_request_on_error():
            body = parse(CompletionsBody, raw)
            self._check(body)
            sampling = body.sampling(16 if body.max_tokens is None else body.max_tokens, body.logprobs or 0)
            single = isinstance(body.prompt, str) or (body.prompt and isinstance(body.prompt[0], int))
            prompts: list[Any] = [body.prompt] if single else list(body.prompt)
            n = _checked_count(1 if body.n is None else body.n, len(prompts))
            _check_logprobs(n * len(prompts), sampling.max_new_tokens, body.logprobs)
        encoded = [await self.model.encode(prompt, client) if isinstance(prompt, str) else prompt for prompt in prompts]
        with bad_request_on_error():
            adapter = self.backend.adapter_of(body.model)
            requests = [
                Request(tuple(tokens), sampling, n=n, first_index=index * n, adapter=adapter, client=client)
                for index, tokens in enumerate(encoded)
            ]
        scores: Sequence[ScoredTokens] = ()
        if body.echo and body.logprobs is not None:
            with bad_request_on_error():
                length = max(len(tokens) for tokens in encoded) + sampling.max_new_tokens
                _check_logprobs(n * len(prompts), length, body.logprobs)
            scores = await self.backend.score_prompts(requests, body.logprobs)
        writer = CompletionsWriter(
            self.model.named(adapter),
            n,
            logprobs=body.logprobs is not None,
            usage=body.include_usage,
            echo=[self.model.text(prompt) for prompt in prompts] if body.echo else (),
            echo_tokens=scores,
        )
        stops = (*sampling.stop, *self.stops)
        job = _Job(
            requests,
            lambda: TextReader(TextStream(self.model.tokenizer, stops)),
            lambda request, turn: self.recorder.text_completed(request.prompt, turn.completion),
            writer,
            bool(body.stream),
        )
        return await self._reply(job)

    async def chat(self, raw: bytes, client: tuple[str, ...]) -> Any:
        with bad_request_on_error():
            body = parse(ChatBody, raw)
            self._check(body)
            request = body.request(client, self.model.max_length)
            n, logprobs = _checked_count(request.call.n, 1), request.logprobs is not None
        model = self.model.named(self.backend.adapter_of(body.model))
        return await self._chat(request, ChatWriter(model, n, logprobs=logprobs, usage=body.include_usage))

    async def responses(self, raw: bytes, client: tuple[str, ...]) -> Any:
        with bad_request_on_error():
            body = parse(ResponsesBody, raw)
            self._check(body)
            request = body.request(client, self.model.max_length)
            model = self.model.named(self.backend.adapter_of(body.model))
            writer = ResponseWriter(model, body.settings(), logprobs=request.logprobs is not None)
        return await self._chat(request, writer)

    async def messages(self, raw: bytes, client: tuple[str, ...]) -> Any:
        with bad_request_on_error():
            body = parse(MessagesBody, raw)
            self._check(body)
            request = body.request(client)
        model = self.model.named(self.backend.adapter_of(body.model))
        return await self._chat(request, MessageWriter(model, body.max_tokens))

    async def count_tokens(self, raw: bytes, client: tuple[str, ...]) -> Any:
        with bad_request_on_error():
            body = parse(CountTokensBody, raw)
            self._check(body)
            request = body.request(client).adapted(self.model)
        return {"input_tokens": len(await self.recorder.prompt(request.call))}

    def _check(self, body: CommonBody | CountTokensBody | ResponsesBody) -> None:
        """Refuses what can be refused before the rest is read."""
        body.check_extra()
        self.backend.adapter_of(body.model)
        assert self.model.tokenizer is not None

    async def _chat(self, request: ChatRequest, writer: ReplyWriter) -> Any:
        with bad_request_on_error():
            request = request.adapted(self.model)
        prompt = await self.recorder.prompt(request.call)
        with bad_request_on_error():
            in_thought = self.model.opens_thought(prompt)
            tools = request.tools(self.model)
            if not self.strict_grammar:
                request = replace(request, choice=replace(request.choice, strict=False))
            call = request.sampled_call(self.model, prompt, in_thought=in_thought)
            _check_logprobs(call.n, call.sampling.max_new_tokens, request.logprobs)
            adapter = self.backend.adapter_of(request.model)
            generation = Request(tuple(prompt), call.sampling, n=call.n, adapter=adapter, client=call.client)
        thoughts, kept = self.model.template.thoughts, self.model.kept_tokens(with_calls=tools is not None)

        def new_reader() -> Reader:
            stream = TextStream(self.model.tokenizer, (*call.sampling.stop, *self.stops), kept)
            return CompletionReader(stream, thoughts, in_thought=in_thought, tools=tools)

        return await self._reply(_Job([generation], new_reader, partial(self._record, call), writer, request.stream))

    def _record(self, call: ChatCall, request: Request, turn: Turn) -> None:
        self.recorder.completed(call, request.prompt, turn.completion, turn.message)

    async def _reply(self, job: _Job) -> Any:
        if job.stream:
            return self._events(job)
        groups = await self.backend.generate(job.requests)
        completions = [completion for group in groups for completion in group]
        turns = await _run(partial(_read, job, completions), completions)
        owners = (request for request, group in zip(job.requests, groups, strict=True) for _ in group)
        for request, turn in zip(owners, turns, strict=True):
            job.record(request, turn)
        usage = job.usage(sum(len(turn.completion.tokens) for turn in turns))
        return await _run(partial(job.writer.reply, turns, usage), completions)

    async def _events(self, job: _Job) -> AsyncGenerator[Any, None]:
        n, total, begun = job.requests[0].n, 0, False
        readers = [job.new_reader() for _ in range(n * len(job.requests))]
        unsent = [ScoredTokens()] * len(readers)  # tokens without their text yet
        async with contextlib.aclosing(self.backend.stream(job.requests)) as stream:
            async for progress in stream:
                if not begun:  # now that the request is accepted
                    begun = True
                    for event in job.writer.begin(job.usage()):
                        yield event
                index = progress.request_index * n + progress.index
                total += len(progress.tokens)
                unsent[index] += ScoredTokens(progress.tokens, progress.logprobs, progress.top_logprobs)
                pieces, turn = readers[index].add(progress.tokens), None
                if progress.completion is not None:
                    last, turn = readers[index].finish(progress.completion)
                    pieces += last
                    job.record(job.requests[progress.request_index], turn)
                if pieces or turn is not None:
                    for event in job.writer.progress(index, pieces, unsent[index], turn):
                        yield event
                    unsent[index] = ScoredTokens()
        for event in job.writer.end(job.usage(total)):
            yield event


async def _run(work: Callable[[], Result], completions: Sequence[Completion]) -> Result:
    """Returns what `work` makes of completions. A thread runs it if it may take long."""
    tokens = sum(len(completion.tokens) + sum(map(len, completion.top_logprobs)) for completion in completions)
    return work() if tokens <= SHORT_TOKENS else await asyncio.to_thread(work)


def _read(job: _Job, completions: Sequence[Completion]) -> list[Turn]:
    return [job.new_reader().finish(completion)[1] for completion in completions]


def _checked_count(n: int, prompts: int) -> int:
    if n < 1 or not 1 <= prompts * n <= MAX_CHOICES:
        raise ValueError(f"{prompts} prompt(s) of n={n} completions: give from 1 to {MAX_CHOICES} completions in all.")
    return n


def _check_logprobs(choices: int, tokens: int, top: int | None) -> None:
    """Refuses a request whose reply could be too large to be written while others wait."""
    count = 0 if top is None else choices * tokens * (1 + top)
    if count > MAX_LOGPROBS:
        raise ValueError(
            f"{choices} completion(s) of up to {tokens} tokens with {top} likeliest ones have {count} log-probs; the "
            f"limit is {MAX_LOGPROBS}. Ask for fewer, or set max_tokens."
        )
