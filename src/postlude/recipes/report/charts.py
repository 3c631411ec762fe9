"""The report's charts as inline SVG: curves, times of steps, distributions over time. They need no script."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from typing import TypeAlias

import numpy as np

from postlude.recipes.report.data import Band, Floats, RunData, Series, downsample, smooth
from postlude.recipes.report.formatting import format_duration, format_number, format_share, tick_labels
from postlude.recipes.report.metrics import TIME, explain, title

WIDTH, HEIGHT = 400, 210
RIGHT, TOP, BOTTOM = 388, 22, 184  # edges of a plot; the axis labels are left of it
CHARACTER = 5.6  # width of a character in a label
GAP = 16  # between the plots of two phases
LEAST_SHARE = 0.3  # smallest share of the width of a phase
COLOURS = 8  # in the style sheet; further runs are dashed
APART = 2  # first colour of phases, distinct from those of runs
SMOOTH_POINTS = 150
DOTTED = 12  # up to so many values are shown as dots
COLUMNS, ROWS, LEVELS = 60, 24, 8  # of a distribution's heat map
STRIP = 46  # width of the last histogram
STRAY = 5.0  # outliers are cut if they widen the range by this factor
Line: TypeAlias = tuple[int, Series]
"""The series of one run in a plot, after the index of the run in the report."""


@dataclass(frozen=True)
class Ruler:
    """Maps numbers to coordinates."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        """Returns the coordinate of a number, the middle if the range is empty."""
        if self.high == self.low:
            return (self.start + self.end) / 2
        return self.start + (self.end - self.start) * (value - self.low) / (self.high - self.low)

    def ticks(self, about: int, *, integers: bool = False) -> list[float]:
        """Returns about so many round numbers in the range; `integers` only for steps."""
        span = self.high - self.low
        if span <= 0 or not math.isfinite(span):
            return [self.low]
        rough = span / max(about, 1)
        power = 10.0 ** math.floor(math.log10(rough))
        width = min((power * times for times in (1, 2, 5, 10)), key=lambda width: abs(math.log(width / rough)))
        width = max(width, 1.0) if integers else width
        first = math.ceil(self.low / width - 1e-9)
        ticks = [index * width for index in range(first, math.floor(self.high / width + 1e-9) + 1)]
        return list(dict.fromkeys(ticks)) or [self.low]


def colour(index: int) -> str:
    """Returns the attribute of the colour of a run or phase."""
    return f'style="--c:var(--c{index % COLOURS})"'


def curve(key: str, runs: Sequence[tuple[int, RunData]], points: int) -> str:
    """Returns the chart of one metric of one or more runs, each with its index in the report.

    Each phase has a plot with an axis of its own, because values of two phases cannot be compared.
    """
    lines: dict[str, list[Line]] = {}
    for phase in dict.fromkeys(band.phase for _, run in runs for band in run.bands):
        lines[phase] = []
    for index, run in runs:
        for phase, series in run.series[key].items():
            lines.setdefault(phase, []).append((index, series))
    plots = {phase: phase_lines for phase, phase_lines in lines.items() if phase_lines}
    spans = {phase: _span(phase_lines) for phase, phase_lines in plots.items()}
    labelled = [_labelled(phase_lines) for phase_lines in plots.values()]
    room = RIGHT - sum(margin for *_, margin in labelled) - GAP * (len(plots) - 1)
    lengths = _widths([last - first for first, last in spans.values()], room)
    parts, data, notes = [], [], []
    x_start = 0.0
    bands = _bands([run for _, run in runs])
    for (phase, phase_lines), (low, high, margin), length in zip(plots.items(), labelled, lengths, strict=True):
        x_start += margin
        x = Ruler(*spans[phase], x_start, x_start + length)
        svg, plot_data, plot_notes = _plot(phase_lines, x, Ruler(low, high, BOTTOM, TOP), points)
        several = len({band.phase for _, run in runs for band in run.bands}) > 1
        phase_bands = bands if not phase else [Band(phase, *map(int, spans[phase]))] if several else []
        parts.append(_banded(phase_bands, x) + svg)
        data.append(plot_data)
        notes += plot_notes
        x_start += length + GAP
    known = explain(key)
    tip = f"{known.meaning}\nlook for: {known.watch}" if known else key
    note = f"<small>{' · '.join(notes)}</small>" if notes else ""
    return (
        f'<figure data-curve="{escape(key)}"><figcaption><b data-tip="{escape(tip)}">{escape(title(key))}</b>'
        f'<code>{escape(key)}</code><span class="now">{_now(key, runs)}</span></figcaption>'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title(key))} by step">{"".join(parts)}'
        f"</svg>{note}{script(data)}</figure>"
    )


def _now(key: str, runs: Sequence[tuple[int, RunData]]) -> str:
    """Returns the default caption: the change of one run, or the last values of several."""
    changes = [(index, run.summary.changes.get(key)) for index, run in runs]
    if len(changes) == 1:
        return str(changes[0][1] or "–")
    values = (f"<b {colour(index)}>{format_number(way.last)}</b>" for index, way in changes[:4] if way)
    return " ".join(values) + (" …" if len(changes) > 4 else "")


def _span(lines: Sequence[Line]) -> tuple[float, float]:
    steps = np.concatenate([series.steps for _, series in lines])
    return float(steps.min()), float(steps.max())


def _labelled(lines: Sequence[Line]) -> tuple[float, float, float]:
    """Returns the range of a value axis and the width of its labels."""
    low, high = _range(np.concatenate([series.finite.values for _, series in lines]))
    return low, high, _margin(Ruler(low, high, BOTTOM, TOP))


def _margin(y: Ruler) -> float:
    """Returns the width of the labels of a value axis."""
    return 10 + CHARACTER * max(map(len, tick_labels(y.ticks(4))))


def _widths(steps: Sequence[float], room: float) -> list[float]:
    """Divides the width by steps, with a minimum for each plot."""
    min_fraction = min(LEAST_SHARE, 1 / len(steps))
    fractions = [max(count / (sum(steps) or 1.0), min_fraction) for count in steps]
    return [room * fraction / sum(fractions) for fraction in fractions]


def _bands(runs: Sequence[RunData]) -> Sequence[Band]:
    """Returns the phases of runs that all have the same ones; [] for a single phase."""
    first = runs[0].bands
    return first if len(first) > 1 and all(run.bands == first for run in runs) else []


def _banded(bands: Sequence[Band], x: Ruler) -> str:
    """Returns the bands of the phases behind a plot. A band extends half a step beyond its steps."""
    parts = []
    for index, band in enumerate(bands):
        start, end = (min(max(x(at), x.start), x.end) for at in (band.first - 0.5, band.last + 0.5))
        if len(bands) == 1:
            start, end = x.start, x.end
        elif index == 0:
            start = x.start
        parts.append(
            f'<rect class="band b{index % 2}" x="{start:.1f}" y="{TOP - 15}" width="{max(end - start, 0):.1f}" '
            f'height="{BOTTOM - TOP + 15}"/>'
        )
        if end - start > CHARACTER * len(band.phase) + 4:
            parts.append(f'<text class="phase" x="{start + 4:.1f}" y="{TOP - 5}">{escape(band.phase)}</text>')
    return "".join(parts)


def _plot(lines: Sequence[Line], x: Ruler, y: Ruler, points: int) -> tuple[str, object, list[str]]:
    """Returns a plot, its data for the page's script, and notes below it."""
    drawn, known, marks = [], [], []
    strays = odd = 0
    for run, series in lines:
        finite = series.finite
        strays += int(((finite.values < y.low) | (finite.values > y.high)).sum())
        odd += len(series.values) - len(finite.values)
        calm = Series(finite.steps, finite.values.clip(y.low, y.high))  # so that no outlier moves the mean
        raw = downsample(finite, points)
        drawn.append(_run(run, raw, smooth(calm, SMOOTH_POINTS), x, y))
        marks.append(_non_finite_marks(series, x))
        if len(raw.values):
            known.append(
                {
                    "run": run,
                    "steps": [int(step) for step in raw.steps],
                    "values": [format_number(float(value)) for value in raw.values],
                    "places": [round(y(min(max(float(value), y.low), y.high))) for value in raw.values],
                }
            )
    box = (x.start - 3, TOP - 4, x.end - x.start + 6, BOTTOM - TOP + 8)  # clips lines at the plot's edges
    clip = '<svg x="{:.1f}" y="{}" width="{:.1f}" height="{}" viewBox="{:.1f} {} {:.1f} {}">'.format(*box, *box)
    notes = [f"{odd} not finite (×)"] * bool(odd) + [f"{strays} beyond the edge"] * bool(strays)
    cross = f'<line class="cross" x1="0" x2="0" y1="{TOP}" y2="{BOTTOM}"/>'
    svg = f"<g>{_axes(x, y)}{clip}{''.join(drawn)}</svg>{''.join(marks)}{cross}</g>"
    return svg, {"x": [round(x.start, 1), round(x.end, 1), x.low, x.high], "runs": known}, notes


def script(data: object) -> str:
    """Returns a script element with JSON for the page's script."""
    return f'<script type="application/json">{as_json(data)}</script>'


def as_json(data: object) -> str:
    """Returns JSON that is safe in a script element."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def step_times(run: RunData, index: int) -> str:
    """Returns the chart of each part's share of a step's time, and of seconds per step."""
    series = {key.removeprefix(TIME): run.all_phases(key).finite for key in run.series if key.startswith(TIME)}
    series = {name: values for name, values in series.items() if len(values.values)}
    totals = {name: float(values.values.clip(min=0).sum()) for name, values in series.items()}
    total_seconds = sum(totals.values())
    if not total_seconds:
        return ""
    bar = "".join(
        f'<i style="--c:var(--c{number % COLOURS});width:{100 * total / total_seconds:.2f}%" '
        f'data-tip="{escape(name)}: {format_duration(total)}, {format_share(total, total_seconds)}"></i>'
        for number, (name, total) in enumerate(totals.items(), start=APART)
    )
    legend = "".join(
        f'<span><i class="swatch" {colour(number)}></i>{escape(name)} {format_share(total, total_seconds)}, '
        f"{format_duration(total)}</span>"
        for number, (name, total) in enumerate(totals.items(), start=APART)
    )
    steps = np.unique(np.concatenate([values.steps for values in series.values()]))
    edges = step_edges(steps)
    means = {name: _column_means(values, edges) for name, values in series.items()}
    y = Ruler(0.0, float(np.sum(list(means.values()), axis=0).max()), BOTTOM, TOP)
    x_start = _margin(y)
    x = Ruler(0, len(edges) - 1, x_start, RIGHT)
    bottoms = np.zeros(len(edges) - 1)
    drawn = []
    for number, mean_seconds in enumerate(means.values(), start=APART):
        tops = bottoms + mean_seconds
        path = "".join(
            f"M{x(c):.1f} {y(tops[c]):.1f}H{x(c + 1):.1f}V{y(bottoms[c]):.1f}H{x(c):.1f}z"
            for c in range(len(mean_seconds))
            if mean_seconds[c] > 0
        )
        drawn.append(f'<path class="fill" {colour(number)} d="{path}"/>')
        bottoms = tops
    tips = tooltip_columns(
        edges,
        x,
        (
            "\n".join(f"{name} {format_duration(mean_seconds[c])}" for name, mean_seconds in means.items())
            for c in range(len(edges) - 1)
        ),
    )
    span = Ruler(float(steps[0]), float(steps[-1]), x_start, RIGHT)
    course = (  # only for several steps
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="Seconds a step by phase">{_axes(span, y)}'
        f"{''.join(drawn)}{tips}</svg>"
        if len(steps) > 1
        else ""
    )
    return (
        f'<figure class="r{index}"><figcaption>{run_label(run, index)}<code>seconds per step</code>'
        f'<span>{format_duration(total_seconds)}</span></figcaption><div class="share">{bar}</div>'
        f'<div class="legend inline">{legend}</div>{course}</figure>'
    )


def distribution(run: RunData, index: int, key: str) -> str:
    """Returns a heat map of values over the run, their median as a line, and the last histogram."""
    steps = np.array([step for step, _ in run.distributions[key]], dtype=float)
    lists = [values for _, values in run.distributions[key]]
    low, high = _range(np.concatenate(lists))
    edges = step_edges(steps)
    borders = np.searchsorted(steps, edges)
    groups = [np.concatenate([np.array([]), *lists[first:last]]) for first, last in pairwise(borders)]
    y = Ruler(low, high, BOTTOM, TOP)
    x_start = _margin(y)
    alone = len(groups) == 1  # then only the histogram is drawn
    strip = RIGHT - x_start + 6 if alone else STRIP
    right = RIGHT - strip
    x = Ruler(0, len(groups), x_start, right)
    heights = np.linspace(low, high, ROWS + 1)
    counts = [np.histogram(group.clip(low, high), heights)[0] for group in groups]
    shades: dict[int, list[str]] = {}
    for column, count in enumerate(counts):
        for row in np.flatnonzero(count):
            level = math.ceil(LEVELS * math.sqrt(count[row] / count.max()))
            top, bottom = y(heights[row + 1]), y(heights[row])
            shades.setdefault(level, []).append(
                f"M{x(column):.1f} {top:.1f}H{x(column + 1):.1f}V{bottom:.1f}H{x(column):.1f}z"
            )
    heat = "".join(
        f'<path class="heat" fill-opacity="{0.08 + 0.82 * level / LEVELS:.2f}" d="{"".join(cells)}"/>'
        for level, cells in sorted(shades.items())
    )
    medians = [(x(position + 0.5), y(float(np.median(group)))) for position, group in enumerate(groups) if len(group)]
    last = next(count for count in reversed(counts) if count.any())
    bars = "".join(
        f'<rect class="heat" x="{right + 6:.1f}" y="{y(heights[row + 1]) + 0.5:.1f}" '
        f'width="{(strip - 6) * last[row] / last.max():.1f}" height="{(BOTTOM - TOP) / ROWS - 1:.1f}"/>'
        for row in np.flatnonzero(last)
    )
    span = Ruler(float(steps.min()), float(steps.max()), x_start, RIGHT if alone else right)
    course = f'{heat}<path class="median" d="{_path(medians)}"/>{tooltip_columns(edges, x, map(_summary, groups))}'
    return (
        f'<figure class="r{index}"><figcaption>{run_label(run, index)}<code>{escape(key)}</code><span>median '
        f'{format_number(float(np.median(groups[-1])))}</span></figcaption><svg viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'role="img" aria-label="{escape(key)} over the run" {colour(index)}>{_axes(span, y, course=not alone)}'
        f"{'' if alone else course}{bars}</svg></figure>"
    )


def _run(index: int, raw: Series, line: Series | None, x: Ruler, y: Ruler) -> str:
    dashed = " dashed" if index >= COLOURS else ""
    places = [
        [(x(s), y(v)) for s, v in zip(series.steps, series.values, strict=True)] for series in (raw, line) if series
    ]
    if line is None:
        dots = places[0] if len(raw.values) <= DOTTED else []
        drawn = f'<path class="line" d="{_path(places[0])}"/>' + "".join(
            f'<circle class="dot" cx="{at:.1f}" cy="{height:.1f}" r="2.5"/>' for at, height in dots
        )
    else:
        drawn = f'<path class="raw" d="{_path(places[0])}"/><path class="line" d="{_path(places[1])}"/>'
    return f'<g class="r{index}{dashed}" {colour(index)}>{drawn}</g>'


def _axes(x: Ruler, y: Ruler, *, course: bool = True) -> str:
    parts = []
    values = y.ticks(4)
    for value, label in zip(values, tick_labels(values), strict=True):
        position = y(value)
        parts.append(
            f'<line class="rule" x1="{x.start:.1f}" x2="{x.end:.1f}" y1="{position:.1f}" y2="{position:.1f}"/>'
        )
        parts.append(f'<text x="{x.start - 5:.1f}" y="{position + 3:.1f}" text-anchor="end">{label}</text>')
    return "".join(parts) + (step_labels(x) if course else "")


def step_labels(x: Ruler) -> str:
    """Returns the labels below a plot."""
    steps = x.ticks(max(1, int((x.end - x.start) / 65)), integers=True)
    return "".join(
        f'<text x="{x(step):.1f}" y="{BOTTOM + 15}" text-anchor="middle">{label}</text>'
        for step, label in zip(steps, tick_labels(steps), strict=True)
    )


def _non_finite_marks(series: Series, x: Ruler) -> str:
    """Returns a cross at the bottom for each step without a finite value."""
    places = {round(x(step)) for step in series.steps[~np.isfinite(series.values)]}
    return "".join(
        f'<path class="odd" d="M{position - 2.5} {BOTTOM - 5}l5 5m0-5l-5 5"/>' for position in sorted(places)
    )


def tooltip_columns(edges: Floats, x: Ruler, texts: Iterable[str]) -> str:
    """Returns invisible columns with tooltips."""
    rects = []
    for column, text in enumerate(texts):
        first, last = int(edges[column]), int(edges[column + 1]) - 1
        steps = f"step {first}" if first == last else f"steps {first}–{last}"
        rects.append(
            f'<rect class="catch" x="{x(column):.1f}" y="{TOP}" width="{x(column + 1) - x(column):.1f}" '
            f'height="{BOTTOM - TOP}" data-tip="{escape(f"{steps}{chr(10)}{text}")}"/>'
        )
    return "".join(rects)


def step_edges(steps: Floats, columns: int = COLUMNS) -> Floats:
    """Returns the edges of at most so many intervals of steps, as whole numbers."""
    first, last = int(steps.min()), int(steps.max()) + 1
    return np.unique(np.linspace(first, last, min(columns, len(np.unique(steps))) + 1).round())


def _column_means(series: Series, edges: Floats) -> Floats:
    sums, _ = np.histogram(series.steps, edges, weights=series.values.clip(min=0))
    counts, _ = np.histogram(series.steps, edges)
    return np.asarray(sums / np.maximum(counts, 1))


def _summary(values: Floats) -> str:
    if not len(values):
        return "no values"
    low, middle, high = (format_number(float(value)) for value in np.quantile(values, [0.05, 0.5, 0.95]))
    return f"median {middle}\n5 % below {low}, 5 % above {high}\n{len(values):,} values"


def _range(values: Floats) -> tuple[float, float]:
    """Returns the range of a value axis: all values, or 98 % of them if outliers would flatten the rest."""
    if not len(values):
        return 0.0, 1.0
    low, high = float(values.min()), float(values.max())
    inner_low, inner_high = (float(value) for value in np.quantile(values, [0.01, 0.99]))
    if inner_high > inner_low and high - low > STRAY * (inner_high - inner_low):
        margin = 0.25 * (inner_high - inner_low)
        low, high = max(low, inner_low - margin), min(high, inner_high + margin)
    if low == high:  # from 0 to a little beyond the value
        return min(1.25 * low, 0.0), max(1.25 * high, 0.0 if low else 1.0)
    return low, high


def run_label(run: RunData, index: int) -> str:
    """Returns the name of a run with its colour."""
    return f'<span><i class="swatch" {colour(index)}></i>{escape(run.name)}</span>'


def _path(places: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in places) if places else ""
