"""RequestQueue: requests that wait for a server, in the order in which they came."""

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
class _Waiting:
    server: asyncio.Future[RemoteServer]
    avoided: AbstractSet[RemoteServer]


class RequestQueue:
    """Assigns requests to the servers of a pool.

    `has_capacity` tells whether a server takes another request. `outage` returns a sentence when no server is left.
    """

    def __init__(
        self, servers: Sequence[RemoteServer], has_capacity: Callable[[RemoteServer], bool], outage: Callable[[], str]
    ) -> None:
        self.servers, self.has_capacity, self.outage = servers, has_capacity, outage
        self._queue: deque[_Waiting] = deque()
        self._turn = 0

    async def assign(self, avoided: AbstractSet[RemoteServer]) -> RemoteServer:
        """Returns the server for the next request and counts the request as outstanding there.

        It is the one with the fewest outstanding requests; equal ones take turns. Servers in `avoided` are used only
        where there are no others.
        """
        waiting = _Waiting(asyncio.get_running_loop().create_future(), avoided)
        self._queue.append(waiting)
        self.dispatch()
        try:
            return await waiting.server
        except asyncio.CancelledError:
            if waiting.server.done() and not waiting.server.cancelled() and not waiting.server.exception():
                waiting.server.result().outstanding -= 1
                self.dispatch()
            raise

    def dispatch(self) -> None:
        """Assign waiting requests while servers have capacity. In an outage, they fail."""
        while self._queue and self._queue[0].server.done():
            self._queue.popleft()  # cancelled
        if not self._queue:
            return
        if outage := self.outage():
            while self._queue:
                waiting = self._queue.popleft()
                if not waiting.server.done():
                    waiting.server.set_exception(ServerError(outage))
            return
        skipped = []
        while self._queue:
            available = [server for server in self.servers if self.has_capacity(server)]
            if not available:
                break
            waiting = self._queue.popleft()
            if waiting.server.done():
                continue
            others = [server for server in self.servers if server.state in ALIVE and server not in waiting.avoided]
            if waiting.avoided and others and not (available := [other for other in others if other in available]):
                skipped.append(waiting)
                continue
            self._turn += 1
            turns = {server: (index - self._turn) % len(available) for index, server in enumerate(available)}
            server = min(available, key=lambda server: (server.outstanding, turns[server]))
            server.outstanding += 1
            waiting.server.set_result(server)
        self._queue.extendleft(reversed(skipped))
