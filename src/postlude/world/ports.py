"""Addresses that servers listen at: whether they are free, and who reaches them. Ports that are reserved."""

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


def check_address(host: str, port: int, keys: str) -> None:
    """Refuses an address that is not free, before a model is loaded. `keys` are the settings that change it."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server does
            trial.bind(address)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise OSError(f"cannot listen at {host}, port {port}: {reason}. Give another {keys}.") from error


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
        self._socket.close()
