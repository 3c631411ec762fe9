"""OpenAIApp: base models and saved samplers by OpenAI's and Anthropic's routes, as `postlude serve` has them.

A request names its model: a base model, or the `tinker://` path of weights saved for sampling.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from postlude.generate.protocol import Completion, Progress
from postlude.generate.protocol import Request as GenerationRequest
from postlude.serving.http.errors import HTTPError, bad_request_on_error
from postlude.serving.http.replies import JSONReply
from postlude.serving.http.requests import unless_disconnected
from postlude.serving.server.api_routes import (
    API_ROUTES,
    MODELS,
    PREFIX,
    APIRoute,
    format_of,
    model_entry,
    model_reply,
    models_reply,
)
from postlude.tinker.app import Handler, TinkerApp
from postlude.tinker.backend import BaseModelInfo, SampleRequest, SampleResult
from postlude.tinker.limits import check_prompt
from postlude.tinker.sampling import Samplers, SamplingSession

if TYPE_CHECKING:
    from postlude.serving.server.chat_calls import ScoredTokens
    from postlude.serving.server.model_routes import ModelRoutes

PREFIXES = (PREFIX, "/oai/api/v1")
Value = TypeVar("Value")


class OpenAIApp:
    """The routes of one server. Importing what they need takes seconds, so a thread does so at the first request."""

    def __init__(self, app: TinkerApp) -> None:
        self._app, self._service = app, app.service
        self._routes: dict[str, ModelRoutes] = {}  # by sampler
        self._tokenizers: dict[str, Any] = {}
        self._loading = asyncio.Lock()

    def routes(self) -> list[Route]:
        """Returns the routes, under each prefix."""
        routes = []
        for prefix in PREFIXES:
            for route in API_ROUTES:
                routes.append(self._route(f"{prefix}{route.path}", self._handler(route), "POST"))
            routes.append(self._route(f"{prefix}{MODELS}", self._models, "GET"))
            routes.append(self._route(f"{prefix}{MODELS}/{{name:path}}", self._model, "GET"))
            routes.append(self._route(f"{prefix}/{{path:path}}", self._app.unknown, "GET", "POST", "PUT", "DELETE"))
        return routes

    def _route(self, path: str, handler: Handler, *methods: str) -> Route:
        return Route(path, self._app.endpoint(handler, format_of(path)), methods=methods)

    async def _models(self, _: Request, owner: str) -> Response:
        return JSONReply(models_reply(self._list(owner)))

    async def _model(self, request: Request, owner: str) -> Response:
        return JSONReply(model_reply(self._list(owner), request.path_params["name"]))

    def _list(self, owner: str) -> list[dict[str, Any]]:
        saved = [
            str(path)
            for path, checkpoint in self._service.state.checkpoints.items()
            if path.kind == "sampler_weights" and checkpoint.owner == owner and not checkpoint.is_expired()
        ]
        names = [*self._service.bases, *saved]
        return [model_entry(name, owner) for name in names]

    def _handler(self, route: APIRoute) -> Handler:
        async def handle(request: Request, owner: str) -> Response:
            body = await self._app.read(request)
            try:
                model = json.loads(body).get("model")
            except (ValueError, AttributeError, RecursionError) as error:
                raise HTTPError(400, "the request is not a JSON object, or is nested too deeply.") from error
            if not isinstance(model, str):
                raise HTTPError(400, f"model is {model!r:.60}: give a base model or a tinker:// path.")
            routes = await self._routes_of(owner, model)
            self._service.samplers.check_room(owner)

            async def reply() -> Response:
                return await route.format.reply(await routes.handler(route)(body, (owner,)))

            return await unless_disconnected(request, reply())

        return handle

    async def _routes_of(self, owner: str, model: str) -> ModelRoutes:
        path = model if model.startswith("tinker://") else None
        record = self._service.sampler_record(owner, f"openai:{owner}:{model}", None if path else model, path)
        sampler_id = f"{record.sampler_id}:{record.saved}"  # a path that was saved again is another sampler
        record = replace(record, sampler_id=sampler_id)
        info = self._service.base(record.base_model)
        sampler = self._service.samplers.samplers.get(sampler_id)
        if sampler is None:
            sampler = SamplingSession(record, owner, session_id="")
            self._service.samplers.add(sampler)
        async with self._loading:
            if sampler_id not in self._routes:
                self._routes[sampler_id] = await asyncio.to_thread(self._new_routes, model, sampler, info)
        return self._routes[sampler_id]

    def _new_routes(self, model: str, sampler: SamplingSession, info: BaseModelInfo) -> ModelRoutes:
        from postlude.hf.load import load_tokenizer
        from postlude.serving.server.model_routes import ModelRoutes
        from postlude.serving.server.served_model import ServedModel

        if info.name not in self._tokenizers:
            self._tokenizers[info.name] = load_tokenizer(info.tokenizer)
        generation = _Generation(self._service.samplers, sampler, info.max_context_length, info.vocab_size)
        return ModelRoutes(ServedModel(model, self._tokenizers[info.name], info.max_context_length), generation)


@dataclass
class _Generation:
    """Generates completions with a sampler, as OpenAI's routes ask for them."""

    samplers: Samplers
    sampler: SamplingSession
    max_length: int
    vocab_size: int

    def adapter_of(self, name: str | None) -> str | None:
        """Returns None: every name was resolved before."""
        return None

    async def generate(self, requests: Sequence[GenerationRequest]) -> list[list[Completion]]:
        """Returns the completions of each request."""
        converted = [self._convert(request) for request in requests]
        results = await asyncio.gather(*(self._sample(request) for request in converted))
        return [list(result.completions) for result in results]

    async def score_prompts(self, requests: Sequence[GenerationRequest], top: int) -> list[ScoredTokens]:
        """Refuses."""
        raise HTTPError(400, "echo with logprobs is not supported here: ask asample for prompt_logprobs.")

    async def stream(self, requests: Sequence[GenerationRequest]) -> AsyncGenerator[Progress, None]:
        """Yields tokens as they come. Closing the generator ends the requests."""
        converted = [self._convert(request) for request in requests]
        arrived: asyncio.Queue[Progress | BaseException | None] = asyncio.Queue()

        async def run(index: int, request: SampleRequest) -> None:
            try:
                result = await self._sample(request, lambda new: arrived.put_nowait(replace(new, request_index=index)))
                for completion_index, completion in enumerate(result.completions):
                    arrived.put_nowait(Progress(index, completion_index, (), (), completion))
                arrived.put_nowait(None)
            except Exception as error:
                arrived.put_nowait(error)

        tasks = [asyncio.create_task(run(index, request)) for index, request in enumerate(converted)]
        try:
            running = len(tasks)
            while running:
                event = await arrived.get()
                if isinstance(event, BaseException):
                    raise event
                if event is None:
                    running -= 1
                else:
                    yield event
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _convert(self, request: GenerationRequest) -> SampleRequest:
        sampling, prompt = request.sampling, np.array(request.prompt, np.int64)
        with bad_request_on_error():
            if sampling.top_logprobs:
                raise ValueError("the likeliest tokens are not returned here: ask for log-probs of sampled ones only.")
            tokens = check_prompt(prompt, sampling.max_new_tokens, self.max_length, self.vocab_size)
        return SampleRequest(tokens, replace(sampling, seed=request.seed), request.n)

    async def _sample(self, request: SampleRequest, progress: Callable[[Progress], None] | None = None) -> SampleResult:
        try:
            return await self.samplers.sample(self.sampler, request, progress)
        except (ValueError, TypeError) as error:
            raise HTTPError(400, str(error)) from error
