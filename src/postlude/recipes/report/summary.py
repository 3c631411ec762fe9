"""RunSummary: the result of a run in a few numbers, for the terminal, the report and the model card.

All numbers are read from the run directory. A change is the first and the last logged value of a metric.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from postlude.recipes.report.formatting import format_duration, format_number, format_share
from postlude.recipes.report.metrics import (
    EVAL,
    FAILED,
    FALLING,
    LENGTHS,
    LOSS,
    MEMORY,
    PASS,
    REUSED,
    REWARD,
    REWARDS,
    SCORES,
    SHARED,
    SKIPPED,
    TIME,
    TOKENS,
    title,
)
from postlude.recipes.run.files import read_metrics, read_record
from postlude.recipes.run.outcome import RunOutcome, read_outcome
from postlude.recipes.run.start_mode import EXPORTED_MODEL

REPORT = "report.html"  # written when a run ends
EVALUATED = "eval"  # the phase of an evaluation


@dataclass(frozen=True)
class MetricChange:
    """The first, last and best value of a metric, as logged."""

    metric: str
    first: float
    last: float
    best: float
    first_step: int
    last_step: int
    best_step: int
    at: Mapping[int, float]
    """Every finite value by step."""

    @property
    def moved(self) -> bool:
        """Whether there are values of two steps or more."""
        return self.first_step != self.last_step

    def __str__(self) -> str:
        return f"{format_number(self.first)} → {format_number(self.last)}" if self.moved else format_number(self.last)


@dataclass(frozen=True)
class RunSummary:
    """The result of a run in a few numbers."""

    outcome: RunOutcome | None
    phases: Sequence[str]
    """Phases of the steps in order, without the evaluation before the first step."""
    first_step: int
    """The first logged step of the last phase; -1 before the first."""
    step: int
    """The last logged step; -1 before the first."""
    changes: Mapping[str, MetricChange]
    """By metric, in the last phase that has it: losses of two phases cannot be compared, held-out metrics can."""
    completions: int
    failures: int
    """Completions whose reward call failed."""
    skipped: int
    """Skipped optimizer steps."""
    tokens: int
    """Tokens that were trained on."""
    shared_tokens: int
    """Trained tokens that were not computed, since another sequence begins with them."""
    reused_prompt_tokens: int
    """Prompt tokens that were not prefilled, since an earlier completion or turn begins with them."""
    not_finite: int
    """Numbers in the metrics that are not finite."""
    seconds: Mapping[str, float]
    exported_step: int | None
    model: Path | None
    report: Path | None

    @property
    def is_evaluation(self) -> bool:
        """Whether the run is an evaluation, with one line of metrics and no curves."""
        return list(self.phases) == [EVALUATED]

    @property
    def score(self) -> MetricChange | None:
        """Held-out reward, accuracy or loss, depending on the recipe."""
        return next((self.changes[name] for name in SCORES if name in self.changes), None)

    @property
    def reward(self) -> MetricChange | None:
        return self.changes.get(REWARD)

    @property
    def loss(self) -> MetricChange | None:
        return self.changes.get(LOSS)

    @property
    def held_out(self) -> dict[str, MetricChange]:
        return {name: change for name, change in self.changes.items() if name.startswith(EVAL)}

    @property
    def failure(self) -> str:
        """Why the run did not finish, or "" if it did."""
        if self.outcome is None or self.outcome.status == "finished":
            return ""
        if self.outcome.status == "interrupted":
            return f"The run was interrupted: {self.outcome.message or f'step {self.outcome.step} was its last.'}"
        reason = f": {self.outcome.message}" if self.outcome.message else "."
        return f"The run failed after step {self.outcome.step}{reason}"


@dataclass(frozen=True)
class SummaryLine:
    """One line of a summary."""

    label: str
    text: str
    note: str = ""
    warn: bool = False


def read_summary(run: Path, lines: Sequence[Mapping[str, Any]] | None = None) -> RunSummary:
    """Returns the summary of a run directory, whether the run has ended or not; `lines` are its metrics, if known."""
    run = Path(run)
    lines = read_metrics(run) if lines is None else lines
    phases = list(dict.fromkeys(str(line.get("phase", "")) for line in lines if line["step"] > 0)) or list(
        dict.fromkeys(str(line.get("phase", "")) for line in lines)
    )
    completions = [  # each has a length, and a reward unless its call failed
        (len(line.get(LENGTHS, line[REWARDS])), _number(line.get(FAILED)))
        for line in lines
        if isinstance(line.get(REWARDS), list)
    ]

    def total(name: str) -> int:
        return round(sum(_number(line.get(name)) for line in lines))

    times: dict[str, float] = {}
    for line in lines:
        for key, value in line.items():
            if key.startswith(TIME) and math.isfinite(_number(value)):
                times[key.removeprefix(TIME)] = times.get(key.removeprefix(TIME), 0.0) + _number(value)
    return RunSummary(
        outcome=read_outcome(run),
        phases=phases,
        first_step=next((line["step"] for line in lines if line["step"] > 0 and line.get("phase") == phases[-1]), -1),
        step=max((line["step"] for line in lines), default=-1),
        changes=_changes(lines),
        completions=sum(count for count, _ in completions),
        failures=sum(round(count * failed) for count, failed in completions),
        skipped=total(SKIPPED),
        tokens=total(TOKENS),
        shared_tokens=total(SHARED),
        reused_prompt_tokens=total(REUSED),
        not_finite=sum(_count_not_finite(value) for line in lines for value in line.values()),
        seconds=times,
        exported_step=read_record(run).get("exported_step"),
        model=run / EXPORTED_MODEL if (run / EXPORTED_MODEL).is_dir() else None,
        report=run / REPORT if (run / REPORT).is_file() else None,
    )


def _changes(lines: Sequence[Mapping[str, Any]]) -> dict[str, MetricChange]:
    values: dict[str, tuple[str, dict[int, float]]] = {}
    for line in lines:
        for name, value in line.items():
            if name != "step" and isinstance(value, int | float) and math.isfinite(value):
                phase = "" if name.startswith(EVAL) else str(line.get("phase", ""))
                if name not in values or values[name][0] != phase:
                    values[name] = phase, {}
                values[name][1][line["step"]] = float(value)
    return {name: _change(name, by_step) for name, (_, by_step) in values.items()}


def _change(metric: str, values: Mapping[int, float]) -> MetricChange:
    steps = list(values)
    best = (min if metric in FALLING else max)(steps, key=values.__getitem__)
    return MetricChange(metric, values[steps[0]], values[steps[-1]], values[best], steps[0], steps[-1], best, values)


def summary_lines(summary: RunSummary) -> list[SummaryLine]:
    """Returns the lines of a summary, the most important first."""
    if summary.step < 0:
        return [SummaryLine("Step", "none", "no step has been logged")]
    lines = []
    if summary.score:
        best = summary.score.best != summary.score.last
        notes = [
            "" if summary.is_evaluation else _steps(summary.score),
            f"best {format_number(summary.score.best)} at step {summary.score.best_step:,}" if best else "",
        ]
        lines.append(SummaryLine(title(summary.score.metric), str(summary.score), ", ".join(filter(None, notes))))
    if summary.reward and not summary.is_evaluation:
        lines.append(SummaryLine(title(REWARD), str(summary.reward), _steps(summary.reward)))
    if summary.loss and summary.reward is None:
        lines.append(SummaryLine(title(LOSS), str(summary.loss), _steps(summary.loss)))
    if summary.completions:
        failed = f"{format_share(summary.failures, summary.completions)} of {summary.completions:,} completions"
        lines.append(SummaryLine("Reward failures", f"{summary.failures:,}", failed, warn=summary.failures > 0))
    if not summary.is_evaluation:
        lines.append(SummaryLine("Steps", f"{summary.step:,}", ", ".join(summary.phases)))
        if summary.exported_step is not None and summary.exported_step != summary.step:
            lines.append(SummaryLine("Exported", f"step {summary.exported_step:,}", "the best on held-out data"))
        lines.append(
            SummaryLine(
                "Skipped steps",
                f"{summary.skipped:,}",
                "because the gradient was not finite" * bool(summary.skipped),
                warn=summary.skipped > 0,
            )
        )
    if summary.shared_tokens:
        note = f"{format_share(summary.shared_tokens, summary.tokens)} of {summary.tokens:,} tokens, computed once"
        lines.append(SummaryLine("Shared tokens", f"{summary.shared_tokens:,}", note))
    if summary.reused_prompt_tokens:
        note = "not prefilled again in rollouts"
        lines.append(SummaryLine("Reused prompt tokens", f"{summary.reused_prompt_tokens:,}", note))
    if summary.not_finite:
        lines.append(SummaryLine("Not finite", f"{summary.not_finite:,}", "numbers in the metrics", warn=True))
    total = sum(summary.seconds.values())
    if total:
        by_seconds = sorted(summary.seconds.items(), key=lambda item: -item[1])
        shares = ", ".join(f"{name} {format_share(seconds, total)}" for name, seconds in by_seconds)
        lines.append(SummaryLine("Time", format_duration(total), shares))
    if MEMORY in summary.changes:
        lines.append(
            SummaryLine("GPU memory", f"{format_number(summary.changes[MEMORY].best)} GiB", "maximum of any rank")
        )
    return lines


def held_out_table(summary: RunSummary) -> list[list[str]]:
    """Returns a header, and the first, the best and the last held-out metrics. An evaluation has one row.

    Returns [] if nothing was held out.
    """
    if not summary.held_out or summary.score is None:
        return []
    names = [summary.score.metric, *(name for name in summary.held_out if name.startswith(PASS))]
    names += [name for name in summary.held_out if name not in names]
    head = ["", *(name.removeprefix(EVAL) for name in names)]
    first = "before" if summary.score.first_step < summary.first_step else "first"
    steps = {first: summary.score.first_step, "best": summary.score.best_step, "after": summary.score.last_step}
    if steps["best"] in (steps[first], steps["after"]):
        del steps["best"]
    if summary.is_evaluation:
        steps = {f"{summary.completions:,} completions": summary.score.last_step}
    elif not summary.score.moved:
        del steps["after"]
    rows = []
    for label, step in steps.items():
        read = [summary.held_out[name].at.get(step) for name in names]
        lead = label if summary.is_evaluation else f"{label}, step {step:,}"
        rows.append([lead, *("–" if value is None else format_number(value) for value in read)])
    return [head, *rows]


def _steps(metric: MetricChange) -> str:
    return f"steps {metric.first_step:,} → {metric.last_step:,}" if metric.moved else f"at step {metric.last_step:,}"


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else 0.0


def _count_not_finite(value: Any) -> int:
    """Returns how many numbers in it are not finite."""
    values = value if isinstance(value, list) else [value]
    return sum(isinstance(item, float) and not math.isfinite(item) for item in values)
