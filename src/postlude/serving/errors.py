"""Failures of a server. Each message is a clause that follows the server's address: "http://a:8000 gave no reply"."""

from __future__ import annotations


class ServerError(OSError):
    """No server could fulfil a request. The message is a whole sentence."""


class ServerUnavailable(Exception):
    """No connection, a broken one, no reply in time, or a reply that says to try later. A retry may succeed."""

    def __init__(self, clause: str, retry_after: float = 0.0) -> None:
        super().__init__(clause)
        self.retry_after = retry_after
        """Seconds that the server asks clients to wait."""


class RequestCancelled(ServerUnavailable):
    """The client closed the connection, because another request showed that the server cannot be used."""


class ServerBusy(ServerUnavailable):
    """The server works but takes no more requests now, for example status 429."""


class InvalidResponse(Exception):
    """A reply that no server of this kind gives. The server is excluded."""


class RequestRefused(Exception):
    """The server understood the request and rejects it. Another server may accept it."""

    def __init__(self, clause: str, status: int = 400, *, unknown_model: bool = False) -> None:
        super().__init__(clause)
        self.status = status
        self.unknown_model = unknown_model
        """Whether the server says that it does not have the request's model."""
