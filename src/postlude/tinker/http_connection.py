"""HTTPConnection: uvicorn's connection, which is closed if the headers of a request do not come, or are too long."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEAD_SECONDS = 10.0  # for the headers of a request, and for the first request of a connection
HEAD_BYTES = 64 * 1024


class HTTPConnection(HttpToolsProtocol):
    """One connection."""

    _limit: asyncio.TimerHandle | None = None
    _received = 0

    def connection_made(self, transport: Any) -> None:
        """Begins to wait for the first request."""
        super().connection_made(transport)
        self._expect_head()

    def on_message_begin(self) -> None:
        """Begins to wait for the rest of the headers."""
        super().on_message_begin()
        self._expect_head()

    def on_headers_complete(self) -> None:
        """Ends the wait."""
        self._cancel()
        super().on_headers_complete()

    def data_received(self, data: bytes) -> None:
        """Reads what came, and closes the connection if the headers go on after too many bytes."""
        super().data_received(data)
        self._received += len(data)
        if self._limit is not None and self._received > HEAD_BYTES:
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Ends the wait."""
        self._cancel()
        super().connection_lost(exc)

    def _expect_head(self) -> None:
        self._cancel()
        self._received = 0
        self._limit = self.loop.call_later(HEAD_SECONDS, self.transport.close)

    def _cancel(self) -> None:
        if self._limit is not None:
            self._limit.cancel()
            self._limit = None
