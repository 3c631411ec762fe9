"""ClientTurns: lets one request at a time pass; clients that wait take turns."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator


class ClientTurns:
    """A lock whose next holder is of the client that has waited longest since its last turn."""

    def __init__(self) -> None:
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # in the order of their turns
        self._held = False

    @contextlib.asynccontextmanager
    async def turn(self, client: str) -> AsyncIterator[None]:
        """Waits for a turn of the client, and holds it."""
        if self._held:
            future = asyncio.get_running_loop().create_future()
            self._waiting.setdefault(client, deque()).append(future)
            try:
                await future
            except asyncio.CancelledError:
                if future.done() and not future.cancelled():  # it had just been given the turn
                    self._pass_on()
                raise
        self._held = True
        try:
            yield
        finally:
            self._pass_on()

    def _pass_on(self) -> None:
        while self._waiting:
            client = next(iter(self._waiting))
            futures = self._waiting.pop(client)
            future = futures.popleft()
            if futures:
                self._waiting[client] = futures  # behind the others
            if not future.cancelled():
                future.set_result(None)
                return
        self._held = False
