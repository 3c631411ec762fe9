"""GenerationServer: the native generator behind HTTP. One thread generates; the event loop handles requests."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import queue
import threading
from bisect import bisect_right
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from urllib.parse import unquote

import torch
from torch import Tensor

from postlude.checks import USER_ERRORS
from postlude.generate.completion_state import CompletionState
from postlude.generate.forward import score_tokens
from postlude.generate.generator import Generator
from postlude.generate.protocol import Completion, Progress, Request
from postlude.generate.session import Session
from postlude.hf.families import FAMILIES
from postlude.hf.load import PartialReloadError, reload_weights
from postlude.hf.peft import read_adapter
from postlude.hf.read_peft import from_peft
from postlude.serving.clients.postlude import (
    ADAPTERS,
    GENERATE,
    OWNER,
    WEIGHTS,
    AdapterBody,
    GenerateBody,
    WeightsBody,
    read_request,
    write_completion,
)
from postlude.serving.request_body import parse
from postlude.serving.server.http_server import HTTPError, HTTPRequest, HTTPServer, bad_request_on_error
from postlude.serving.server.openai_routes import CHAT, COMPLETIONS, MODELS, OpenAIRoutes, ScoredTokens

SCORED_TOKENS = 8192  # of prompts, between two steps
CLOSE_TIMEOUT = 5.0  # seconds for a step to end, and for the last replies
POLL_SECONDS = 0.25  # between two checks whether a client is gone
BODY_BYTES, TOKEN_BYTES = 1 << 20, 16  # the size limit of a request: a constant, and bytes for each token of the cache
LOG = logging.getLogger("postlude")


@dataclass(frozen=True)
class _WeightsInfo:
    version: str | None = None
    checksum: str | None = None


@dataclass(eq=False)
class _Pending:
    """A running request."""

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
    `run` raises the error. With a `key`, requests must carry it; without one, weights stay as they are (`HTTPServer`).
    """

    def __init__(
        self, generator: Generator, name: str, version: str | None = "default", *, key: str | None = None
    ) -> None:
        self.generator, self.name = generator, name
        self.weights = _WeightsInfo(version)
        self._session = Session(generator, version)
        self._tasks: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()  # for the thread that generates
        self._pending: dict[int, _Pending] = {}
        max_body = BODY_BYTES + TOKEN_BYTES * generator.max_batch_tokens
        self._http = HTTPServer(self._handle, key=key, max_body=max_body, admin_paths=(WEIGHTS, ADAPTERS))
        openai = OpenAIRoutes(self, name, generator.tokenizer, generator.max_length)
        self._routes: dict[tuple[str, str], Callable[[HTTPRequest], Awaitable[Any]]] = {
            ("GET", "/health"): self._get_health,
            ("GET", MODELS): self._get_models,
            ("GET", WEIGHTS): self._get_weights,
            ("POST", WEIGHTS): self._post_weights,
            ("POST", ADAPTERS): self._post_adapters,
            ("POST", GENERATE): self._post_generate,
            ("POST", COMPLETIONS): openai.completions,
            ("POST", CHAT): openai.chat,
        }
        self._stopped: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._failure: BaseException | None = None

    async def run(self, host: str, port: int, ready: Callable[[str], None]) -> None:
        """Serves until `stop`; `ready` gets the address. Raises the error that ended generation, if there was one."""
        self._loop, self._stopped = asyncio.get_running_loop(), asyncio.Event()
        chosen_port = await self._http.listen(host, port)
        thread = threading.Thread(target=self._generate, name="postlude generator", daemon=True)
        thread.start()
        ready(f"http://{f'[{host}]' if ':' in host else host}:{chosen_port}")
        await self._stopped.wait()
        self._tasks.put(_exit_thread)
        await asyncio.to_thread(thread.join, CLOSE_TIMEOUT)
        await self._http.close(CLOSE_TIMEOUT)
        if self._failure is not None:
            raise self._failure

    def stop(self) -> None:
        """Stops serving. Called in the event loop, or by a signal handler there."""
        assert self._stopped is not None
        self._stopped.set()

    # --- in the event loop

    async def generate(self, requests: Sequence[Request], is_gone: Callable[[], bool]) -> list[list[Completion]]:
        """Returns the completions of each request. Raises ConnectionError, and stops, when the client `is_gone`."""
        pending = self._submit([_Pending(request) for request in requests])
        waiting = {asyncio.wrap_future(request.future) for request in pending}
        try:
            while waiting:
                done, waiting = await asyncio.wait(waiting, timeout=POLL_SECONDS, return_when=asyncio.FIRST_EXCEPTION)
                errors = [error for future in done if (error := future.exception()) is not None]
                if errors:
                    raise errors[0]
                if waiting and is_gone():
                    raise ConnectionError
        except asyncio.CancelledError:
            raise HTTPError(500, "generating has ended.") from None
        finally:
            self._cancel(pending)
        return [request.future.result() for request in pending]

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

    async def stream(self, requests: Sequence[Request], is_gone: Callable[[], bool]) -> AsyncGenerator[Progress, None]:
        """Yields the tokens of the same completions as they come."""
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
                try:
                    event = await asyncio.wait_for(events.get(), POLL_SECONDS)
                except TimeoutError:
                    if is_gone():
                        raise ConnectionError from None
                    continue
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
            served = ", ".join(map(repr, (self.name, *self.generator.adapters.names)))
            raise HTTPError(404, f"model is {name!r:.200}, but {served} is served here.", "model_not_found")
        return name

    def _submit(self, pending: Sequence[_Pending]) -> Sequence[_Pending]:
        if self.weights.version is None:
            raise HTTPError(503, "there are no weights yet.")
        for request in pending:
            self._tasks.put(partial(self._add, request))
        return pending

    def _cancel(self, pending: Sequence[_Pending]) -> None:
        running = [request for request in pending if not request.future.done()]
        if running:
            self._tasks.put(lambda: self._drop(running))

    async def _handle(self, request: HTTPRequest) -> Any:
        route = self._routes.get((request.method, request.path))
        if route is None and request.method == "GET" and request.path.startswith(f"{MODELS}/"):
            route = self._get_model
        if route is None:
            raise HTTPError(404, f"there is no {request.method} {request.path} here.")
        return await route(request)

    async def _get_health(self, _: HTTPRequest) -> Any:
        return {"status": "ok"}

    async def _get_models(self, _: HTTPRequest) -> Any:
        max_length = self.generator.max_length
        model = {"id": self.name, "object": "model", "created": 0, "owned_by": OWNER, "max_model_len": max_length}
        adapters = [{**model, "id": name, "parent": self.name} for name in self.generator.adapters.names]
        return {"object": "list", "data": [model, *adapters]}

    async def _get_model(self, request: HTTPRequest) -> Any:
        name = unquote(request.path.removeprefix(f"{MODELS}/"))
        self.adapter_of(name)
        models = (await self._get_models(request))["data"]
        return next(model for model in models if model["id"] == name)

    async def _get_weights(self, _: HTTPRequest) -> Any:
        return vars(self.weights)

    async def _post_generate(self, request: HTTPRequest) -> Any:
        with bad_request_on_error():
            body = parse(GenerateBody, request.body)
            generation = read_request(body, self.adapter_of(body.model), request.client)
        ((completion,),) = await self.generate([generation], request.is_gone)
        return write_completion(completion)

    async def _post_weights(self, request: HTTPRequest) -> Any:
        with bad_request_on_error():
            body = parse(WeightsBody, request.body)
        return await self._update(partial(self._reload, body.directory, body.version))

    async def _post_adapters(self, request: HTTPRequest) -> Any:
        with bad_request_on_error():
            body = parse(AdapterBody, request.body)
            if body.name == self.name:
                raise ValueError(f"{body.name!r} is the name of the model; give the adapter another.")
        return await self._update(partial(self._load_adapter, body))

    async def _update(self, change: Callable[[Future[None]], None]) -> Any:
        """Lets the generating thread change weights, and waits for it."""
        await self._between_steps(change)
        return vars(self.weights)

    async def _between_steps(self, task: Callable[[Future[Any]], None]) -> Any:
        """Returns what the generating thread sets as the task's result, between two steps."""
        future: Future[Any] = Future()
        self._tasks.put(lambda: task(future))
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            raise HTTPError(500, "generating has ended.") from None

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
            pending = self._pending.get(result.request_id)
            if pending is None:
                continue  # another completion of the request has failed
            if result.completion is None:
                self._drop([pending])
                _resolve(pending.future, error=HTTPError(500, f"this completion failed: {result.error}"))
            elif pending.finish(result.index, result.completion):
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
                self._session.abort(request_id)

    def _fail_all(self, sentence: str) -> None:
        for pending in self._pending.values():
            _resolve(pending.future, error=HTTPError(500, sentence))
        self._pending.clear()

    def _restart_session(self, sentence: str) -> None:
        """Fails all running requests, and starts with an empty session."""
        self._fail_all(sentence)
        self.generator.release()
        self._session = Session(self.generator, self.weights.version)

    def _reload(self, directory: str, version: str, future: Future[None]) -> None:
        self._change_weights(lambda: reload_weights(self.generator.model, directory), version, future)

    def _load_adapter(self, body: AdapterBody, future: Future[None]) -> None:
        model = self.generator.model

        def load() -> None:
            family = FAMILIES[model.config.family] if model.config.family is not None else None
            files = read_adapter(body.directory)
            self.generator.load_adapter(body.name, *from_peft(*files, model.config, family, model.block_types))

        self._change_weights(load, body.version, future)

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


def _resolve(future: Future[Any], value: Any = None, *, error: Exception | None = None) -> None:
    with contextlib.suppress(InvalidStateError):  # it was cancelled
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(value)


def _exit_thread() -> None:
    raise SystemExit
