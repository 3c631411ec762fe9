"""Answers of servers for the ranks of a run: the first rank talks to them."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from pathlib import Path

from postlude.engine import Engine
from postlude.generate.protocol import Completion, FinishedCompletion, Request
from postlude.generate.sampling_params import SamplingParams
from postlude.serving.clients.client import GenerationClient
from postlude.serving.weights.sync import SyncMethod, WeightSync, make_weight_sync
from postlude.world.agreement import Rank0Controller, on_rank0


class ServerEngine:
    """A `DistributedEngine` of servers, which answer beside whatever the ranks do.

    Given an `engine`, they get its weights before they are asked; else they keep theirs. Weights go by `sync`: below
    `directory`, which servers must see under the same path, or over the network, where a server may take `seconds` for
    a part of them; `checksum_every` is `WeightSync`'s, and `untied` writes a tied head as one of its own. Without
    `wait` ranks go on while servers read what is on disk. They have the name START.STEP, START being new with
    each start of the run: a step that is done again may have made others.
    """

    batched_polls = False

    def __init__(
        self,
        connect: Callable[[], GenerationClient],
        *,
        engine: Engine | None = None,
        directory: Path | None = None,
        sync: SyncMethod = "disk",
        seconds: float = 60.0,
        checksum_every: int = 0,
        untied: bool = False,
        wait: bool = True,
    ) -> None:
        self.engine = engine
        self.sync: WeightSync | None = None
        self.controller: Rank0Controller[None, None] = Rank0Controller(lambda _: self.refresh())
        self.servers: GenerationClient | None = None
        try:
            self.servers = connect() if self.controller.is_rank0 else None
            self.start: str = on_rank0(lambda: secrets.token_hex(4), self.controller.group)
            if engine is not None:
                self.sync = make_weight_sync(
                    sync,
                    engine,
                    self.servers,
                    directory=directory,
                    group=self.controller.group,
                    seconds=seconds,
                    checksum_every=checksum_every,
                    untied=untied,
                    wait=wait,
                )
        except BaseException:
            self.close()
            raise

    def refresh(self) -> None:
        """Have servers use the engine's weights, where a step was made since the last time or one came that lacks them.

        Every rank makes this call.
        """
        if self.engine is not None and self.sync is not None:
            self.sync.bring(f"{self.start}.{self.engine.step}")

    def check_health(self) -> None:
        """Have all ranks send weights, if nobody can answer without them. The first rank calls it while all wait."""
        if self.sync is not None and self.sync.is_stuck():
            self.controller.call_all(None)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams | Sequence[SamplingParams],
        n: int = 1,
        *,
        first: int = 0,
    ) -> list[list[Completion]]:
        """The servers' answers. The first rank asks."""
        return self._servers.generate(prompts, sampling, n, first=first)

    def submit(self, request: Request) -> int:
        """Ask for answers, and go on. The first rank asks."""
        return self._servers.submit(request)

    def poll(self, timeout: float | None = 0.0) -> list[FinishedCompletion]:
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
        if self.sync is not None:
            found["servers/reload_seconds"] = max((server.reload_seconds for server in fleet.servers), default=0.0)
            found |= self.sync.take_costs()
        return {name: float(value) for name, value in found.items()}

    def close(self) -> None:
        """Let go of the servers, and of the weights that they have read."""
        if self.servers is not None:
            self.servers.close()
        if self.sync is not None:
            self.sync.close()
        self.controller.close()

    @property
    def _servers(self) -> GenerationClient:
        assert self.servers is not None, "the first rank alone talks to servers"
        return self.servers
