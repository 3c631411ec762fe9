"""Whether a request may come from a page of another site, which browsers let send to servers of this machine too.

Such a page cannot set the header of a key, send JSON, or leave out its origin. A name of its own that it has lead to
this machine's address is seen in `Host`.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

JSON = "application/json"


@dataclass(frozen=True)
class SourceCheck:
    """The check of a server without a key."""

    host: str
    """The name or address at which it listens."""
    key_option: str
    """How the user gives it a key."""

    def refusal(self, headers: Mapping[str, str]) -> str | None:
        """Returns why a request is refused (status 403); None if it is not. Names of headers are in lower case."""
        named, origin = headers.get("host", ""), headers.get("origin")
        key = f"or start the server with a key ({self.key_option}), which requests must then send"
        if not self._is_own_name(named):
            return (
                f"the request's Host is {named[:80]!r}, but without a key this server replies under its own names "
                f"only. Connect to localhost, {self.host} or an address, {key}."
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
        if name in ("localhost", self.host.lower()) or name.endswith(".localhost"):
            return True
        try:
            ipaddress.ip_address(name.partition("%")[0])
        except ValueError:
            return False
        return True  # only a name can be made to lead here from elsewhere


def type_refusal(headers: Mapping[str, str], *types: str) -> str | None:
    """Returns why the Content-Type of a body is refused (status 415); None if it is one of `types`."""
    sent = headers.get("content-type", "")
    if sent.partition(";")[0].strip().lower() in types:
        return None
    return f"the request's Content-Type is {sent[:60]!r}; send {' or '.join(types)}."
