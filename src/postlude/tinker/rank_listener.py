"""RankListener: where rank 0 connects to the HTTP process. Whoever else connects is closed, and delays nobody."""

from __future__ import annotations

import queue
import socket
import struct
import threading
from contextlib import suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener, answer_challenge, deliver_challenge

HANDSHAKE_SECONDS = 10.0
MAX_HANDSHAKES = 16  # at a time; further connections are closed
Address = str | tuple[str, int]


class RankListener:
    """Listens at a path, or at one address of this machine, for the process that knows `key`.

    Every connection proves that it knows the key, in a thread of its own and within `HANDSHAKE_SECONDS`, and so does
    this end. The traffic after it is not encrypted.
    """

    def __init__(self, address: Address, key: bytes) -> None:
        self._listener, self._key = Listener(address, backlog=MAX_HANDSHAKES), key
        self.address: Address = self._listener.address
        self._connections: queue.SimpleQueue[Connection | None] = queue.SimpleQueue()
        self._handshakes = threading.Semaphore(MAX_HANDSHAKES)
        threading.Thread(target=self._accept, name="tinker listener", daemon=True).start()

    def accept(self) -> Connection:
        """Waits for the first connection that knows the key. Raises EOFError if the listener is closed before."""
        connection = self._connections.get()
        if connection is None:
            raise EOFError
        return connection

    def close(self) -> None:
        """Stops to listen, and ends `accept`."""
        with suppress(OSError):
            Client(self.address).close()  # wakes the thread that accepts, which closing does not
        self._listener.close()
        self._connections.put(None)

    def _accept(self) -> None:
        while True:
            try:
                connection = self._listener.accept()
            except OSError:  # closed
                return
            if self._handshakes.acquire(blocking=False):
                threading.Thread(target=self._authenticate, args=(connection,), daemon=True).start()
            else:
                connection.close()

    def _authenticate(self, connection: Connection) -> None:
        try:
            _set_timeout(connection, HANDSHAKE_SECONDS)
            deliver_challenge(connection, self._key)
            answer_challenge(connection, self._key)
            _set_timeout(connection, 0.0)
        except (AuthenticationError, EOFError, OSError, ValueError):
            connection.close()
        else:
            self._connections.put(connection)
        finally:
            self._handshakes.release()


def _set_timeout(connection: Connection, seconds: float) -> None:
    """Lets reads and writes of a socket's connection fail after so many seconds; 0 lets them wait."""
    with socket.socket(fileno=socket.dup(connection.fileno())) as duplicate:  # options belong to both
        limit = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
        duplicate.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        duplicate.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
