"""Who may use a server: those with a key or, without one, all but pages of other sites.

Browsers let such a page send to servers of this machine too. It cannot set the header of a key, send JSON, or leave out
its origin. A name of its own that it has lead to this machine's address is seen in `Host`.
"""

from __future__ import annotations

import hashlib
import ipaddress
from collections.abc import Iterable, Mapping
from urllib.parse import urlsplit

from postlude.serving.http.errors import HTTPError


class Keys:
    """The keys of a server that listens at `host`; `option` is how the user gives it some."""

    def __init__(self, keys: Iterable[str] | None, host: str, option: str) -> None:
        self._owners = None if keys is None else frozenset(map(_digest, keys))
        self._host, self._option = host, option

    def owner(self, headers: Mapping[str, str]) -> str | None:
        """Returns a name for the key of a request, or None if it has none, which a server with keys refuses.

        Names of headers are in lower case.
        """
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        key = headers.get("x-api-key") or (bearer.strip() if scheme.lower() == "bearer" else "")
        owner = _digest(key) if key else None
        if self._owners is None:
            if (reason := self._source_refusal(headers)) is not None:
                raise HTTPError(403, reason)
        elif owner not in self._owners:
            raise HTTPError(
                401,
                f"this server needs its key ({self._option}): send the header Authorization: Bearer KEY.",
                "invalid_api_key",
            )
        return owner

    def check_admin(self, path: str) -> None:
        """Refuses a route that changes what all clients get, if the server has no key."""
        if self._owners is None:
            raise HTTPError(
                403,
                f"{path} changes what all clients get, so it needs a key, and this server has none: start it with one "
                f"({self._option}), and send it as Authorization: Bearer KEY.",
            )

    def _source_refusal(self, headers: Mapping[str, str]) -> str | None:
        named, origin = headers.get("host", ""), headers.get("origin")
        key = f"or start the server with a key ({self._option}), which requests must then send"
        if not self._is_own_name(named):
            return (
                f"the request's Host is {named[:80]!r}, but without a key this server replies under its own names "
                f"only. Connect to localhost, {self._host} or an address, {key}."
            )
        if origin is not None and origin.lower().partition("://")[2] != named.lower():
            return (
                f"the request comes from a page of {origin[:80]!r}, and without a key this server takes none of other "
                f"sites. Leave out the header Origin, {key}."
            )
        return None

    def _is_own_name(self, named: str) -> bool:
        try:
            name = urlsplit(f"//{named}").hostname or ""
        except ValueError:
            return False
        if name in ("localhost", self._host.lower()) or name.endswith(".localhost"):
            return True
        try:
            ipaddress.ip_address(name.partition("%")[0])
        except ValueError:
            return False
        return True  # only a name can be made to lead here from elsewhere


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode(errors="surrogateescape")).hexdigest()[:24]
