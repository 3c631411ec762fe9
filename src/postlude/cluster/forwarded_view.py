"""The run's steps as the driver shows them: what a rank's view is told goes through the relay to a live view there."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from postlude.recipes.report.live import LiveView
from postlude.recipes.run.directory import flatten, is_rank0


@dataclass(frozen=True)
class ForwardedViews:
    """Makes views that the driver shows."""

    relay: Any

    def __call__(self, total: int, *, title: str = "postlude", start: int = 0, unit: str = "step") -> ForwardedView:
        """A view."""
        return ForwardedView(self.relay, {"total": total, "title": title, "start": start, "unit": unit})


class ForwardedView:
    """A rank's view: what it is told, the driver's `LiveView` shows. On a rank that is not the first, nothing."""

    def __init__(self, relay: Any, settings: dict[str, Any]) -> None:
        self.relay, self.settings, self.silent = relay, settings, not is_rank0()

    def __enter__(self) -> Self:
        self._tell("view", self.settings)
        return self

    def __exit__(self, *_: object) -> None:
        self._tell("end of view")

    def doing(self, phase: str) -> None:
        """Say what is going on."""
        self._tell("doing", phase)

    def update(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Show a finished step."""
        numbers = {name: value for name, value in flatten(metrics).items() if isinstance(value, int | float)}
        self._tell("update", step, numbers)

    def _tell(self, *news: Any) -> None:
        if not self.silent:
            self.relay.tell.remote(*news)


class DriverDisplay:
    """The driver's side: shows what ranks say."""

    def __init__(self) -> None:
        self.view: LiveView | None = None
        self.began = False
        """Whether a run has gone on from where it was to go on."""

    def hear(self, news: list[tuple[Any, ...]]) -> None:
        """Show what was said."""
        for each in news:
            match each:
                case ("said", stream, text):
                    print(text, end="", flush=True, file=sys.stderr if stream == "stderr" else sys.stdout)
                case ("view", settings):
                    self.leave()
                    self.began = True
                    self.view = LiveView(**settings, silent=False).__enter__()
                case ("doing", phase) if self.view is not None:
                    self.view.doing(phase)
                case ("update", step, metrics) if self.view is not None:
                    self.view.update(step, metrics)
                case ("end of view",):
                    self.leave()

    def leave(self) -> None:
        """Show no more steps, as those who did them are done or lost."""
        if self.view is not None:
            self.view.__exit__()
            self.view = None
