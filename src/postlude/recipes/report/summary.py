"""The summary: what came of a run, in the few numbers that decide. Terminal, report and model card say these.

Everything is read from the run's records, and a change is always a metric's first value and its last, as they were
logged: whoever looks them up finds the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from postlude.recipes.report.formatting import duration, share, short
from postlude.recipes.report.metrics import (
    EVAL,
    FAILED,
    FALLING,
    LENGTHS,
    LOSS,
    MEMORY,
    PASS,
    REWARD,
    REWARDS,
    SCORES,
    SKIPPED,
    TIME,
    title,
)
from postlude.recipes.run.directory import read_metrics
from postlude.recipes.run.outcome import RunOutcome, read_outcome
from postlude.recipes.run.start_mode import MODEL

REPORT = "report.html"  # what a run that has ended has besides its records and MODEL
EVALUATED = "eval"  # the phase of a run that only measures


@dataclass(frozen=True)
class MetricChange:
    """A metric's way: its first and last value, and the best of all, as logged."""

    metric: str
    first: float
    last: float
    best: float
    first_step: int
    last_step: int
    best_step: int
    at: Mapping[int, float]
    """Every finite value, by its step."""

    @property
    def moved(self) -> bool:
        """Whether there is a way at all: two readings or more."""
        return self.first_step != self.last_step

    def __str__(self) -> str:
        return f"{short(self.first)} → {short(self.last)}" if self.moved else short(self.last)


@dataclass(frozen=True)
class RunSummary:
    """What came of a run."""

    path: Path
    outcome: RunOutcome | None
    phases: Sequence[str]
    """Of steps, in their order; without the reading before the first."""
    step: int
    """The last one logged; -1 before the first."""
    changes: Mapping[str, MetricChange]
    """Each metric's, in the last phase that has it: another phase's loss is of another thing. What is measured on what
    is held out is the same thing throughout."""
    answers: int
    failures: int
    """Answers that the reward function failed on."""
    skipped: int
    """Optimizer steps that were left out."""
    not_finite: int
    """Numbers in the metrics that are not finite."""
    seconds: Mapping[str, float]
    model: Path | None
    report: Path | None

    @property
    def is_evaluation(self) -> bool:
        """Whether the run only measures: it has one reading, and no curves."""
        return list(self.phases) == [EVALUATED]

    @property
    def score(self) -> MetricChange | None:
        """On what is held out: mean reward, accuracy or loss, whichever the run has."""
        return next((self.changes[name] for name in SCORES if name in self.changes), None)

    @property
    def reward(self) -> MetricChange | None:
        """The mean of the answers trained on."""
        return self.changes.get(REWARD)

    @property
    def loss(self) -> MetricChange | None:
        """Of the last phase."""
        return self.changes.get(LOSS)

    @property
    def held_out(self) -> dict[str, MetricChange]:
        """All that is measured on what is held out, by its name."""
        return {name: way for name, way in self.changes.items() if name.startswith(EVAL)}

    @property
    def bad(self) -> str:
        """What is to be said before anything else: how the run went wrong. Empty where it did not."""
        if self.outcome is None or self.outcome.status == "finished":
            return ""
        if self.outcome.status == "interrupted":
            return f"The run was interrupted: {self.outcome.message or f'step {self.outcome.step} was its last.'}"
        why = f": {self.outcome.message}" if self.outcome.message else "."
        return f"The run failed after step {self.outcome.step}{why}"


@dataclass(frozen=True)
class SummaryLine:
    """One line of a summary."""

    label: str
    text: str
    note: str = ""
    warn: bool = False


def read_summary(run: Path) -> RunSummary:
    """The verdict on what a run's directory holds, whether the run is over or not."""
    run = Path(run)
    lines = read_metrics(run)
    phases = list(dict.fromkeys(str(line.get("phase", "")) for line in lines if line["step"] > 0)) or list(
        dict.fromkeys(str(line.get("phase", "")) for line in lines)
    )
    answers = [  # every one has a length, and a reward unless the call for it failed
        (len(line.get(LENGTHS, line[REWARDS])), _number(line.get(FAILED)))
        for line in lines
        if isinstance(line.get(REWARDS), list)
    ]
    times: dict[str, float] = {}
    for line in lines:
        for key, value in line.items():
            if key.startswith(TIME) and math.isfinite(_number(value)):
                times[key.removeprefix(TIME)] = times.get(key.removeprefix(TIME), 0.0) + _number(value)
    return RunSummary(
        path=run,
        outcome=read_outcome(run),
        phases=phases,
        step=max((line["step"] for line in lines), default=-1),
        changes=_ways(lines),
        answers=sum(count for count, _ in answers),
        failures=sum(round(count * failed) for count, failed in answers),
        skipped=round(sum(_number(line.get(SKIPPED)) for line in lines)),
        not_finite=sum(_odd(value) for line in lines for value in line.values()),
        seconds=times,
        model=run / MODEL if (run / MODEL).is_dir() else None,
        report=run / REPORT if (run / REPORT).is_file() else None,
    )


def _ways(lines: Sequence[Mapping[str, Any]]) -> dict[str, MetricChange]:
    found: dict[str, tuple[str, dict[int, float]]] = {}
    for line in lines:
        for name, value in line.items():
            if name != "step" and isinstance(value, int | float) and math.isfinite(value):
                phase = "" if name.startswith(EVAL) else str(line.get("phase", ""))
                if name not in found or found[name][0] != phase:
                    found[name] = phase, {}
                found[name][1][line["step"]] = float(value)
    return {name: _way(name, values) for name, (_, values) in found.items()}


def _way(metric: str, values: Mapping[int, float]) -> MetricChange:
    steps = list(values)
    best = (min if metric in FALLING else max)(steps, key=values.__getitem__)
    return MetricChange(metric, values[steps[0]], values[steps[-1]], values[best], steps[0], steps[-1], best, values)


def summary_lines(summary: RunSummary) -> list[SummaryLine]:
    """The verdict's lines, most telling first."""
    if summary.step < 0:
        return [SummaryLine("Step", "none", "no step has been logged")]
    found = []
    if summary.score:
        best = summary.score.best != summary.score.last
        notes = [
            "" if summary.is_evaluation else _steps(summary.score),
            f"best {short(summary.score.best)} at step {summary.score.best_step:,}" if best else "",
        ]
        found.append(SummaryLine(title(summary.score.metric), str(summary.score), ", ".join(filter(None, notes))))
    if summary.reward and not summary.is_evaluation:
        found.append(SummaryLine(title(REWARD), str(summary.reward), _steps(summary.reward)))
    if summary.loss and summary.reward is None:
        found.append(SummaryLine(title(LOSS), str(summary.loss), _steps(summary.loss)))
    if summary.answers:
        failed = f"{share(summary.failures, summary.answers)} of {summary.answers:,} answers"
        found.append(SummaryLine("Reward failures", f"{summary.failures:,}", failed, warn=summary.failures > 0))
    if not summary.is_evaluation:
        found.append(SummaryLine("Steps", f"{summary.step:,}", ", ".join(summary.phases)))
        found.append(
            SummaryLine(
                "Skipped steps",
                f"{summary.skipped:,}",
                "for a gradient that was not finite" * bool(summary.skipped),
                warn=summary.skipped > 0,
            )
        )
    if summary.not_finite:
        found.append(SummaryLine("Not finite", f"{summary.not_finite:,}", "numbers in the metrics", warn=True))
    whole = sum(summary.seconds.values())
    if whole:
        parts = sorted(summary.seconds.items(), key=lambda part: -part[1])
        said = ", ".join(f"{name} {share(seconds, whole)}" for name, seconds in parts)
        found.append(SummaryLine("Time", duration(whole), said))
    if MEMORY in summary.changes:
        found.append(SummaryLine("GPU memory", f"{short(summary.changes[MEMORY].best)} GiB", "at most, on a rank"))
    return found


def held_out_table(summary: RunSummary) -> list[list[str]]:
    """What was measured on what is held out: a head, and a row for the first reading, the best and the last.

    An evaluation has one reading, and so one row. Empty where nothing was held out.
    """
    if not summary.held_out or summary.score is None:
        return []
    names = [summary.score.metric, *(name for name in summary.held_out if name.startswith(PASS))]
    names += [name for name in summary.held_out if name not in names]
    head = ["", *(name.removeprefix(EVAL) for name in names)]
    steps = {"before": summary.score.first_step, "best": summary.score.best_step, "after": summary.score.last_step}
    if steps["best"] in (steps["before"], steps["after"]):
        del steps["best"]
    if summary.is_evaluation:
        steps = {f"{summary.answers:,} answers": summary.score.last_step}
    elif not summary.score.moved:
        del steps["after"]
    rows = []
    for label, step in steps.items():
        read = [summary.held_out[name].at.get(step) for name in names]
        lead = label if summary.is_evaluation else f"{label}, step {step:,}"
        rows.append([lead, *("–" if value is None else short(value) for value in read)])
    return [head, *rows]


def _steps(metric: MetricChange) -> str:
    return f"steps {metric.first_step:,} → {metric.last_step:,}" if metric.moved else f"at step {metric.last_step:,}"


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else 0.0


def _odd(value: Any) -> int:
    """How many numbers in it are not finite."""
    values = value if isinstance(value, list) else [value]
    return sum(isinstance(each, float) and not math.isfinite(each) for each in values)
