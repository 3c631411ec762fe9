"""The end of a run: its outcome, report and summary."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from postlude.error_output import escape_controls
from postlude.hf.export import ModelCard
from postlude.json_log import is_json, print_line
from postlude.recipes.report.live import RunConsole
from postlude.recipes.report.page import write_report
from postlude.recipes.report.summary import REPORT, RunSummary, held_out_table, read_summary, summary_lines
from postlude.recipes.run.directory import is_rank0
from postlude.recipes.run.files import read_config
from postlude.recipes.run.outcome import EXIT_FAILED, OutcomeStatus, RunOutcome, write_outcome

NOT_IN_MODEL_CARD = ("run", "model", "loggers")


def finish_run(run: Path, outcome: RunOutcome) -> None:
    """Writes the outcome and the report of a run, and prints its summary. Ranks other than 0 do nothing."""
    if is_rank0():
        write_outcome(run, outcome)
        write_report([run], run / REPORT)
        summary = read_summary(run)
        with suppress(OSError):  # the terminal may be closed
            print_summary(summary, RunConsole())


def finish_failed_run(run: Path, step: int, error: BaseException) -> None:
    """As `finish_run`, for a run that ends with an error, which the caller raises. What fails here is added to it."""
    status: OutcomeStatus = "failed" if isinstance(error, Exception) else "interrupted"
    try:
        finish_run(run, RunOutcome(status, step, str(error), EXIT_FAILED))
    except Exception as report_error:
        error.add_note(f"The report could not be written either: {report_error}")


def print_summary(summary: RunSummary, console: Console) -> None:
    """Prints what went wrong, then a line for each fact, then the paths of the model and the report."""
    if is_json():
        facts = {line.label.lower(): f"{line.text} {line.note}".strip() for line in summary_lines(summary)}
        message = summary.failure or "the run has ended"
        print_line(message, summary=facts, model=summary.model, report=summary.report)
        return
    console.print()
    if summary.failure:
        console.print(Text(escape_controls(summary.failure), style="bold red"), soft_wrap=True)
    lines = Table.grid(padding=(0, 2))
    lines.add_column(style="dim", no_wrap=True)
    lines.add_column(no_wrap=True)
    lines.add_column(style="dim")
    for line in summary_lines(summary):
        lines.add_row(line.label.lower(), Text(line.text, style="bold red" if line.warn else "bold"), Text(line.note))
    console.print(lines)
    table = held_out_table(summary)
    if table and (summary.is_evaluation or len(table[0]) > 3):  # pass@k and others, that the lines above do not show
        (corner, *readings), *measured = zip(*table, strict=True)  # one row a metric fits narrow terminals
        held_out = Table(f"held out{corner}", *readings, box=SIMPLE_HEAD)
        for row in measured:
            held_out.add_row(*row)
        console.print(held_out)
    for label, path in (("model", summary.model), ("report", summary.report)):
        if path is not None:
            console.print(f"{label}: {path}", markup=False, highlight=False, soft_wrap=True)


def model_card(run: Path, recipe: str, model: str, steps: int) -> ModelCard:
    """Returns the card of a model that a run trained: its config without paths, and its summary."""
    config = {name: value for name, value in read_config(run).items() if name not in NOT_IN_MODEL_CARD}
    scores = {line.label: f"{line.text} {line.note}".strip() for line in summary_lines(read_summary(run))}
    return ModelCard(model, f"Trained with `postlude {recipe}` for {steps} steps.", config, scores)
