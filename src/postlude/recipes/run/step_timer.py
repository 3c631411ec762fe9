"""StepTimer: the seconds of each part of a step, such as "rollout" and "train"."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from postlude.recipes.report.metrics import TIME


class StepTimer:
    """Counts the seconds of the parts of a step. A part inside another one counts to the outer one only."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._running = False

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        """Counts the time of the body."""
        if self._running:
            yield
            return
        started, self._running = time.perf_counter(), True
        try:
            yield
        finally:
            self._running = False
        self.seconds[part] = self.seconds.get(part, 0.0) + time.perf_counter() - started

    def take(self) -> dict[str, float]:
        """Returns the seconds so far as metrics, and starts again from zero."""
        seconds, self.seconds = self.seconds, {}
        return {f"{TIME}{part}": value for part, value in seconds.items()}
