"""RequestQueue: requests that wait for a server, first in, first out."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from postlude.serving.clients.remote_server import RemoteServer
from postlude.serving.errors import ServerError

ALIVE = ("connecting", "up", "needs_weights")  # states of servers that may take requests, now or soon


@dataclass(frozen=True)
class _QueuedRequest:
    server_future: asyncio.Future[RemoteServer]
    avoided: AbstractSet[RemoteServer]


class RequestQueue:
    """Assigns requests to the servers of a pool.

    `has_capacity` returns whether a server takes another request. `outage` returns an error message when no
    server is left, else "".
    """

    def __init__(
        self, servers: Sequence[RemoteServer], has_capacity: Callable[[RemoteServer], bool], outage: Callable[[], str]
    ) -> None:
        self.servers, self.has_capacity, self.outage = servers, has_capacity, outage
        self._queue: deque[_QueuedRequest] = deque()
        self._assigned = 0

    async def assign(self, avoided: AbstractSet[RemoteServer]) -> RemoteServer:
        """Returns the server for the next request and counts the request as outstanding there.

        It is the one with the fewest outstanding requests; ties are broken round-robin. Servers in `avoided` are used
        only if there are no others.
        """
        queued = _QueuedRequest(asyncio.get_running_loop().create_future(), avoided)
        self._queue.append(queued)
        self.dispatch()
        try:
            return await queued.server_future
        except asyncio.CancelledError:
            if (
                queued.server_future.done()
                and not queued.server_future.cancelled()
                and not queued.server_future.exception()
            ):
                queued.server_future.result().load.outstanding -= 1
                self.dispatch()
            raise

    def dispatch(self) -> None:
        """Assigns waiting requests while servers have capacity. In an outage, they fail."""
        while self._queue and self._queue[0].server_future.done():
            self._queue.popleft()  # cancelled
        if not self._queue:
            return
        if outage := self.outage():
            while self._queue:
                queued = self._queue.popleft()
                if not queued.server_future.done():
                    queued.server_future.set_exception(ServerError(outage))
            return
        without_server = []
        while self._queue:
            available = [server for server in self.servers if self.has_capacity(server)]
            if not available:
                break
            queued = self._queue.popleft()
            if queued.server_future.done():
                continue
            preferred = [server for server in self.servers if server.state in ALIVE and server not in queued.avoided]
            if queued.avoided and preferred:
                available = [server for server in preferred if server in available]
            if not available:
                without_server.append(queued)
                continue
            self._assigned += 1
            round_robin = {server: (index - self._assigned) % len(available) for index, server in enumerate(available)}
            server = min(available, key=lambda server: (server.load.outstanding, round_robin[server]))
            server.load.outstanding += 1
            queued.server_future.set_result(server)
        self._queue.extendleft(reversed(without_server))
