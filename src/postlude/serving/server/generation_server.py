"""GenerationServer: a generator that answers over HTTP.

One thread generates; the loop hears questions and tells answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch

from postlude.checks import USER_ERRORS
from postlude.data.chat_tokenizer import ChatTokenizer
from postlude.generate.completion_state import CompletionState
from postlude.generate.generator import Generator
from postlude.generate.protocol import Completion, Progress, Request
from postlude.generate.session import Session
from postlude.hf.reload import PartialReloadError, reload_weights
from postlude.serving.clients.postlude import (
    GENERATE,
    OWNER,
    WEIGHTS,
    GenerateBody,
    WeightsBody,
    read_request,
    write_completion,
)
from postlude.serving.request_body import parse
from postlude.serving.server.http_server import Listener, Problem, Question, mistakes_refused
from postlude.serving.server.openai_routes import CHAT, COMPLETIONS, MODELS, OpenAIRoutes

LEFT_WITHIN = 5.0  # seconds for a step to end, and for last answers to be told
LOOKED = 0.25  # seconds between two looks whether who asked is still there
BODY_BYTES, TOKEN_BYTES = 1 << 20, 16  # the most bytes of a request: these, and so many for each token of the cache
LOG = logging.getLogger("postlude")


@dataclass(frozen=True)
class _Held:
    """The weights that the model has."""

    version: str | None = None
    checksum: str | None = None


@dataclass(eq=False)
class _Pending:
    """A request that is under way."""

    request: Request
    future: Future[list[Completion]] = field(default_factory=Future)
    listener: Callable[[int, Sequence[int], Sequence[float], Completion | None], None] | None = None
    """Hears of tokens as they come, in the thread that generates."""
    answers: dict[int, CompletionState] = field(default_factory=dict)
    done: dict[int, Completion] = field(default_factory=dict)
    heard: dict[int, int] = field(default_factory=dict)
    """How many tokens of each answer the listener has heard of."""

    def tell(self, number: int, tokens: Sequence[int], logprobs: Sequence[float], done: Completion | None) -> None:
        """Let the listener hear of an answer's new tokens."""
        before = self.heard.get(number, 0)
        if self.listener is not None and (len(tokens) > before or done is not None):
            self.heard[number] = len(tokens)
            self.listener(number, tokens[before:], logprobs[before:], done)

    def finish(self, number: int, completion: Completion) -> bool:
        """Take one answer; whether it was the last."""
        self.tell(number, completion.tokens, completion.logprobs, completion)
        self.done[number] = completion
        return len(self.done) == self.request.n


class GenerationServer:
    """A model by `name`, and its generator. `version` is what its weights are called, None where it has none yet.

    Requests join while others run. New weights are read between two steps: answers under way wait meanwhile, are kept,
    and go on with the new weights, all before them passing the model anew. A request that fails is told so, and the
    others go on; where a step fails as a whole, all that are under way are told, and new ones are answered. A device
    that is broken ends it: `run` raises that. With a `key`, requests must carry it (`Listener`).
    """

    def __init__(
        self, generator: Generator, name: str, version: str | None = "default", *, key: str | None = None
    ) -> None:
        self.generator, self.name = generator, name
        self.held = _Held(version)
        self._session = Session(generator, version)
        self._work: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._waiting: dict[int, _Pending] = {}
        max_body = BODY_BYTES + TOKEN_BYTES * generator.max_batch_tokens
        self._listener = Listener(self._answer, key=key, max_body=max_body)
        tokenizer = cast("ChatTokenizer | None", generator.tokenizer)
        openai = OpenAIRoutes(self, name, tokenizer, generator.max_batch_tokens)
        self._routes: dict[tuple[str, str], Callable[[Question], Awaitable[Any]]] = {
            ("GET", "/health"): self._health,
            ("GET", MODELS): self._models,
            ("GET", WEIGHTS): self._weights,
            ("POST", WEIGHTS): self._renew,
            ("POST", GENERATE): self._complete,
            ("POST", COMPLETIONS): openai.completions,
            ("POST", CHAT): openai.chat,
        }
        self._ended: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._failure: BaseException | None = None

    async def run(self, host: str, port: int, ready: Callable[[str], None]) -> None:
        """Serve until `end`; `ready` hears the address. Raises what ended generating, if it was that."""
        self._loop, self._ended = asyncio.get_running_loop(), asyncio.Event()
        found = await self._listener.listen(host, port)
        thread = threading.Thread(target=self._generate, name="postlude generator", daemon=True)
        thread.start()
        ready(f"http://{f'[{host}]' if ':' in host else host}:{found}")
        await self._ended.wait()
        self._work.put(_leave)
        await asyncio.to_thread(thread.join, LEFT_WITHIN)
        await self._listener.close(LEFT_WITHIN)
        if self._failure is not None:
            raise self._failure

    def end(self) -> None:
        """Stop serving. Called in the loop, or by a handler of a signal there."""
        assert self._ended is not None
        self._ended.set()

    # --- in the loop

    async def answers(self, requests: Sequence[Request], gone: Callable[[], bool]) -> list[list[Completion]]:
        """The answers to each request, in order. Work ends when who asked is `gone`: then a ConnectionError."""
        pending = self._submit([_Pending(request) for request in requests])
        waiting = {asyncio.wrap_future(each.future) for each in pending}
        try:
            while waiting:
                done, waiting = await asyncio.wait(waiting, timeout=LOOKED, return_when=asyncio.FIRST_EXCEPTION)
                failed = [error for each in done if (error := each.exception()) is not None]
                if failed:
                    raise failed[0]
                if waiting and gone():
                    raise ConnectionError
        except asyncio.CancelledError:
            raise Problem(500, "generating has ended.") from None
        finally:
            self._withdraw(pending)
        return [each.future.result() for each in pending]

    async def stream(self, requests: Sequence[Request], gone: Callable[[], bool]) -> AsyncGenerator[Progress, None]:
        """The same answers as they come, until all are finished."""
        loop = asyncio.get_running_loop()
        news: asyncio.Queue[Progress | Future[list[Completion]]] = asyncio.Queue()

        def put(item: Progress | Future[list[Completion]]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop may have ended
                loop.call_soon_threadsafe(news.put_nowait, item)

        pending = [_Pending(request) for request in requests]
        for place, each in enumerate(pending):
            each.listener = lambda *what, place=place: put(Progress(place, *what))
            each.future.add_done_callback(put)
        self._submit(pending)
        left = len(pending)
        try:
            while left:
                try:
                    item = await asyncio.wait_for(news.get(), LOOKED)
                except TimeoutError:
                    if gone():
                        raise ConnectionError from None
                    continue
                if isinstance(item, Progress):
                    yield item
                else:
                    item.result()
                    left -= 1
        finally:
            self._withdraw(pending)

    def _submit(self, pending: Sequence[_Pending]) -> Sequence[_Pending]:
        if self.held.version is None:
            raise Problem(503, "there are no weights yet.")
        for each in pending:
            self._work.put(partial(self._add, each))
        return pending

    def _withdraw(self, pending: Sequence[_Pending]) -> None:
        """End what is still under way of these."""
        left = [each for each in pending if not each.future.done()]
        if left:
            self._work.put(lambda: self._drop(left))

    async def _answer(self, question: Question) -> Any:
        route = self._routes.get((question.method, question.path))
        if route is None:
            raise Problem(404, f"there is no {question.method} {question.path} here.")
        return await route(question)

    async def _health(self, _: Question) -> Any:
        return {"status": "ok"}

    async def _models(self, _: Question) -> Any:
        longest = self.generator.max_batch_tokens
        model = {"id": self.name, "object": "model", "created": 0, "owned_by": OWNER, "max_model_len": longest}
        return {"object": "list", "data": [model]}

    async def _weights(self, _: Question) -> Any:
        return vars(self.held)

    async def _complete(self, question: Question) -> Any:
        with mistakes_refused():
            asked = parse(GenerateBody, question.body)
            self.check_model(asked.model)
            request = read_request(asked)
        ((found,),) = await self.answers([request], question.gone)
        return write_completion(found)

    def check_model(self, name: str | None) -> None:
        """Refuse the name of another model."""
        if name not in (None, self.name):
            raise ValueError(f"model is {name!r}, but {self.name!r} is served here.")

    async def _renew(self, question: Question) -> Any:
        with mistakes_refused():
            asked = parse(WeightsBody, question.body)
        future: Future[None] = Future()
        self._work.put(lambda: self._read(asked.directory, asked.version, future))
        try:
            await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            raise Problem(500, "generating has ended.") from None
        return vars(self.held)

    # --- in the thread that generates

    def _generate(self) -> None:
        assert self._loop is not None
        assert self._ended is not None
        try:
            while True:
                while not self._session.busy or not self._work.empty():
                    self._work.get()()
                self._step()
        except SystemExit:
            pass
        except BaseException as error:
            self._failure = error
        finally:
            self._fail_all(f"generating has ended: {self._failure or 'the server was told to'}.")
            self._loop.call_soon_threadsafe(self._ended.set)

    def _step(self) -> None:
        """A token for every answer under way. Where that fails as a whole, all of them are told, and it goes on."""
        try:
            done = self._session.step()
        except Exception as error:
            if isinstance(error, torch.AcceleratorError) and not isinstance(error, torch.OutOfMemoryError):
                raise  # nothing that runs in this process will work again
            LOG.exception("a step of generating failed")
            self._begin_anew(f"generating failed: {error}")
            return
        for each in done:
            pending = self._waiting.get(each.ticket)
            if pending is None:
                continue  # another answer to it has failed
            if each.answer is None:
                self._drop([pending])
                _settle(pending.future, error=Problem(500, f"this answer failed: {each.error}"))
            elif pending.finish(each.number, each.answer):
                del self._waiting[each.ticket]
                _settle(pending.future, [pending.done[number] for number in range(pending.request.n)])
        for pending in self._waiting.values():
            if pending.listener is not None:
                for number, answer in pending.answers.items():
                    if number not in pending.done:
                        pending.tell(number, answer.tokens, answer.logprobs, None)

    def _add(self, pending: _Pending) -> None:
        try:
            ticket = self._session.add(pending.request)
        except USER_ERRORS as error:
            _settle(pending.future, error=Problem(400, str(error)))
        except Exception as error:
            LOG.exception("a request could not be added")
            _settle(pending.future, error=Problem(500, f"the request failed: {error!r}."))
        else:
            self._waiting[ticket] = pending
            if pending.listener is not None:
                pending.answers = self._session.progress(ticket)

    def _drop(self, unwanted: Sequence[_Pending]) -> None:
        for ticket, pending in list(self._waiting.items()):
            if pending in unwanted:
                del self._waiting[ticket]
                self._session.withdraw(ticket)

    def _fail_all(self, sentence: str) -> None:
        for pending in self._waiting.values():
            _settle(pending.future, error=Problem(500, sentence))
        self._waiting.clear()

    def _begin_anew(self, sentence: str) -> None:
        """Whoever waits is told why there is no answer, and nothing is left of what was under way."""
        self._fail_all(sentence)
        self.generator.release()
        self._session = Session(self.generator, self.held.version)

    def _read(self, directory: str, version: str, future: Future[None]) -> None:
        found = []
        try:
            self._session.renew(lambda: found.append(reload_weights(self.generator.model, directory)), version)
        except PartialReloadError as error:
            self.held = _Held()
            self._begin_anew(f"there are no weights any more: {error}")
            _settle(future, error=Problem(500, f"there are no weights until others are read: {error}"))
            return
        except Exception as error:  # before the first weight was touched
            why = str(error) if isinstance(error, USER_ERRORS) else repr(error)
            _settle(future, error=Problem(400, f"the weights stay {self.held.version!r}, as they were: {why}"))
            return
        self.held = _Held(version, found[0])
        _settle(future, None)


def _settle(future: Future[Any], value: Any = None, *, error: Exception | None = None) -> None:
    with contextlib.suppress(InvalidStateError):  # nobody waits for it any more
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(value)


def _leave() -> None:
    raise SystemExit
