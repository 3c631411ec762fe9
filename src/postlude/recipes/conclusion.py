"""The end of a run: what is written of it, and what is said."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from postlude.recipes.report.page import write_report
from postlude.recipes.run.directory import is_first_rank
from postlude.recipes.run.ending import Ending, write_ending
from postlude.recipes.verdict import REPORT, Verdict, facts, held_out_table, read_verdict


def conclude(run: Path, ending: Ending) -> None:
    """Write how the run ended and its report, and say the verdict. Of a rank that is not the first: nothing."""
    if is_first_rank():
        write_ending(run, ending)
        write_report([run], run / REPORT)
        verdict = read_verdict(run)
        with suppress(OSError):  # a terminal that has hung up takes no words
            tell(verdict, Console())


def tell(verdict: Verdict, console: Console) -> None:
    """Print a verdict: what went wrong first, then a line a fact, then where the model and the report are."""
    console.print()
    if verdict.bad:
        console.print(Text(verdict.bad, style="bold red"), soft_wrap=True)
    lines = Table.grid(padding=(0, 2))
    lines.add_column(style="dim", no_wrap=True)
    lines.add_column(no_wrap=True)
    lines.add_column(style="dim")
    for fact in facts(verdict):
        lines.add_row(fact.label.lower(), Text(fact.text, style="bold red" if fact.warn else "bold"), Text(fact.note))
    console.print(lines)
    table = held_out_table(verdict)
    if table and (verdict.is_evaluation or len(table[0]) > 3):  # pass@k and others, beside what was said above
        (corner, *readings), *measured = zip(*table, strict=True)  # a row a metric: no terminal is too narrow
        shown = Table(f"held out{corner}", *readings, box=SIMPLE_HEAD)
        for row in measured:
            shown.add_row(*row)
        console.print(shown)
    for label, path in (("model", verdict.model), ("report", verdict.report)):
        if path is not None:
            console.print(f"{label}: {path}", markup=False, highlight=False, soft_wrap=True)
