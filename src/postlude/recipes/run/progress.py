"""RunProgress: where a rank is in its run: the step, its phase, and the part of it. The one place that knows it.

The training loop and its `StepTimer` say it. The files of `status/`, the metrics port and traces read it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from postlude.checks import error_message

START, STEP, EVALUATION, CHECKPOINT, EXPORT, PUSH = "start", "step", "evaluation", "checkpoint", "export", "push"
"""What a run does at a time. A step has parts of its own, those of its `StepTimer`."""


@dataclass
class RunProgress:
    """Where a rank is. Only the thread that trains changes it; others may read it at any time. Times are Unix's."""

    title: str = ""
    unit: str = "step"
    """The name of a step: "task" in an evaluation."""
    total: int = 0
    """The last step of the run."""
    step: int = 0
    """Finished steps."""
    phase: str = ""
    """The phase of the current step: "sft" in a warm start, else the recipe's name."""
    activity: str = START
    """What the run does; empty between two activities."""
    activity_began: float = field(default_factory=time.time)
    part: str = ""
    """The part of the activity, such as "rollout"; between two parts, the last one."""
    in_part: bool = False
    """Whether it is in this part; else it has ended, and another one has not begun."""
    part_began: float = field(default_factory=time.time)
    first_step: int = 0
    """Finished steps when this process began its first one."""
    first_step_began: float = 0.0
    longest: dict[str, float] = field(default_factory=dict)
    """The seconds that each activity took at most."""
    outcome: str = ""
    """"finished", "interrupted" or "failed"; empty while the run goes on."""
    error: str = ""
    """Why it was interrupted or failed."""

    def start(self, title: str, step: int, total: int, unit: str = STEP) -> None:
        """Begins the steps of a run that has `step` of `total` already."""
        self.title, self.unit, self.total = title, unit, total
        self.step = self.first_step = step
        self.first_step_began = time.time()

    def end(self, outcome: str, error: str = "") -> None:
        self.outcome, self.error = outcome, error

    @contextmanager
    def until_end(self) -> Iterator[None]:
        """Says of an error of the block that it ends the run."""
        try:
            yield
        except BaseException as error:
            self.end("failed" if isinstance(error, Exception) else "interrupted", error_message(error))
            raise

    @contextmanager
    def during(self, activity: str) -> Iterator[None]:
        self._begin(activity)
        yield
        self.longest[activity] = max(self.longest.get(activity, 0.0), time.time() - self.activity_began)
        self._begin("")

    def enter(self, part: str) -> None:
        """Begins a part, or continues it."""
        self.in_part = True
        if part != self.part:
            self.part, self.part_began = part, time.time()

    def leave(self) -> None:
        self.in_part = False

    def _begin(self, activity: str) -> None:
        self.activity, self.part, self.in_part = activity, "", False
        self.activity_began = self.part_began = time.time()

    @property
    def remaining_seconds(self) -> float | None:
        """The seconds of the steps that are left, if they take as long as those of this process; None before one."""
        done = self.step - self.first_step
        return (self.total - self.step) * (time.time() - self.first_step_began) / done if done > 0 else None


class WarningCount(logging.Filter):
    """Counts the warnings of a logger, and keeps the last one. It lets every record pass.

    It is a filter because a handler would keep Python from printing warnings where no other handler is set up.
    """

    def __init__(self) -> None:
        super().__init__()
        self.count, self.last, self.last_time = 0, "", 0.0

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno >= logging.WARNING:
            self.count += 1
            self.last, self.last_time = record.getMessage(), record.created
        return True


class StepFilter(logging.Filter):
    """Adds the number of finished steps to records, for structured logs."""

    def __init__(self, progress: RunProgress) -> None:
        super().__init__()
        self.progress = progress

    def filter(self, record: logging.LogRecord) -> bool:
        record.step = self.progress.step
        return True
