"""Heat maps of what layers measure, over steps: one row per layer, or one per expert in a map of each layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape
from itertools import pairwise

import numpy as np

from postlude.recipes.report.charts import (
    BOTTOM,
    CHARACTER,
    COLUMNS,
    HEIGHT,
    RIGHT,
    TOP,
    WIDTH,
    Ruler,
    colour,
    run_label,
    step_edges,
    step_labels,
    tooltip_columns,
)
from postlude.recipes.report.data import Floats, RunData, Series
from postlude.recipes.report.formatting import format_number
from postlude.recipes.report.metrics import LAYER, explain, title

CELLS, FEWEST_COLUMNS = 60_000, 6  # of all maps of lists on the page, and of each
LEVELS = 6
ROW_LABELS = 8
NOTE = (
    "A row is a layer; stronger colour: a larger value. In the maps of load a row is an expert, and the colour is its "
    "load over the mean of its layer: palest below a quarter, strongest above 4; red: no token chose it."
)


def layer_maps(runs: Sequence[RunData]) -> str:
    """Returns the section of heat maps; "" if no run measured layers."""
    rows = sum(len(steps[0][1]) for run in runs for steps in run.layers.values())
    columns = min(max(CELLS // max(rows, 1), FEWEST_COLUMNS), COLUMNS)
    figures = []
    for index, run in enumerate(runs):
        figures += [_numbers(run, index, metric, series) for metric, series in _by_metric(run).items()]
        figures += [_vectors(run, index, name, columns) for name in run.layers]
    return f'<h2>Layers</h2><p class="soft">{NOTE}</p><div class="grid">{"".join(figures)}</div>' if figures else ""


def _by_metric(run: RunData) -> dict[str, dict[str, Series]]:
    """Returns the series of each layer by metric: {"moe/entropy": {"layer_03": …}}."""
    by_metric: dict[str, dict[str, Series]] = {}
    for key in run.series:
        if match := LAYER.fullmatch(key):
            by_metric.setdefault(f"{match['block']}/{match['name']}", {})[match["layer"]] = run.all_phases(key).finite
    return {
        metric: layers for metric, layers in by_metric.items() if any(len(series.steps) for series in layers.values())
    }


def _numbers(run: RunData, index: int, metric: str, layers: Mapping[str, Series]) -> str:
    steps = np.concatenate([series.steps for series in layers.values()])
    edges = step_edges(steps)
    values = np.array([_bin_means(series, edges) for series in layers.values()])
    low, high = float(np.nanmin(values)), float(np.nanmax(values))
    shares = (values - low) / (high - low or 1.0)
    names = [layer.replace("layer_", "").replace("_", " ") for layer in layers]

    def describe(column: Floats) -> str:
        if np.isnan(column).all():
            return "no values"
        top, bottom = int(np.nanargmax(column)), int(np.nanargmin(column))
        return (
            f"layer {names[top]}: {format_number(float(column[top]))}, the largest\n"
            f"layer {names[bottom]}: {format_number(float(column[bottom]))}, the smallest"
        )

    levels = np.where(np.isnan(values), -1, 1 + np.minimum(np.nan_to_num(shares) * LEVELS, LEVELS - 1).astype(int))
    span = f"{format_number(low)} to {format_number(high)}"
    known = explain(metric)
    tip = f"{known.meaning}\nlook for: {known.watch}" if known else metric
    caption = f'<b data-tip="{escape(tip)}">{escape(title(metric))}</b><code>{escape(metric)}</code>'
    return _figure(run, index, metric, f"{caption}<span>{span}</span>", edges, values, levels, names, describe)


def _vectors(run: RunData, index: int, name: str, columns: int) -> str:
    steps = np.array([step for step, _ in run.layers[name]], dtype=float)
    rows = np.array([row for _, row in run.layers[name]])  # [steps, entries]
    edges = step_edges(steps, columns)
    totals = np.array([rows[first:last].sum(0) for first, last in pairwise(np.searchsorted(steps, edges))]).T
    relative = totals / np.maximum(totals.mean(0), 1e-12)  # [entries, columns]
    exponents = np.log2(np.maximum(relative, 1e-12))  # below -2, -1, 0, 1, 2, above
    levels = np.where(totals > 0, 1 + np.clip(np.floor(exponents) + 3, 0, LEVELS - 1).astype(int), 0)

    def describe(column: Floats) -> str:
        return (
            f"most: {int(column.argmax())}, {format_number(float(column.max()))} times the mean\n"
            f"{int((column == 0).sum())} of {len(column)} without any"
        )

    caption = f"<b>{escape(name)}</b><code></code><span>largest {format_number(float(relative[:, -1].max()))}</span>"
    labels = [str(entry) for entry in range(len(totals))]
    return _figure(run, index, name, caption, edges, relative, levels, labels, describe)


def _figure(
    run: RunData,
    index: int,
    key: str,
    caption: str,
    edges: Floats,
    values: Floats,
    levels: np.ndarray[tuple[int, ...], np.dtype[np.int_]],
    labels: Sequence[str],
    describe: Callable[[Floats], str],
) -> str:
    """Returns the map of `values` [rows, columns], drawn as `levels`: 0 is marked, -1 left out."""
    rows, columns = values.shape
    x_start = 10 + CHARACTER * max(map(len, labels))
    labelled_rows = range(0, rows, max(1, -(-rows // ROW_LABELS)))
    height = (BOTTOM - TOP) / rows
    marks = "".join(
        f'<text x="{x_start - 5:.1f}" y="{TOP + height * (row + 0.5) + 3:.1f}" text-anchor="end">{labels[row]}</text>'
        for row in labelled_rows
    )
    steps = step_labels(Ruler(float(edges[0]), float(edges[-1]) - 1, x_start, RIGHT))
    cells = (
        f'<svg class="cells" x="{x_start:.1f}" y="{TOP}" width="{RIGHT - x_start:.1f}" height="{BOTTOM - TOP}" '
        f'viewBox="0 0 {columns} {rows}" preserveAspectRatio="none">{_cells(levels)}</svg>'
    )
    tips = tooltip_columns(edges, Ruler(0, columns, x_start, RIGHT), (describe(column) for column in values.T))
    return (
        f'<figure class="r{index}" data-heat="{escape(key)}"><figcaption>{run_label(run, index)}{caption}</figcaption>'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(key)} over the run" {colour(index)}>'
        f"{marks}{steps}{cells}{tips}</svg></figure>"
    )


def _cells(levels: np.ndarray[tuple[int, ...], np.dtype[np.int_]]) -> str:
    """Returns one path per level. Neighbouring columns of one level are one line, as thick as a row."""
    paths: dict[int, list[str]] = {}
    for row, line in enumerate(levels):
        borders = [0, *(np.flatnonzero(np.diff(line)) + 1), len(line)]
        for first, last in pairwise(borders):
            paths.setdefault(int(line[first]), []).append(f"M{first} {row}h{last - first}")
    return "".join(
        f'<path{_style(level)} transform="translate(0 .5)" d="{"".join(parts)}"/>'
        for level, parts in sorted(paths.items())
        if level >= 0
    )


def _style(level: int) -> str:
    return ' class="idle"' if level == 0 else f' stroke-opacity="{0.06 + 0.94 * (level - 1) / (LEVELS - 1):.2f}"'


def _bin_means(series: Series, edges: Floats) -> Floats:
    """Returns the mean of each interval of steps; NaN without values."""
    counts, _ = np.histogram(series.steps, edges)
    sums, _ = np.histogram(series.steps, edges, weights=series.values)
    return np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)
