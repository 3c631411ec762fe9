"""PhaseTimer: seconds by the name of what was done in them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from postlude.recipes.report.metrics import TIME


class PhaseTimer:
    """Counts the seconds of a step's phases. What is done within another phase counts to that one alone."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._running = False

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Count what is done within."""
        if self._running:
            yield
            return
        began, self._running = time.perf_counter(), True
        try:
            yield
        finally:
            self._running = False
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - began

    def take(self) -> dict[str, float]:
        """The seconds so far, named as metrics; and start over."""
        found = {f"{TIME}{phase}": seconds for phase, seconds in self.seconds.items()}
        self.seconds = {}
        return found
