"""StepSchedule: which steps of a run are evaluated and saved. StepTimer: the seconds of each part of a step."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from postlude.recipes.report.metrics import TIME
from postlude.recipes.run.progress import RunProgress
from postlude.trace.recorder import NO_RECORDER, Recorder
from postlude.trace.spans import Span

OTHER = "other"  # the part of a step that is in no other part


@dataclass(frozen=True)
class StepSchedule:
    """A run's steps. `first` of them come before the recipe's own, from which evaluations are counted."""

    total: int
    first: int
    evaluate_every: int
    evaluate_at_start: bool
    save_every: int
    exports: bool

    def evaluates_after(self, step: int) -> bool:
        """Whether there is an evaluation after a step; 0 is before the first."""
        own_step = step - self.first
        if not self.evaluate_every or own_step < (0 if self.evaluate_at_start else 1):
            return False
        return own_step % self.evaluate_every == 0 or step == self.total

    def saves_after(self, step: int) -> bool:
        return step == self.total or bool(self.save_every and step % self.save_every == 0)

    @property
    def phases(self) -> dict[str, list[int]]:
        """By name, the steps that do more than train. The export after the last step counts to it."""
        steps = range(1, self.total + 1)
        return {
            "evaluation": [step for step in steps if self.evaluates_after(step)],
            "checkpoint": [step for step in steps if self.saves_after(step)],
            "export": [self.total] if self.exports else [],
        }


class StepTimer:
    """Counts the seconds of the parts of a step. A part inside another one counts to the outer one only."""

    def __init__(self, progress: RunProgress | None = None, recorder: Recorder = NO_RECORDER) -> None:
        self.progress, self.recorder = progress or RunProgress(), recorder
        self.seconds: dict[str, float] = {}
        self._running = False

    @contextmanager
    def step(self) -> Iterator[None]:
        """Counts the time of the body that is in none of its parts as the part `OTHER`."""
        started, before = time.perf_counter(), sum(self.seconds.values())
        yield
        parts = sum(self.seconds.values()) - before
        self.seconds[OTHER] = max(0.0, time.perf_counter() - started - parts)

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        if self._running:
            yield
            return
        started, self._running = time.perf_counter(), True
        self.progress.enter(part)
        try:
            yield
        finally:
            self._running, ended = False, time.perf_counter()
            self.progress.leave()
            self.recorder.add(Span(0, "part", part, started, ended))
        self.seconds[part] = self.seconds.get(part, 0.0) + ended - started

    def take(self) -> dict[str, float]:
        """Returns the seconds so far as metrics, and starts again from zero."""
        seconds, self.seconds = self.seconds, {}
        return {f"{TIME}{part}": value for part, value in seconds.items()}
