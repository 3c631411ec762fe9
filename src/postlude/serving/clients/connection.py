"""ServerConnection: HTTP/1.1 to one server, asynchronous, on connections that are kept for the next request."""

from __future__ import annotations

import asyncio
import json
import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from postlude.serving.errors import InvalidResponse, RequestCancelled, ServerUnavailable

LARGEST = 1 << 28  # bytes of a reply
MOST_HEADERS = 256
BROKEN = (OSError, asyncio.IncompleteReadError, EOFError)


@dataclass(frozen=True)
class Reply:
    """What came back."""

    status: int
    headers: Mapping[str, str]
    """By their names in small letters."""
    body: bytes

    def json(self) -> Any:
        """The body, as JSON has it; None of an empty one."""
        try:
            return json.loads(self.body) if self.body.strip() else None
        except (ValueError, RecursionError) as error:
            raise InvalidResponse(f"answered with something that is not JSON: {error}") from error


@dataclass
class _Connection:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    used: bool = field(default=False)
    """Whether it has carried a request already: the server may have closed it since."""


class ServerConnection:
    """One server's address. Every coroutine belongs to the loop that first asked."""

    def __init__(self, url: str, headers: Mapping[str, str] | None = None) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"url {url!r} is no address of a server; give one such as http://localhost:8000.")
        self.url = url.rstrip("/").removesuffix("/v1")
        self._root = urlsplit(self.url).path
        self._host, self._secure = parts.hostname, parts.scheme == "https"
        self._port = parts.port or (443 if self._secure else 80)
        self._headers = {"Host": parts.netloc.rpartition("@")[2], "Content-Type": "application/json", **(headers or {})}
        self._idle: list[_Connection] = []
        self._waits: dict[asyncio.Timeout, bool] = {}  # for replies, and whether they are given up

    async def ask(self, method: str, path: str, body: Any = None, *, timeout: float) -> Reply:
        """One request and its reply, whatever its status. Raises `ServerUnavailable` where none comes in time."""
        data = b"" if body is None else json.dumps(body).encode()
        head = f"{method} {self._root}{path} HTTP/1.1\r\n"
        head += "".join(f"{name}: {value}\r\n" for name, value in self._headers.items())
        sent = f"{head}Content-Length: {len(data)}\r\n\r\n".encode("latin-1") + data
        limit = asyncio.timeout(timeout)
        self._waits[limit] = False
        try:
            async with limit:
                return await self._exchange(sent)
        except TimeoutError:
            if self._waits[limit]:
                raise RequestCancelled("was given up") from None
            raise ServerUnavailable(f"gave no answer within {timeout:g} s") from None
        finally:
            del self._waits[limit]

    async def _exchange(self, sent: bytes) -> Reply:
        while True:
            connection = await self._connected()
            kept = False
            try:
                reply, kept = await _one(connection, sent)
                return reply
            except BROKEN as error:
                if connection.used:  # closed while it was idle, as servers do: the next one tells more
                    continue
                raise ServerUnavailable(_reason(error)) from error
            finally:
                connection.used = True
                if kept:
                    self._idle.append(connection)
                else:
                    connection.writer.close()

    async def _connected(self) -> _Connection:
        while self._idle:
            connection = self._idle.pop()
            if not connection.reader.at_eof():
                return connection
            connection.writer.close()
        try:
            secure = ssl.create_default_context() if self._secure else None
            return _Connection(*await asyncio.open_connection(self._host, self._port, ssl=secure))
        except OSError as error:
            raise ServerUnavailable(_reason(error)) from error

    def hang_up(self) -> None:
        """Wait for no reply any more: those that are asked for raise `ServerUnavailable`."""
        for limit in self._waits:
            if not limit.expired():
                self._waits[limit] = True
                limit.reschedule(asyncio.get_running_loop().time())

    def close(self) -> None:
        """Let go of the connections."""
        for connection in self._idle:
            connection.writer.close()
        self._idle.clear()


async def _one(connection: _Connection, sent: bytes) -> tuple[Reply, bool]:
    """Send, and read the reply; and whether the connection can be used again."""
    connection.writer.write(sent)
    await connection.writer.drain()
    reader = connection.reader
    try:
        version, _, rest = (await _line(reader)).partition(" ")
        if not version.startswith("HTTP/1."):
            raise ValueError(version[:40])
        status = int(rest.split(" ")[0])
        headers: dict[str, str] = {}
        while line := await _line(reader):
            if len(headers) == MOST_HEADERS:
                raise ValueError(f"more than {MOST_HEADERS} headers")
            name, _, value = line.partition(":")
            headers[name.strip().lower()] = value.strip()
        kept = version != "HTTP/1.0" and headers.get("connection", "").lower() != "close"
        if "chunked" in headers.get("transfer-encoding", "").lower():
            body = await _chunks(reader)
        elif "content-length" in headers:
            body = await reader.readexactly(_bounded(int(headers["content-length"])))
        else:
            body, kept = await _rest(reader), False
    except ValueError as error:  # a line that is none, a number that is none
        raise InvalidResponse(f"answered with something that is not HTTP: {error}") from error
    return Reply(status, headers, body), kept


async def _line(reader: asyncio.StreamReader) -> str:
    line = await reader.readline()
    if not line.endswith(b"\n"):
        raise EOFError("the connection was closed in the middle of an answer")
    return line.decode("latin-1").rstrip("\r\n")


async def _chunks(reader: asyncio.StreamReader) -> bytes:
    found = []
    total = 0
    while size := int((await _line(reader)).split(";")[0], 16):
        total = _bounded(total + size)
        found.append(await reader.readexactly(size))
        await _line(reader)
    while await _line(reader):
        pass  # what may follow the last chunk
    return b"".join(found)


async def _rest(reader: asyncio.StreamReader) -> bytes:
    """All until the connection ends."""
    found, total = [], 0
    while part := await reader.read(1 << 16):
        total = _bounded(total + len(part))
        found.append(part)
    return b"".join(found)


def _bounded(size: int) -> int:
    if size > LARGEST:
        raise InvalidResponse(f"answered with more than {LARGEST} bytes")
    return size


def _reason(error: BaseException) -> str:
    if isinstance(error, asyncio.IncompleteReadError | EOFError | ConnectionResetError):
        return "closed the connection in the middle of an answer"
    if isinstance(error, OSError) and error.errno is not None and error.errno > 0:
        return f"cannot be reached: {os.strerror(error.errno)}"
    return f"cannot be reached: {error or type(error).__name__}"
