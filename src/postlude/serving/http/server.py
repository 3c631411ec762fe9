"""listening: serves an application with uvicorn. BackgroundServer does so in a thread."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import math
import resource
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from postlude.serving.http.connection import HTTPConnection

BACKLOG = 2048
IDLE_SECONDS = 75  # after which a connection without a request is closed
CLOSE_SECONDS = 1.0  # that the last replies of a background server have
REPEAT_SECONDS = 60.0  # between two errors about descriptors
LOG = logging.getLogger("postlude")


@contextlib.asynccontextmanager
async def listening(app: ASGIApp, host: str, port: int, close_seconds: float = 5.0) -> AsyncIterator[str]:
    """Serves an application, and yields its address; port 0 chooses a free one.

    At the end no more requests are accepted, and running ones have `close_seconds` to end.
    """
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
    config = uvicorn.Config(
        app,
        http=HTTPConnection,
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=False,
        lifespan="on",
        timeout_keep_alive=IDLE_SECONDS,
        timeout_graceful_shutdown=math.ceil(close_seconds),
        backlog=BACKLOG,
    )
    logging.getLogger("uvicorn").setLevel(logging.ERROR)  # its warnings are of requests that clients can send at will
    asyncio.get_running_loop().set_exception_handler(_LoopErrors())
    server = _Server(config)
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        while not server.started and not task.done():
            await asyncio.sleep(0.01)
        if not task.done():
            yield f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        await task


class BackgroundServer:
    """Serves an application in a thread of its own until `close`. `address` is where."""

    def __init__(self, app: ASGIApp, host: str, port: int) -> None:
        self._stop: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event, str]] = Future()
        serving = self._serve(app, host, port)
        self._thread = threading.Thread(target=asyncio.run, args=(serving,), name="postlude http", daemon=True)
        self._thread.start()
        *_, self.address = self._stop.result()

    def close(self) -> None:
        loop, stopped, _ = self._stop.result()
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(stopped.set)
        self._thread.join(CLOSE_SECONDS + 1)

    async def _serve(self, app: ASGIApp, host: str, port: int) -> None:
        stopped = asyncio.Event()
        try:
            async with listening(app, host, port, CLOSE_SECONDS) as address:
                self._stop.set_result((asyncio.get_running_loop(), stopped, address))
                await stopped.wait()
        except BaseException as error:
            if self._stop.done():
                LOG.warning("%s is not served any more: %r.", address, error)
            else:
                self._stop.set_exception(error)


class _Server(uvicorn.Server):
    """A server whose signals are handled by the caller."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _LoopErrors:
    """Logs what an event loop reports. When descriptors run out, asyncio does so hundreds of times a second."""

    def __init__(self) -> None:
        self._logged_at = -math.inf

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if not isinstance(error, OSError) or error.errno not in (errno.EMFILE, errno.ENFILE):
            loop.default_exception_handler(context)
        elif loop.time() - self._logged_at >= REPEAT_SECONDS:
            self._logged_at = loop.time()
            LOG.error(
                "no file descriptor is left for a new connection, so clients wait until others close; the limit is %d. "
                "Raise it with `ulimit -n`.",
                resource.getrlimit(resource.RLIMIT_NOFILE)[0],
            )
