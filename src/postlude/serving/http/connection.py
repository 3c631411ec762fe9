"""HTTPConnection: uvicorn's connection, with limits of time and size, which replies to clients that half-closed it.

A client that closes its connection and one that only ends its own side (`shutdown(SHUT_WR)`) both send a FIN, and
uvicorn closes both. An interim response (RFC 9110, 15.2) tells them apart, since a closed connection answers it with a
reset.
"""

from __future__ import annotations

import asyncio
import socket
from http import HTTPStatus
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from postlude.serving.http.errors import HTTPError, error_body
from postlude.serving.http.replies import write_json

HEAD_SECONDS = 10.0  # for the headers of a request, and for the first request of a connection
HEAD_BYTES = 64 * 1024
DRAIN_SECONDS = 10.0  # to read the rest of a request that is refused, so that the client gets the refusal
GONE_SECONDS = 0.25  # between two checks whether a client that sends no more is gone
PIPELINED = 8  # requests that may wait for the reply to an earlier one
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class HTTPConnection(HttpToolsProtocol):
    _limit: asyncio.TimerHandle | None = None
    _received = 0  # bytes since the headers began
    _receiving = False  # whether a request's headers have come, but not all of its body

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if isinstance(self.client, tuple):  # asyncio does so for sockets that it has made itself
            transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._cycles: list[RequestResponseCycle] = []
        self._expect_head()

    def on_message_begin(self) -> None:
        """Begins to wait for the rest of the headers."""
        super().on_message_begin()
        self._expect_head()

    def on_headers_complete(self) -> None:
        """Ends the wait. Reading goes on, so that the end of a client is noticed behind a second request."""
        if self.parser.should_upgrade():  # it is parsed again
            return
        self._cancel()
        self._receiving = True
        super().on_headers_complete()
        self._cycles = [*self._unfinished(), self.cycle]
        self.cycle.transport = _Reply(self.transport)
        if len(self.pipeline) < PIPELINED:
            self.flow.resume_reading()

    def on_message_complete(self) -> None:
        """Ends the wait for the rest of a request that was refused."""
        if self.parser.should_upgrade():
            return
        super().on_message_complete()
        self._receiving = False
        self._cancel()

    def on_response_complete(self) -> None:
        """Begins to wait for the rest of a request that was refused."""
        for cycle in self._cycles:
            if cycle.response_complete:
                cycle.transport.write(b"")  # of a reply without a body
        super().on_response_complete()
        if self._receiving and not self._unfinished() and not self.transport.is_closing():
            self._limit = self.loop.call_later(DRAIN_SECONDS, self.transport.close)

    def data_received(self, data: bytes) -> None:
        """Reads what came, and refuses headers that go on after too many bytes."""
        self._unset_keepalive_if_required()
        try:
            self._parse(memoryview(data))
        except httptools.HttpParserError:
            self.send_400_response("")
        self._received += len(data)
        if self._limit is not None and not self._receiving and self._received > HEAD_BYTES:
            self._refuse(431, f"the request's headers have more than {HEAD_BYTES} bytes.")

    def eof_received(self) -> bool:  # type: ignore[override]
        """Keeps the connection open while replies are due: the client may still read them."""
        cycles = self._unfinished()
        if not cycles or self._receiving:
            return False
        cycles[-1].keep_alive = False
        if cycles[0].scope["http_version"] != "1.0" and not cycles[0].response_started:
            self.transport.write(CONTINUE)
        self._cancel()
        self._limit = self.loop.call_later(GONE_SECONDS, self._close_if_gone)
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        """Tells all running requests that their client is gone."""
        self._cancel()
        for cycle in self._unfinished():
            cycle.disconnected = True
            cycle.message_event.set()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Refuses what is no HTTP."""
        self._refuse(400, "this is no request of HTTP/1.1.")

    def _parse(self, data: memoryview) -> None:
        """Parses what came. A wish for another protocol, as Java's client sends with its first request, is ignored.

        Servers may do so (RFC 9110, 7.8), but httptools drops the body of such a request: it is parsed again without.
        """
        while data:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                method = self.parser.get_method()
                if method == b"CONNECT":
                    raise httptools.HttpParserError from None
                (parsed,) = upgrade.args
                data = data[parsed:]
                lines = [b"%s %s HTTP/%s" % (method, self.url, self.parser.get_http_version().encode())]
                lines += [b"%s: %s" % header for header in self.headers if header[0] != b"upgrade"]
                self.parser.feed_data(b"\r\n".join([*lines, b"", b""]))

    def _unfinished(self) -> list[RequestResponseCycle]:
        return [cycle for cycle in self._cycles if not cycle.response_complete]

    def _close_if_gone(self) -> None:
        if self.transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.transport.abort()
        else:
            self._limit = self.loop.call_later(GONE_SECONDS, self._close_if_gone)

    def _expect_head(self) -> None:
        self._cancel()
        self._received = 0
        self._limit = self.loop.call_later(HEAD_SECONDS, self._end_wait)

    def _end_wait(self) -> None:
        if self._unfinished():
            self._expect_head()  # of a later request, whose client waits for this reply
        elif self._received:
            self._refuse(408, f"the request's headers did not come within {HEAD_SECONDS:g} s.")
        else:
            self.transport.close()

    def _refuse(self, status: int, sentence: str) -> None:
        self._cancel()
        if self._unfinished():  # a reply that is being written
            self.transport.close()
            return
        body = write_json(error_body(HTTPError(status, sentence)))
        head = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nContent-Type: application/json\r\n"
        self.transport.write(f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body)
        self.transport.close()

    def _cancel(self) -> None:
        if self._limit is not None:
            self._limit.cancel()
            self._limit = None


class _Reply(asyncio.Transport):
    """Sends the head of a reply with the first part of its body.

    A system call less: after each one, the thread that generates may have the interpreter for milliseconds.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        super().__init__()
        self._transport, self._held, self._begun = transport, b"", False

    def write(self, data: bytes) -> None:  # type: ignore[override]
        """Sends a part of the reply with what was held, or holds the first one."""
        if data == CONTINUE:
            self._transport.write(data)
        elif not self._begun:
            self._begun, self._held = True, data
        else:
            self._transport.write(self._held + data)
            self._held = b""

    def close(self) -> None:
        """Closes the connection after what was held is sent."""
        if self._held:
            self.write(b"")
        self._transport.close()

    def is_closing(self) -> bool:
        return self._transport.is_closing()
