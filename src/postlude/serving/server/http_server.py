"""Listener: the other end of `wire.py`. An asynchronous HTTP/1.1 server for JSON requests, and no more."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import logging
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from postlude.checks import USER_ERRORS

MAX_BODY = 4 * 1024**2  # bytes of a request, unless the caller says otherwise
MAX_HEAD = 64 * 1024
IDLE = 75.0  # seconds after which a connection that sends nothing is closed
LINGER = 5.0  # seconds in which the rest of a refused request is read, so that the client gets the refusal
OPEN_PATHS = ("/health",)  # need no key
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
LOG = logging.getLogger("postlude")


class Problem(Exception):
    """An answer's status, and a sentence."""

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status


@contextlib.contextmanager
def mistakes_refused() -> Iterator[None]:
    """What a request says wrong is status 400, and a sentence."""
    try:
        yield
    except USER_ERRORS as error:
        raise Problem(400, str(error)) from error


@dataclass(frozen=True)
class Question:
    """One request."""

    method: str
    path: str
    body: bytes
    gone: Callable[[], bool]
    """Whether the client has closed or reset the connection."""


class Listener:
    """Listens at an address, and answers every request with what `answer` returns, or with the `Problem` it raises.

    `answer` returns a value for JSON, or an asynchronous generator of values, which are sent as server-sent events.
    With a `key`, a request must carry it as `Authorization: Bearer KEY`.
    """

    def __init__(
        self, answer: Callable[[Question], Awaitable[Any]], *, key: str | None = None, max_body: int = MAX_BODY
    ) -> None:
        self._answer, self._key, self._max_body = answer, key, max_body
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.StreamWriter] = set()
        self._asked = 0  # questions that are not answered yet

    async def listen(self, host: str, port: int) -> int:
        """Begin, and return the port: that of 0 is one that is free."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: asyncio.StreamReaderProtocol(_Reader(limit=MAX_HEAD, loop=loop), self._serve, loop=loop), host, port
        )
        found: int = self._server.sockets[0].getsockname()[1]
        return found

    async def close(self, within: float) -> None:
        """Hear nobody any more; those who have asked are answered, if that is possible within so many seconds."""
        if self._server is not None:
            self._server.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within):
                while self._asked:
                    await asyncio.sleep(0.01)
        for writer in self._connections:
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert isinstance(reader, _Reader)
        self._connections.add(writer)
        try:
            while await self._one(reader, writer):
                pass
        except (OSError, EOFError, TimeoutError):
            pass  # who asked has gone away, or has nothing to ask
        finally:
            self._connections.discard(writer)
            writer.close()

    async def _one(self, reader: _Reader, writer: asyncio.StreamWriter) -> bool:
        """One question and its answer; whether others may follow."""
        path = ""
        try:
            async with asyncio.timeout(IDLE):
                head = await _read_head(reader)
                path = head.path
                self._check(head)
                body = await reader.readexactly(head.length)
        except Problem as problem:  # where the next question would begin, nobody knows
            await _write(writer, problem.status, _error(path, problem), kept=False)
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(LINGER):
                    while await reader.read(MAX_HEAD):
                        pass
            return False
        peer = _Peer(reader, writer, interim=head.version != "HTTP/1.0")
        self._asked += 1
        try:
            status, said = await self._said(Question(head.method, head.path, body, peer.gone))
            if isinstance(said, AsyncGenerator):
                await _write_events(writer, said)
                return False
            await _write(writer, status, said, kept=head.kept)
        finally:
            self._asked -= 1
        return head.kept

    def _check(self, head: _Head) -> None:
        """Refuse a request without the key, or a larger one than there may be, before its body is read."""
        if self._key is not None and head.path not in OPEN_PATHS:
            scheme, _, given = head.headers.get("authorization", "").partition(" ")
            right = hmac.compare_digest(given.strip().encode(errors="replace"), self._key.encode())
            if scheme.lower() != "bearer" or not right:
                raise Problem(401, "this server needs its key: send the header Authorization: Bearer KEY.")
        if head.length > self._max_body:
            raise Problem(413, f"the request has {head.length} bytes; the most is {self._max_body}.")

    async def _said(self, question: Question) -> tuple[int, Any]:
        """The status and what is said. A fault of one request is answered with 500, and nobody else notices."""
        try:
            said = await self._answer(question)
            if isinstance(said, AsyncGenerator):  # what is wrong with the request is a status, not an event
                said = _from_first(await anext(said), said)
            return HTTPStatus.OK, said
        except Problem as problem:
            return problem.status, _error(question.path, problem)
        except ConnectionError:
            raise
        except Exception as error:
            LOG.exception("%s %s failed", question.method, question.path)
            return 500, _error(question.path, Problem(500, f"the request failed: {error!r}."))


class _Reader(asyncio.StreamReader):
    """A stream that knows of its end also while there is unread data before it."""

    ended = False

    def feed_eof(self) -> None:
        self.ended = True
        super().feed_eof()


@dataclass
class _Peer:
    """Who asked, while the answer is made.

    A client that closes its connection and one that only ends its own side look alike: both send a FIN. An interim
    response (RFC 9110, 15.2) tells them apart, since a closed connection answers it with a reset.
    """

    reader: _Reader
    writer: asyncio.StreamWriter
    interim: bool
    """Whether the client's version of HTTP has interim responses."""
    probed: bool = False

    def gone(self) -> bool:
        """Whether nobody will read the answer."""
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
    """A request but for its body."""

    method: str
    path: str
    """Without what follows a question mark."""
    version: str
    headers: Mapping[str, str]
    """By their names in small letters."""
    length: int

    @property
    def kept(self) -> bool:
        """Whether the connection stays open for another request."""
        return self.version != "HTTP/1.0" and self.headers.get("connection", "").lower() != "close"


async def _read_head(reader: asyncio.StreamReader) -> _Head:
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    except asyncio.LimitOverrunError as error:
        raise Problem(431, f"the request's headers have more than {MAX_HEAD} bytes.") from error
    first, *lines = head.rstrip("\r\n").split("\r\n")
    words = first.split(" ")
    if len(words) != 3 or not words[2].startswith("HTTP/1."):
        raise Problem(400, f"{first[:80]!r} does not begin a request of HTTP/1.1.")
    headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    if "transfer-encoding" in headers:
        raise Problem(411, "the request comes in chunks; send it whole, with its Content-Length.")
    stated = headers.get("content-length", "0")
    if not (stated.isdecimal() and len(stated) < 20):
        raise Problem(400, f"Content-Length is {stated[:40]!r}: give the number of the body's bytes.")
    return _Head(words[0], words[1].partition("?")[0], words[2], headers, int(stated))


def _error(path: str, problem: Problem) -> dict[str, Any]:
    """The body of an answer that is none: under /v1/ as OpenAI's clients read it."""
    if not path.startswith("/v1/"):
        return {"error": str(problem)}
    kind = "invalid_request_error" if problem.status < 500 else "server_error"
    return {"error": {"message": str(problem), "type": kind, "param": None, "code": None}}


async def _from_first(first: Any, rest: AsyncGenerator[Any, None]) -> AsyncGenerator[Any, None]:
    async with contextlib.aclosing(rest):
        yield first
        async for value in rest:
            yield value


async def _write(writer: asyncio.StreamWriter, status: int, said: Any, *, kept: bool) -> None:
    data = json.dumps(said).encode()
    head = f"HTTP/1.1 {int(status)} {HTTPStatus(status).phrase}\r\nContent-Type: application/json\r\n"
    if status == HTTPStatus.UNAUTHORIZED:
        head += "WWW-Authenticate: Bearer\r\n"
    head += f"Content-Length: {len(data)}\r\nConnection: {'keep-alive' if kept else 'close'}\r\n\r\n"
    writer.write(head.encode("latin-1") + data)
    with contextlib.suppress(ConnectionError):
        await writer.drain()


async def _write_events(writer: asyncio.StreamWriter, values: AsyncGenerator[Any, None]) -> None:
    """Server-sent events, one a value; the connection's end ends them."""
    head = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nCache-Control: no-cache\r\nConnection: close\r\n\r\n"
    writer.write(head.encode("latin-1"))
    try:
        async with contextlib.aclosing(values):  # whatever ends this ends the work for it
            async for value in values:
                writer.write(b"data: " + json.dumps(value).encode() + b"\n\n")
                await writer.drain()
        writer.write(b"data: [DONE]\n\n")
    except Problem as problem:
        writer.write(b"data: " + json.dumps(_error("/v1/", problem)).encode() + b"\n\n")
    await writer.drain()
