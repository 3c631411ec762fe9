"""Rollout engines on one rank, for tests."""

import itertools
from typing import Any

from postlude.generate.protocol import FinishedCompletion, Request, RolloutEngine
from postlude.world.agreement import Rank0Controller


class SingleRankEngine:
    """An engine that has `generate`, with the methods that a run calls. `poll` generates all submitted requests."""

    fixed_order = True

    def __init__(self, engine: RolloutEngine) -> None:
        self.engine = engine
        self.controller: Rank0Controller[Any, Any] = Rank0Controller(lambda _: None)
        self.submitted: dict[int, Request] = {}
        self.request_ids = itertools.count()

    def submit(self, request: Request) -> int:
        request_id = next(self.request_ids)
        self.submitted[request_id] = request
        return request_id

    def poll(self, timeout: float | None = 0.0) -> list[FinishedCompletion]:
        requests, self.submitted = self.submitted, {}
        finished = []
        for request_id, request in requests.items():
            ((*completions,),) = self.engine.generate(
                [request.prompt], [request.sampling], request.n, first_index=request.first_index
            )
            finished += [
                FinishedCompletion(request_id, index, completion) for index, completion in enumerate(completions)
            ]
        return finished

    def sync_weights(self) -> None: ...

    def check_health(self) -> None: ...

    def take_metrics(self) -> dict[str, float]:
        return {}

    def close(self) -> None: ...
