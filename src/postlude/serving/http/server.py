"""listening: serves an application with uvicorn."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import math
import resource
import socket
from collections.abc import AsyncIterator, Iterator
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from postlude.serving.http.connection import HTTPConnection

BACKLOG = 2048
IDLE_SECONDS = 75  # after which a connection without a request is closed
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
