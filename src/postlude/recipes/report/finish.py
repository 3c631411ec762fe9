"""The end of a run: what is written of it, and what is said."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from postlude.recipes.report.page import write_report
from postlude.recipes.report.summary import REPORT, RunSummary, held_out_table, read_summary, summary_lines
from postlude.recipes.run.directory import is_rank0
from postlude.recipes.run.outcome import RunOutcome, write_outcome


def conclude(run: Path, outcome: RunOutcome) -> None:
    """Write how the run ended and its report, and say the summary. Of a rank that is not the first: nothing."""
    if is_rank0():
        write_outcome(run, outcome)
        write_report([run], run / REPORT)
        summary = read_summary(run)
        with suppress(OSError):  # a terminal that has hung up takes no words
            print_summary(summary, Console())


def print_summary(summary: RunSummary, console: Console) -> None:
    """Print a summary: what went wrong first, then a line a fact, then where the model and the report are."""
    console.print()
    if summary.bad:
        console.print(Text(summary.bad, style="bold red"), soft_wrap=True)
    lines = Table.grid(padding=(0, 2))
    lines.add_column(style="dim", no_wrap=True)
    lines.add_column(no_wrap=True)
    lines.add_column(style="dim")
    for fact in summary_lines(summary):
        lines.add_row(fact.label.lower(), Text(fact.text, style="bold red" if fact.warn else "bold"), Text(fact.note))
    console.print(lines)
    table = held_out_table(summary)
    if table and (summary.is_evaluation or len(table[0]) > 3):  # pass@k and others, beside what was said above
        (corner, *readings), *measured = zip(*table, strict=True)  # a row a metric: no terminal is too narrow
        shown = Table(f"held out{corner}", *readings, box=SIMPLE_HEAD)
        for row in measured:
            shown.add_row(*row)
        console.print(shown)
    for label, path in (("model", summary.model), ("report", summary.report)):
        if path is not None:
            console.print(f"{label}: {path}", markup=False, highlight=False, soft_wrap=True)
