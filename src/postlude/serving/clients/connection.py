"""ServerConnection: asynchronous HTTP/1.1 to one server, with connections that are kept open for the next request.

httpx and aiohttp need more CPU time per request; docs/architecture.md has the measurements.
"""

from __future__ import annotations

import asyncio
import json
import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from postlude.serving.errors import InvalidResponse, RequestCancelled, RequestRefused, ServerBusy, ServerUnavailable

MAX_REPLY = 1 << 28  # bytes
MAX_HEADERS = 256
BYTES = "application/octet-stream"  # of a body that is not JSON
BUSY = 429
TEMPORARY = frozenset({408, 409, 425, 500, 502, 503, 504})
REFUSED = frozenset({400, 404, 413, 422})
CONNECTION_ERRORS = (OSError, asyncio.IncompleteReadError, EOFError)


@dataclass(frozen=True)
class Reply:
    status: int
    headers: Mapping[str, str]
    """By their names in lower case."""
    body: bytes

    def json(self) -> Any:
        """Returns the body's JSON; None for an empty body."""
        try:
            return json.loads(self.body) if self.body.strip() else None
        except (ValueError, RecursionError) as error:
            raise InvalidResponse(f"replied with something that is not JSON: {error}") from error


@dataclass
class _Connection:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    was_idle: bool = False
    """Whether it was idle before this request, and no reply has begun: the server may have closed it meanwhile."""


class ServerConnection:
    """The address of one server and its open connections. All coroutines run in one event loop."""

    def __init__(self, url: str, headers: Mapping[str, str] | None = None) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"url {url!r} is not a server's address; give one such as http://localhost:8000.")
        self.url = url.rstrip("/").removesuffix("/v1")
        self._root = urlsplit(self.url).path
        self._host, self._secure = parts.hostname, parts.scheme == "https"
        self._port = parts.port or (443 if self._secure else 80)
        for name, value in (headers or {}).items():
            if not (value.isascii() and value.isprintable()):
                raise ValueError(
                    f"the header {name} for {url} has a line break or a character that is not ASCII. Check the API "
                    "key: the end of a line may have been copied with it."
                )
        self._headers = {"Host": parts.netloc.rpartition("@")[2], "Content-Type": "application/json", **(headers or {})}
        self._idle: list[_Connection] = []
        self._timeouts: dict[asyncio.Timeout, bool] = {}  # running requests; True if `cancel_requests` ended it

    async def request(self, method: str, path: str, body: Any = None, *, timeout: float) -> Reply:
        """Returns the reply, whatever its status. Raises `ServerUnavailable` if none comes within `timeout` seconds."""
        data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        headers = self._headers | ({"Content-Type": BYTES} if isinstance(body, bytes) else {})
        head = f"{method} {self._root}{path} HTTP/1.1\r\n"
        head += "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        message = f"{head}Content-Length: {len(data)}\r\n\r\n".encode("latin-1") + data
        timeout_scope = asyncio.timeout(timeout)
        self._timeouts[timeout_scope] = False
        try:
            async with timeout_scope:
                return await self._send_and_receive(message)
        except TimeoutError:
            if self._timeouts[timeout_scope]:
                raise RequestCancelled("had its requests cancelled by the client") from None
            raise ServerUnavailable(f"gave no reply within {timeout:g} s") from None
        finally:
            del self._timeouts[timeout_scope]

    async def _send_and_receive(self, message: bytes) -> Reply:
        while True:
            connection = await self._connect()
            reusable = False
            try:
                reply, reusable = await _send_and_receive_on(connection, message)
                return reply
            except CONNECTION_ERRORS as error:
                if connection.was_idle:  # the server closed it while it was idle: retry on another
                    continue
                raise ServerUnavailable(_reason(error)) from error
            finally:
                connection.was_idle = True
                if reusable:
                    self._idle.append(connection)
                else:
                    connection.writer.close()

    async def _connect(self) -> _Connection:
        while self._idle:
            connection = self._idle.pop()
            if not connection.reader.at_eof():
                return connection
            connection.writer.close()
        try:
            context = ssl.create_default_context() if self._secure else None
            return _Connection(*await asyncio.open_connection(self._host, self._port, ssl=context))
        except (OSError, UnicodeError) as error:  # the latter for a host that is no name
            raise ServerUnavailable(_reason(error)) from error

    def cancel_requests(self) -> None:
        """Ends all running requests: they raise `RequestCancelled`."""
        for timeout_scope in self._timeouts:
            if not timeout_scope.expired():
                self._timeouts[timeout_scope] = True
                timeout_scope.reschedule(asyncio.get_running_loop().time())

    def close(self) -> None:
        for connection in self._idle:
            connection.writer.close()
        self._idle.clear()


async def _send_and_receive_on(connection: _Connection, message: bytes) -> tuple[Reply, bool]:
    """Returns the reply, and whether the connection can be used again."""
    connection.writer.write(message)
    await connection.writer.drain()
    reader = connection.reader
    try:
        version, _, status_text = (await _line(reader)).partition(" ")
        connection.was_idle = False
        if not version.startswith("HTTP/1."):
            raise ValueError(version[:40])
        status = int(status_text.split(" ")[0])
        headers: dict[str, str] = {}
        while line := await _line(reader):
            if len(headers) == MAX_HEADERS:
                raise ValueError(f"more than {MAX_HEADERS} headers")
            name, _, value = line.partition(":")
            headers[name.strip().lower()] = value.strip()
        reusable = version != "HTTP/1.0" and headers.get("connection", "").lower() != "close"
        if "chunked" in headers.get("transfer-encoding", "").lower():
            body = await _chunked_body(reader)
        elif "content-length" in headers:
            body = await reader.readexactly(_check_size(int(headers["content-length"])))
        else:
            body, reusable = await _body_until_end(reader), False
    except ValueError as error:  # a malformed line or number
        raise InvalidResponse(f"replied with something that is not HTTP: {error}") from error
    return Reply(status, headers, body), reusable


async def _line(reader: asyncio.StreamReader) -> str:
    line = await reader.readline()
    if not line.endswith(b"\n"):
        raise EOFError
    return line.decode("latin-1").rstrip("\r\n")


async def _chunked_body(reader: asyncio.StreamReader) -> bytes:
    chunks, total = [], 0
    while size := int((await _line(reader)).split(";")[0], 16):
        total = _check_size(total + size)
        chunks.append(await reader.readexactly(size))
        await _line(reader)
    while await _line(reader):
        pass  # trailers
    return b"".join(chunks)


async def _body_until_end(reader: asyncio.StreamReader) -> bytes:
    chunks, total = [], 0
    while chunk := await reader.read(1 << 16):
        total = _check_size(total + len(chunk))
        chunks.append(chunk)
    return b"".join(chunks)


def _check_size(size: int) -> int:
    if size > MAX_REPLY:
        raise InvalidResponse(f"replied with more than {MAX_REPLY} bytes")
    return size


def _reason(error: BaseException) -> str:
    if isinstance(error, asyncio.IncompleteReadError | EOFError | ConnectionResetError):
        return "closed the connection in the middle of a reply"
    if isinstance(error, OSError) and error.errno is not None and error.errno > 0:
        return f"cannot be reached: {os.strerror(error.errno)}"
    return f"cannot be reached: {error or type(error).__name__}"


def json_or_raise(reply: Reply) -> Any:
    """Returns the JSON of a successful reply. Raises the error for any other status."""
    if 200 <= reply.status < 300:
        # vLLM confirms a loaded adapter with a sentence, and its metrics are Prometheus's text.
        return reply.body.decode(errors="replace") if reply.body.startswith((b"Success", b"# ")) else reply.json()
    problem = f"status {reply.status}: {_message(reply)}"
    retry_after = reply.headers.get("retry-after", "")
    seconds = float(retry_after) if retry_after.replace(".", "", 1).isdecimal() else 0.0
    if reply.status == BUSY:
        raise ServerBusy(f"replies with {problem}", seconds)
    if reply.status in TEMPORARY:
        raise ServerUnavailable(f"replies with {problem}", seconds)
    if reply.status in REFUSED:
        raise RequestRefused(problem, reply.status, unknown_model=_names_unknown_model(reply))
    raise InvalidResponse(f"replies with {problem}")


def _names_unknown_model(reply: Reply) -> bool:
    """Whether the error is that of an unknown model: OpenAI's code, or vLLM's name of the parameter."""
    try:
        error = reply.json()["error"]
        return bool(error.get("code") == "model_not_found" or error.get("param") == "model")
    except (InvalidResponse, AttributeError, KeyError, TypeError):
        return False


def _message(reply: Reply) -> str:
    """Returns the server's error message on one line."""
    text = reply.body[:2000].decode(errors="replace").strip()
    try:
        body = reply.json()
        message = next((body[name] for name in ("error", "message", "detail") if name in body), text)
        return " ".join(str(message.get("message", message) if isinstance(message, dict) else message).split())
    except (InvalidResponse, AttributeError, TypeError):
        return " ".join(text.split()) or "no message"
