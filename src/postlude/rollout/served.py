"""Answers of servers for the ranks of a run: the first rank talks to them."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from pathlib import Path

from postlude.engine import Engine
from postlude.rollout.protocol import Completion, Finished, Request
from postlude.rollout.sampling import Sampling
from postlude.rollout.servers.engine import HTTPEngine
from postlude.rollout.syncing import Sync, Way, sync_of
from postlude.world.agreement import Lead, first_rank_says


class ServedAnswers:
    """A `RankedEngine` of servers, which answer beside whatever the ranks do.

    Given an `engine`, they get its weights before they are asked; else they keep theirs. Weights go by `sync`: below
    `directory`, which servers must see under the same path, or over the network, where a server may take `seconds` for
    a part of them; `check_every` is `Sync`'s, and `untied` writes a tied head as one of its own. Without `wait`
    ranks go on while servers read what is on disk. They have the name START.STEP, START being new with each start of
    the run: a step that is done again may have made others.
    """

    together = False

    def __init__(
        self,
        connect: Callable[[], HTTPEngine],
        *,
        engine: Engine | None = None,
        directory: Path | None = None,
        sync: Way = "disk",
        seconds: float = 60.0,
        check_every: int = 0,
        untied: bool = False,
        wait: bool = True,
    ) -> None:
        self.engine = engine
        self.sync: Sync | None = None
        self.lead: Lead[None, None] = Lead(lambda _: self.refresh())
        self.servers: HTTPEngine | None = None
        try:
            self.servers = connect() if self.lead.leads else None
            self.start: str = first_rank_says(lambda: secrets.token_hex(4), self.lead.group)
            if engine is not None:
                self.sync = sync_of(
                    sync,
                    engine,
                    self.servers,
                    directory=directory,
                    group=self.lead.group,
                    seconds=seconds,
                    check_every=check_every,
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

    def tend(self) -> None:
        """Have all ranks send weights, if nobody can answer without them. The first rank calls it while all wait."""
        if self.sync is not None and self.sync.is_stuck():
            self.lead.give(None)

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling | Sequence[Sampling], n: int = 1, *, first: int = 0
    ) -> list[list[Completion]]:
        """The servers' answers. The first rank asks."""
        return self._servers.generate(prompts, sampling, n, first=first)

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
        self.lead.close()

    @property
    def _servers(self) -> HTTPEngine:
        assert self.servers is not None, "the first rank alone talks to servers"
        return self.servers
