"""`report.html`: one run, or several side by side, on one self-contained page.

Curves, times of steps, distributions, samples with each token's log-prob, config. All text is escaped and the page
forbids network access: HTML in a completion stays text.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from postlude.durable_files import write_atomic
from postlude.recipes.report.charts import as_json, colour, curve, distribution, step_times
from postlude.recipes.report.data import RunData, read_runs
from postlude.recipes.report.heat_maps import layer_maps
from postlude.recipes.report.metrics import EVAL, LAYER, LENGTH, LOSS, MEMORY, PASS, REWARD, SPEED, TIME
from postlude.recipes.report.samples import samples
from postlude.recipes.report.summary import REPORT
from postlude.recipes.report.tables import config, differences, held_out, machine, summaries
from postlude.recipes.run.directory import is_private

CURVES = (  # the first curves, in this order
    f"{EVAL}{REWARD}",
    REWARD,
    f"{EVAL}accuracy",
    "accuracy",
    f"{EVAL}{LOSS}",
    LOSS,
    "nll",
    LENGTH,
    "entropy",
    "kl",
    "kl_old",
    "grad_norm",
    "rollout_kl",
    "rollout_logprob_diff_max",
    "rollout_chi2",
    "ratio",
    "clip_ratio/low",
    "clip_ratio/high",
    "lr",
    SPEED,
    MEMORY,
)
ALL_POINTS, MOST_POINTS, FEWEST_POINTS = 36_000, 500, 60  # on the whole page, in a curve
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


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
    this_file = Path(__file__)
    title = " · ".join(run.name for run in runs[:4]) + (" …" if len(runs) > 4 else "")
    style, code = (this_file.with_suffix(suffix).read_text() for suffix in (".css", ".js"))
    sections = [
        summaries(runs),
        held_out(runs),
        differences(runs),
        _legend(runs),
        _curves(runs),
        _times(runs),
        _distributions(runs),
        layer_maps(runs),
        samples(runs),
        config(runs),
        machine(runs),
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)} – Postlude report</title><style>{style}</style></head><body><main>"
        f'<small>Postlude report</small><h1>{escape(title)}</h1>{"".join(sections)}</main><div id="tip"></div>'
        f'<script type="application/json" id="names">{as_json([run.name for run in runs])}</script>'
        f"<script>{code}</script></body></html>\n"
    )


def _legend(runs: Sequence[RunData]) -> str:
    if len(runs) == 1:
        return ""
    labels = (
        f'<label {colour(index)}><input type="checkbox" value="{index}" checked autocomplete="off">'
        f'<i class="swatch"></i>{escape(run.name)}</label>'
        for index, run in enumerate(runs)
    )
    return f'<div class="legend">{"".join(labels)}</div>'


def _curves(runs: Sequence[RunData]) -> str:
    drawn = [(index, run) for index, run in enumerate(runs) if not run.summary.is_evaluation]  # evaluations are a table
    keys = list(dict.fromkeys(key for _, run in drawn for key in run.series if not key.startswith(TIME)))
    keys = [key for key in keys if not LAYER.fullmatch(key)]  # heat maps show those
    known = [key for key in CURVES if key in keys]
    index = sum(key in keys for key in CURVES[:2])
    known[index:index] = sorted(
        (key for key in keys if key.startswith(EVAL) and key not in CURVES),
        key=lambda key: (not key.startswith(PASS), key),
    )
    other_keys = sorted(key for key in keys if key not in known)
    count = sum(key in run.series for _, run in drawn for key in keys)
    points = min(max(ALL_POINTS // max(count, 1), FEWEST_POINTS), MOST_POINTS)

    def grid(keys: Sequence[str]) -> str:
        charts = (curve(key, [(index, run) for index, run in drawn if key in run.series], points) for key in keys)
        return f'<div class="grid">{"".join(charts)}</div>'

    return (f"<h2>Curves</h2>{grid(known)}" if known else "") + (
        f"<h2>More</h2>{grid(other_keys)}" if other_keys else ""
    )


def _times(runs: Sequence[RunData]) -> str:
    drawn = "".join(step_times(run, index) for index, run in enumerate(runs))
    return f'<h2>Where the time went</h2><div class="grid wide">{drawn}</div>' if drawn else ""


def _distributions(runs: Sequence[RunData]) -> str:
    keys = dict.fromkeys(key for run in runs for key in run.distributions)
    drawn = "".join(
        distribution(run, index, key) for key in keys for index, run in enumerate(runs) if key in run.distributions
    )
    note = '<p class="soft">Stronger colour: more of them. Line: median. Bars at the right: the last steps.</p>'
    return f'<h2>Distributions</h2>{note}<div class="grid wide">{drawn}</div>' if drawn else ""
