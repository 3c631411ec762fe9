"""Engines of one rank, for tests of what stands on them."""

from __future__ import annotations

from typing import Any

from postlude.rollout.protocol import RolloutEngine, Submitted
from postlude.world.agreement import Lead


class Alone(Submitted):
    """Any engine, as one of a run's ranks."""

    together = True

    def __init__(self, engine: RolloutEngine) -> None:
        super().__init__(engine)
        self.lead: Lead[Any, Any] = Lead(lambda _: None)

    def refresh(self) -> None: ...

    def tend(self) -> None: ...

    def take_metrics(self) -> dict[str, float]:
        return {}

    def close(self) -> None: ...
