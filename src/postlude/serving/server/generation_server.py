"""GenerationServer: the native generator behind HTTP. One thread generates; the event loop handles requests."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import queue
import threading
from bisect import bisect_right
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response
from starlette.routing import Route, Router
from torch import Tensor

from postlude.checks import USER_ERRORS
from postlude.generate.completion_state import CompletionState
from postlude.generate.forward import score_tokens
from postlude.generate.generator import Generator
from postlude.generate.protocol import Completion, Progress, Request, SamplingUsage
from postlude.generate.session import Session
from postlude.hf.families import FAMILIES
from postlude.hf.load import PartialReloadError, reload_weights, replace_weights
from postlude.hf.peft import read_adapter
from postlude.hf.read_peft import from_peft
from postlude.serving.clients.postlude import (
    ADAPTERS,
    GENERATE,
    OWNER,
    PIECE_FILES,
    PIECES,
    WEIGHTS,
    AdapterBody,
    GenerateBody,
    PieceFilesBody,
    WeightsBody,
    read_request,
    write_completion,
)
from postlude.serving.http.access import Keys
from postlude.serving.http.errors import HTTPError, bad_request_on_error
from postlude.serving.http.metrics import METRICS, GenerationMetrics, RequestMetrics, metrics_reply
from postlude.serving.http.replies import ReplyFormat
from postlude.serving.http.requests import BYTES, JSON, read_body, unless_disconnected
from postlude.serving.http.server import listening
from postlude.serving.request_body import parse
from postlude.serving.server.api_routes import (
    MODELS,
    PREFIX,
    format_of,
    model_entry,
    model_reply,
    models_reply,
    unknown_model,
)
from postlude.serving.server.chat_calls import ScoredTokens
from postlude.serving.server.model_routes import ModelRoutes, PostHandler
from postlude.serving.server.served_model import ServedModel
from postlude.serving.weights.delta import MAX_PIECE_BYTES, ReceivedWeights

SCORED_TOKENS = 8192  # of prompts, between two steps
CLOSE_TIMEOUT = 5.0  # seconds for a step to end, and for the last replies
BODY_SECONDS = 75.0  # for the body of a request
BODY_BYTES, TOKEN_BYTES = 1 << 20, 16  # the size limit of a request: a constant, and bytes for each token of the cache
HEALTH = "/health"  # needs no key
KEY_OPTION = "POSTLUDE_API_KEY, or --api-key"
METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
LOG = logging.getLogger("postlude")


def _unknown(request: HTTPRequest) -> Any:
    raise HTTPError(404, f"there is no {request.method} {request.scope['path']} here.")


@dataclass(frozen=True)
class _WeightsInfo:
    version: str | None = None
    checksum: str | None = None


@dataclass(eq=False)
class _Pending:
    request: Request
    future: Future[list[Completion]] = field(default_factory=Future)
    on_progress: Callable[..., None] | None = None
    """Gets new tokens, in the thread that generates: the fields of `Progress` after the first."""
    states: dict[int, CompletionState] = field(default_factory=dict)
    completions: dict[int, Completion] = field(default_factory=dict)
    reported: dict[int, int] = field(default_factory=dict)
    """Tokens of each completion that `on_progress` got."""

    def report(self, index: int, now: CompletionState | Completion) -> None:
        """Passes new tokens of a completion to `on_progress`."""
        before, completion = self.reported.get(index, 0), now if isinstance(now, Completion) else None
        if self.on_progress is not None and (len(now.tokens) > before or completion is not None):
            self.reported[index] = len(now.tokens)
            new = (now.tokens[before:], now.logprobs[before:], completion, now.top_logprobs[before:])
            self.on_progress(index, *new)

    def finish(self, index: int, completion: Completion) -> bool:
        """Adds a completion. Returns whether it was the last."""
        self.report(index, completion)
        self.completions[index] = completion
        return len(self.completions) == self.request.n


class GenerationServer:
    """Serves a generator's model under `name`. `version` names its weights; None if it has none yet.

    Requests join while others run. New weights are loaded between two steps: running completions wait, then continue
    with the new weights, which prefill their tokens again. A request that fails gets an error, and the others continue.
    If a whole step fails, all running requests get an error, and new ones are served. A broken device ends the server:
    `run` raises the error. With a `key`, requests must carry it; without one they must come from no page of another
    site, and weights stay as they are.
    """

    def __init__(
        self, generator: Generator, name: str, version: str | None = "default", *, key: str | None = None
    ) -> None:
        self.generator, self.name = generator, name
        self.weights = _WeightsInfo(version)
        self._received, self._pieces_lock = ReceivedWeights(), asyncio.Lock()
        self._session = Session(generator, version)
        self._tasks: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()  # for the thread that generates
        self._pending: dict[int, _Pending] = {}
        self._key = key
        self._max_body = BODY_BYTES + TOKEN_BYTES * generator.max_batch_tokens
        self._stopped: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._failure: BaseException | None = None
        self._requests = RequestMetrics()
        self._generation = GenerationMetrics(self._usage)

    async def run(self, host: str, port: int, ready: Callable[[str], None]) -> None:
        """Serves until `stop`; `ready` gets the address. Raises the error that ended generation, if there was one."""
        self._loop, self._stopped = asyncio.get_running_loop(), asyncio.Event()
        thread = threading.Thread(target=self._generate, name="postlude generator", daemon=True)
        async with listening(self._requests.counting(self._app(host)), host, port, CLOSE_TIMEOUT) as address:
            thread.start()
            ready(address)
            await self._stopped.wait()
            self._tasks.put(_exit_thread)
            await asyncio.to_thread(thread.join, CLOSE_TIMEOUT)
        if self._failure is not None:
            raise self._failure

    def stop(self) -> None:
        """Stops serving. Called in the event loop, or by a signal handler there."""
        assert self._stopped is not None
        self._stopped.set()

    def _usage(self) -> SamplingUsage:
        return self._session.usage()

    # --- in the event loop

    async def generate(self, requests: Sequence[Request]) -> list[list[Completion]]:
        """Returns the completions of each request. Generating them ends when this is cancelled."""
        pending = self._submit([_Pending(request) for request in requests])
        try:
            return await asyncio.gather(*(asyncio.wrap_future(request.future) for request in pending))
        finally:
            self._cancel(pending)

    async def score_prompts(self, requests: Sequence[Request], top: int) -> list[ScoredTokens]:
        """Returns the tokens of prompts with their log-probs. Between two steps of generating, one batch is scored."""
        scores: list[ScoredTokens] = []
        remaining = list(requests)
        while remaining:
            count = bisect_right(
                list(itertools.accumulate(len(request.prompt) for request in remaining)), SCORED_TOKENS
            )
            batch, remaining = remaining[: max(1, count)], remaining[max(1, count) :]
            scores += await self._between_steps(partial(self._score, batch, top))
        return scores

    async def stream(self, requests: Sequence[Request]) -> AsyncGenerator[Progress, None]:
        """Yields the tokens of the same completions as they come. Generating them ends with this generator."""
        loop = asyncio.get_running_loop()
        events: asyncio.Queue[Progress | Future[list[Completion]]] = asyncio.Queue()

        def put(event: Progress | Future[list[Completion]]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop may have ended
                loop.call_soon_threadsafe(events.put_nowait, event)

        pending = [_Pending(request) for request in requests]
        for index, request in enumerate(pending):
            request.on_progress = lambda *progress, index=index: put(Progress(index, *progress))
            request.future.add_done_callback(put)
        self._submit(pending)
        unfinished = len(pending)
        try:
            while unfinished:
                event = await events.get()
                if isinstance(event, Progress):
                    yield event
                else:
                    event.result()
                    unfinished -= 1
        finally:
            self._cancel(pending)

    def adapter_of(self, name: str | None) -> str | None:
        """Returns the adapter that a request with this model uses. An unknown name is status 404."""
        if name in (None, self.name):
            return None
        if name not in self.generator.adapters.names:
            raise unknown_model(name, (self.name, *self.generator.adapters.names))
        return name

    def _submit(self, pending: Sequence[_Pending]) -> Sequence[_Pending]:
        if self.weights.version is None:
            raise HTTPError(503, "there are no weights yet.")
        for request in pending:
            self._tasks.put(partial(self._add, request))
        return pending

    def _cancel(self, pending: Sequence[_Pending]) -> None:
        running = [request for request in pending if not request.future.done() or request.future.cancelled()]
        if running:
            self._tasks.put(lambda: self._drop(running))

    def _app(self, host: str) -> Router:
        """Returns the application of a server that listens at `host`."""
        keys = Keys(None if self._key is None else [self._key], host, KEY_OPTION)
        routes = ModelRoutes(ServedModel(self.name, self.generator.tokenizer, self.generator.max_length), self)
        posts: dict[str, PostHandler] = {  # in this order they are tried: the frequent ones first
            GENERATE: self._post_generate,
            **routes.posts,
            WEIGHTS: self._post_weights,
            PIECES: self._post_piece,
            PIECE_FILES: self._post_piece_files,
            ADAPTERS: self._post_adapters,
        }
        gets = {
            HEALTH: lambda _: {"status": "ok"},
            METRICS: lambda _: metrics_reply(
                metric.family() for metric in (*self._requests.readers, *self._generation.readers)
            ),
            f"{PREFIX}{MODELS}": lambda _: models_reply(self._models()),
            f"{PREFIX}{MODELS}/{{name:path}}": lambda request: model_reply(self._models(), request.path_params["name"]),
            WEIGHTS: lambda _: vars(self.weights),
        }
        return Router(
            [
                *(Route(path, self._endpoint(keys, post), methods=["POST"]) for path, post in posts.items()),
                *(Route(path, self._endpoint(keys, get=get), methods=["GET"]) for path, get in gets.items()),
                Route("/{path:path}", self._endpoint(keys, get=_unknown), methods=list(METHODS)),
            ]
        )

    def _endpoint(
        self, keys: Keys, post: PostHandler | None = None, get: Callable[[HTTPRequest], Any] = _unknown
    ) -> Callable[[HTTPRequest], Awaitable[Response]]:
        """Returns the endpoint of a route. A request without the key is refused before its body is read."""

        async def reply(request: HTTPRequest, form: ReplyFormat) -> Response:
            path: str = request.scope["path"]
            if path != HEALTH or self._key is None:
                keys.owner(request.headers)
            if path in (WEIGHTS, PIECES, PIECE_FILES, ADAPTERS):
                keys.check_admin(path)
            limit, types = (MAX_PIECE_BYTES, (BYTES,)) if path == PIECES else (self._max_body, (JSON,))
            body = await read_body(request, limit, BODY_SECONDS, types)
            if post is None:
                return await form.reply(get(request))
            client = () if request.client is None else tuple(map(str, request.client))
            return await unless_disconnected(request, _reply(form, post(body, client)))

        async def endpoint(request: HTTPRequest) -> Response:
            form = format_of(request.scope["path"])
            return await form.respond(request, reply(request, form))

        return endpoint

    def _models(self) -> list[dict[str, Any]]:
        entry = partial(model_entry, owner=OWNER, max_model_len=self.generator.max_length)
        return [entry(self.name), *(entry(name, parent=self.name) for name in self.generator.adapters.names)]

    async def _post_generate(self, raw: bytes, client: tuple[str, ...]) -> Any:
        with bad_request_on_error():
            body = parse(GenerateBody, raw)
            generation = read_request(body, self.adapter_of(body.model), client)
        ((completion,),) = await self.generate([generation])
        return write_completion(completion)

    async def _post_weights(self, raw: bytes, _: tuple[str, ...]) -> Any:
        with bad_request_on_error():
            body = parse(WeightsBody, raw)
        return await self._update(partial(reload_weights, self.generator.model, body.directory), body.version)

    async def _post_piece(self, raw: bytes, _: tuple[str, ...]) -> Any:
        return await asyncio.shield(self._add_pieces([raw]))  # a thread cannot be cancelled

    async def _post_piece_files(self, raw: bytes, _: tuple[str, ...]) -> Any:
        with bad_request_on_error():
            weights = parse(PieceFilesBody, raw).weights()
        if not weights.directory.is_dir():
            raise HTTPError(404, f"there is no directory {weights.directory} here.")
        reply = await asyncio.shield(self._add_pieces(weights.pieces()))
        if self.weights.version != weights.version:  # such as files that a shared disk does not list yet
            raise HTTPError(400, f"the pieces in {weights.directory} end before the last one of {weights.version!r}.")
        return reply

    async def _add_pieces(self, pieces: Iterable[bytes]) -> Any:
        """Adds pieces, and uses the new weights after the last one."""
        async with self._pieces_lock:
            with bad_request_on_error():
                is_complete = await asyncio.to_thread(lambda: any(self._received.add(piece) for piece in pieces))
            if not is_complete:
                return vars(self.weights)
            assert self._received.version is not None
            load = partial(replace_weights, self.generator.model, self._received.source, "what was sent in pieces")
            return await self._update(load, self._received.version)

    async def _post_adapters(self, raw: bytes, _: tuple[str, ...]) -> Any:
        with bad_request_on_error():
            body = parse(AdapterBody, raw)
            if body.name == self.name:
                raise ValueError(f"{body.name!r} is the name of the model; give the adapter another.")
        return await self._update(partial(self._load_adapter, body), body.version)

    async def _update(self, load: Callable[[], str | None], version: str) -> Any:
        """Lets the generating thread change weights by `load`, and waits for it."""
        await self._between_steps(partial(self._change_weights, load, version))
        return vars(self.weights)

    async def _between_steps(self, task: Callable[[Future[Any]], None]) -> Any:
        """Returns what the generating thread sets as the task's result, between two steps."""
        future: Future[Any] = Future()
        self._tasks.put(lambda: task(future))
        return await asyncio.wrap_future(future)

    # --- in the thread that generates

    def _generate(self) -> None:
        assert self._loop is not None
        assert self._stopped is not None
        try:
            while True:
                while not self._session.busy or not self._tasks.empty():
                    self._tasks.get()()
                self._step()
        except SystemExit:
            pass
        except BaseException as error:
            self._failure = error
        finally:
            self._fail_all(f"generating has ended: {self._failure or 'the server was stopped'}.")
            self._loop.call_soon_threadsafe(self._stopped.set)

    def _step(self) -> None:
        """Generates a token of every running completion. If the whole step fails, all running requests fail."""
        try:
            finished = self._session.step()
        except Exception as error:
            if isinstance(error, torch.AcceleratorError) and not isinstance(error, torch.OutOfMemoryError):
                raise  # the device is unusable in this process
            LOG.exception("a step of generating failed")
            self._restart_session(f"generating failed: {error}")
            return
        for result in finished:
            pending = self._pending[result.request_id]
            completion = result.completion
            if completion is None:
                self._generation.end("failed")
                del self._pending[result.request_id]
                _resolve(pending.future, error=HTTPError(500, f"this completion failed: {result.error}"))
                continue
            times = (completion.queue_seconds, completion.first_token_seconds)
            self._generation.end(completion.finish_reason, len(completion.tokens), *times)
            if pending.finish(result.index, completion):
                del self._pending[result.request_id]
                _resolve(pending.future, [pending.completions[index] for index in range(pending.request.n)])
        for pending in self._pending.values():
            if pending.on_progress is not None:
                for index, state in pending.states.items():
                    if index not in pending.completions:
                        pending.report(index, state)

    def _add(self, pending: _Pending) -> None:
        try:
            request_id = self._session.add(pending.request)
        except USER_ERRORS as error:
            _resolve(pending.future, error=HTTPError(400, str(error)))
        except Exception as error:
            LOG.exception("a request could not be added")
            _resolve(pending.future, error=HTTPError(500, f"the request failed: {error!r}."))
        else:
            self._pending[request_id] = pending
            self._generation.begin(len(pending.request.prompt))
            if pending.on_progress is not None:
                pending.states = self._session.unfinished(request_id)

    def _score(self, requests: Sequence[Request], top: int, future: Future[list[ScoredTokens]]) -> None:
        adapter = requests[0].adapter
        try:
            if self.weights.version is None:
                raise HTTPError(503, "there are no weights yet.")
            for request in requests:
                self.generator.new_completions("the prompt", request.prompt, request.sampling, 1, adapter=adapter)
            sequences = [torch.tensor(request.prompt) for request in requests]
            with self.generator.generation_mode(adapter):
                values = score_tokens(self.generator.model, sequences, SCORED_TOKENS, k=top)
        except HTTPError as error:
            _resolve(future, error=error)
        except USER_ERRORS as error:
            _resolve(future, error=HTTPError(400, str(error)))
        except Exception as error:
            LOG.exception("prompts could not be scored")
            _resolve(future, error=HTTPError(500, f"the request failed: {error!r}."))
        else:
            _resolve(future, [_scored(request.prompt, values, index) for index, request in enumerate(requests)])
        finally:
            if not self._session.busy:
                self.generator.adapters.activate(None)

    def _drop(self, cancelled: Sequence[_Pending]) -> None:
        for request_id, pending in list(self._pending.items()):
            if pending in cancelled:
                del self._pending[request_id]
                for state in self._session.unfinished(request_id).values():
                    self._generation.end("cancelled", len(state.tokens))
                self._session.abort(request_id)

    def _fail_all(self, sentence: str) -> None:
        for pending in self._pending.values():
            self._generation.end("failed")
            _resolve(pending.future, error=HTTPError(500, sentence))
        self._pending.clear()

    def _restart_session(self, sentence: str) -> None:
        """Fails all running requests, and starts with an empty session."""
        self._fail_all(sentence)
        self.generator.release()
        self._session = Session(self.generator, self.weights.version)

    def _load_adapter(self, body: AdapterBody) -> None:
        model = self.generator.model
        family = FAMILIES[model.config.family] if model.config.family is not None else None
        files = read_adapter(body.directory)
        self.generator.load_adapter(body.name, *from_peft(*files, model.config, family, model.block_types))

    def _change_weights(self, load: Callable[[], str | None], version: str, future: Future[None]) -> None:
        """Changes weights by `load`, which returns their checksum if it read all of them."""
        checksums: list[str | None] = []
        try:
            self._session.update_weights(lambda: checksums.append(load()), version)
        except PartialReloadError as error:
            self.weights = _WeightsInfo()
            self._restart_session(f"there are no weights any more: {error}")
            _resolve(future, error=HTTPError(500, f"there are no weights until others are read: {error}"))
        except Exception as error:  # before the first weight was changed
            reason = str(error) if isinstance(error, USER_ERRORS) else repr(error)
            _resolve(future, error=HTTPError(400, f"the weights stay {self.weights.version!r}, as they were: {reason}"))
        else:
            self.weights = _WeightsInfo(version, checksums[0] or self.weights.checksum)
            _resolve(future, None)


def _scored(prompt: Sequence[int], values: Mapping[str, Sequence[Tensor]], index: int) -> ScoredTokens:
    """Returns the scores of one prompt. A token that is among the likeliest ones has the same log-prob there."""
    logprobs: list[float | None] = [None, *values["logprobs"][index][1:].tolist()]
    if "ids" not in values:
        return ScoredTokens(prompt, logprobs)
    rows = zip(values["ids"][index].tolist(), values["top"][index].tolist(), strict=True)
    places = [dict(zip(*row, strict=True)) for row in rows]
    for position in range(1, len(prompt)):
        logprobs[position] = places[position].get(prompt[position], logprobs[position])
    return ScoredTokens(prompt, logprobs, [None, *(list(place.items()) for place in places[1:])])


async def _reply(form: ReplyFormat, result: Awaitable[Any]) -> Response:
    return await form.reply(await result)


def _resolve(future: Future[Any], value: Any = None, *, error: Exception | None = None) -> None:
    with contextlib.suppress(InvalidStateError):  # it was cancelled
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(value)


def _exit_thread() -> None:
    raise SystemExit
