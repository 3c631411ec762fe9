"""ForwardedView: a rank's progress view, which the driver shows. `DriverDisplay` is the driver's side."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, Self

from postlude.recipes.report.live import LiveView
from postlude.recipes.run.directory import flatten, is_rank0


class ForwardedView:
    """Sends rank 0's progress to the driver's `LiveView`. On other ranks it does nothing."""

    def __init__(self, relay: Any, total: int, **settings: Any) -> None:
        self.relay, self.silent = relay, not is_rank0()
        self.settings = {"total": total, **settings}

    def __enter__(self) -> Self:
        self._send("start of view", self.settings)
        return self

    def __exit__(self, *_: object) -> None:
        self._send("end of view")

    def set_phase(self, phase: str) -> None:
        """Shows the current phase."""
        self._send("phase", phase)

    def update(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Shows a finished step."""
        numbers = {name: value for name, value in flatten(metrics).items() if isinstance(value, int | float)}
        self._send("update", step, numbers)

    def show_notice(self, notice: str) -> bool:
        """Returns false: the panel is the driver's."""
        return False

    def _send(self, *message: Any) -> None:
        if not self.silent:
            self.relay.send.remote(*message)


class DriverDisplay:
    """Shows the messages of ranks, on the driver."""

    def __init__(self) -> None:
        self.view: LiveView | None = None
        self.run_started = False
        """Whether a view was shown: the run has started or resumed."""

    def show(self, messages: list[tuple[Any, ...]]) -> None:
        """Shows messages."""
        for message in messages:
            match message:
                case ("output", stream, text):
                    print(text, end="", flush=True, file=sys.stderr if stream == "stderr" else sys.stdout)
                case ("start of view", settings):
                    self.close_view()
                    self.run_started = True
                    self.view = LiveView(**settings, silent=False).__enter__()
                case ("phase", phase) if self.view is not None:
                    self.view.set_phase(phase)
                case ("update", step, metrics) if self.view is not None:
                    self.view.update(step, metrics)
                case ("end of view",):
                    self.close_view()

    def show_notice(self, notice: str) -> bool:
        """Shows a line in the panel, if there is one."""
        return self.view is not None and self.view.show_notice(notice)

    def close_view(self) -> None:
        """Closes the progress view, as its ranks have finished or are lost."""
        if self.view is not None:
            self.view.__exit__()
            self.view = None
