"""HTTPServer: an asynchronous HTTP/1.1 server for JSON requests.

It replies to clients that have closed their own side of the connection, which uvicorn and aiohttp do not;
docs/architecture.md has the comparison.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hmac
import logging
import math
import resource
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from postlude.checks import USER_ERRORS
from postlude.serving.json_reply import write_json
from postlude.serving.request_source import JSON, SourceCheck, type_refusal

MAX_BODY = 4 * 1024**2  # bytes of a request, unless the caller sets another limit
MAX_HEAD = 64 * 1024
IDLE_TIMEOUT = 75.0  # seconds after which a connection that sends nothing is closed
HEAD_TIMEOUT = 10.0  # seconds for the headers of a request
BODY_TIMEOUT = 75.0  # seconds for its body
DRAIN_TIMEOUT = 5.0  # seconds to read the rest of a refused request, so that the client gets the refusal
REPEAT_SECONDS = 60.0  # between two errors about descriptors
OPEN_PATHS = ("/health",)  # need no key
KEY_OPTION = "POSTLUDE_API_KEY, or --api-key"
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
LOG = logging.getLogger("postlude")


class HTTPError(Exception):
    """A status and a sentence for the client, and OpenAI's `code` for it, if there is one."""

    def __init__(self, status: int, sentence: str, code: str | None = None) -> None:
        super().__init__(sentence)
        self.status, self.code = status, code


@contextlib.contextmanager
def bad_request_on_error() -> Iterator[None]:
    """Turns the user's errors into status 400."""
    try:
        yield
    except USER_ERRORS as error:
        raise HTTPError(400, str(error)) from error


@dataclass(frozen=True)
class HTTPRequest:
    """One request."""

    method: str
    path: str
    body: bytes
    is_gone: Callable[[], bool]
    """Whether the client has closed or reset the connection."""
    client: tuple[str, ...] = ()
    """Its address and its connection, or other names, by which clients take turns."""


class HTTPServer:
    """Replies to every request with the result of `handle`, or with the `HTTPError` it raises.

    `handle` returns a JSON value, or an asynchronous generator of values, which are sent as server-sent events. With a
    `key`, requests must carry `Authorization: Bearer KEY`. Without one they must come from no page of another site, and
    `admin_paths` are refused.
    """

    def __init__(
        self,
        handle: Callable[[HTTPRequest], Awaitable[Any]],
        *,
        key: str | None = None,
        max_body: int = MAX_BODY,
        admin_paths: Collection[str] = (),
    ) -> None:
        self._handle, self._key, self._max_body, self._admin_paths = handle, key, max_body, admin_paths
        self._source = SourceCheck("localhost", KEY_OPTION)
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.StreamWriter] = set()
        self._running = 0  # requests without a reply

    async def listen(self, host: str, port: int) -> int:
        """Starts to listen. Returns the port; port 0 chooses a free one."""
        loop = asyncio.get_running_loop()
        self._source = SourceCheck(host, KEY_OPTION)
        loop.set_exception_handler(_LoopErrors())
        self._server = await loop.create_server(
            lambda: asyncio.StreamReaderProtocol(_Reader(limit=MAX_HEAD, loop=loop), self._serve, loop=loop), host, port
        )
        chosen: int = self._server.sockets[0].getsockname()[1]
        return chosen

    async def close(self, timeout: float) -> None:
        """Accepts no more requests, and waits up to `timeout` seconds for the replies to running ones."""
        if self._server is not None:
            self._server.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                while self._running:
                    await asyncio.sleep(0.01)
        for writer in self._connections:
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert isinstance(reader, _Reader)
        self._connections.add(writer)
        try:
            while await self._serve_one(reader, writer):
                pass
        except (OSError, EOFError, TimeoutError):
            pass  # the client is gone, or sends nothing
        except asyncio.CancelledError:
            pass  # the loop ends; asyncio of Python 3.11 logs a cancelled connection as an error
        finally:
            self._connections.discard(writer)
            writer.close()

    async def _serve_one(self, reader: _Reader, writer: asyncio.StreamWriter) -> bool:
        """Replies to one request. Returns whether the connection stays open."""
        try:
            async with asyncio.timeout(IDLE_TIMEOUT):
                first = await reader.readexactly(1)
            async with _time_limit(HEAD_TIMEOUT, "headers"):
                head = await _read_head(first, reader)
            self._check(head)
            async with _time_limit(BODY_TIMEOUT, "body"):
                body = await reader.readexactly(head.length)
        except HTTPError as error:  # where the next request begins is unknown
            await _write(writer, error.status, error_body(error), keep_alive=False)
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(DRAIN_TIMEOUT):
                    while await reader.read(MAX_HEAD):
                        pass
            return False
        client = _Client(reader, writer, interim=head.version != "HTTP/1.0")
        self._running += 1
        try:
            status, result = await self._result(HTTPRequest(head.method, head.path, body, client.is_gone, client.name))
            if isinstance(result, AsyncGenerator):
                await _write_events(writer, result)
                return False
            await _write(writer, status, result, keep_alive=head.keep_alive)
        finally:
            self._running -= 1
        return head.keep_alive

    def _check(self, head: _Head) -> None:
        """Refuses a request without the key, from another site or above the size limit, before its body is read."""
        if self._key is None:
            if (reason := self._source.refusal(head.headers)) is not None:
                raise HTTPError(403, reason)
            if head.path in self._admin_paths:
                raise HTTPError(
                    403,
                    f"{head.path} changes what all clients get, so it needs a key, and this server has none: start it "
                    f"with one ({KEY_OPTION}), and send it as Authorization: Bearer KEY.",
                )
        elif head.path not in OPEN_PATHS:
            scheme, _, key = head.headers.get("authorization", "").partition(" ")
            matches = hmac.compare_digest(key.strip().encode(errors="replace"), self._key.encode())
            if scheme.lower() != "bearer" or not matches:
                raise HTTPError(
                    401, "this server needs its key: send the header Authorization: Bearer KEY.", "invalid_api_key"
                )
        if head.length and (reason := type_refusal(head.headers, JSON)) is not None:
            raise HTTPError(415, reason)
        if head.length > self._max_body:
            raise HTTPError(413, f"the request has {head.length} bytes; the most is {self._max_body}.")

    async def _result(self, request: HTTPRequest) -> tuple[int, Any]:
        """Returns status and result. An unexpected error of one request is status 500."""
        try:
            result = await self._handle(request)
            if isinstance(result, AsyncGenerator):  # so that an invalid request gets a status, not an event
                result = _prepend(await anext(result), result)
            return HTTPStatus.OK, result
        except HTTPError as error:
            return error.status, error_body(error)
        except ConnectionError:
            raise
        except Exception as error:
            LOG.exception("%s %s failed", request.method, request.path)
            return 500, error_body(HTTPError(500, f"the request failed: {error!r}."))


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


class _Reader(asyncio.StreamReader):
    """A stream that notices its end even while it has unread data."""

    ended = False

    def feed_eof(self) -> None:
        self.ended = True
        super().feed_eof()


@dataclass
class _Client:
    """The client of a running request.

    A client that closes its connection and one that only ends its own side both send a FIN. An interim response (RFC
    9110, 15.2) tells them apart, since a closed connection answers it with a reset.
    """

    reader: _Reader
    writer: asyncio.StreamWriter
    interim: bool
    """Whether the client's version of HTTP has interim responses."""
    probed: bool = False

    @property
    def name(self) -> tuple[str, ...]:
        """The client's address and port."""
        return tuple(map(str, (self.writer.get_extra_info("peername") or ())[:2]))

    def is_gone(self) -> bool:
        """Whether the client will not read the reply."""
        if self.writer.is_closing() or self.reader.exception() is not None:
            return True
        if self.writer.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            return True
        if self.reader.ended and self.interim and not self.probed:
            self.probed = True
            self.writer.write(CONTINUE)
        return False


@dataclass(frozen=True)
class _Head:
    """A request without its body."""

    method: str
    path: str
    """Without the query."""
    version: str
    headers: Mapping[str, str]
    """By their names in lower case."""
    length: int

    @property
    def keep_alive(self) -> bool:
        """Whether the connection stays open for another request."""
        return self.version != "HTTP/1.0" and self.headers.get("connection", "").lower() != "close"


@contextlib.asynccontextmanager
async def _time_limit(seconds: float, part: str) -> AsyncIterator[None]:
    """Refuses a request of which a part does not come in time."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError as error:
        raise HTTPError(408, f"the request's {part} did not come within {seconds:g} s.") from error


async def _read_head(first: bytes, reader: asyncio.StreamReader) -> _Head:
    try:
        head = (first + await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    except asyncio.LimitOverrunError as error:
        raise HTTPError(431, f"the request's headers have more than {MAX_HEAD} bytes.") from error
    line, *lines = head.rstrip("\r\n").split("\r\n")
    words = line.split(" ")
    if len(words) != 3 or not words[2].startswith("HTTP/1."):
        raise HTTPError(400, f"{line[:80]!r} does not begin a request of HTTP/1.1.")
    headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    if "transfer-encoding" in headers:
        raise HTTPError(411, "the request comes in chunks; send it whole, with its Content-Length.")
    length = headers.get("content-length", "0")
    if not (length.isdecimal() and len(length) < 20):
        raise HTTPError(400, f"Content-Length is {length[:40]!r}: give the number of the body's bytes.")
    return _Head(words[0], words[1].partition("?")[0], words[2], headers, int(length))


def error_body(error: HTTPError) -> dict[str, Any]:
    """Returns the body of an error in OpenAI's format."""
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    return {"error": {"message": str(error), "type": kind, "param": None, "code": error.code}}


def server_sent_event(value: Any) -> bytes:
    """Returns a value as one server-sent event."""
    return b"data: " + write_json(value) + b"\n\n"


async def _prepend(first: Any, rest: AsyncGenerator[Any, None]) -> AsyncGenerator[Any, None]:
    async with contextlib.aclosing(rest):
        yield first
        async for value in rest:
            yield value


async def _write(writer: asyncio.StreamWriter, status: int, result: Any, *, keep_alive: bool) -> None:
    data = write_json(result)
    head = f"HTTP/1.1 {int(status)} {HTTPStatus(status).phrase}\r\nContent-Type: application/json\r\n"
    if status == HTTPStatus.UNAUTHORIZED:
        head += "WWW-Authenticate: Bearer\r\n"
    head += f"Content-Length: {len(data)}\r\nConnection: {'keep-alive' if keep_alive else 'close'}\r\n\r\n"
    writer.write(head.encode("latin-1") + data)
    with contextlib.suppress(ConnectionError):
        await writer.drain()


async def _write_events(writer: asyncio.StreamWriter, values: AsyncGenerator[Any, None]) -> None:
    """Writes one server-sent event per value. The end of the connection ends them."""
    head = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nCache-Control: no-cache\r\nConnection: close\r\n\r\n"
    writer.write(head.encode("latin-1"))
    try:
        async with contextlib.aclosing(values):  # so that generation stops with the connection
            async for value in values:
                writer.write(server_sent_event(value))
                await writer.drain()
        writer.write(b"data: [DONE]\n\n")
    except HTTPError as error:
        writer.write(server_sent_event(error_body(error)))
    await writer.drain()
