"""Served: a generator that answers over HTTP. One thread generates; the loop hears questions and tells answers."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from postlude.checks import MISTAKES
from postlude.hf.renew import renew
from postlude.rollout.generator import Generator
from postlude.rollout.protocol import Completion, Request
from postlude.rollout.servers.listening import Listener, Problem, Question
from postlude.rollout.servers.postlude import GENERATE, OWNER, WEIGHTS, read_request, write_completion
from postlude.rollout.session import Session

LEFT_WITHIN = 5.0  # seconds for a step to end, and for last answers to be told
LOOKED = 0.25  # seconds between two looks whether who asked is still there


@dataclass(frozen=True)
class _Held:
    """The weights that the model has."""

    version: str | None = None
    checksum: str | None = None


class Served:
    """A model by `name`, and its generator. `version` is what its weights are called, None where it has none yet.

    Requests join while others run. New weights are read between two steps: answers under way wait meanwhile, are kept,
    and go on with the new weights, all before them passing the model anew. Where generating fails, whoever waits is
    told so, and `run` raises it.
    """

    def __init__(self, generator: Generator, name: str, version: str | None = "default") -> None:
        self.generator, self.name = generator, name
        self.held = _Held(version)
        self._session = Session(generator, version)
        self._work: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._waiting: dict[int, Future[Completion]] = {}
        self._listener = Listener(self._answer)
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

    async def _answer(self, question: Question) -> Any:
        match question.method, question.path:
            case "GET", "/health":
                return {"status": "ok"}
            case "GET", "/v1/models":
                longest = self.generator.max_batch_tokens
                model = {"id": self.name, "object": "model", "owned_by": OWNER, "max_model_len": longest}
                return {"object": "list", "data": [model]}
            case "GET", path if path == WEIGHTS:
                return vars(self.held)
            case "POST", path if path == WEIGHTS:
                return await self._renew(question.body)
            case "POST", path if path == GENERATE:
                return await self._complete(question)
        raise Problem(404, f"there is no {question.method} {question.path} here.")

    async def _complete(self, question: Question) -> Any:
        try:
            asked = question.body if isinstance(question.body, dict) else {}
            if asked.get("model", self.name) != self.name:
                raise ValueError(f"model is {asked['model']!r}, but {self.name!r} is served here.")
            request = read_request(asked)
        except MISTAKES as error:
            raise Problem(400, str(error)) from error
        if self.held.version is None:
            raise Problem(503, "there are no weights yet.")
        future: Future[Completion] = Future()
        self._work.put(lambda: self._add(request, future))
        done = asyncio.wrap_future(future)
        while not (await asyncio.wait({done}, timeout=LOOKED))[0]:
            if question.gone():
                self._work.put(lambda: self._withdraw(future))
                raise ConnectionError
        return write_completion(await _told(done))

    async def _renew(self, body: Any) -> Any:
        try:
            directory, version = str(body["directory"]), str(body["version"])
        except (KeyError, TypeError) as error:
            raise Problem(400, f"{WEIGHTS} needs a directory and a version.") from error
        future: Future[None] = Future()
        self._work.put(lambda: self._read(directory, version, future))
        await _told(asyncio.wrap_future(future))
        return vars(self.held)

    # --- in the thread that generates

    def _generate(self) -> None:
        assert self._loop is not None
        assert self._ended is not None
        try:
            while True:
                while not self._session.busy or not self._work.empty():
                    self._work.get()()
                for done in self._session.step():
                    future = self._waiting.pop(done.ticket)
                    if done.answer is None:
                        future.set_exception(Problem(500, f"this answer failed: {done.error}"))
                    else:
                        future.set_result(done.answer)
        except SystemExit:
            pass
        except BaseException as error:
            self._failure = error
        finally:
            lost = Problem(500, f"generating has ended: {self._failure or 'the server was told to'}.")
            for future in self._waiting.values():
                future.set_exception(lost)
            self._loop.call_soon_threadsafe(self._ended.set)

    def _add(self, request: Request, future: Future[Completion]) -> None:
        try:
            self._waiting[self._session.add(request)] = future
        except MISTAKES as error:
            future.set_exception(Problem(400, str(error)))

    def _withdraw(self, future: Future[Completion]) -> None:
        for ticket, each in self._waiting.items():
            if each is future:
                del self._waiting[ticket]
                self._session.withdraw(ticket)
                return

    def _read(self, directory: str, version: str, future: Future[None]) -> None:
        found = []
        try:
            self._session.renew(lambda: found.append(renew(self.generator.model, directory)), version)
        except MISTAKES as error:
            future.set_exception(Problem(400, f"the weights stay {self.held.version!r}, as they were: {error}"))
            return
        except BaseException as error:
            future.set_exception(Problem(500, str(error)))
            raise
        self.held = _Held(version, found[0])
        future.set_result(None)


async def _told(done: asyncio.Future[Any]) -> Any:
    try:
        return await done
    except asyncio.CancelledError:
        raise Problem(500, "generating has ended.") from None


def _leave() -> None:
    raise SystemExit
