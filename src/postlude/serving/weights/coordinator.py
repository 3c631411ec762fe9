"""TransferCoordinator: sends rank 0's requests during a weight transfer, and tracks which servers still take part."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from postlude.serving.clients.api import SendRequest, ServerAPI, TensorSpecs
from postlude.serving.clients.client import GenerationClient
from postlude.serving.clients.remote_server import RemoteServer, WeightsVersion
from postlude.serving.errors import InvalidResponse, RequestRefused, ServerUnavailable

ServerCall = Callable[[ServerAPI, SendRequest], Awaitable[None]]


@dataclass(frozen=True)
class TransferTarget:
    """A server that takes part in a transfer."""

    url: str
    connect_count: int
    """A channel that was opened at an earlier count is invalid."""
    workers: int


class TransferCoordinator:
    """One transfer. A server that fails is reported to its pool, and the others continue.

    A command goes to all servers at the same time and runs until the next command: ranks send weights meanwhile. No
    request waits longer than `timeout` seconds, since all ranks wait with it.
    """

    def __init__(self, client: GenerationClient, weights: WeightsVersion, timeout: float | None = None) -> None:
        self.client, self.weights, self.timeout = client, weights, timeout
        self._start_time = time.perf_counter()
        self._servers: dict[str, RemoteServer] = {}
        self._workers: dict[str, int] = {}
        self._running: dict[str, Future[bool]] = {}

    def targets(self) -> tuple[list[TransferTarget], set[str]]:
        """Returns the servers that reply and lack the weights, and the addresses of all servers.

        Raises `ServerError` when no server is left.
        """
        pool = self.client.pool
        self._servers = {server.url: server for server in self.client.run(pool.servers_to_update(self.weights))}

        def count_workers(url: str) -> ServerCall:
            async def count(api: ServerAPI, send: SendRequest) -> None:
                if not api.can_receive_weights:
                    raise InvalidResponse(f"is {api.name}, which takes no weights over the network; use sync: disk")
                self._workers[url] = await api.worker_count(send)

            return count

        self._start_commands({url: count_workers(url) for url in self._servers})
        targets = [TransferTarget(url, self._servers[url].connect_count, self._workers[url]) for url in self._wait()]
        return targets, {server.url for server in pool.servers}

    def join(self, infos: Mapping[str, Mapping[str, Any]]) -> None:
        """Makes the workers of servers join their channels."""

        def join(url: str) -> ServerCall:
            return lambda api, send: api.join_channel(send, infos[url], self._workers[url])

        self._start_commands({url: join(url) for url in infos if url in self._servers})

    def begin(self, failures: Mapping[str, str]) -> list[str]:
        """Makes servers pause and prepare. They get no requests until `finish`. Returns those that are ready."""
        ready = self._wait(failures)
        for server in self._servers.values():
            server.update_unconfirmed = True
            if server.state == "up":
                server.state = "needs_weights"
        self._start_commands(dict.fromkeys(ready, lambda api, send: api.begin_update(send)))
        return self._wait()

    def receive(self, specs: TensorSpecs, failures: Mapping[str, str]) -> list[str]:
        """Makes servers receive the next broadcast. Returns those that do."""
        self._start_commands(dict.fromkeys(self._wait(failures), lambda api, send: api.receive_tensors(send, specs)))
        return list(self._servers)

    def finish(self, failures: Mapping[str, str]) -> list[str]:
        """Makes servers use the new weights. Returns those that report the new version."""
        version = self.weights.version
        self._start_commands(dict.fromkeys(self._wait(failures), lambda api, send: api.finish_update(send, version)))
        for url in self._wait():
            server = self._servers[url]
            server.reload_seconds = time.perf_counter() - self._start_time
            confirm = self.client.pool.confirm(server, self.weights, timeout=self.timeout)
            self._running[url] = self.client.start(self._succeeds(server, confirm))
        return self._wait()

    def _start_commands(self, commands: Mapping[str, ServerCall]) -> None:
        for url, command in commands.items():
            server = self._servers[url]
            work = server.call(command, timeout=self.timeout)
            self._running[url] = self.client.start(self._succeeds(server, work))

    def _wait(self, failures: Mapping[str, str] | None = None) -> list[str]:
        """Waits for all commands. Returns the servers that still take part, without those whose channels failed."""
        for url, reason in (failures or {}).items():
            self._report_failure(url, ServerUnavailable(reason))
        running, self._running = self._running, {}
        for url, future in running.items():
            if not future.result():
                self._servers.pop(url, None)
        return list(self._servers)

    def _report_failure(self, url: str, error: Exception) -> None:
        if future := self._running.pop(url, None):
            future.cancel()
        if server := self._servers.pop(url, None):

            async def fail() -> None:
                self.client.pool.fail(server, error)

            self.client.run(fail())

    async def _succeeds(self, server: RemoteServer, work: Coroutine[Any, Any, None]) -> bool:
        """Returns whether `work` succeeded; a failure is reported to the pool."""
        try:
            await work
        except RequestRefused as error:
            self.client.pool.fail(server, InvalidResponse(f"could not take new weights: {error}"))
        except (ServerUnavailable, InvalidResponse) as error:
            self.client.pool.fail(server, error)
        else:
            return True
        return False


def assign_ranks(urls: Sequence[str], previous: Mapping[str, int], ranks: int) -> dict[str, int]:
    """Returns the rank that sends to each server: the previous one, else the rank with the fewest servers."""
    assigned = {url: previous[url] for url in urls if url in previous}
    for url in urls:
        if url not in assigned:
            load = list(assigned.values())
            assigned[url] = min(range(ranks), key=load.count)
    return assigned
