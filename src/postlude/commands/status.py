"""`postlude status`: where a run is, from its directory alone."""

from __future__ import annotations

import argparse

from postlude.error_output import escape_controls
from postlude.recipes.report.status import read_status, status_lines
from postlude.recipes.run.outcome import EXIT_DONE, EXIT_FAILED


def run(options: argparse.Namespace) -> int:
    status = read_status(options.run.expanduser())
    if options.json:
        print(status.as_json())
    else:
        for label, text in status_lines(status):
            print(f"{label:<9}  {escape_controls(text)}")
    return EXIT_DONE if status.well else EXIT_FAILED
