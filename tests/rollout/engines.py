"""Rollout engines on one rank, for tests."""

from typing import Any

from postlude.generate.protocol import BatchedPollEngine, RolloutEngine
from postlude.world.agreement import Rank0Controller


class SingleRankEngine(BatchedPollEngine):
    """A rollout engine with the methods that a run calls, for one rank."""

    def __init__(self, engine: RolloutEngine) -> None:
        super().__init__(engine)
        self.controller: Rank0Controller[Any, Any] = Rank0Controller(lambda _: None)

    def sync_weights(self) -> None: ...

    def check_health(self) -> None: ...

    def take_metrics(self) -> dict[str, float]:
        return {}

    def close(self) -> None: ...
