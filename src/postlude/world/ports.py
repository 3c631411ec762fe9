"""Ports that are reserved from the moment they are picked until a server listens there."""

from __future__ import annotations

import ipaddress
import os
import socket
import sys
from pathlib import Path

LISTEN = "0A"  # the state of a listening socket in /proc/net/tcp


def is_loopback(host: str) -> bool:
    """Returns whether a server at this name or address can be reached from this machine only."""
    try:
        addresses = {str(address[0]) for *_, address in socket.getaddrinfo(host or "0.0.0.0", None)}
    except OSError:
        return False
    return bool(addresses) and all(ipaddress.ip_address(address.partition("%")[0]).is_loopback for address in addresses)


def is_own_listener(port: int) -> bool:
    """Returns whether what listens at a TCP port of this machine, belongs to this process's user.

    On Linux the kernel says so. On other systems nothing does, and the answer is yes.
    """
    tables = [Path("/proc/net", name) for name in ("tcp", "tcp6")]
    if not tables[0].exists():
        return True
    entries = [line.split() for table in tables if table.exists() for line in table.read_text().splitlines()[1:]]
    owners = {entry[7] for entry in entries if entry[3] == LISTEN and int(entry[1].rpartition(":")[2], 16) == port}
    return owners == {str(os.getuid())}


class ReservedPort:
    """A free port of this machine that no other process is given until it is released.

    A socket is bound to it and does not listen. Linux then gives the port to no process that asks for any port, but
    lets a server listen there that sets SO_REUSEADDR, as servers do. On other systems it is released at once.
    """

    def __init__(self, host: str) -> None:
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind((host, 0))
        self.number: int = self._socket.getsockname()[1]
        if sys.platform != "linux":
            self.release()

    def release(self) -> None:
        """Closes the socket."""
        self._socket.close()
