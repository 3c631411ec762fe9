"""What both servers share of HTTP: bodies, connections and clients that leave."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable

import pytest
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router

from postlude.serving.http import connection
from postlude.serving.http.errors import HTTPError
from postlude.serving.http.replies import ANTHROPIC, OPENAI, RESPONSES, EventStream, JSONReply, ReplyFormat
from postlude.serving.http.requests import read_body, unless_disconnected
from postlude.serving.http.server import listening

Handler = Callable[[Request], Awaitable[Response]]
POST = b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"


async def echo(request: Request) -> Response:
    try:
        return JSONReply({"read": len(await read_body(request, 1000, 5.0))})
    except HTTPError as error:
        return OPENAI.error(error)


def exchange(handler: Handler, client: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]) -> None:
    """Serves the handler, and runs a client on one connection."""

    async def run() -> None:
        app = Router([Route("/", handler, methods=["GET", "POST"])])
        async with listening(app, "127.0.0.1", 0, close_seconds=1.0) as address, asyncio.timeout(30):
            reader, writer = await asyncio.open_connection("127.0.0.1", int(address.rpartition(":")[2]))
            await client(reader, writer)
            writer.close()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("sent", "status", "text"),
    [
        (CHUNKED + b"2\r\n{}\r\n0\r\n\r\n", 200, b'{"read": 2}'),
        (CHUNKED + b"400\r\n" + b"1" * 1024 + b"\r\n0\r\n\r\n", 413, b"has more than 1000 bytes; the most is 1000"),
        (POST + b"Content-Length: 1001\r\n\r\n" + b"1" * 1001, 413, b"has 1001 bytes; the most is 1000"),
        (
            POST.replace(b"application/json", b"text/plain") + b"Content-Length: 2\r\n\r\n{}",
            415,
            b"send application/json",
        ),
        (CHUNKED.replace(b"application/json", b"text/plain") + b"2\r\n{}\r\n0\r\n\r\n", 415, b"send application/json"),
    ],
    ids=["chunks", "too many chunks", "too long", "text", "text in chunks"],
)
def test_a_refused_body_leaves_the_connection_usable(sent: bytes, status: int, text: bytes) -> None:
    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for number, wanted in ((sent, (status, text)), (b"GET / HTTP/1.1\r\n\r\n", (200, b'{"read": 0}'))):
            writer.write(number)
            head = await reader.readuntil(b"\r\n\r\n")
            body = await reader.readexactly(int(head.lower().partition(b"content-length: ")[2].partition(b"\r")[0]))
            assert (int(head.split(b" ")[1]), wanted[1] in body) == (wanted[0], True), (head, body)

    exchange(echo, client)


@pytest.mark.parametrize(
    "body", [b"Content-Length: 2\r\n\r\n{}", b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n"]
)
@pytest.mark.parametrize("split", [False, True])
def test_a_wish_for_another_protocol_is_ignored(body: bytes, *, split: bool) -> None:
    """Java's client sends it with its first request, whose body is read all the same."""
    sent = POST + b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n" + body

    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(2):
            for piece in [bytes([byte]) for byte in sent] if split else [sent]:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0)
            assert (await reader.readuntil(b"}")).partition(b"\r\n\r\n")[2] == b'{"read": 2}'
        writer.write(b"CONNECT host:1 HTTP/1.1\r\nHost: host\r\n\r\n")
        assert b"this is no request" in await reader.read()

    exchange(echo, client)


def test_requests_behind_one_another_are_replied_to_in_order() -> None:
    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        lengths = range(1, 6)
        bodies = [POST + b"Content-Length: %d\r\n\r\n" % length + b"1" * length for length in lengths]
        writer.write(b"".join(bodies) + b"GET / HTTP/1.1\r\nConnection: close\r\n\r\n")
        replies = await reader.read()
        while not reader.at_eof():
            replies += await reader.read()
        assert [int(part.partition(b"}")[0]) for part in replies.split(b'"read": ')[1:]] == [*lengths, 0]

    exchange(echo, client)


@pytest.mark.parametrize("ending", ["close", "close behind another request", "half-close"])
def test_work_ends_with_its_client(monkeypatch: pytest.MonkeyPatch, ending: str) -> None:
    monkeypatch.setattr(connection, "GONE_SECONDS", 0.01)
    started, cancelled, released = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def work() -> Response:
        started.set()
        try:
            await released.wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise
        return JSONReply("done")

    async def handler(request: Request) -> Response:
        return await unless_disconnected(request, work())

    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        await started.wait()
        if ending == "half-close":
            writer.write_eof()
            await asyncio.sleep(0.1)
            assert not cancelled.is_set()
            released.set()
            assert b'"done"' in await reader.read()
            return
        if ending != "close":
            writer.write(b"GET / HTTP/1.1\r\n\r\n")
        writer.close()
        await cancelled.wait()

    exchange(handler, client)


def test_events_of_a_half_closed_client_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "GONE_SECONDS", 0.01)
    half_closed = asyncio.Event()

    async def values() -> AsyncGenerator[int, None]:
        yield 1
        await half_closed.wait()
        await asyncio.sleep(0.1)
        yield 2
        raise HTTPError(500, "no more.")

    async def handler(_: Request) -> Response:
        return await OPENAI.reply(values())

    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        received = await reader.readuntil(b"data: 1")
        writer.write_eof()
        half_closed.set()
        received += await reader.read()
        assert b"100 Continue" not in received
        assert received.count(b"data: ") == 3
        assert b"data: 2\n\n" in received
        assert b"no more." in received

    exchange(handler, client)


@pytest.mark.parametrize(
    ("form", "name", "error"),
    [
        (OPENAI, b"", b'{"error": {"message": "gone.", "type": "server_error", "param": null, "code": null}}'),
        (RESPONSES, b"event: error\n", b'{"type": "error", "error": {"message": "gone.", "type": "server_error"'),
        (ANTHROPIC, b"event: error\n", b'{"type": "error", "error": {"type": "overloaded_error", "message": "gone."}}'),
    ],
    ids=["chat", "responses", "messages"],
)
def test_an_error_in_a_stream_has_the_form_of_its_api(form: ReplyFormat, name: bytes, error: bytes) -> None:
    async def values() -> AsyncGenerator[dict[str, str], None]:
        yield {"type": "begun"}
        raise HTTPError(503, "gone.")

    async def read() -> bytes:
        reply = await form.reply(values())
        assert isinstance(reply, EventStream)
        return b"".join([bytes(part) async for part in reply.body_iterator])

    first = (b"event: begun\n" if name else b"") + b'data: {"type": "begun"}\n\n'
    assert asyncio.run(read()).startswith(first + name + b"data: " + error)
