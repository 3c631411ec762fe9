"""ProxyForwarder: connects what arrives at a socket of a sandbox to the proxy outside.

A program in a network of its own reaches nothing but what listens there. The first process inside makes a socket that
listens at the proxy's address, and sends it here through a Unix socket in the work directory (`first_process.py`). A
socket belongs to the network it was made in, whoever accepts from it. This file needs the standard library alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading

from postlude.rollout.sandboxes.process import SOCKET_NAME

CHUNK = 1 << 16
CONNECTIONS = 256  # of a program at a time
HANDOVER_LIMIT = 10.0  # seconds between connecting and sending the socket


class ProxyForwarder:
    """Takes the socket of one sandbox, then forwards its connections in a thread."""

    def __init__(self, workdir: str, proxy: str) -> None:
        host, _, port = proxy.rpartition(":")
        self.address = host, int(port)
        self.path = os.path.join(workdir, SOCKET_NAME)
        self.handover = socket.socket(socket.AF_UNIX)
        self._open = 0
        os.chdir(workdir)  # a supervisor has no other use for its current directory
        try:
            self._remove()
            self.handover.bind(SOCKET_NAME)
        finally:
            os.chdir("/")
        self.handover.listen(1)

    def receive(self) -> None:
        """Takes the socket that the sandbox sends, and starts to forward."""
        connection, _ = self.handover.accept()
        with connection:
            connection.settimeout(HANDOVER_LIMIT)
            with contextlib.suppress(OSError):
                _, descriptors, _, _ = socket.recv_fds(connection, 1, 1)
                if descriptors:
                    listener = socket.socket(fileno=descriptors[0])
                    listener.set_inheritable(False)
                    threading.Thread(target=asyncio.run, args=(self._serve(listener),), daemon=True).start()
                    self.close()
                    connection.sendall(b".")

    def close(self) -> None:
        """Takes no socket from now on. What is forwarded goes on."""
        self.handover.close()
        self._remove()

    def _remove(self) -> None:
        with contextlib.suppress(OSError):
            os.unlink(self.path)

    async def _serve(self, listener: socket.socket) -> None:
        server = await asyncio.start_server(self._forward, sock=listener)
        async with server:
            await server.serve_forever()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forwards one connection until both sides have ended it."""
        self._open += 1
        if self._open <= CONNECTIONS:
            await forward(reader, writer, self.address)
        else:
            writer.close()
        self._open -= 1


async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, address: tuple[str, int]) -> None:
    """Connects a connection to another address, until both sides have ended it."""
    with contextlib.closing(writer), contextlib.suppress(OSError):
        other_reader, other_writer = await asyncio.open_connection(*address)
        with contextlib.closing(other_writer):
            await asyncio.gather(_copy(reader, other_writer), _copy(other_reader, writer))


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(CHUNK):
        writer.write(data)
        await writer.drain()
    writer.write_eof()
