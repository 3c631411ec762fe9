"""ServerEngine: the rollout engine of a run that uses servers. Rank 0 sends requests, and all ranks sync weights."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import replace
from operator import sub

from postlude.engine import Engine
from postlude.generate.protocol import FinishedCompletion, Request
from postlude.serving.clients.api import DraftCounts
from postlude.serving.clients.client import GenerationClient
from postlude.serving.clients.remote_server import STATUS_TIMEOUT, RemoteServer
from postlude.serving.clients.vllm import router_layers, select_layers
from postlude.serving.errors import InvalidResponse, RequestRefused, ServerError, ServerUnavailable
from postlude.serving.weights.adapter_sync import make_sync
from postlude.serving.weights.sync import SyncOptions, WeightSync
from postlude.world.agreement import Rank0Controller, on_rank0

NONE = DraftCounts(0, 0, 0)


class ServerEngine:
    """Rollout engine backed by inference servers, which can generate while the ranks train. A `DistributedEngine`.

    `make_client` makes the client, on rank 0. With a training `engine` and `sync`, servers get its weights before they
    generate; else they keep their own. A version of the weights is named START.STEP. START is a random id of each
    start of the run (`start_id`), because a step that is repeated after a restart may give other weights. With
    `record_routing`, completions keep the experts that a server reports, of the layers that have some.
    """

    fixed_order = False

    def __init__(
        self,
        make_client: Callable[[], GenerationClient],
        *,
        engine: Engine | None = None,
        sync: SyncOptions | None = None,
        record_routing: bool = False,
    ) -> None:
        self.engine = engine
        self._router_layers = router_layers(engine.config) if engine is not None and record_routing else []
        self.sync: WeightSync | None = None
        self.controller: Rank0Controller[None, None] = Rank0Controller(lambda _: self.sync_weights())
        self._client: GenerationClient | None = None
        self._draft_counts: dict[RemoteServer, DraftCounts] = {}
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
        assert self._client is not None, "only rank 0 has the client"
        return self._client

    def sync_weights(self) -> None:
        """Syncs the engine's weights to servers, if they are new or a server lacks them. Every rank calls it."""
        if self.engine is not None and self.sync is not None:
            self.sync.sync(f"{self.start_id}.{self.engine.step}")

    def wake(self) -> None:
        """Lets servers generate that share the engine's devices, whose memory is free now. Every rank calls it."""
        if self.sync is not None:
            self.sync.wake()

    def sleep(self) -> None:
        """Makes these servers free their memory. Every rank calls it."""
        if self.sync is not None:
            self.sync.sleep()

    def check_health(self) -> None:
        """Makes all ranks send weights if no server can generate without them. Rank 0 calls it while all wait."""
        if self.sync is not None and self.sync.is_blocked():
            self.controller.call_all(None)

    def submit(self, request: Request) -> int:
        """Sends a request without waiting. Call it on rank 0 only."""
        return self.client.submit(request)

    def cancel(self, request_id: int) -> None:
        """Ends a request. Call it on rank 0 only."""
        self.client.cancel(request_id)

    def poll(self, timeout: float | None = 0.0) -> list[FinishedCompletion]:
        """Returns the completions finished since the last call. Call it on rank 0 only."""
        finished = self.client.poll(timeout)
        return [self._with_routing(result) for result in finished] if self._router_layers else finished

    def _with_routing(self, result: FinishedCompletion) -> FinishedCompletion:
        """Returns the completion with the experts of layers that have some. Servers report all layers."""
        completion = result.completion
        if completion is None or completion.routing is None:
            return result
        try:
            routing = select_layers(completion.routing, self._router_layers)
        except InvalidResponse as problem:
            error = ServerError(f"a server {problem}.")
            return FinishedCompletion(result.request_id, result.index, None, error)
        return replace(result, completion=replace(completion, routing=routing))

    def take_metrics(self) -> dict[str, float]:
        """Returns the metrics of servers since the last call. Call it on rank 0 only."""
        pool, counts = self.client.pool, self.client.take_counts()
        metrics: dict[str, float] = {
            "servers/up": pool.count_up(),
            "servers/failed": counts.failed,
            "servers/retried": counts.retried,
        }
        if self.sync is not None:
            metrics["servers/reload_seconds"] = max(
                (server.weights.reload_seconds for server in pool.servers), default=0.0
            )
            metrics |= self.sync.take_metrics()
            results = [server.weights.probe_result for server in pool.servers if server.state == "up"]
            differences = [result.logprob_diff for result in results if result is not None]  # of log-probs
            metrics |= {"sync/logprob_diff": max(differences)} if differences else {}
        steps, drafted, accepted = self.client.run(self._count_drafts())
        if steps and drafted:
            metrics |= {"draft_acceptance": accepted / drafted, "draft_length": 1.0 + accepted / steps}
        return {name: float(value) for name, value in metrics.items()}

    async def _count_drafts(self) -> DraftCounts:
        """Returns what servers that draft have counted since the last call."""
        total = NONE
        for server in [server for server in self.client.pool.servers if server.state == "up"]:
            try:
                counts = await server.call(lambda api, send: api.draft_counts(send), timeout=STATUS_TIMEOUT)
            except (ServerUnavailable, InvalidResponse, RequestRefused):  # the next request to it finds out
                continue
            if counts is not None:
                before = self._draft_counts.get(server, NONE)
                before = before if before.steps <= counts.steps else NONE  # it was restarted
                self._draft_counts[server] = counts
                total = DraftCounts(*(sum(pair) for pair in zip(total, map(sub, counts, before), strict=True)))
        return total

    def close(self) -> None:
        """Closes the client, and removes the weight files."""
        if self._client is not None:
            self._client.close()
        if self.sync is not None:
            self.sync.close()
        self.controller.close()
