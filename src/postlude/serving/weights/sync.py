"""How an engine's weights reach servers: by a directory that all see, or sent into their memory. What that took.

Every rank makes the same calls; the first one has the servers.
"""

from __future__ import annotations

import shutil
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Literal

import torch.distributed as dist

from postlude.engine import Engine
from postlude.hf.checksum import checksum
from postlude.serving.clients.client import GenerationClient
from postlude.serving.clients.remote_server import Weights
from postlude.serving.errors import ServerError
from postlude.serving.weights.transfer import WeightTransfer
from postlude.world.agreement import on_rank0

WEIGHTS = "weights"  # in the run's directory: what servers read
SyncMethod = Literal["disk", "network"]


class WeightSync(ABC):
    """One way. Every `checksum_every`th time, from the first on, servers are compared by their checksums; 0 for never.

    `group` is of all ranks, and has the patience to wait for servers; None takes the ranks' own.
    """

    def __init__(
        self,
        engine: Engine,
        servers: GenerationClient | None,
        *,
        group: dist.ProcessGroup | None = None,
        checksum_every: int = 0,
    ) -> None:
        self.engine, self._servers, self.group, self.checksum_every = engine, servers, group, checksum_every
        self.given: str | None = None
        self.costs: dict[str, float] = {}
        """Of the last time, as metrics, on the first rank."""
        self._times = 0

    @property
    def servers(self) -> GenerationClient:
        """Of the first rank."""
        assert self._servers is not None, "the first rank alone talks to servers"
        return self._servers

    def bring(self, version: str) -> None:
        """Have servers use the engine's weights, under the name `version`, where they do not."""
        if not self._wanted(version):
            return
        began = time.perf_counter()
        size = self._bring(version)
        if self.given != version:  # else one that came late was brought what others have
            self.given = version
            self._check()
        self.costs |= {"servers/sync_seconds": time.perf_counter() - began, "servers/sync_bytes": float(size)}

    def is_stuck(self) -> bool:
        """Whether no server can answer before it is brought weights. The first rank asks."""
        return False

    def take_costs(self) -> dict[str, float]:
        """What bringing weights took since the last time; nothing where none were brought."""
        costs, self.costs = self.costs, {}
        return costs

    @abstractmethod
    def close(self) -> None:
        """Let go of what servers no longer need."""

    def _wanted(self, version: str) -> bool:
        return self.given != version

    def _check(self) -> None:
        self._times += 1
        if self.checksum_every and (self._times - 1) % self.checksum_every == 0:
            began = time.perf_counter()
            on_rank0(self._compare, self.group)
            self.costs["servers/check_seconds"] = time.perf_counter() - began

    def _compare(self) -> None:
        self.servers.renewed()
        if self.servers.compares():
            self.servers.compare(self._checksum())

    @abstractmethod
    def _bring(self, version: str) -> int:
        """How many bytes the weights have."""

    @abstractmethod
    def _checksum(self) -> str:
        """Of what was brought last. The first rank asks."""


class DiskSync(WeightSync):
    """All ranks stream the weights, the first writes safetensors below `directory`, and servers read them there."""

    def __init__(
        self,
        engine: Engine,
        servers: GenerationClient | None,
        directory: Path,
        *,
        group: dist.ProcessGroup | None = None,
        checksum_every: int = 0,
        untied: bool = False,
        wait: bool = True,
    ) -> None:
        super().__init__(engine, servers, group=group, checksum_every=checksum_every)
        self.untied, self.wait = untied, wait
        self.room = directory.expanduser().absolute() / WEIGHTS

    def close(self) -> None:
        """Remove what servers have read."""
        if self._servers is not None:
            shutil.rmtree(self.room, ignore_errors=True)

    def _bring(self, version: str) -> int:
        began = time.perf_counter()
        path = self.room / version
        try:
            self.engine.export_hf(path, untied=self.untied)
        except OSError as error:
            raise ServerError(
                f"weights for servers could not be written below {self.room}: {error} "
                "There has to be room for them twice."
            ) from error
        self.costs["servers/write_seconds"] = time.perf_counter() - began
        return on_rank0(lambda: self._tell(path), self.group)

    def _tell(self, path: Path) -> int:
        self.servers.update(str(path), path.name, wait=self.wait)
        kept = self.servers.directories()
        for other in path.parent.iterdir():
            if str(other) not in kept:
                shutil.rmtree(other, ignore_errors=True)
        return sum(file.stat().st_size for file in path.glob("*.safetensors"))

    def _checksum(self) -> str:
        assert self.given is not None
        return checksum(self.room / self.given)


class NetworkSync(WeightSync):
    """All ranks stream the weights, and send them to servers. Nothing is written.

    A server that comes late waits until all ranks are here the next time.
    """

    def __init__(
        self,
        engine: Engine,
        servers: GenerationClient | None,
        *,
        seconds: float,
        group: dist.ProcessGroup | None = None,
        checksum_every: int = 0,
    ) -> None:
        super().__init__(engine, servers, group=group, checksum_every=checksum_every)
        self.transfer = WeightTransfer(engine, seconds=seconds, group=group)
        self._sent = ""

    def close(self) -> None:
        """Let go of the channels."""
        self.transfer.close()

    def _wanted(self, version: str) -> bool:
        return super()._wanted(version) or on_rank0(self._any_waits, self.group)

    def is_stuck(self) -> bool:
        """Whether all servers that are there came after the last time."""
        return self._any_waits() and not self.servers.fleet.up()

    def _any_waits(self) -> bool:
        return self.servers.fleet.any_waits()

    def _bring(self, version: str) -> int:
        """Until a server has them: those that fail on the way may come again, and when none is left that is said."""
        weights = Weights(None, version)
        while True:
            sent = self.transfer.send(self._servers, weights)
            if on_rank0(lambda: self.servers.fleet.up() > 0, self.group):
                self.costs["servers/send_seconds"] = sent.seconds
                self._sent = sent.checksum
                return sent.bytes

    def _checksum(self) -> str:
        return self._sent


def make_weight_sync(
    way: SyncMethod,
    engine: Engine,
    servers: GenerationClient | None,
    *,
    directory: Path | None,
    group: dist.ProcessGroup | None = None,
    seconds: float = 60.0,
    checksum_every: int = 0,
    untied: bool = False,
    wait: bool = True,
) -> WeightSync:
    """The way that a config names. Without `wait` ranks go on while servers read."""
    if way == "network":
        return NetworkSync(engine, servers, seconds=seconds, group=group, checksum_every=checksum_every)
    assert directory is not None
    return DiskSync(engine, servers, directory, group=group, checksum_every=checksum_every, untied=untied, wait=wait)
