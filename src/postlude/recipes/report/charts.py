"""The report's figures: their captions as HTML, and the numbers that `page.js` draws with uPlot."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from postlude.recipes.report.data import Band, Floats, RunData, Series, read_runs, thin
from postlude.recipes.report.formatting import escape, format_duration, format_number, format_share
from postlude.recipes.report.metrics import LAYER, TIME, explain, title

COLOURS = 8  # in the style sheet; further runs are dashed
FIRST_PART = 2  # colour of the first part of a step, distinct from those of runs
TIME_COLUMNS, COLUMNS, FEWEST_ROWS, ROWS = 160, 60, 4, 24  # of stacked times, and of heat maps
LEVELS = 9  # of a heat map's colour
CELLS, FEWEST_COLUMNS = 60_000, 6  # of all maps of lists on the page, and of each
DIGITS = 8  # of a drawn number
STRAY = 5.0  # outliers are cut if they widen a distribution by this factor
CAPTION_RUNS = 4  # whose last values a caption shows
LAYERS_NOTE = (
    "A row is a layer; stronger colour: a larger value. In the maps of load a row is an expert, and the colour is its "
    "load over the mean of its layer: palest below a quarter, strongest above 4; red: no token chose it."
)
Line: TypeAlias = tuple[int, RunData, Series]
"""A metric of a run, after the index of the run in the report."""


class ChartData:
    """The numbers of every figure, in the order of the page."""

    def __init__(self) -> None:
        self._steps: dict[tuple[int, ...], int] = {}
        self._charts: list[Mapping[str, Any]] = []

    def add(self, **chart: Any) -> int:
        self._charts.append(chart)
        return len(self._charts) - 1

    def steps(self, steps: Floats) -> int:
        """Returns the index of a list of steps, which metrics share."""
        return self._steps.setdefault(tuple(map(int, steps)), len(self._steps))

    def json(self, names: Sequence[str]) -> str:
        """Returns everything as JSON that is safe in a script element."""
        page = {"names": names, "steps": list(self._steps), "charts": self._charts}
        text = json.dumps(page, separators=(",", ":"), allow_nan=False)
        return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def colour(index: int) -> str:
    return f'style="--c:var(--c{index % COLOURS})"'


def run_label(run: RunData, index: int) -> str:
    return f'<span class="run"><i class="swatch" {colour(index)}></i>{escape(run.name)}</span>'


def curve(data: ChartData, key: str, phase: str, lines: Sequence[Line], bands: Sequence[Band], points: int) -> str:
    """Returns the figure of a metric in one phase, or in all of them if `phase` is "", with `bands` behind it."""
    drawn, odd = [], 0
    for index, _, series in lines:
        finite = series.finite
        extremes, means = thin(finite, points)
        odd_steps = series.steps[~np.isfinite(series.values)]
        odd += len(odd_steps)
        drawn.append(
            {"run": index, "steps": data.steps(extremes.steps), "values": _numbers(extremes.values)}
            | ({"odd": _numbers(odd_steps[:: len(odd_steps) // points + 1])} if len(odd_steps) else {})
            | ({"means": [_numbers(means.steps), _numbers(means.values)]} if means else {})
        )
    tag = f'<span class="tag">{escape(phase)}</span>' if phase else ""
    tag += f'<span class="tag warn">{odd:,} not finite ×</span>' if odd else ""
    chart = data.add(kind="lines", series=drawn, bands=[[band.phase, band.first, band.last] for band in bands])
    return (
        f'<figure data-curve="{escape(key)}">'
        f'<figcaption>{_title(key)}{tag}<span class="now">{_now(lines)}</span></figcaption>{_about(key)}'
        f"{_chart(chart, f'{title(key)} by step')}</figure>"
    )


def _now(lines: Sequence[Line]) -> str:
    """Returns the first and last value of one run, or the last values of several."""
    values = [(index, series.finite.values) for index, _, series in lines]
    if len(values) == 1:
        ends = [format_number(float(value)) for value in values[0][1][[0, -1]]] if len(values[0][1]) else ["–"]
        return " → ".join(ends if len(values[0][1]) > 1 else ends[-1:])
    last = [
        f'<b class="r{index}" {colour(index)}>{format_number(float(of_run[-1]))}</b>'
        for index, of_run in values
        if len(of_run)
    ]
    return " ".join(last[:CAPTION_RUNS]) + (" …" if len(last) > CAPTION_RUNS else "")


def _title(key: str) -> str:
    known = explain(key)
    tip = f"{known.meaning}\nrange: {known.range}\nlook for: {known.watch}" if known else key
    return f'<b data-tip="{escape(tip)}">{escape(title(key))}</b>'


def _about(key: str) -> str:
    known = explain(key)
    return f'<p class="about"><code>{escape(key)}</code> {escape(known.meaning if known else "")}</p>'


def _chart(chart: int, label: str) -> str:
    return f'<div class="chart" data-chart="{chart}" role="img" aria-label="{escape(label)}"></div>'


def step_times(data: ChartData, run: RunData, index: int) -> str:
    """Returns the figure of each part's share of a step's time, and of seconds per step."""
    parts = {key.removeprefix(TIME): run.all_phases(key).finite for key in run.series if key.startswith(TIME)}
    parts = {name: Series(part.steps, part.values.clip(min=0)) for name, part in parts.items() if len(part.values)}
    totals = {name: float(part.values.sum()) for name, part in parts.items()}
    total = sum(totals.values())
    if not total:
        return ""
    bar, legend = [], []
    for number, (name, seconds) in enumerate(totals.items(), start=FIRST_PART):
        words = f"{escape(name)} {format_share(seconds, total)}, {format_duration(seconds)}"
        width = f"--c:var(--c{number % COLOURS});width:{100 * seconds / total:.2f}%"
        bar.append(f'<i style="{width}" data-tip="{words}"></i>')
        legend.append(f'<span><i class="swatch" {colour(number)}></i>{words}</span>')
    steps = np.unique(np.concatenate([part.steps for part in parts.values()]))
    course = ""
    if len(steps) > 1:
        edges = step_edges(steps, TIME_COLUMNS)
        columns = data.steps(edges[:-1])
        stacked = [
            {"run": number, "name": name, "steps": columns, "values": _numbers(np.nan_to_num(_bin_means(part, edges)))}
            for number, (name, part) in enumerate(parts.items(), start=FIRST_PART)
        ]
        course = _chart(data.add(kind="stack", series=stacked), "seconds per step by part")
        course = f'<p class="about">seconds per step</p>{course}'
    return (
        f'<figure class="r{index}"><figcaption>{run_label(run, index)}<span class="now">{format_duration(total)}</span>'
        f'</figcaption><div class="share">{"".join(bar)}</div><div class="parts">{"".join(legend)}</div>'
        f"{course}</figure>"
    )


def distribution(data: ChartData, run: RunData, index: int, key: str) -> str:
    """Returns the heat map of lists of numbers over the run, with their median as a line."""
    steps = np.array([step for step, _ in run.distributions[key]], dtype=float)
    lists = [values for _, values in run.distributions[key]]
    values = np.concatenate(lists)
    low, high = _range(values)
    distinct = len(np.unique(values))
    rows = min(max(distinct, FEWEST_ROWS), ROWS)
    edges = step_edges(steps)
    borders = np.searchsorted(steps, edges)
    groups = [np.concatenate([np.array([]), *lists[first:last]]) for first, last in pairwise(borders)]
    counts = np.array([np.histogram(group.clip(low, high), rows, (low, high))[0] for group in groups])
    levels = np.ceil(LEVELS * np.sqrt(counts / np.maximum(counts.max(1, keepdims=True), 1))).astype(int)
    chart = data.add(
        kind="heat",
        run=index,
        edges=_numbers(edges),
        rows=_rows(np.where(levels > 0, levels, -1).T),
        range=_numbers(np.array([low, high])),
        line=[_number(float(np.median(group))) if len(group) and distinct > rows else None for group in groups],
        tips=[_quantiles(group) for group in groups],
    )
    last = format_number(float(np.median(next(group for group in reversed(groups) if len(group)))))
    return _heat_figure(run, index, key, f'<span class="now">median {last}</span>', chart)


def _quantiles(values: Floats) -> str:
    if not len(values):
        return "no values"
    low, middle, high = (format_number(float(value)) for value in np.quantile(values, [0.05, 0.5, 0.95]))
    return f"median {middle}\n5 % below {low}, 5 % above {high}\n{len(values):,} values"


def _range(values: Floats) -> tuple[float, float]:
    """Returns the range of all values, or of 98 % of them if outliers would flatten the rest."""
    low, high = float(values.min()), float(values.max())
    inner_low, inner_high = (float(value) for value in np.quantile(values, [0.01, 0.99]))
    if inner_high > inner_low and high - low > STRAY * (inner_high - inner_low):
        margin = 0.25 * (inner_high - inner_low)
        low, high = max(low, inner_low - margin), min(high, inner_high + margin)
    if low == high:  # from 0 to a little beyond the value
        return min(1.25 * low, 0.0), max(1.25 * high, 0.0 if low else 1.0)
    return low, high


def layer_maps(data: ChartData, runs: Sequence[RunData]) -> list[str]:
    """Returns the heat maps of what layers measure: a row a layer, or an expert in a map of each layer."""
    rows = sum(len(steps[0][1]) for run in runs for steps in run.layers.values())
    columns = min(max(CELLS // max(rows, 1), FEWEST_COLUMNS), COLUMNS)
    figures = []
    for index, run in enumerate(runs):
        figures += [_layer_numbers(data, run, index, metric, series) for metric, series in _by_metric(run).items()]
        figures += [_layer_lists(data, run, index, name, columns) for name in run.layers]
    return figures


def _by_metric(run: RunData) -> dict[str, dict[str, Series]]:
    """Returns the series of each layer by metric: {"moe/entropy": {"layer_03": …}}."""
    by_metric: dict[str, dict[str, Series]] = {}
    for key in run.series:
        if match := LAYER.fullmatch(key):
            by_metric.setdefault(f"{match['block']}/{match['name']}", {})[match["layer"]] = run.all_phases(key).finite
    return {
        metric: layers for metric, layers in by_metric.items() if any(len(series.steps) for series in layers.values())
    }


def _layer_numbers(data: ChartData, run: RunData, index: int, metric: str, layers: Mapping[str, Series]) -> str:
    edges = step_edges(np.concatenate([series.steps for series in layers.values()]))
    values = np.array([_bin_means(series, edges) for series in layers.values()])
    low, high = float(np.nanmin(values)), float(np.nanmax(values))
    shares = np.nan_to_num((values - low) / (high - low or 1.0))
    levels = np.where(np.isnan(values), -1, 1 + np.minimum(shares * LEVELS, LEVELS - 1).astype(int))
    names = [layer.replace("layer_", "").replace("_", " ") for layer in layers]

    def describe(column: Floats) -> str:
        if np.isnan(column).all():
            return "no values"
        top, bottom = int(np.nanargmax(column)), int(np.nanargmin(column))
        return (
            f"layer {names[top]}: {format_number(float(column[top]))}, the largest\n"
            f"layer {names[bottom]}: {format_number(float(column[bottom]))}, the smallest"
        )

    span = f"{format_number(low)} to {format_number(high)}"
    return _layer_figure(data, run, index, metric, span, edges, values, levels, names, describe)


def _layer_lists(data: ChartData, run: RunData, index: int, name: str, columns: int) -> str:
    steps = np.array([step for step, _ in run.layers[name]], dtype=float)
    rows = np.array([row for _, row in run.layers[name]])  # [steps, entries]
    edges = step_edges(steps, columns)
    totals = np.array([rows[first:last].sum(0) for first, last in pairwise(np.searchsorted(steps, edges))]).T
    relative = totals / np.maximum(totals.mean(0), 1e-12)  # [entries, columns]
    bins = np.clip(np.floor(np.log2(np.maximum(relative, 1e-12))) + 3, 0, 5)  # below -2, -1, 0, 1, 2, above
    levels = np.where(totals > 0, 1 + (bins * (LEVELS - 1) / 5).astype(int), 0)

    def describe(column: Floats) -> str:
        return (
            f"most: {int(column.argmax())}, {format_number(float(column.max()))} times the mean\n"
            f"{int((column == 0).sum())} of {len(column)} without any"
        )

    names = [str(entry) for entry in range(len(totals))]
    largest = f"largest {format_number(float(relative[:, -1].max()))}"
    return _layer_figure(data, run, index, name, largest, edges, relative, levels, names, describe)


def _layer_figure(
    data: ChartData,
    run: RunData,
    index: int,
    key: str,
    now: str,
    edges: Floats,
    values: Floats,
    levels: NDArray[np.int_],
    names: Sequence[str],
    describe: Callable[[Floats], str],
) -> str:
    """Returns the map of `values` [rows, columns], drawn as `levels`: 0 is marked, -1 left out."""
    tips = [describe(column) for column in values.T]
    chart = data.add(kind="heat", run=index, edges=_numbers(edges), rows=_rows(levels), names=names, tips=tips)
    return _heat_figure(run, index, key, f'<span class="now">{now}</span>', chart)


def _heat_figure(run: RunData, index: int, key: str, now: str, chart: int) -> str:
    return (
        f'<figure class="r{index}" data-heat="{escape(key)}"><figcaption>{_title(key)}{now}</figcaption>'
        f'<p class="about">{run_label(run, index)}<code>{escape(key)}</code></p>'
        f"{_chart(chart, f'{key} over the run')}</figure>"
    )


def step_edges(steps: Floats, columns: int = COLUMNS) -> Floats:
    """Returns the edges of at most so many intervals of steps, as whole numbers."""
    first, last = int(steps.min()), int(steps.max()) + 1
    return np.unique(np.linspace(first, last, min(columns, len(np.unique(steps))) + 1).round())


def _bin_means(series: Series, edges: Floats) -> Floats:
    """Returns the mean of each interval of steps; NaN without values."""
    counts, _ = np.histogram(series.steps, edges)
    sums, _ = np.histogram(series.steps, edges, weights=series.values)
    return np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)


def _rows(levels: NDArray[np.int_]) -> list[str]:
    """Returns one character a cell, [rows][columns]: its level, or "." for none."""
    return ["".join("." if level < 0 else str(level) for level in row) for row in levels.tolist()]


def _numbers(values: Floats) -> list[float]:
    return [_number(value) for value in values.tolist()]


def _number(value: float) -> float:
    """Returns a finite number with as many digits as a chart can use, which are few bytes of JSON."""
    return int(value) if value.is_integer() and abs(value) < 1e15 else float(f"{value:.{DIGITS}g}")


SVG_COLUMNS, MOST = 3, 6  # figures in a row, and in all
WIDTH, HEIGHT, HEAD = 260, 130, 34  # of a figure, and of the line above all, in pixels
LEFT, RIGHT, TOP, BOTTOM = 48, 14, 26, 20  # around a curve
POINTS = 200  # of a curve


def curves_svg(run: Path, keys: tuple[str, ...], lead: str) -> str:
    """Returns a line of text, and below it the curves of the first of the metrics that have two values or more."""
    (data,) = read_runs([run])
    found = [(key, data.all_phases(key).finite) for key in keys if key in data.series]
    drawn = [(key, series) for key, series in found if len(series.steps) > 1][:MOST]
    rows = -(-len(drawn) // SVG_COLUMNS)
    figures = [
        f'<g transform="translate({WIDTH * (place % SVG_COLUMNS)} {HEAD + HEIGHT * (place // SVG_COLUMNS)})">'
        f"{_figure(key, thin(series, POINTS)[0])}</g>"
        for place, (key, series) in enumerate(drawn)
    ]
    width, height = WIDTH * SVG_COLUMNS, HEAD + HEIGHT * rows
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="11" fill="#444">'
        f'<rect width="{width}" height="{height}" fill="#fff"/>'
        f'<text x="8" y="21" font-size="13">{escape(lead)}</text>{"".join(figures)}</svg>'
    )


def _figure(key: str, series: Series) -> str:
    """Returns a curve with its title, the range of its values, and its first and last step."""
    low, high = float(series.values.min()), float(series.values.max())
    first, last = int(series.steps[0]), int(series.steps[-1])
    inner_width, inner_height = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
    x = LEFT + inner_width * (series.steps - first) / (last - first)
    y = TOP + inner_height * (1 - (series.values - low) / ((high - low) or 1.0))
    points = " ".join(f"{across:.1f},{down:.1f}" for across, down in zip(x, y, strict=True))
    base = HEIGHT - BOTTOM
    return (
        f'<text x="{LEFT}" y="16">{escape(title(key))}</text>'
        f'<text x="{WIDTH - RIGHT}" y="16" text-anchor="end">{format_number(float(series.values[-1]))}</text>'
        f'<path d="M{LEFT} {TOP}V{base}H{WIDTH - RIGHT}" fill="none" stroke="#bbb"/>'
        f'<text x="{LEFT - 4}" y="{TOP + 8}" text-anchor="end">{format_number(high)}</text>'
        f'<text x="{LEFT - 4}" y="{base}" text-anchor="end">{format_number(low)}</text>'
        f'<text x="{LEFT}" y="{HEIGHT - 5}">{first}</text>'
        f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 5}" text-anchor="end">{last}</text>'
        f'<polyline points="{points}" fill="none" stroke="#2f6fd0" stroke-width="1.6" stroke-linejoin="round"/>'
    )
