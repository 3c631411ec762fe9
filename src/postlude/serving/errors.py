"""What can go wrong with a server. Each is a clause that follows its address: "http://a:8000 gave no answer"."""

from __future__ import annotations


class ServerError(OSError):
    """Servers did not give the answers that were asked for, in a sentence."""


class ServerUnavailable(Exception):
    """No connection, a broken one, no answer in time, or one that says "not now". Another attempt may do."""

    def __init__(self, clause: str, after: float = 0.0) -> None:
        super().__init__(clause)
        self.after = after
        """Seconds that the server asks to be left alone for."""


class RequestCancelled(ServerUnavailable):
    """We let go of the connection, since another request showed that the server is not to be asked."""


class ServerBusy(ServerUnavailable):
    """The server is well but does not answer this now, such as with status 429: it is asked again a little later."""


class InvalidResponse(Exception):
    """An answer that is none. The server is not what it was taken for, and is left out."""


class RequestRefused(Exception):
    """The server read the request, and will not do it. Another one may."""

    def __init__(self, clause: str, status: int = 400) -> None:
        super().__init__(clause)
        self.status = status
