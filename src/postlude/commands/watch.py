"""`postlude watch` and `postlude report`: the live view of a run that another process works on, and reports of runs."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from rich.console import Console

from postlude.checks import check_writable
from postlude.error_output import escape_controls
from postlude.recipes.report.live import REMEMBERED, LiveView, RunConsole
from postlude.recipes.report.status import RUNNING, STALLED, UNRESPONSIVE, RunStatus, read_status, status_lines
from postlude.recipes.run.files import METRICS, AppendedLines
from postlude.recipes.run.outcome import EXIT_DONE, EXIT_FAILED

POLL_SECONDS = 1.0
GOING_ON = (RUNNING, STALLED, UNRESPONSIVE)  # a run in another state does not go on


def run(options: argparse.Namespace) -> int:
    """Shows a run until it ends. Returns 1 if it failed or was killed."""
    console, path = RunConsole(), options.run.expanduser()
    try:
        status = _watch(path, console)
    except KeyboardInterrupt:
        console.print("The run goes on.")
        return EXIT_DONE
    for label, text in status_lines(status):
        console.print(f"{label:<9}  {escape_controls(text)}", soft_wrap=True, markup=False, highlight=False)
    return EXIT_DONE if status.well else EXIT_FAILED


def _watch(path: Path, console: RunConsole) -> RunStatus:
    """Shows a run while it goes on. Returns its state then."""
    status = read_status(path)
    while status.state in GOING_ON and not status.total:  # it loads its model, or a checkpoint
        time.sleep(POLL_SECONDS)
        status = read_status(path)
    if status.state not in GOING_ON:
        return status
    lines = AppendedLines(path / METRICS)
    with WatchView(status, console) as view:
        for line in lines.take()[-REMEMBERED:]:
            view.record(line["step"], line)
        while status.state in GOING_ON:
            view.show(status)
            for line in lines.take():
                view.update(line["step"], line)
            time.sleep(POLL_SECONDS)
            status = read_status(path)
        for line in lines.take():
            view.update(line["step"], line)
    return status


class WatchView(LiveView):
    """The view of a run whose steps another process does, which says how long they take."""

    def __init__(self, status: RunStatus, console: RunConsole) -> None:
        super().__init__(status.total, title=status.title, unit=status.unit, console=console, silent=False)
        self.status = status

    def show(self, status: RunStatus) -> None:
        """Shows where the run is. Without a panel, a line says what is wrong."""
        if status.explanation and status.explanation != self.status.explanation and not self.has_panel:
            self.print_line(escape_controls(status.explanation))
        self.status, self.step, self.began = status, status.step, time.monotonic() - status.elapsed_seconds
        self.set_phase(f"{status.phase}, {status.place}" if status.phase else status.place)
        self.show_notice(escape_controls(status.explanation))

    def remaining(self) -> tuple[float, bool]:
        """Returns the remaining seconds, as the run says."""
        seconds = self.status.remaining_seconds
        return (0.0, False) if seconds is None else (seconds, True)


def run_report(options: argparse.Namespace) -> None:
    from postlude.recipes.report.page import write_report  # numpy, which takes long

    console = Console()
    for run in options.runs:
        if not (run / "metrics.jsonl").is_file():
            raise FileNotFoundError(f"{run} has no metrics.jsonl, so it is not the directory of a run.")
    target = options.to or options.runs[0] / "report.html"
    check_writable("--to", target.parent, "the file")
    written = write_report(options.runs, target)
    console.print(f"report: {written}", markup=False, highlight=False, soft_wrap=True)
