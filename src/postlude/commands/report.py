"""`postlude report`: the report of a run, or of several to compare."""

from __future__ import annotations

import argparse

from rich.console import Console

from postlude.checks import check_writable
from postlude.recipes.report.page import write_report


def run(options: argparse.Namespace) -> None:
    """Writes the report."""
    console = Console()
    for run in options.runs:
        if not (run / "metrics.jsonl").is_file():
            raise FileNotFoundError(f"{run} has no metrics.jsonl, so it is not the directory of a run.")
    target = options.to or options.runs[0] / "report.html"
    check_writable("--to", target.parent, "the file")
    written = write_report(options.runs, target)
    console.print(f"report: {written}", markup=False, highlight=False, soft_wrap=True)
