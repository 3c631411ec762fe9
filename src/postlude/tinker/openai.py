"""OpenAIApp: OpenAI's completions of base models and saved samplers, with the routes that `postlude serve` has.

A request names its model: a base model, or the `tinker://` path of weights saved for sampling.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from postlude.serving.http.errors import HTTPError, bad_request_on_error
from postlude.serving.http.replies import JSONReply, openai_error, openai_reply
from postlude.serving.http.requests import unless_disconnected
from postlude.tinker.app import TinkerApp
from postlude.tinker.backend import SampledSequence, SampleProgress, SampleRequest
from postlude.tinker.limits import check_prompt
from postlude.tinker.sampling import Samplers, SamplingSession

if TYPE_CHECKING:
    from postlude.generate.protocol import Completion, Progress
    from postlude.generate.protocol import Request as GenerationRequest
    from postlude.serving.server.openai_routes import OpenAIRoutes, ScoredTokens

PREFIXES = ("/v1", "/oai/api/v1")
Value = TypeVar("Value")


class OpenAIApp:
    """The routes of one server. Importing what they need takes seconds, so it happens at the first request."""

    def __init__(self, app: TinkerApp) -> None:
        self._app, self._service = app, app.service
        self._routes: dict[tuple[str, str], OpenAIRoutes] = {}
        self._tokenizers: dict[str, Any] = {}
        self._loading = asyncio.Lock()

    def routes(self) -> list[Route]:
        """Returns the routes, under each prefix."""
        routes = []
        for prefix in PREFIXES:
            for name, chat in (("completions", False), ("chat/completions", True)):
                endpoint = self._app.endpoint(self._handler(chat=chat), openai_error)
                routes.append(Route(f"{prefix}/{name}", endpoint, methods=["POST"]))
            for path, read in (("models", self._models), ("models/{name:path}", self._model)):
                routes.append(Route(f"{prefix}/{path}", self._app.endpoint(read, openai_error), methods=["GET"]))
            unknown = self._app.endpoint(self._unknown, openai_error)
            routes.append(Route(f"{prefix}/{{path:path}}", unknown, methods=["GET", "POST", "PUT", "DELETE"]))
        return routes

    async def _models(self, _: Request, owner: str) -> Response:
        return JSONReply({"object": "list", "data": self._list(owner)})

    async def _model(self, request: Request, owner: str) -> Response:
        name = request.path_params["name"]
        for model in self._list(owner):
            if model["id"] == name:
                return JSONReply(model)
        raise HTTPError(404, f"there is no model {name[:200]!r}.", "model_not_found")

    async def _unknown(self, request: Request, _: str) -> Response:
        raise HTTPError(404, f"{request.method} {request.url.path} is not supported by this server.")

    def _list(self, owner: str) -> list[dict[str, Any]]:
        saved = [
            str(path)
            for path, checkpoint in self._service.state.checkpoints.items()
            if path.kind == "sampler_weights" and checkpoint.owner == owner and not checkpoint.is_expired()
        ]
        names = [*self._service.bases, *saved]
        return [{"id": name, "object": "model", "created": 0, "owned_by": owner} for name in names]

    def _handler(self, *, chat: bool) -> Callable[[Request, str], Any]:
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
                return await openai_reply(await (routes.chat if chat else routes.completions)(body, (owner,)))

            return await unless_disconnected(request, reply())

        return handle

    async def _routes_of(self, owner: str, model: str) -> OpenAIRoutes:
        from postlude.hf.load import load_tokenizer
        from postlude.serving.server.openai_routes import OpenAIRoutes

        path = model if model.startswith("tinker://") else None
        sampler_id = f"openai:{owner}:{model}"
        record = self._service.sampler_record(owner, sampler_id, None if path else model, path)
        info = self._service.base(record.base_model)
        sampler = self._service.samplers.samplers.get(sampler_id)
        if sampler is None:
            sampler = SamplingSession(record, owner, session_id="")
            self._service.samplers.add(sampler)
            self._routes.pop((owner, model), None)
        async with self._loading:
            if info.name not in self._tokenizers:
                self._tokenizers[info.name] = await asyncio.to_thread(load_tokenizer, info.tokenizer)
        if (owner, model) not in self._routes:
            adapter = _Generation(self._service.samplers, sampler, info.max_context_length, info.vocab_size)
            tokenizer = self._tokenizers[info.name]
            self._routes[owner, model] = OpenAIRoutes(adapter, model, tokenizer, info.max_context_length)
        return self._routes[owner, model]


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
        results = await asyncio.gather(
            *(self._sampled(self.samplers.sample(self.sampler, sample_request)) for sample_request in converted)
        )
        return [[_completion(sequence) for sequence in result.sequences] for result in results]

    async def score_prompts(self, requests: Sequence[GenerationRequest], top: int) -> list[ScoredTokens]:
        """Refuses."""
        raise HTTPError(400, "echo with logprobs is not supported here: ask asample for prompt_logprobs.")

    async def stream(self, requests: Sequence[GenerationRequest]) -> AsyncGenerator[Progress, None]:
        """Yields tokens as they come. Closing the generator ends the requests."""
        from postlude.generate.protocol import Progress

        converted = [self._convert(request) for request in requests]
        arrived: asyncio.Queue[Progress | BaseException | None] = asyncio.Queue()

        async def run(index: int, request: SampleRequest) -> None:
            def progress(new: SampleProgress) -> None:
                arrived.put_nowait(Progress(index, new.index, new.tokens, new.logprobs, None))

            try:
                result = await self._sampled(self.samplers.sample(self.sampler, request, progress))
                for completion_index, sequence in enumerate(result.sequences):
                    arrived.put_nowait(Progress(index, completion_index, (), (), _completion(sequence)))
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
        import numpy as np

        sampling, prompt = request.sampling, np.array(request.prompt, np.int64)
        with bad_request_on_error():
            if sampling.top_logprobs:
                raise ValueError("the likeliest tokens are not returned here: ask for log-probs of sampled ones only.")
            tokens = check_prompt(prompt, sampling.max_new_tokens, self.max_length, self.vocab_size)
        return SampleRequest(tokens, replace(sampling, seed=request.seed), request.n)

    async def _sampled(self, sampling: Any) -> Any:
        try:
            return await sampling
        except (ValueError, TypeError) as error:
            raise HTTPError(400, str(error)) from error


def _completion(sequence: SampledSequence) -> Completion:
    from postlude.generate.protocol import Completion

    logprobs = sequence.logprobs.tolist()
    return Completion(sequence.tokens.tolist(), logprobs, logprobs, sequence.stop_reason, text=sequence.text)
