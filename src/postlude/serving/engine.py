"""ServerEngine: the rollout engine of a run that uses servers. Rank 0 sends requests, and all ranks sync weights."""

from __future__ import annotations

import secrets
from collections.abc import Callable

from postlude.engine import Engine
from postlude.generate.protocol import FinishedCompletion, Request
from postlude.serving.clients.client import GenerationClient
from postlude.serving.weights.adapter_sync import make_sync
from postlude.serving.weights.sync import SyncOptions, WeightSync
from postlude.world.agreement import Rank0Controller, on_rank0


class ServerEngine:
    """Rollout engine backed by inference servers, which can generate while the ranks train. A `DistributedEngine`.

    `make_client` makes the client, on rank 0. With a training `engine` and `sync`, servers get its weights before they
    generate; else they keep their own. A version of the weights is named START.STEP. START is a random id of each
    start of the run (`start_id`), because a step that is repeated after a restart may give other weights.
    """

    fixed_order = False

    def __init__(
        self,
        make_client: Callable[[], GenerationClient],
        *,
        engine: Engine | None = None,
        sync: SyncOptions | None = None,
    ) -> None:
        self.engine = engine
        self.sync: WeightSync | None = None
        self.controller: Rank0Controller[None, None] = Rank0Controller(lambda _: self.sync_weights())
        self._client: GenerationClient | None = None
        try:
            self._client = make_client() if self.controller.is_rank0 else None
            self.start_id: str = on_rank0(lambda: secrets.token_hex(4), self.controller.group)
            if engine is not None and sync is not None:
                self.sync = make_sync(engine, self._client, sync, self.controller.group)
        except BaseException:
            self.close()
            raise

    @property
    def client(self) -> GenerationClient:
        """The client, on rank 0."""
        assert self._client is not None, "only rank 0 has the client"
        return self._client

    def sync_weights(self) -> None:
        """Syncs the engine's weights to servers, if they are new or a server lacks them. Every rank calls it."""
        if self.engine is not None and self.sync is not None:
            self.sync.sync(f"{self.start_id}.{self.engine.step}")

    def check_health(self) -> None:
        """Makes all ranks send weights if no server can generate without them. Rank 0 calls it while all wait."""
        if self.sync is not None and self.sync.is_blocked():
            self.controller.call_all(None)

    def submit(self, request: Request) -> int:
        """Sends a request without waiting. Call it on rank 0 only."""
        return self.client.submit(request)

    def poll(self, timeout: float | None = 0.0) -> list[FinishedCompletion]:
        """Returns the completions finished since the last call. Call it on rank 0 only."""
        return self.client.poll(timeout)

    def take_metrics(self) -> dict[str, float]:
        """Returns the metrics of servers since the last call. Call it on rank 0 only."""
        pool, counts = self.client.pool, self.client.take_counts()
        metrics: dict[str, float] = {
            "servers/up": pool.count_up(),
            "servers/failed": counts.failed,
            "servers/retried": counts.retried,
        }
        if self.sync is not None:
            metrics["servers/reload_seconds"] = max((server.reload_seconds for server in pool.servers), default=0.0)
            metrics |= self.sync.take_metrics()
            results = [server.probe_result for server in pool.servers if server.state == "up"]
            differences = [result.logprob_diff for result in results if result is not None]  # of log-probs
            metrics |= {"sync/logprob_diff": max(differences)} if differences else {}
        return {name: float(value) for name, value in metrics.items()}

    def close(self) -> None:
        """Closes the client, and removes the weight files."""
        if self._client is not None:
            self._client.close()
        if self.sync is not None:
            self.sync.close()
        self.controller.close()
