"""The verdict: what came of a run, in the few numbers that decide. Terminal, report and model card say these.

Everything is read from the run's records, and a change is always a metric's first value and its last, as they were
logged: whoever looks them up finds the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from postlude.recipes.ending import Ending, read_ending
from postlude.recipes.metrics import (
    EVAL,
    FAILED,
    FALLING,
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
from postlude.recipes.numbers import duration, share, short
from postlude.recipes.run import read_metrics

MODEL, REPORT = "model", "report.html"  # what a finished run has besides its records
EVALUATED = "eval"  # the phase of a run that only measures


@dataclass(frozen=True)
class Change:
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
class Verdict:
    """What came of a run."""

    path: Path
    ending: Ending | None
    phases: Sequence[str]
    """Of steps, in their order; without the reading before the first."""
    step: int
    """The last one logged; -1 before the first."""
    score: Change | None
    """On what is held out: mean reward, accuracy or loss, whichever the run has."""
    held_out: Mapping[str, Change]
    """All that is measured on what is held out, by its name."""
    reward: Change | None
    loss: Change | None
    """Of the last phase alone: another phase's loss is of another thing."""
    answers: int
    failures: int
    """Answers that the reward function failed on."""
    skipped: int
    """Optimizer steps that were left out."""
    not_finite: int
    """Numbers in the metrics that are not finite."""
    seconds: Mapping[str, float]
    memory: float | None
    """GiB, the most on a GPU at any time."""
    model: Path | None
    report: Path | None

    @property
    def bad(self) -> str:
        """What is to be said before anything else: how the run went wrong. Empty where it did not."""
        if self.ending is None or self.ending.outcome == "finished":
            return ""
        how = "was interrupted" if self.ending.outcome == "interrupted" else "failed"
        why = f": {self.ending.sentence}" if self.ending.sentence else "."
        return f"The run {how} after step {self.ending.step}{why}"


@dataclass(frozen=True)
class Fact:
    """One line of a verdict."""

    label: str
    text: str
    note: str = ""
    warn: bool = False


def read_verdict(run: Path) -> Verdict:
    """The verdict on what a run's directory holds, whether the run is over or not."""
    run = Path(run)
    lines = read_metrics(run)
    phases = list(dict.fromkeys(str(line.get("phase", "")) for line in lines if line["step"] > 0)) or list(
        dict.fromkeys(str(line.get("phase", "")) for line in lines)
    )
    own = [line for line in lines if phases and line.get("phase", "") == phases[-1]]
    score = next((found for name in SCORES if (found := change(lines, name))), None)
    names = dict.fromkeys(key for line in lines for key in line if key.startswith(EVAL))
    held_out = {name: found for name in names if (found := change(lines, name))}
    answers = [(len(line[REWARDS]), _number(line.get(FAILED))) for line in lines if isinstance(line.get(REWARDS), list)]
    times: dict[str, float] = {}
    for line in lines:
        for key, value in line.items():
            if key.startswith(TIME) and math.isfinite(_number(value)):
                times[key.removeprefix(TIME)] = times.get(key.removeprefix(TIME), 0.0) + _number(value)
    memory = change(lines, MEMORY)
    return Verdict(
        path=run,
        ending=read_ending(run),
        phases=phases,
        step=max((line["step"] for line in lines), default=-1),
        score=score,
        held_out=held_out,
        reward=change(own, REWARD),
        loss=change(own, LOSS),
        answers=sum(count for count, _ in answers),
        failures=sum(round(count * failed) for count, failed in answers),
        skipped=round(sum(_number(line.get(SKIPPED)) for line in lines)),
        not_finite=sum(_odd(value) for line in lines for value in line.values()),
        seconds=times,
        memory=memory.best if memory else None,
        model=run / MODEL if (run / MODEL).is_dir() else None,
        report=run / REPORT if (run / REPORT).is_file() else None,
    )


def change(lines: Sequence[Mapping[str, Any]], metric: str) -> Change | None:
    """A metric's way through a run; None where it has no finite value."""
    found = [(line["step"], float(line[metric])) for line in lines if _is_number(line.get(metric))]
    if not found:
        return None
    best_step, best = (min if metric in FALLING else max)(found, key=lambda each: each[1])
    return Change(metric, found[0][1], found[-1][1], best, found[0][0], found[-1][0], best_step, dict(found))


def facts(verdict: Verdict) -> list[Fact]:
    """The verdict's lines, most telling first."""
    if verdict.step < 0:
        return [Fact("Step", "none", "no step has been logged")]
    found = [_score(verdict.score)] if verdict.score else []
    if verdict.reward and EVALUATED not in verdict.phases:
        found.append(Fact(title(REWARD), str(verdict.reward), _steps(verdict.reward)))
    if verdict.loss and verdict.reward is None:
        found.append(Fact(title(LOSS), str(verdict.loss), _steps(verdict.loss)))
    if verdict.answers:
        failed = f"{share(verdict.failures, verdict.answers)} of {verdict.answers:,} answers"
        found.append(Fact("Reward failures", f"{verdict.failures:,}", failed, warn=verdict.failures > 0))
    if EVALUATED not in verdict.phases:
        found.append(Fact("Steps", f"{verdict.step:,}", ", ".join(verdict.phases)))
        found.append(Fact("Skipped steps", f"{verdict.skipped:,}", "gradient not finite", warn=verdict.skipped > 0))
    if verdict.not_finite:
        found.append(Fact("Not finite", f"{verdict.not_finite:,}", "numbers in the metrics", warn=True))
    whole = sum(verdict.seconds.values())
    if whole:
        parts = sorted(verdict.seconds.items(), key=lambda part: -part[1])
        said = ", ".join(f"{name} {share(seconds, whole)}" for name, seconds in parts)
        found.append(Fact("Time", duration(whole), said))
    if verdict.memory is not None:
        found.append(Fact("GPU memory", f"{short(verdict.memory)} GiB", "at most, on a rank"))
    return found


def held_out_table(verdict: Verdict) -> list[list[str]]:
    """What was measured on what is held out: a head, and a row for the first reading, the best and the last.

    An evaluation has one reading, and so one row. Empty where nothing was held out.
    """
    if not verdict.held_out or verdict.score is None:
        return []
    names = [verdict.score.metric, *(name for name in verdict.held_out if name.startswith(PASS))]
    names += [name for name in verdict.held_out if name not in names]
    head = ["step", *(name.removeprefix(EVAL) for name in names)]
    steps = {"before": verdict.score.first_step, "best": verdict.score.best_step, "after": verdict.score.last_step}
    rows = []
    for label, step in steps.items():
        if (label == "best" and step in (steps["before"], steps["after"])) or (
            label != "after" and not verdict.score.moved
        ):
            continue
        read = [verdict.held_out[name].at.get(step) for name in names]
        rows.append(
            [
                f"{label} ({step:,})" if verdict.score.moved else f"{step:,}",
                *("–" if value is None else short(value) for value in read),
            ]
        )
    return [head, *rows]


def _score(metric: Change) -> Fact:
    best = f"best {short(metric.best)} at step {metric.best_step:,}" if metric.best != metric.last else ""
    return Fact(title(metric.metric), str(metric), ", ".join(filter(None, [_steps(metric), best])))


def _steps(metric: Change) -> str:
    return f"steps {metric.first_step:,} → {metric.last_step:,}" if metric.moved else f"at step {metric.last_step:,}"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else 0.0


def _odd(value: Any) -> int:
    """How many numbers in it are not finite."""
    values = value if isinstance(value, list) else [value]
    return sum(isinstance(each, float) and not math.isfinite(each) for each in values)
