"""SharedMemorySync: gives weights to servers on the ranks' own devices, which can sleep while the trainer trains."""

from __future__ import annotations

import asyncio
import time
from functools import cached_property

import torch.distributed as dist

from postlude.engine import Engine
from postlude.serving.clients.client import GenerationClient
from postlude.serving.clients.remote_server import RemoteServer
from postlude.serving.clients.server_weights import WeightsVersion
from postlude.serving.errors import InvalidResponse, RequestRefused, ServerError, ServerUnavailable
from postlude.serving.weights.sync import NetworkSync, SyncOptions
from postlude.serving.weights.transfer import SharedMemoryTransfer, WeightTransfer
from postlude.world.agreement import on_rank0


class SharedMemorySync(NetworkSync):
    """All ranks stream the weights into buffers that the servers on their devices read.

    With `options.sleep`, servers have neither weights nor KV cache between `sleep` and the next `sync` and `wake`. They
    sleep from the start. After `wake` their version and log-probs are checked, and then their checksums.
    """

    def __init__(
        self,
        engine: Engine,
        client: GenerationClient | None,
        options: SyncOptions,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(engine, client, options, group)
        self._unchecked_version: str | None = None  # whose checksums are to be compared
        self._sleepless: dict[RemoteServer, int] = {}  # the connection in which a server did not free its memory
        if options.sleep:
            on_rank0(lambda: self.client.connect(), group)  # noqa: PLW0108 - other ranks have no client
            self.sleep()

    @cached_property
    def transfer(self) -> WeightTransfer:
        return SharedMemoryTransfer(self.engine, timeout=self.options.timeout, group=self.group)

    def is_blocked(self) -> bool:
        """Whether all servers came after the last sync. Those that sleep cannot get weights while others generate."""
        return not self.options.sleep and super().is_blocked()

    def sleep(self) -> None:
        """Frees the servers' memory. Every rank calls it."""
        if self.options.sleep:
            start = time.perf_counter()
            on_rank0(lambda: self.client.run(self._sleep_all()), self.group)
            self.metrics["servers/sleep_seconds"] = time.perf_counter() - start

    def wake(self) -> None:
        """Lets servers that have the weights generate. Every rank calls it when there is room for their KV caches."""
        if self.options.sleep:
            start = time.perf_counter()
            on_rank0(lambda: self.client.run(self._wake_all()), self.group)
            self.metrics["servers/wake_seconds"] = time.perf_counter() - start
            if self._unchecked_version is not None:
                self._unchecked_version = None
                super()._compare_checksums()

    def _compare_checksums(self) -> None:
        if self.options.sleep:
            self._unchecked_version = self.version
        else:
            super()._compare_checksums()

    def _sync(self, version: str) -> int:
        if not self.options.sleep:
            return super()._sync(version)
        result = self.transfer.send(self._client, WeightsVersion(None, version, self._probe))
        if not result.servers:
            problems = on_rank0(self._problems, self.group)
            raise ServerError(f"no server took the weights: {problems}.")
        self.metrics["servers/send_seconds"] = result.seconds
        self._sent_checksum = result.checksum
        return result.bytes

    def _problems(self) -> str:
        """Returns why servers are not usable. Rank 0 calls it."""
        pool = self.client.pool
        return "; ".join([*(f"{server.url} {server.problem}" for server in pool.servers), *pool.unreplaced])

    async def _sleep_all(self) -> None:
        """Whatever their state: also a server that takes no requests holds memory. Others sleep when they connect."""
        pool = self.client.pool
        pool.sleep_timeout = self.options.timeout
        known = [server for server in pool.servers if server.connect_count and not server.is_asleep]
        awake = [server for server in known if self._sleepless.get(server) != server.connect_count]
        await asyncio.gather(*map(self._sleep, awake))

    async def _sleep(self, server: RemoteServer) -> None:
        replied = server.state in ("up", "needs_weights")
        try:
            await server.sleep(self.options.timeout)
        except (ServerUnavailable, InvalidResponse, RequestRefused) as error:
            self._sleepless[server] = server.connect_count  # one that hangs would be waited for at every step
            if replied:
                self.client.pool.fail(server, InvalidResponse(f"did not free its memory: {error}"))

    async def _wake_all(self) -> None:
        """Wakes the servers that have the newest weights. Those that came later sleep until the next sync."""
        pool = self.client.pool
        pool.sleep_timeout = None
        servers = [server for server in pool.servers if server.state == "needs_weights"]
        assert pool.weights is not None
        version = pool.weights.version
        await asyncio.gather(*(self._wake(server) for server in servers if server.weights.version == version))
        if not self.client.pool.count_up():
            raise ServerError(f"no server generates after its weights were updated: {self._problems()}.")

    async def _wake(self, server: RemoteServer) -> None:
        pool, timeout = self.client.pool, self.options.timeout
        assert pool.weights is not None
        try:
            await server.wake(timeout)
            await pool.confirm(server, pool.weights, timeout=timeout)
        except RequestRefused as error:
            pool.fail(server, InvalidResponse(f"did not allocate its memory: {error}"))
        except (ServerUnavailable, InvalidResponse) as error:
            # It would be given the same weights again, for which the trainer's are needed.
            pool.fail(server, InvalidResponse(str(error)))
