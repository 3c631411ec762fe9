"""The report's drawings, as inline SVG: curves, phase times, distributions over time. They show without a script."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

import numpy as np

from postlude.recipes.numbers import duration, short
from postlude.recipes.report_data import TIME, Floats, RunData, Series, smooth, thin

WIDTH, HEIGHT = 380, 200
LEFT, RIGHT, TOP, BOTTOM = 44, 366, 10, 178  # the plot's edges
COLOURS = 8  # in the style sheet; more runs than that are dashed
APART = 2  # phases begin at another colour than runs
SMOOTH_POINTS = 150
COLUMNS, ROWS, LEVELS = 60, 24, 8  # of a distribution over time
STRIP = 46  # width of the last column's histogram beside it
STRAY = 5.0  # a range this many times that of nearly all values is made of strays, which are cut

BOX = (LEFT - 3, TOP - 4, RIGHT - LEFT + 6, BOTTOM - TOP + 8)  # the plot and a little: what lies beyond is cut
CLIP = '<svg x="{}" y="{}" width="{}" height="{}" viewBox="{} {} {} {}">'.format(*BOX, *BOX)


@dataclass(frozen=True)
class Scale:
    """From numbers to places in a drawing."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        """A number's place; the middle where there is only one number."""
        if self.high == self.low:
            return (self.start + self.end) / 2
        return self.start + (self.end - self.start) * (value - self.low) / (self.high - self.low)

    def ticks(self, about: int) -> list[float]:
        """Round numbers in the range, about so many."""
        span = self.high - self.low
        if span <= 0 or not math.isfinite(span):
            return [self.low]
        rough = span / about
        power = 10.0 ** math.floor(math.log10(rough))
        width = min((power * times for times in (1, 2, 5, 10)), key=lambda width: abs(math.log(width / rough)))
        first = math.ceil(self.low / width - 1e-9)
        return [index * width for index in range(first, math.floor(self.high / width + 1e-9) + 1)]


def colour(index: int) -> str:
    """The attributes that give a run (or a phase) its colour."""
    return f'style="--c:var(--c{index % COLOURS})"'


def curve(title: str, key: str, runs: Sequence[tuple[int, Series]], points: int) -> str:
    """One metric of one or more runs; `runs` pairs a run's place in the report with its series."""
    finite = [(index, series.finite) for index, series in runs]
    values = np.concatenate([series.values for _, series in finite])
    steps = np.concatenate([series.steps for _, series in runs])
    low, high = _range(values)
    within = [Series(series.steps, series.values.clip(low, high)) for _, series in finite]  # no stray moves a mean
    shown = [
        (index, thin(series, points), smooth(calm, SMOOTH_POINTS))
        for (index, series), calm in zip(finite, within, strict=True)
    ]
    x = Scale(float(steps.min()), float(steps.max()), LEFT, RIGHT)
    y = Scale(low, high, BOTTOM, TOP)
    marks = [_odd(series, x) for _, series in runs]
    lines = [_run(index, raw, line, x, y) for index, raw, line in shown]
    strays = int(((values < low) | (values > high)).sum())
    now = ", ".join(short(float(series.values[-1])) if len(series.values) else "–" for _, series in runs[:3])
    odd = sum(len(series.values) for _, series in runs) - len(values)
    notes = [f"{odd} not finite (×)"] * bool(odd) + [f"{strays} beyond the edge"] * bool(strays)
    note = f"<small>{' · '.join(notes)}</small>" if notes else ""
    data = {
        "x": [LEFT, RIGHT, x.low, x.high],
        "runs": [
            {"run": index, "steps": [int(step) for step in raw.steps], "values": [_brief(v) for v in raw.values]}
            for index, raw, _ in shown
            if len(raw.values)
        ],
    }
    return (
        f'<figure data-curve="{escape(key)}"><figcaption>{escape(title)}<code>{escape(key)}</code><span>{now}</span>'
        f'</figcaption><svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)} by step">'
        f"{_axes(x, y)}{CLIP}{''.join(lines)}</svg>{''.join(marks)}"
        f'<line class="cross" x1="0" x2="0" y1="{TOP}" y2="{BOTTOM}"/></svg>{note}{script(data)}</figure>'
    )


def script(data: object) -> str:
    """JSON that the page's script reads; no text in it can end the element."""
    return f'<script type="application/json">{as_json(data)}</script>'


def as_json(data: object) -> str:
    """JSON that may stand in a script element."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def phases(run: RunData, index: int) -> str:
    """How a run's time went: each phase's share of all of it, and seconds a step over the run."""
    series = {key.removeprefix(TIME): run.series[key].finite for key in run.series if key.startswith(TIME)}
    series = {name: found for name, found in series.items() if len(found.values)}
    totals = {name: float(found.values.clip(min=0).sum()) for name, found in series.items()}
    whole = sum(totals.values())
    if not whole:
        return ""
    bar = "".join(
        f'<i style="--c:var(--c{place % COLOURS});width:{100 * total / whole:.2f}%" '
        f'data-tip="{escape(name)}: {duration(total)}, {total / whole:.1%}"></i>'
        for place, (name, total) in enumerate(totals.items(), start=APART)
    )
    legend = "".join(
        f'<span><i class="swatch" {colour(place)}></i>{escape(name)} {total / whole:.0%}, {duration(total)}</span>'
        for place, (name, total) in enumerate(totals.items(), start=APART)
    )
    steps = np.unique(np.concatenate([found.steps for found in series.values()]))
    edges = _edges(steps)
    x = Scale(0, len(edges) - 1, LEFT, RIGHT)
    means = {name: _column_means(found, edges) for name, found in series.items()}
    y = Scale(0.0, float(np.sum(list(means.values()), axis=0).max()), BOTTOM, TOP)
    bottoms = np.zeros(len(edges) - 1)
    drawn = []
    for place, found in enumerate(means.values(), start=APART):
        tops = bottoms + found
        path = "".join(
            f"M{x(c):.1f} {y(tops[c]):.1f}H{x(c + 1):.1f}V{y(bottoms[c]):.1f}H{x(c):.1f}z"
            for c in range(len(found))
            if found[c] > 0
        )
        drawn.append(f'<path class="fill" {colour(place)} d="{path}"/>')
        bottoms = tops
    tips = _catchers(
        edges,
        x,
        ("\n".join(f"{name} {duration(found[c])}" for name, found in means.items()) for c in range(len(edges) - 1)),
    )
    span = Scale(float(steps[0]), float(steps[-1]), LEFT, RIGHT)
    return (
        f'<figure class="r{index}"><figcaption>{_name(run, index)}<code>seconds a step</code><span>{duration(whole)}'
        f'</span></figcaption><div class="share">{bar}</div><div class="legend inline">{legend}</div>'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="Seconds a step by phase">{_axes(span, y)}'
        f"{''.join(drawn)}{tips}</svg></figure>"
    )


def distribution(run: RunData, index: int, key: str) -> str:
    """How values spread over the run: more colour where more of them lie, the median as a line, the end's histogram."""
    steps = np.array([step for step, _ in run.distributions[key]], dtype=float)
    lists = [values for _, values in run.distributions[key]]
    low, high = _range(np.concatenate(lists))
    edges = _edges(steps)
    borders = np.searchsorted(steps, edges)
    groups = [np.concatenate([np.array([]), *lists[first:last]]) for first, last in pairwise(borders)]
    right = RIGHT - STRIP
    x, y = Scale(0, len(groups), LEFT, right), Scale(low, high, BOTTOM, TOP)
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
    medians = [(x(place + 0.5), y(float(np.median(group)))) for place, group in enumerate(groups) if len(group)]
    last = next(count for count in reversed(counts) if count.any())
    bars = "".join(
        f'<rect class="heat" x="{right + 6}" y="{y(heights[row + 1]) + 0.5:.1f}" '
        f'width="{(STRIP - 6) * last[row] / last.max():.1f}" height="{(BOTTOM - TOP) / ROWS - 1:.1f}"/>'
        for row in np.flatnonzero(last)
    )
    span = Scale(float(steps.min()), float(steps.max()), LEFT, right)
    return (
        f'<figure class="r{index}"><figcaption>{_name(run, index)}<code>{escape(key)}</code><span>median '
        f'{short(float(np.median(groups[-1])))}</span></figcaption><svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{escape(key)} over the run" {colour(index)}>{_axes(span, y)}{heat}'
        f'<path class="median" d="{_path(medians)}"/>{bars}{_catchers(edges, x, map(_summary, groups))}</svg></figure>'
    )


def _run(index: int, raw: Series, line: Series | None, x: Scale, y: Scale) -> str:
    dashed = " dashed" if index >= COLOURS else ""
    places = [[(x(s), y(v)) for s, v in zip(one.steps, one.values, strict=True)] for one in (raw, line) if one]
    if len(raw.values) == 1:
        drawn = f'<circle class="dot" cx="{places[0][0][0]:.1f}" cy="{places[0][0][1]:.1f}" r="3"/>'
    elif line is None:
        drawn = f'<path class="line" d="{_path(places[0])}"/>'
    else:
        drawn = f'<path class="raw" d="{_path(places[0])}"/><path class="line" d="{_path(places[1])}"/>'
    return f'<g class="r{index}{dashed}" {colour(index)}>{drawn}</g>'


def _axes(x: Scale, y: Scale) -> str:
    parts = []
    for value in y.ticks(4):
        place = y(value)
        parts.append(f'<line class="rule" x1="{LEFT}" x2="{x.end}" y1="{place:.1f}" y2="{place:.1f}"/>')
        parts.append(f'<text x="{LEFT - 5}" y="{place + 3:.1f}" text-anchor="end">{_tick(value)}</text>')
    for value in x.ticks(5):
        if value == int(value):
            parts.append(f'<text x="{x(value):.1f}" y="{BOTTOM + 15}" text-anchor="middle">{_tick(value)}</text>')
    return "".join(parts)


def _odd(series: Series, x: Scale) -> str:
    """A cross at the foot for each step without a finite value; those on one spot are one."""
    places = {round(x(step)) for step in series.steps[~np.isfinite(series.values)]}
    return "".join(f'<path class="odd" d="M{place - 2.5} {BOTTOM - 5}l5 5m0-5l-5 5"/>' for place in sorted(places))


def _catchers(edges: Floats, x: Scale, texts: Iterable[str]) -> str:
    """Invisible columns that tell what they are of."""
    found = []
    for column, text in enumerate(texts):
        first, last = int(edges[column]), int(edges[column + 1]) - 1
        steps = f"step {first}" if first == last else f"steps {first}–{last}"
        found.append(
            f'<rect class="catch" x="{x(column):.1f}" y="{TOP}" width="{x(column + 1) - x(column):.1f}" '
            f'height="{BOTTOM - TOP}" data-tip="{escape(f"{steps}{chr(10)}{text}")}"/>'
        )
    return "".join(found)


def _edges(steps: Floats) -> Floats:
    """Borders of at most COLUMNS stretches that hold all steps, as whole numbers; the last is one beyond."""
    first, last = int(steps.min()), int(steps.max()) + 1
    return np.unique(np.linspace(first, last, min(COLUMNS, len(np.unique(steps))) + 1).round())


def _column_means(series: Series, edges: Floats) -> Floats:
    sums, _ = np.histogram(series.steps, edges, weights=series.values.clip(min=0))
    counts, _ = np.histogram(series.steps, edges)
    return np.asarray(sums / np.maximum(counts, 1))


def _summary(values: Floats) -> str:
    if not len(values):
        return "no values"
    low, middle, high = (short(float(value)) for value in np.quantile(values, [0.05, 0.5, 0.95]))
    return f"median {middle}\n5 % below {low}, 5 % above {high}\n{len(values):,} values"


def _range(values: Floats) -> tuple[float, float]:
    """What a value axis spans: all values, or nearly all where a few strays would flatten the rest."""
    if not len(values):
        return 0.0, 1.0
    low, high = float(values.min()), float(values.max())
    inner_low, inner_high = (float(value) for value in np.quantile(values, [0.01, 0.99]))
    if inner_high > inner_low and high - low > STRAY * (inner_high - inner_low):
        margin = 0.25 * (inner_high - inner_low)
        low, high = max(low, inner_low - margin), min(high, inner_high + margin)
    if low == high:
        margin = abs(low) * 0.1 or 1.0
        return low - margin, high + margin
    return low, high


def _name(run: RunData, index: int) -> str:
    return f'<span><i class="swatch" {colour(index)}></i>{escape(run.name)}</span>'


def _path(places: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in places) if places else ""


def _tick(value: float) -> str:
    size = abs(value)
    for power, letter in ((9, "G"), (6, "M"), (3, "k")):
        if size >= 1e4 and 10**power <= size < 10 ** (power + 3):
            return f"{value / 10**power:.3g}{letter}"
    if size >= 1e4 or 0 < size < 1e-3:
        digits, exponent = f"{value:.2e}".split("e")
        return f"{float(digits):g}e{int(exponent)}"
    return f"{value:.4g}"


def _brief(value: float) -> float:
    return float(f"{value:.5g}")
