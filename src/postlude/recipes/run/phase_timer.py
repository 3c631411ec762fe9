"""PhaseTimer: seconds by phase of a step."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from postlude.recipes.report.metrics import TIME


class PhaseTimer:
    """Counts the seconds of a step's phases. A phase inside another one counts to the outer one only."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._running = False

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Counts the time of the body."""
        if self._running:
            yield
            return
        started, self._running = time.perf_counter(), True
        try:
            yield
        finally:
            self._running = False
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - started

    def take(self) -> dict[str, float]:
        """Returns the seconds so far as metrics, and starts again from zero."""
        seconds, self.seconds = self.seconds, {}
        return {f"{TIME}{phase}": value for phase, value in seconds.items()}
