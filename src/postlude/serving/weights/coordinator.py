"""TransferCoordinator: on rank 0, tells servers which weights come next and keeps track of who still receives them."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from postlude.serving.clients.api import Ask, ServerAPI, TensorSpecs
from postlude.serving.clients.remote_server import RemoteServer, Weights
from postlude.serving.clients.server_pool import ServerPool
from postlude.serving.errors import InvalidResponse, RequestRefused, ServerUnavailable

Said = Callable[[ServerAPI, Ask], Awaitable[None]]


@dataclass(frozen=True)
class TransferTarget:
    """A server that takes part."""

    url: str
    meeting: int
    """How often it has come: a channel that was opened before the last time leads nowhere."""
    workers: int


class TransferCoordinator:
    """One handover. A server that fails is left to its fleet; the others go on.

    What is said is said to all at the same time, and goes on until the next thing is said: weights are sent meanwhile.
    No request waits longer than `seconds`, since all ranks wait with it.
    """

    def __init__(
        self,
        fleet: ServerPool,
        weights: Weights,
        start: Callable[[Coroutine[Any, Any, Any]], Future[Any]],
        seconds: float | None = None,
    ) -> None:
        self.fleet, self.weights, self._start, self.seconds = fleet, weights, start, seconds
        self._began = time.perf_counter()
        self._taking: dict[str, RemoteServer] = {}
        self._workers: dict[str, int] = {}
        self._said: dict[str, Future[bool]] = {}

    def takers(self) -> tuple[list[TransferTarget], set[str]]:
        """Who takes part: those that are there and lack the weights; and the addresses of all there are.

        Raises a sentence when nobody is left at all.
        """
        self._taking = {server.url: server for server in self._start(self.fleet.takers(self.weights)).result()}

        def count(url: str) -> Said:
            async def workers(api: ServerAPI, ask: Ask) -> None:
                if not api.receives:
                    raise InvalidResponse(f"speaks {api.name}, which takes no weights over the network; use sync: disk")
                self._workers[url] = await api.workers(ask)

            return workers

        self._say({url: count(url) for url in self._taking})
        taking = self._heard()
        known = {server.url for server in self.fleet.servers}
        return [TransferTarget(url, self._taking[url].meetings, self._workers[url]) for url in taking], known

    def join(self, places: Mapping[str, Mapping[str, Any]]) -> None:
        """Have the workers of servers join channels, each at its place."""

        def at(url: str) -> Said:
            return lambda api, ask: api.join(ask, places[url], self._workers[url])

        self._say({url: at(url) for url in places if url in self._taking})

    def begin(self, broken: Mapping[str, str]) -> list[str]:
        """Have them pause, and get ready. Returns who is."""
        for server in self._taking.values():
            server.unsure = True
        self._say(dict.fromkeys(self._heard(broken), lambda api, ask: api.begin(ask)))
        return self._heard()

    def take(self, tensors: TensorSpecs, broken: Mapping[str, str]) -> list[str]:
        """Have those that took all before take this, which is to be sent now. Returns who they are."""
        self._say(dict.fromkeys(self._heard(broken), lambda api, ask: api.take(ask, tensors)))
        return list(self._taking)

    def finish(self, broken: Mapping[str, str]) -> list[str]:
        """Have them use what they took. Returns who has the new weights, as they themselves say."""
        version = self.weights.version
        self._say(dict.fromkeys(self._heard(broken), lambda api, ask: api.finish(ask, version)))
        for url in self._heard():
            self._taking[url].reload_seconds = time.perf_counter() - self._began
            self._said[url] = self._start(self._attempt(self._taking[url], self._has(self._taking[url])))
        return self._heard()

    def _say(self, what: Mapping[str, Said]) -> None:
        for url, said in what.items():
            server = self._taking[url]
            self._said[url] = self._start(self._attempt(server, server.say(said, seconds=self.seconds)))

    def _heard(self, broken: Mapping[str, str] | None = None) -> list[str]:
        """Wait for all that was said. Returns who still takes part; `broken` are those to which a channel broke."""
        for url, reason in (broken or {}).items():
            self._drop(url, ServerUnavailable(reason))
        said, self._said = self._said, {}
        for url, future in said.items():
            if not future.result():
                self._taking.pop(url, None)
        return list(self._taking)

    def _drop(self, url: str, error: Exception) -> None:
        """Leave a server to its fleet, whatever it was asked last."""
        if future := self._said.pop(url, None):
            future.cancel()
        if server := self._taking.pop(url, None):

            async def fail() -> None:
                self.fleet.failed(server, error)

            self._start(fail()).result()

    async def _has(self, server: RemoteServer) -> None:
        await self.fleet.has(server, self.weights)

    async def _attempt(self, server: RemoteServer, work: Coroutine[Any, Any, None]) -> bool:
        """Whether it did what it was asked for."""
        try:
            await work
        except RequestRefused as error:
            self.fleet.failed(server, InvalidResponse(f"could not take new weights: {error}"))
        except (ServerUnavailable, InvalidResponse) as error:
            self.fleet.failed(server, error)
        else:
            return True
        return False


def merged(parts: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """What every rank found, as one."""
    found: dict[str, Any] = {}
    for part in parts:
        found |= part
    return found


def owners(urls: Sequence[str], before: Mapping[str, int], ranks: int) -> dict[str, int]:
    """Which rank sends to which server: as before where it did, else the one with the fewest of these."""
    found = {url: before[url] for url in urls if url in before}
    for url in urls:
        if url not in found:
            load = list(found.values())
            found[url] = min(range(ranks), key=load.count)
    return found
