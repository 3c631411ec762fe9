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

from postlude.recipes.metrics import (
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
from postlude.recipes.numbers import duration, share, short
from postlude.recipes.run.beginning import MODEL
from postlude.recipes.run.directory import read_metrics
from postlude.recipes.run.ending import Ending, read_ending

REPORT = "report.html"  # what a run that has ended has besides its records and MODEL
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
    ways: Mapping[str, Change]
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
    def score(self) -> Change | None:
        """On what is held out: mean reward, accuracy or loss, whichever the run has."""
        return next((self.ways[name] for name in SCORES if name in self.ways), None)

    @property
    def reward(self) -> Change | None:
        """The mean of the answers trained on."""
        return self.ways.get(REWARD)

    @property
    def loss(self) -> Change | None:
        """Of the last phase."""
        return self.ways.get(LOSS)

    @property
    def held_out(self) -> dict[str, Change]:
        """All that is measured on what is held out, by its name."""
        return {name: way for name, way in self.ways.items() if name.startswith(EVAL)}

    @property
    def bad(self) -> str:
        """What is to be said before anything else: how the run went wrong. Empty where it did not."""
        if self.ending is None or self.ending.outcome == "finished":
            return ""
        if self.ending.outcome == "interrupted":
            return f"The run was interrupted: {self.ending.sentence or f'step {self.ending.step} was its last.'}"
        why = f": {self.ending.sentence}" if self.ending.sentence else "."
        return f"The run failed after step {self.ending.step}{why}"


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
    return Verdict(
        path=run,
        ending=read_ending(run),
        phases=phases,
        step=max((line["step"] for line in lines), default=-1),
        ways=_ways(lines),
        answers=sum(count for count, _ in answers),
        failures=sum(round(count * failed) for count, failed in answers),
        skipped=round(sum(_number(line.get(SKIPPED)) for line in lines)),
        not_finite=sum(_odd(value) for line in lines for value in line.values()),
        seconds=times,
        model=run / MODEL if (run / MODEL).is_dir() else None,
        report=run / REPORT if (run / REPORT).is_file() else None,
    )


def _ways(lines: Sequence[Mapping[str, Any]]) -> dict[str, Change]:
    found: dict[str, tuple[str, dict[int, float]]] = {}
    for line in lines:
        for name, value in line.items():
            if name != "step" and isinstance(value, int | float) and math.isfinite(value):
                phase = "" if name.startswith(EVAL) else str(line.get("phase", ""))
                if name not in found or found[name][0] != phase:
                    found[name] = phase, {}
                found[name][1][line["step"]] = float(value)
    return {name: _way(name, values) for name, (_, values) in found.items()}


def _way(metric: str, values: Mapping[int, float]) -> Change:
    steps = list(values)
    best = (min if metric in FALLING else max)(steps, key=values.__getitem__)
    return Change(metric, values[steps[0]], values[steps[-1]], values[best], steps[0], steps[-1], best, values)


def facts(verdict: Verdict) -> list[Fact]:
    """The verdict's lines, most telling first."""
    if verdict.step < 0:
        return [Fact("Step", "none", "no step has been logged")]
    found = []
    if verdict.score:
        best = verdict.score.best != verdict.score.last
        notes = [
            "" if verdict.is_evaluation else _steps(verdict.score),
            f"best {short(verdict.score.best)} at step {verdict.score.best_step:,}" if best else "",
        ]
        found.append(Fact(title(verdict.score.metric), str(verdict.score), ", ".join(filter(None, notes))))
    if verdict.reward and not verdict.is_evaluation:
        found.append(Fact(title(REWARD), str(verdict.reward), _steps(verdict.reward)))
    if verdict.loss and verdict.reward is None:
        found.append(Fact(title(LOSS), str(verdict.loss), _steps(verdict.loss)))
    if verdict.answers:
        failed = f"{share(verdict.failures, verdict.answers)} of {verdict.answers:,} answers"
        found.append(Fact("Reward failures", f"{verdict.failures:,}", failed, warn=verdict.failures > 0))
    if not verdict.is_evaluation:
        found.append(Fact("Steps", f"{verdict.step:,}", ", ".join(verdict.phases)))
        found.append(
            Fact(
                "Skipped steps",
                f"{verdict.skipped:,}",
                "for a gradient that was not finite" * bool(verdict.skipped),
                warn=verdict.skipped > 0,
            )
        )
    if verdict.not_finite:
        found.append(Fact("Not finite", f"{verdict.not_finite:,}", "numbers in the metrics", warn=True))
    whole = sum(verdict.seconds.values())
    if whole:
        parts = sorted(verdict.seconds.items(), key=lambda part: -part[1])
        said = ", ".join(f"{name} {share(seconds, whole)}" for name, seconds in parts)
        found.append(Fact("Time", duration(whole), said))
    if MEMORY in verdict.ways:
        found.append(Fact("GPU memory", f"{short(verdict.ways[MEMORY].best)} GiB", "at most, on a rank"))
    return found


def held_out_table(verdict: Verdict) -> list[list[str]]:
    """What was measured on what is held out: a head, and a row for the first reading, the best and the last.

    An evaluation has one reading, and so one row. Empty where nothing was held out.
    """
    if not verdict.held_out or verdict.score is None:
        return []
    names = [verdict.score.metric, *(name for name in verdict.held_out if name.startswith(PASS))]
    names += [name for name in verdict.held_out if name not in names]
    head = ["", *(name.removeprefix(EVAL) for name in names)]
    steps = {"before": verdict.score.first_step, "best": verdict.score.best_step, "after": verdict.score.last_step}
    if steps["best"] in (steps["before"], steps["after"]):
        del steps["best"]
    if verdict.is_evaluation:
        steps = {f"{verdict.answers:,} answers": verdict.score.last_step}
    elif not verdict.score.moved:
        del steps["after"]
    rows = []
    for label, step in steps.items():
        read = [verdict.held_out[name].at.get(step) for name in names]
        lead = label if verdict.is_evaluation else f"{label}, step {step:,}"
        rows.append([lead, *("–" if value is None else short(value) for value in read)])
    return [head, *rows]


def _steps(metric: Change) -> str:
    return f"steps {metric.first_step:,} → {metric.last_step:,}" if metric.moved else f"at step {metric.last_step:,}"


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else 0.0


def _odd(value: Any) -> int:
    """How many numbers in it are not finite."""
    values = value if isinstance(value, list) else [value]
    return sum(isinstance(each, float) and not math.isfinite(each) for each in values)
