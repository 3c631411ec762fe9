"""AgentProxy: the HTTP server through which agents ask for completions of the trained model.

Each episode has an API key of its own, by which its calls are known. One server, on loopback, has all episodes. What
the episodes asked for is kept outside of the server, so that one that fails can start again at the same address.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import logging
import threading
import time
from concurrent.futures import Future
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Router
from starlette.types import Receive, Scope, Send

from postlude.rollout.agent_session import AgentSession
from postlude.serving.http.errors import HTTPError
from postlude.serving.http.replies import ReplyFormat
from postlude.serving.http.requests import read_body, unless_disconnected
from postlude.serving.http.server import listening
from postlude.serving.server.api_routes import API_ROUTES, MODELS, PREFIX, format_of, models_reply
from postlude.serving.server.model_routes import ModelRoutes

BODY_BYTES = 16 << 20  # of a request
BODY_SECONDS = 60.0
CLOSE_SECONDS = 2.0  # for replies to end
RESTARTS, RESTART_SECONDS = 50, 0.2  # of a server that failed, and the time between two
POSTS = {f"{PREFIX}{route.path}": route for route in API_ROUTES}
LOG = logging.getLogger("postlude")


class AgentProxy:
    """A server in a thread of its own."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        self._episodes: dict[str, tuple[AgentSession, ModelRoutes]] = {}  # by API key
        self._loop = asyncio.new_event_loop()
        self._stopped = asyncio.Event()
        started: Future[str] = Future()
        self._thread = threading.Thread(
            target=self._run, args=(host, started), name="postlude agents' model", daemon=True
        )
        self._thread.start()
        self.url = started.result()

    def add(self, session: AgentSession) -> None:
        """Accepts the calls of an episode."""
        self._episodes[session.key] = session, session.routes()

    def remove(self, session: AgentSession) -> None:
        """Accepts no more calls of an episode."""
        self._episodes.pop(session.key, None)

    def check(self) -> None:
        """Raises RuntimeError if the server has ended."""
        if not self._thread.is_alive():
            raise RuntimeError(f"the server of agents' calls at {self.url} has ended; the log above says why.")

    def close(self) -> None:
        """Ends the server."""
        self._episodes.clear()
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._stopped.set)
        self._thread.join()

    def _run(self, host: str, started: Future[str]) -> None:
        """Serves until `close`. After an error it goes on, with the calls in progress if the server still runs."""
        serving, restarts = self._loop.create_task(self._serve(host, 0, started)), 0
        while True:
            try:
                self._loop.run_until_complete(serving)
                break
            except BaseException as error:  # also of a task that calls sys.exit, which asyncio lets out of the loop
                if not started.done():
                    started.set_exception(error)
                    break
                restarts += 1
                LOG.error("the server of agents' calls failed: %r.", error, exc_info=error)
                if restarts > RESTARTS:
                    self._stopped.set()
                    with contextlib.suppress(BaseException):
                        self._loop.run_until_complete(serving)
                    break
            if serving.done():
                time.sleep(RESTART_SECONDS)
                port = int(started.result().rpartition(":")[2])
                serving = self._loop.create_task(self._serve(host, port, started))
        self._loop.close()

    async def _serve(self, host: str, port: int, started: Future[str]) -> None:
        app = Router(default=self._respond, redirect_slashes=False)
        async with listening(app, host, port, CLOSE_SECONDS) as address:
            if not started.done():
                started.set_result(address)
            await self._stopped.wait()

    async def _respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        request, form = Request(scope, receive), format_of(scope["path"])
        response = await form.respond(request, self._reply(request, form))
        await response(scope, receive, send)

    async def _reply(self, request: Request, form: ReplyFormat) -> Response:
        path: str = request.scope["path"]
        session, routes = self._episode(request)
        if path == f"{PREFIX}{MODELS}" and request.method == "GET":
            return await form.reply(models_reply([session.model_entry()]))
        route = POSTS.get(path)
        if route is None or request.method != "POST":
            raise HTTPError(404, f"there is no {request.method} {path:.80} here.")
        body = await read_body(request, BODY_BYTES, BODY_SECONDS)

        async def work() -> Response:
            return await form.reply(await routes.handler(route)(body, (session.key,)))

        return await unless_disconnected(request, work())

    def _episode(self, request: Request) -> tuple[AgentSession, ModelRoutes]:
        scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
        keys = (request.headers.get("x-api-key", ""), bearer.strip() if scheme.lower() == "bearer" else "")
        episode = next((episode for key in keys if (episode := self._episodes.get(key)) is not None), None)
        if episode is None:
            raise HTTPError(
                401,
                "this API key is of no episode that is in progress: send OPENAI_API_KEY of yours.",
                "invalid_api_key",
            )
        return episode


def copy_tokenizer(tokenizer: Any) -> Any:
    """Returns a copy for another thread: a tokenizer is not thread-safe."""
    return copy.deepcopy(tokenizer)
