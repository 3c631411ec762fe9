"""Answers of servers for the ranks of a run: the first rank talks to them."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from postlude.engine import Engine
from postlude.rollout.protocol import Completion, Finished, Request
from postlude.rollout.sampling import Sampling
from postlude.rollout.servers.engine import HTTPEngine
from postlude.world.agreement import Lead, first_rank_says

WEIGHTS = "weights"  # in the run's directory: what servers read


class ServedAnswers:
    """A `RankedEngine` of servers, which answer beside whatever the ranks do.

    Given an `engine`, they get its weights before they are asked; else they keep theirs. Weights go by disk: all ranks
    stream them, the first writes safetensors below `directory`, which the servers must see under the same path, and
    tells each server to read them. They go by the name START.STEP, START being new with each start of the run: a step
    that is done again may have made others.
    """

    together = False

    def __init__(
        self, connect: Callable[[], HTTPEngine], *, engine: Engine | None = None, directory: Path | None = None
    ) -> None:
        self.engine, self.directory = engine, directory
        self.servers = connect() if dist.get_rank() == 0 else None
        self.lead: Lead[Any, Any] = Lead(lambda _: None)
        self.start: str = first_rank_says(lambda: secrets.token_hex(4))
        self.updated_at = -1
        self.reload_seconds = 0.0

    def refresh(self) -> None:
        """Write the engine's weights and have all servers read them, if a step was made since the last time."""
        if self.engine is None or self.updated_at == self.engine.step:
            return
        assert self.directory is not None
        room = self.directory.expanduser().absolute() / WEIGHTS
        path = room / f"{self.start}.{self.engine.step}"
        self.engine.export_hf(path, overwrite=True)
        first_rank_says(lambda: self._tell(path))
        self.updated_at = self.engine.step

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling | Sequence[Sampling], n: int = 1
    ) -> list[list[Completion]]:
        """The servers' answers. The first rank asks."""
        return self._servers.generate(prompts, sampling, n)

    def submit(self, request: Request) -> int:
        """Ask for answers, and go on. The first rank asks."""
        return self._servers.submit(request)

    def poll(self, timeout: float | None = 0.0) -> list[Finished]:
        """What has been answered since the last time."""
        return self._servers.poll(timeout)

    def take_metrics(self) -> dict[str, float]:
        """How the servers fared. The first rank asks."""
        fleet, counts = self._servers.fleet, self._servers.take_counts()
        found: dict[str, float] = {
            "servers/up": fleet.up(),
            "servers/failed": counts.failed,
            "servers/retried": counts.retried,
        }
        if self.engine is not None:
            found["servers/reload_seconds"] = max(server.reload_seconds for server in fleet.servers)
        return {name: float(value) for name, value in found.items()}

    def close(self) -> None:
        """Let go of the servers, and of the weights that they have read."""
        if self.servers is not None:
            self.servers.close()
            if self.directory is not None:
                shutil.rmtree(self.directory / WEIGHTS, ignore_errors=True)

    @property
    def _servers(self) -> HTTPEngine:
        assert self.servers is not None, "the first rank alone talks to servers"
        return self.servers

    def _tell(self, path: Path) -> None:
        self._servers.update(str(path), path.name)
        for other in path.parent.iterdir():
            if other != path:
                shutil.rmtree(other, ignore_errors=True)  # a server that comes is told of the newest alone
