"""The data of a run's report: series, distributions and samples, thinned for drawing."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from postlude.recipes.report.metrics import EVAL
from postlude.recipes.report.summary import RunSummary, read_summary
from postlude.recipes.run.files import read_config, read_layers, read_metrics, read_record, read_samples
from postlude.recipes.run.loggers import dotted

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Series:
    """One metric of one run: `steps` [n], rising, and `values` [n], finite or not."""

    steps: Floats
    values: Floats

    @property
    def finite(self) -> Series:
        """The series without values that are not finite."""
        good = np.isfinite(self.values)
        return Series(self.steps[good], self.values[good])


@dataclass(frozen=True)
class Band:
    """The steps of one phase."""

    phase: str
    first: int
    last: int


@dataclass(frozen=True)
class RunData:
    """A run as the report reads it."""

    name: str
    path: Path
    config: Mapping[str, Any]
    bands: Sequence[Band]
    """The phases of the run in order."""
    series: Mapping[str, Mapping[str, Series]]
    """By metric, then by phase, because losses of two phases cannot be compared. Held-out metrics are under ""."""
    distributions: Mapping[str, Sequence[tuple[int, Floats]]]
    """Lists of numbers by step: rewards, lengths, …"""
    layers: Mapping[str, Sequence[tuple[int, Floats]]]
    """Lists of one layer each by step, such as the load of its experts, by name: "moe/layer_03/load"."""
    samples: Sequence[Mapping[str, Any]]
    machine: Mapping[str, Any]
    """Versions, commit and device of the last start, or {}."""
    summary: RunSummary

    def all_phases(self, key: str) -> Series:
        phases = self.series[key].values()
        steps, values = (np.concatenate([getattr(phase, name) for phase in phases]) for name in ("steps", "values"))
        order = np.argsort(steps, kind="stable")
        return Series(steps[order], values[order])


def read_runs(paths: Sequence[Path]) -> list[RunData]:
    """Reads the runs. Each is named after its directory, or its whole path if two directories have the same name."""
    for path in paths:
        if not path.is_dir():
            raise FileNotFoundError(f"{path} is not a directory, so no run can be read from it.")
    resolved = [path.resolve() for path in paths]
    times = Counter(path.name for path in resolved)
    return [_read(path, path.name if times[path.name] == 1 else str(path)) for path in resolved]


def _read(path: Path, name: str) -> RunData:
    numbers: dict[str, dict[str, dict[int, float]]] = {}
    lists: dict[str, dict[int, Floats]] = {}
    bands: list[Band] = []
    lines = read_metrics(path)
    summary = read_summary(path, lines)
    for line in lines:
        step = line.pop("step")
        phase = str(line.pop("phase", ""))
        if step > 0:  # the evaluation before the first step has no phase
            if bands and bands[-1].phase == phase:
                bands[-1] = replace(bands[-1], last=step)
            else:
                bands.append(Band(phase, step, step))
        for key, value in line.items():
            if isinstance(value, int | float):
                part = "" if key.startswith(EVAL) else phase
                numbers.setdefault(key, {}).setdefault(part, {})[step] = float(value)
            elif isinstance(value, list):
                values = _numbers(value)
                if len(values):
                    lists.setdefault(key, {})[step] = values
    samples = read_samples(path)
    starts = read_record(path).get("starts", [])
    if not lists:
        lists = _from_samples(samples)
    return RunData(
        name=name,
        path=path,
        config=dotted(read_config(path)),
        bands=bands,
        series={key: {part: _series(values) for part, values in parts.items()} for key, parts in numbers.items()},
        distributions={key: sorted(values.items()) for key, values in lists.items()},
        layers=_layers(path),
        samples=samples,
        machine=dotted(starts[-1]) if starts else {},
        summary=summary,
    )


def _layers(path: Path) -> dict[str, list[tuple[int, Floats]]]:
    """Returns layers.jsonl by name. Steps whose list has another length, as after a change of model, are left out."""
    vectors: dict[str, list[tuple[int, Floats]]] = {}
    for line in read_layers(path):
        step = line.pop("step")
        for name, values in line.items():
            row = np.array(values, dtype=float)
            steps = vectors.setdefault(name, [])
            if not steps or len(row) == len(steps[0][1]):
                steps.append((step, row))
    return vectors


def _series(values: Mapping[int, float]) -> Series:
    steps = sorted(values)
    return Series(np.array(steps, dtype=float), np.array([values[step] for step in steps]))


def _from_samples(samples: Sequence[Mapping[str, Any]]) -> dict[str, dict[int, Floats]]:
    """Returns rewards and lengths of the samples, for a run that logged no lists."""
    lists: dict[str, dict[int, list[Any]]] = {}
    for sample in samples:
        for key, value in (("sample rewards", sample.get("reward")), ("sample lengths", len(sample.get("tokens", ())))):
            lists.setdefault(key, {}).setdefault(sample["step"], []).append(value)
    numbers = {key: {step: _numbers(values) for step, values in steps.items()} for key, steps in lists.items()}
    return {
        key: {step: values for step, values in steps.items() if len(values)}
        for key, steps in numbers.items()
        if any(values.any() for values in steps.values())
    }


def _numbers(values: Sequence[Any]) -> Floats:
    if {type(value) for value in values} <= {int, float}:  # the common case, which is fast
        array: Floats = np.array(values, dtype=float)
        return np.extract(np.isfinite(array), array)
    return np.array([value for value in values if isinstance(value, int | float) and math.isfinite(value)], dtype=float)


def thin(series: Series, points: int) -> tuple[Series, Series | None]:
    """Returns at most `points` of a finite series, and the means of its parts; the series itself and None if short.

    The points are the minimum and the maximum of each part, so that no spike is lost.
    """
    count = len(series.values)
    if count <= points:
        return series, None
    edges = np.linspace(0, count, max(points // 2, 1) + 1).astype(int)
    extremes: set[int] = set()
    for first, last in pairwise(edges):
        part = series.values[first:last]
        extremes |= {int(first + part.argmin()), int(first + part.argmax())}
    index = np.array(sorted(extremes))
    means = np.add.reduceat(series.values, edges[:-1]) / np.diff(edges)
    middles = series.steps[(edges[:-1] + edges[1:]) // 2]
    return Series(series.steps[index], series.values[index]), Series(middles, means)
