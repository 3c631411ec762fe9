"""WeightSync: sends an engine's weights to servers, through a directory that all can read or over the network.

Every rank makes the same calls; only rank 0 has the client of the servers.

`ChecksumComparison` checks that servers hold the same weights, by the hashes that they report.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import shutil
import time
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch.distributed as dist

from postlude.engine import Engine
from postlude.engine.export import Untied, export
from postlude.generate.probe import Probe, WeightProbe
from postlude.hf.tensor_sources import checksum
from postlude.options import SyncMethod
from postlude.serving.clients.client import GenerationClient
from postlude.serving.clients.remote_server import RemoteServer
from postlude.serving.clients.server_pool import ServerPool
from postlude.serving.clients.server_weights import WeightsVersion
from postlude.serving.errors import InvalidResponse, RequestRefused, ServerError, ServerUnavailable
from postlude.serving.weights.delta import WeightPieces
from postlude.serving.weights.transfer import WeightTransfer
from postlude.world.agreement import on_rank0

WEIGHTS = "weights"  # in the run's directory: what servers read
LOG = logging.getLogger("postlude")
UNCHANGED = "has its previous weights, by their checksum, after it was given new ones"


@dataclass(frozen=True)
class SyncOptions:
    directory: Path
    """The run's directory. With `method="disk"`, servers see it under the same path."""
    method: SyncMethod = "disk"
    timeout: float = 60.0
    """Seconds that a server may take to join a channel or to receive one broadcast."""
    checksum_every: int = 0
    """Compare the servers' checksums at every n-th sync, beginning with the first; 0 is never."""
    untied: bool = False
    """Write a tied head as a tensor of its own."""
    probe: WeightProbe | None = None
    """Compares log-probs of servers with the engine's after every sync."""
    wait: bool = True
    """Whether ranks wait until servers have read weights from disk."""
    sleep: bool = False
    """Whether servers free their memory while the trainer trains, with `method="ipc"`."""


class WeightSync(ABC):
    """Sends weights to servers. `group` has all ranks and a timeout longer than servers take; None is the default."""

    def __init__(
        self,
        engine: Engine,
        client: GenerationClient | None,
        options: SyncOptions,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.engine, self._client, self.options, self.group = engine, client, options, group
        self.version: str | None = None
        self.metrics: dict[str, float] = {}
        """Metrics of the last sync, on rank 0."""
        self._comparison: ChecksumComparison | None = None
        self._probe: Probe | None = None
        self._sync_count = 0

    @property
    def client(self) -> GenerationClient:
        assert self._client is not None, "only rank 0 has the client"
        return self._client

    def sync(self, version: str) -> None:
        """Makes servers use the engine's weights under the name `version`, if some do not."""
        if not self._is_needed(version):
            return
        start = time.perf_counter()
        if self.version != version and self.options.probe is not None:
            self._probe = self.options.probe.score()
        size = self._sync(version)
        if self.version != version:  # else only a late server got the weights
            self.version = version
            self._compare_checksums()
        self.metrics |= {"servers/sync_seconds": time.perf_counter() - start, "servers/sync_bytes": float(size)}

    def is_blocked(self) -> bool:
        """Whether no server can generate before the next sync. Rank 0 calls it."""
        return False

    def sleep(self) -> None:  # noqa: B027 - most servers keep their memory
        """Frees the memory of servers that share the trainer's devices. Every rank calls it after sampling."""

    def wake(self) -> None:  # noqa: B027
        """Lets servers that sleep generate with the weights of the last sync. Every rank calls it before sampling."""

    def take_metrics(self) -> dict[str, float]:
        """Returns the metrics of syncs since the last call."""
        metrics, self.metrics = self.metrics, {}
        return metrics

    @abstractmethod
    def close(self) -> None:
        """Releases what servers no longer need."""

    def _is_needed(self, version: str) -> bool:
        return self.version != version

    def _compare_checksums(self) -> None:
        self._sync_count += 1
        every = self.options.checksum_every
        if every and (self._sync_count - 1) % every == 0:
            start = time.perf_counter()
            on_rank0(self._compare_on_rank0, self.group)
            self.metrics["servers/check_seconds"] = time.perf_counter() - start

    def _compare_on_rank0(self) -> None:
        self._comparison = self._comparison or ChecksumComparison(self.client.pool)
        self.client.wait_for_reload()
        if self._comparison.is_possible():
            self.client.run(self._comparison.compare(self._checksum()))

    @abstractmethod
    def _sync(self, version: str) -> int:
        """Syncs, and returns the bytes of the weights."""

    @abstractmethod
    def _checksum(self) -> str:
        """Returns the checksum of the weights of the last sync. Rank 0 calls it."""


class DiskSync(WeightSync):
    """All ranks stream the weights, rank 0 writes them as safetensors, and servers read the files."""

    @property
    def root(self) -> Path:
        return self.options.directory.expanduser().absolute() / WEIGHTS

    def close(self) -> None:
        if self._client is not None:
            shutil.rmtree(self.root, ignore_errors=True)

    def _sync(self, version: str) -> int:
        start = time.perf_counter()
        path = self.root / version
        try:
            self.engine.failure_state.check()
            model = Untied(self.engine) if self.options.untied else self.engine
            export(model, path, None, self.engine.compute_dtype, card=None, overwrite=False)
        except OSError as error:
            raise ServerError(
                f"weights for servers could not be written below {self.root}: {error} "
                "There must be room for two copies of the weights."
            ) from error
        self.metrics["servers/write_seconds"] = time.perf_counter() - start
        return on_rank0(lambda: self._reload(WeightsVersion(str(path), version, self._probe), path), self.group)

    def _reload(self, weights: WeightsVersion, path: Path) -> int:
        """Makes servers read weights that were written to `path`, and deletes older versions. Returns their bytes."""
        self.client.reload(weights, wait=self.options.wait)
        in_use = self.client.directories_in_use()
        for directory in path.parent.iterdir():
            if str(directory) not in in_use:
                shutil.rmtree(directory, ignore_errors=True)
        return sum(file.stat().st_size for file in path.glob("*.safetensors"))

    def _checksum(self) -> str:
        assert self.version is not None
        return checksum(self.root / self.version)


class DeltaSync(DiskSync):
    """Servers read what changed since their version of the weights, or all. Where they see no files, rank 0 sends it.

    The directory of the last version is kept, to compare the next with it.
    """

    def _reload(self, weights: WeightsVersion, path: Path) -> int:
        start = time.perf_counter()
        base = None if self.version is None else self.root / self.version
        try:
            pieces = WeightPieces.of(path, weights.version, base if base is not None and base.exists() else None)
        except OSError as error:
            raise ServerError(
                f"the weights that changed could not be written below {self.root}: {error}. There must be room for "
                "two copies of the weights and what changed."
            ) from error
        size = super()._reload(replace(weights, pieces=pieces), path)
        self.metrics["servers/delta_seconds"] = time.perf_counter() - start
        if pieces.base is None:
            return size
        self.metrics["servers/changed"] = pieces.changed / pieces.total
        return pieces.delta_bytes


class NetworkSync(WeightSync):
    """All ranks stream the weights and send them into the memory of servers. A late server waits for the next sync."""

    _sent_checksum = ""

    @cached_property
    def transfer(self) -> WeightTransfer:
        return WeightTransfer(self.engine, timeout=self.options.timeout, group=self.group)

    def close(self) -> None:
        self.transfer.close()

    def is_blocked(self) -> bool:
        """Whether all servers that reply came after the last sync."""
        return self._any_needs_weights() and not self.client.pool.count_up()

    def _is_needed(self, version: str) -> bool:
        return super()._is_needed(version) or on_rank0(self._any_needs_weights, self.group)

    def _any_needs_weights(self) -> bool:
        return self.client.pool.any_needs_weights()

    def _sync(self, version: str) -> int:
        """Sends until a server has the weights: servers that fail may come back. Raises when none is left."""
        weights = WeightsVersion(None, version, self._probe)
        while True:
            result = self.transfer.send(self._client, weights)
            if on_rank0(lambda: self.client.pool.count_up() > 0, self.group):
                self.metrics["servers/send_seconds"] = result.seconds
                self._sent_checksum = result.checksum
                return result.bytes

    def _checksum(self) -> str:
        return self._sent_checksum


class ChecksumComparison:
    """Servers hash parameters as they are stored, fused and sharded, so only servers of equal layout are compared.

    A server that differs from the majority is excluded. So is one whose hashes did not change since the last
    comparison although the trainer's weights did. Without a majority, a warning is logged and all are kept.
    """

    def __init__(self, pool: ServerPool) -> None:
        self.pool = pool
        self.trainer_checksum: str | None = None
        """The trainer's checksum at the last comparison."""
        self.server_checksums: dict[RemoteServer, str] = {}
        """Each server's checksum at the last comparison."""

    def is_possible(self) -> bool:
        """Whether a server may report hashes."""
        return any(server.state == "up" and server.api.reports_hashes for server in self.pool.servers)

    async def compare(self, trainer_checksum: str) -> int:
        """Compares all servers that are up. Returns how many reported hashes."""
        servers = [server for server in self.pool.servers if server.state == "up"]
        reports = zip(servers, await asyncio.gather(*map(self._fetch_hashes, servers)), strict=True)
        hashes = {server: values for server, values in reports if values}
        checksums = {server: _combine(values) for server, values in hashes.items()}
        if self.trainer_checksum not in (None, trainer_checksum):
            for server, checksum in checksums.items():
                if self.server_checksums.get(server) == checksum:
                    self.pool.fail(server, InvalidResponse(UNCHANGED))
        by_layout: dict[frozenset[str], list[RemoteServer]] = defaultdict(list)
        for server, values in hashes.items():
            if server.state == "up":
                by_layout[frozenset(values)].append(server)
        for equal_layout in by_layout.values():
            self._compare(equal_layout, hashes, checksums)
        self.trainer_checksum, self.server_checksums = trainer_checksum, checksums
        return len(hashes)

    def _compare(
        self,
        servers: list[RemoteServer],
        hashes: Mapping[RemoteServer, Mapping[str, str]],
        checksums: Mapping[RemoteServer, str],
    ) -> None:
        counts = Counter(checksums[server] for server in servers).most_common()
        if len(counts) == 1:
            return
        if counts[0][1] == counts[1][1]:
            urls = [next(s.url for s in servers if checksums[s] == checksum) for checksum, _ in counts[:2]]
            LOG.warning(
                "%s have different weights after the same update, and there is no majority to tell which are right.",
                " and ".join(urls),
            )
            return
        correct = next(server for server in servers if checksums[server] == counts[0][0])
        for server in servers:
            if checksums[server] != counts[0][0]:
                different = [name for name, value in hashes[server].items() if hashes[correct][name] != value]
                problem = (
                    f"has other weights than {counts[0][1]} others after the same update: {len(different)} of "
                    f"{len(hashes[server])} tensors, such as {different[0]}"
                )
                self.pool.fail(server, InvalidResponse(problem))

    async def _fetch_hashes(self, server: RemoteServer) -> Mapping[str, str] | None:
        try:
            return await server.call(lambda api, send: api.parameter_hashes(send))
        except RequestRefused:  # an older version
            return None
        except (ServerUnavailable, InvalidResponse) as error:
            self.pool.fail(server, error)
            return None


def _combine(hashes: Mapping[str, str]) -> str:
    lines = "".join(f"{name} {hashes[name]}\n" for name in sorted(hashes))
    return hashlib.sha256(lines.encode()).hexdigest()
