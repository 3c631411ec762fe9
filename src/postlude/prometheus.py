"""Metrics in Prometheus's text format: counters and histograms, and `render`, which writes them."""

from __future__ import annotations

import math
import re
import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Literal, Protocol, TypeAlias

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PREFIX = "postlude_"
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
"""Upper bounds of a histogram of seconds."""
LabelValues: TypeAlias = tuple[str, ...]
Reading: TypeAlias = float | Mapping[LabelValues, float]
"""A value, or values by those of the labels."""


@dataclass(frozen=True)
class MetricSample:
    """One line: a value of a metric. `suffix` follows the metric's name, as in "_bucket"."""

    value: float
    labels: Mapping[str, str] = field(default_factory=dict)
    suffix: str = ""


@dataclass(frozen=True)
class MetricFamily:
    """A metric with all its values."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    samples: Sequence[MetricSample]


class MetricReader(Protocol):
    """Gives its values at any time, in any thread."""

    def family(self) -> MetricFamily:
        """Returns the present values."""


class MetricCounter:
    """A sum that only grows, for each combination of the values of its labels."""

    def __init__(self, name: str, text: str, labels: Sequence[str] = ()) -> None:
        self.name, self.text, self.labels = name, text, tuple(labels)
        self._values: Counter[LabelValues] = Counter()
        self._lock = threading.Lock()
        if not labels:
            self._values[()] = 0

    def add(self, amount: float = 1, *label_values: str) -> None:
        """Adds to the sum with these values of the labels."""
        with self._lock:
            self._values[label_values] += amount  # type: ignore[assignment]  # a Counter sums floats too

    def family(self) -> MetricFamily:
        with self._lock:
            values = dict(self._values)
        return MetricFamily(self.name, "counter", self.text, _labelled(self.labels, values))


@dataclass(frozen=True)
class Gauge:
    """A value that is read when it is asked for."""

    name: str
    text: str
    read: Callable[[], Reading]
    labels: Sequence[str] = ()
    kind: Literal["counter", "gauge"] = "gauge"

    def family(self) -> MetricFamily:
        value = self.read()
        values: Mapping[LabelValues, float] = value if isinstance(value, Mapping) else {(): value}
        return MetricFamily(self.name, self.kind, self.text, _labelled(self.labels, values))


class Histogram:
    """Counts values by upper bounds, for each combination of the values of its labels."""

    def __init__(self, name: str, text: str, labels: Sequence[str] = (), bounds: Sequence[float] = SECONDS) -> None:
        self.name, self.text, self.labels, self.bounds = name, text, tuple(labels), tuple(bounds)
        self._counts: dict[LabelValues, list[int]] = {}
        self._sums: Counter[LabelValues] = Counter()
        self._lock = threading.Lock()
        if not labels:
            self._counts[()] = [0] * (len(self.bounds) + 1)

    def observe(self, value: float, *label_values: str) -> None:
        """Counts a value."""
        with self._lock:
            counts = self._counts.setdefault(label_values, [0] * (len(self.bounds) + 1))
            counts[bisect_left(self.bounds, value)] += 1
            self._sums[label_values] += value  # type: ignore[assignment]

    def family(self) -> MetricFamily:
        with self._lock:
            counted = {values: (list(counts), self._sums[values]) for values, counts in self._counts.items()}
        samples = []
        for values, (counts, total) in counted.items():
            labels = dict(zip(self.labels, values, strict=True))
            for bound, count in zip([*self.bounds, math.inf], accumulate(counts), strict=True):
                samples.append(MetricSample(count, {**labels, "le": _number(bound)}, "_bucket"))
            samples += [MetricSample(total, labels, "_sum"), MetricSample(sum(counts), labels, "_count")]
        return MetricFamily(self.name, "histogram", self.text, samples)


def metric_name(name: str) -> str:
    """Returns a name as Prometheus has it: eval/pass@4 is postlude_eval_pass_4."""
    return PREFIX + re.sub(r"[^a-zA-Z0-9_]", "_", name)


def render(families: Iterable[MetricFamily]) -> bytes:
    """Returns the text of all values."""
    lines = []
    for family in families:
        text = family.help.replace("\\", r"\\").replace("\n", r"\n")
        lines += [f"# HELP {family.name} {text}", f"# TYPE {family.name} {family.kind}"]
        lines += [f"{family.name}{sample.suffix}{_labels(sample)} {_number(sample.value)}" for sample in family.samples]
    return "".join(f"{line}\n" for line in lines).encode(errors="replace")


def _labelled(labels: Sequence[str], values: Mapping[LabelValues, float]) -> list[MetricSample]:
    return [MetricSample(value, dict(zip(labels, key, strict=True))) for key, value in values.items()]


def _labels(sample: MetricSample) -> str:
    pairs = [f'{name}="{_escaped(value)}"' for name, value in sample.labels.items()]
    return f"{{{','.join(pairs)}}}" if pairs else ""


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def _number(value: float) -> str:
    if math.isfinite(value):
        return repr(value)
    return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"
