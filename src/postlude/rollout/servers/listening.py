"""Listener: the other end of `wire.py`. HTTP/1.1 for questions and answers of JSON, asynchronous, and no more."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

MOST_BODY = 64 * 1024**2  # bytes of a question
MOST_HEAD = 64 * 1024
IDLE = 75.0  # seconds after which a connection that asks nothing is closed


class Problem(Exception):
    """What an answer's status says, and a sentence."""

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status


@dataclass(frozen=True)
class Question:
    """One request."""

    method: str
    path: str
    body: Any
    """What its JSON says; None of an empty one."""
    gone: Callable[[], bool]
    """Whether who asked has gone away."""


class Listener:
    """Listens at an address, and answers every question by what `answer` returns, or by the `Problem` it raises."""

    def __init__(self, answer: Callable[[Question], Awaitable[Any]]) -> None:
        self._answer = answer
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.StreamWriter] = set()
        self._asked = 0  # questions that are not answered yet

    async def listen(self, host: str, port: int) -> int:
        """Begin, and return the port: that of 0 is one that is free."""
        self._server = await asyncio.start_server(self._serve, host, port, limit=MOST_HEAD)
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
        self._connections.add(writer)
        try:
            while await self._one(reader, writer):
                pass
        except (OSError, EOFError, TimeoutError):
            pass  # who asked has gone away, or has nothing to ask
        finally:
            self._connections.discard(writer)
            writer.close()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """One question and its answer; whether others may follow."""
        async with asyncio.timeout(IDLE):
            try:
                method, path, headers, body = await _read(reader)
            except Problem as problem:  # where the next question would begin, nobody knows
                await _write(writer, problem.status, {"error": str(problem)}, kept=False)
                return False
        kept = headers.get("connection", "").lower() != "close"
        self._asked += 1
        try:
            await _write(writer, *await self._said(method, path, body, reader), kept=kept)
        finally:
            self._asked -= 1
        return kept

    async def _said(self, method: str, path: str, body: bytes, reader: asyncio.StreamReader) -> tuple[int, Any]:
        """The status and what is said."""
        try:
            parsed = json.loads(body) if body.strip() else None
        except ValueError as error:
            return HTTPStatus.BAD_REQUEST, {"error": f"the request is not JSON: {error}"}
        try:
            return HTTPStatus.OK, await self._answer(Question(method, path, parsed, reader.at_eof))
        except Problem as problem:
            return problem.status, {"error": str(problem)}


async def _read(reader: asyncio.StreamReader) -> tuple[str, str, dict[str, str], bytes]:
    """The method, the path without what follows a question mark, the headers by small names, and the body."""
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    except asyncio.LimitOverrunError as error:
        raise Problem(431, f"the request's headers have more than {MOST_HEAD} bytes.") from error
    first, *lines = head.rstrip("\r\n").split("\r\n")
    words = first.split(" ")
    if len(words) != 3 or not words[2].startswith("HTTP/1."):
        raise Problem(400, f"{first[:80]!r} does not begin a request of HTTP/1.1.")
    headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    if "transfer-encoding" in headers:
        raise Problem(411, "the request comes in chunks; send it whole, with its Content-Length.")
    stated = headers.get("content-length", "0")
    if not stated.isdecimal():
        raise Problem(400, f"Content-Length is {stated[:40]!r}: give the number of the body's bytes.")
    if int(stated) > MOST_BODY:
        raise Problem(413, f"the request has {stated} bytes; the most is {MOST_BODY}.")
    return words[0], words[1].partition("?")[0], headers, await reader.readexactly(int(stated))


async def _write(writer: asyncio.StreamWriter, status: int, said: Any, *, kept: bool) -> None:
    data = json.dumps(said).encode()
    head = f"HTTP/1.1 {int(status)} {HTTPStatus(status).phrase}\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(data)}\r\nConnection: {'keep-alive' if kept else 'close'}\r\n\r\n"
    writer.write(head.encode("latin-1") + data)
    with contextlib.suppress(ConnectionError):
        await writer.drain()
