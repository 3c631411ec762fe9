"""Progress of a run: a live panel on a terminal, elsewhere a line per step, or one of JSON. Only rank 0 shows it."""

from __future__ import annotations

import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from statistics import median
from threading import Lock
from types import MappingProxyType
from typing import Any, Protocol, Self, TypeAlias

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from postlude.json_log import is_json, print_line
from postlude.recipes.report.formatting import format_duration, format_number
from postlude.recipes.report.metrics import TIME, labelled_values
from postlude.recipes.run.files import flatten

BLOCKS = "▁▂▃▄▅▆▇█"
COLOURS = ("cyan", "magenta", "yellow", "green", "blue", "red")
REFRESHES = 4  # of the panel a second, in a thread of its own
REMEMBERED = 240  # values behind a sparkline
RECENT = 20  # steps behind the ETA
PLAIN = frozenset[str]()  # the phases of a step that only trains
NARROW = 72  # columns of a terminal that shows values in one column


class RunConsole(Console):
    """Prints what a run shows. A reader that goes away, such as `| head`, does not end the run, as rich's own does.

    In a notebook it prints plain lines: rich would make each line an output of its own, and take its color for that of
    a terminal.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        if self.is_jupyter:
            super().__init__(**settings, force_jupyter=False, force_terminal=False, color_system=None)

    def on_broken_pipe(self) -> None:
        self.quiet = True
        with suppress(OSError), open(os.devnull, "w") as nothing:  # Python writes to it once more when it ends
            os.dup2(nothing.fileno(), sys.stdout.fileno())


class ProgressView(Protocol):
    """A context manager that shows every step."""

    total: int
    """The number of steps, as far as it is known."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...

    def set_phase(self, phase: str) -> None:
        """Shows the current phase."""

    def update(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Shows a finished step."""

    def show_notice(self, notice: str) -> bool:
        """Shows a line in the panel. Returns false where there is none. It does not wait: signal handlers call it."""


ViewFactory: TypeAlias = Callable[..., ProgressView]
"""Makes a view to enter, with the arguments of `LiveView`."""


class LiveView:
    """Shows every step in the terminal. Ranks other than 0 show nothing.

    `start` is the last step before a resumed run; `unit` is the name of a step. `phases` are by name the steps that
    have more to do, such as an evaluation: the remaining time has each as long as it took so far.
    """

    def __init__(
        self,
        total: int,
        *,
        title: str = "postlude",
        start: int = 0,
        unit: str = "step",
        phases: Mapping[str, Sequence[int]] = MappingProxyType({}),
        console: Console | None = None,
        silent: bool | None = None,
    ) -> None:
        self.total, self.title, self.step, self.unit = total, title, start, unit
        self._console = console or RunConsole()
        if silent is None:
            from postlude.recipes.run.directory import is_rank0  # imports torch

            silent = not is_rank0()
        self._silent = silent
        self._history: dict[str, deque[float]] = {}
        self._seconds: dict[str, float] = {}
        self._phase = self._notice = ""
        self.began = time.monotonic()
        self._last_end = self.began
        self._phases: dict[int, frozenset[str]] = {}  # by step, of steps that have some
        for name, steps in phases.items():
            self._phases |= {step: self._phases.get(step, frozenset()) | {name} for step in steps}
        self._seconds_by_phases: dict[frozenset[str], list[float]] = {}
        self._eta = "eta ?"
        self._live: Live | None = None
        self._lock = Lock()  # another thread draws the panel

    def __enter__(self) -> Self:
        self.began = time.monotonic()
        self._last_end = self.began
        if self.step and not self._silent:
            self.print_line(self._before())
        if not self._silent and self._console.is_terminal and not self._console.is_dumb_terminal:
            self._live = Live(console=self._console, refresh_per_second=REFRESHES, get_renderable=self._render)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._phase = ""
        if self._live is not None:
            with suppress(OSError):  # the terminal may be closed
                self._live.stop()
            self._live = None

    def set_phase(self, phase: str) -> None:
        """Shows the current phase next to the title: "sft" in a warm start, else the recipe's name."""
        self._phase = phase

    def update(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Shows a finished step. `metrics` are those of `RunDirectory.log`, nested or flat."""
        if self._silent:
            return
        flat = self.record(step, metrics)
        if not self.has_panel:
            self.print_line(self._line(flat))

    def record(self, step: int, metrics: Mapping[str, Any]) -> dict[str, float]:
        """Adds a finished step to the panel. Returns its numbers."""
        flat = {key: float(value) for key, value in flatten(metrics).items() if isinstance(value, int | float)}
        with self._lock:
            self.step = step
            now = time.monotonic()
            self._seconds_by_phases.setdefault(self._phases.get(step, PLAIN), []).append(now - self._last_end)
            self._last_end = now
            seconds, complete = self.remaining()
            self._eta = f"eta {'' if complete else 'at least '}{format_duration(seconds)}"
            for label, value in labelled_values(flat):
                self._history.setdefault(label, deque(maxlen=REMEMBERED)).append(value)
            self._seconds = {key.removeprefix(TIME): value for key, value in flat.items() if key.startswith(TIME)}
        return flat

    def show_notice(self, notice: str) -> bool:
        self._notice = notice  # without the lock, which the interrupted code may hold
        return self.has_panel

    @property
    def has_panel(self) -> bool:
        """Whether there is a panel; else each step is a line."""
        return self._live is not None

    def print_line(self, line: str) -> None:
        try:
            self._console.print(line, soft_wrap=True, markup=False, highlight=False)
        except OSError:  # the terminal is closed, which must not end the run
            self._silent = True

    def _before(self) -> str:
        done = f"{self.unit} {self.step}/{self.total}"
        if self.step < self.total:
            return f"resuming after {done}"
        return f"{done} is done, and nothing is left to do: raise {self.unit}s to continue, or give another --run."

    def _line(self, flat: Mapping[str, float]) -> str:
        values = [f"{label} {format_number(value)}" for label, value in labelled_values(flat)]
        return "  ".join([f"{self.unit} {self.step}/{self.total}", *values, self._eta])

    def _render(self) -> RenderableType:
        with self._lock:
            return self._panel()

    def _panel(self) -> RenderableType:
        wide = self._console.width >= NARROW
        head = Table.grid(expand=True, padding=(0, 1))
        head.add_column(no_wrap=True)
        head.add_column(ratio=1)
        head.add_column(no_wrap=True, justify="right")
        spent = time.monotonic() - self.began
        head.add_row(
            Text(f"{self.unit} {self.step:,}/{self.total:,}", style="bold"),
            ProgressBar(total=max(self.total, 1), completed=self.step),
            Text(f"{format_duration(spent)} · {self._eta}", style="dim"),
        )
        values = Table.grid(expand=True, padding=(0, 1))
        for _ in range(2 if wide else 1):
            values.add_column(no_wrap=True, style="dim")
            values.add_column(no_wrap=True, justify="right", min_width=8)
            values.add_column(no_wrap=True, ratio=1)
        cells = [self._cells(label, 24 if wide else 12) for label in self._history]
        for first in range(0, len(cells), 2 if wide else 1):
            values.add_row(*(cell for row in cells[first : first + (2 if wide else 1)] for cell in row))
        parts: list[RenderableType] = [head]
        if cells:
            parts.append(values)
        if self._seconds:
            parts.append(time_bar(self._seconds, max(self._console.width - 6, 10)))
        if self._notice:
            parts.append(Text(self._notice, style="bold yellow"))
        phase = f" · {self._phase}" if self._phase else ""
        return Panel(Group(*parts), title=Text(f"{self.title}{phase}"), title_align="left", border_style="dim")

    def _cells(self, label: str, width: int) -> tuple[Text, Text, Text]:
        history = list(self._history[label])
        last = history[-1]
        style = "bold" if math.isfinite(last) else "bold red"
        return Text(label), Text(format_number(last), style=style), Text(sparkline(history, width), style="cyan")

    def remaining(self) -> tuple[float, bool]:
        """Returns the remaining seconds, and whether they include every phase: one never measured cannot be.

        A step takes as long as the last ones, with its share of what single ones took longer.
        """
        plain = self._seconds_by_phases.get(PLAIN) or [min(map(min, self._seconds_by_phases.values()))]
        usual = median(plain[-RECENT:])
        beyond = sum(max(seconds - usual, 0.0) for seconds in plain) / len(plain)
        extra = {
            phases: max(sum(seconds) / len(seconds) - usual, 0.0)
            for phases, seconds in self._seconds_by_phases.items()
            if phases
        }
        ahead = [phases for step, phases in self._phases.items() if self.step < step <= self.total]
        count = max(self.total - self.step, 0)
        total, complete = usual * count + beyond * (count - len(ahead)), True
        for phases in ahead:
            missing = phases
            for measured in sorted(extra, key=len, reverse=True):  # those measured together first
                if measured <= missing:
                    total, missing = total + extra[measured], missing - measured
            complete = complete and not missing
        return total, complete


def sparkline(values: Sequence[float], width: int) -> str:
    """Returns the values as `width` block characters. A step without a finite value is blank."""
    if not values:
        return ""
    count = min(width, len(values))
    edges = [index * len(values) // count for index in range(count + 1)]
    means = []
    for first, last in pairwise(edges):
        finite = [value for value in values[first:last] if math.isfinite(value)]
        means.append(sum(finite) / len(finite) if finite else math.nan)
    finite = [value for value in means if math.isfinite(value)]
    low, high = (min(finite), max(finite)) if finite else (0.0, 0.0)
    scale = (len(BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(BLOCKS[round((value - low) * scale)] if math.isfinite(value) else " " for value in means)


def time_bar(seconds: Mapping[str, float], width: int) -> Text:
    """Returns a bar of the shares of a step's time, with a legend."""
    total = sum(value for value in seconds.values() if math.isfinite(value))
    bar, legend = Text(), Text("\n")
    for index, (part, value) in enumerate(seconds.items()):
        colour = COLOURS[index % len(COLOURS)]
        if total > 0 and math.isfinite(value):
            bar.append("━" * round(width * value / total), style=colour)
        legend.append("■ ", style=colour).append(f"{part} {format_duration(value)}  ", style="dim")
    return bar + legend


class JSONView(LiveView):
    """Prints a line for each step, with all its numbers."""

    def __enter__(self) -> Self:
        return self

    def update(self, step: int, metrics: Mapping[str, Any]) -> None:
        if not self._silent:
            numbers = {name: value for name, value in flatten(metrics).items() if isinstance(value, int | float)}
            message = f"{self.unit} {step}/{self.total}"
            print_line(message, step, title=self.title, phase=self._phase, total=self.total, metrics=numbers)


def open_view(total: int, **settings: Any) -> ProgressView:
    return (JSONView if is_json() else LiveView)(total, **settings)
