"""Ports that are held from the moment they are picked until someone listens there."""

from __future__ import annotations

import ipaddress
import socket
import sys


def is_loopback(host: str) -> bool:
    """Whether a server that listens at this name or address is reached from this machine alone."""
    try:
        found = {str(address[0]) for *_, address in socket.getaddrinfo(host or "0.0.0.0", None)}
    except OSError:
        return False
    return bool(found) and all(ipaddress.ip_address(each.partition("%")[0]).is_loopback for each in found)


class ReservedPort:
    """A port of this machine that was free, and that nobody else is given until it is released.

    A socket is bound to it and does not listen. Linux then gives it to none who asks for any port, also of another run,
    and lets a server listen there that sets SO_REUSEADDR, as servers do; elsewhere it is released at once.
    """

    def __init__(self, host: str) -> None:
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind((host, 0))
        self.number: int = self._socket.getsockname()[1]
        if sys.platform != "linux":
            self.release()

    def release(self) -> None:
        """Let others have it."""
        self._socket.close()
