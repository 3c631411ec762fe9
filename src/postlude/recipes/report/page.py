"""`report.html`: one run, or several side by side, on one self-contained page.

Curves, times of steps, distributions, samples with each token's log-prob, config. All text is escaped, and the page
forbids network access and every script but its own: HTML in a completion stays text.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path

from postlude.durable_files import write_atomic
from postlude.recipes.report.charts import LAYERS_NOTE, ChartData, colour, curve, distribution, layer_maps, step_times
from postlude.recipes.report.data import RunData, read_runs
from postlude.recipes.report.formatting import escape
from postlude.recipes.report.metrics import (
    HELD_OUT,
    LAYER,
    LENGTH,
    LOSS,
    OTHER,
    PASS,
    REWARD,
    SCORES,
    SPEED,
    TIME,
    known_metrics,
    metric_groups,
    topic,
)
from postlude.recipes.report.summary import REPORT
from postlude.recipes.report.tables import config, differences, held_out, machine, samples, summaries
from postlude.recipes.run.files import is_private

MAIN = "Main curves"
MAIN_CURVES = (*SCORES, REWARD, "accuracy", LOSS, "nll", LENGTH, "entropy", "kl", "grad_norm", "lr", SPEED)
FIRST_TOPICS = (MAIN, HELD_OUT, "Completions", "Policy gradient", "Supervised, preference, distillation, value")
ALL_POINTS, MOST_POINTS, FEWEST_POINTS = 60_000, 2_000, 60  # on the whole page, in a curve
DISTRIBUTIONS_NOTE = "Stronger colour: more of them. Line: median."
HERE = Path(__file__).parent


def write_report(run_dirs: Sequence[Path], target: Path) -> Path:
    """Writes the page of one or more runs to `target`, or to `report.html` in a directory, and returns its path."""
    if not run_dirs:
        raise ValueError("a report needs at least one run directory.")
    target = target / REPORT if target.is_dir() else target
    target.parent.mkdir(parents=True, exist_ok=True)
    page = _page(read_runs(run_dirs))
    write_atomic(target, page.encode(errors="backslashreplace"), private=any(map(is_private, run_dirs)))
    return target


def _page(runs: Sequence[RunData]) -> str:
    data = ChartData()
    name = " · ".join(run.name for run in runs[:4]) + (" …" if len(runs) > 4 else "")
    sections = [
        held_out(runs),
        differences(runs),
        _curves(data, runs),
        _section("Where the time went", (step_times(data, run, index) for index, run in enumerate(runs)), wide=True),
        _section("Distributions", _distributions(data, runs), note=DISTRIBUTIONS_NOTE),
        _section("Layers", layer_maps(data, runs), note=LAYERS_NOTE),
        samples(runs),
        config(runs),
        machine(runs),
    ]
    style = _read("uplot/uPlot.min.css") + _read("page.css")
    licence = f"/*! uPlot:\n{_read('uplot/LICENSE')}\n*/\n"
    code = "\n" + licence + _read("uplot/uPlot.min.js") + _read("numbers.js") + _read("page.js")
    digest = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; base-uri 'none'; "
        "form-action 'none'"
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(name)} – Postlude report</title><style>{style}</style></head><body><main>"
        f"<header><small>Postlude report</small><h1>{escape(name)}</h1></header>{summaries(runs)}{_tools(runs)}"
        f'{"".join(sections)}</main><div id="tip" hidden></div>'
        f'<script type="application/json" id="data">{data.json([run.name for run in runs])}</script>'
        f"<script>{code}</script></body></html>\n"
    )


def _read(name: str) -> str:
    return (HERE / name).read_text("utf-8")


def _tools(runs: Sequence[RunData]) -> str:
    """Returns the controls of the charts, and for several runs a box for each."""
    boxes = (
        f'<label {colour(index)}><input type="checkbox" value="{index}" checked autocomplete="off">'
        f'<i class="swatch"></i>{escape(run.name)}</label>'
        for index, run in enumerate(runs)
    )
    return (
        '<noscript><p class="soft">The charts need JavaScript; all else is here without it.</p>'
        "<style>.tools,.chart{display:none!important}</style></noscript>"
        f'<div class="tools">{"".join(boxes) if len(runs) > 1 else ""}'
        '<label>smooth <input type="range" id="smooth" min="0" max="20" value="5" autocomplete="off"></label>'
        '<input type="search" id="filter" placeholder="filter charts" aria-label="filter charts" autocomplete="off">'
        '<button id="reset" hidden>all steps</button><button id="theme" data-tip="light or dark">◐</button></div>'
    )


def _section(name: str, figures: Iterable[str], *, note: str = "", wide: bool = False) -> str:
    drawn = "".join(figures)
    if not drawn:
        return ""
    lead = f'<p class="soft">{note}</p>' if note else ""
    return f'<section><h2>{escape(name)}</h2>{lead}<div class="grid{" wide" * wide}">{drawn}</div></section>'


def _curves(data: ChartData, runs: Sequence[RunData]) -> str:
    """Returns the curves by topic: a figure a metric and phase, because losses of two phases cannot be compared."""
    drawn = [(index, run) for index, run in enumerate(runs) if not run.summary.is_evaluation]  # evaluations are a table
    phases = list(dict.fromkeys(band.phase for _, run in drawn for band in run.bands))
    found = {key for _, run in drawn for key in run.series if not key.startswith(TIME) and not LAYER.fullmatch(key)}
    keys = [key for key in MAIN_CURVES if key in found]
    order = {key: place for place, key in enumerate(known_metrics())}
    keys += sorted(found - set(keys), key=lambda key: (not key.startswith(PASS), order.get(key, len(order)), key))
    points = ALL_POINTS // max(sum(len(run.series[key]) for key in keys for _, run in drawn if key in run.series), 1)
    points = min(max(points, FEWEST_POINTS), MOST_POINTS)
    all_bands = drawn[0][1].bands if drawn else []
    bands = all_bands if len(phases) > 1 and all(run.bands == all_bands for _, run in drawn) else []
    topics: dict[str, list[str]] = {name: [] for name in (*FIRST_TOPICS, *metric_groups(), OTHER)}
    for key in keys:
        for phase in dict.fromkeys(["", *phases]):
            lines = [(index, run, run.series[key][phase]) for index, run in drawn if phase in run.series.get(key, {})]
            if lines:
                name = MAIN if key in MAIN_CURVES else topic(key)
                shown = phase if len(phases) > 1 else ""
                topics[name].append(curve(data, key, shown, lines, [] if phase else bands, points))
    return "".join(_section(name, figures) for name, figures in topics.items())


def _distributions(data: ChartData, runs: Sequence[RunData]) -> Iterable[str]:
    for key in dict.fromkeys(key for run in runs for key in run.distributions):
        for index, run in enumerate(runs):
            if key in run.distributions:
                yield distribution(data, run, index, key)
