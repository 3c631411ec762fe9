"""`report.html`: a run, or several side by side, on one page that needs nothing but a browser.

Curves, phase times, distributions, sample rollouts with each token's log-prob, config. All text is escaped and the page
forbids itself the network: a completion that holds HTML stays text.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from postlude.recipes.numbers import short
from postlude.recipes.report_charts import as_json, colour, curve, distribution, phases
from postlude.recipes.report_data import TIME, RunData, read_runs
from postlude.recipes.sinks import write_whole
from postlude.recipes.verdict import facts, held_out_table, read_verdict

NAME = "report.html"
CURVES = {
    "reward_mean": "Reward",
    "eval/accuracy": "Evaluation accuracy",
    "accuracy": "Accuracy",
    "length_mean": "Length",
    "loss": "Loss",
    "nll": "Negative log-likelihood",
    "kl_reference": "KL to the reference",
    "kl_old": "KL to the old policy",
    "entropy": "Entropy",
    "grad_norm": "Gradient norm",
    "rollout_kl": "Rollout mismatch",
    "rollout_gap_max": "Rollout mismatch, largest",
    "ratio": "Ratio to the old policy",
    "clipped_low": "Clipped below",
    "clipped_high": "Clipped above",
    "lr": "Learning rate",
    "tokens_per_second": "Tokens per second",
}
EVALUATION = "eval/"
ALL_POINTS, MOST_POINTS, FEWEST_POINTS = 36_000, 500, 60  # on the whole page, in a curve
SAMPLE_STEPS = 6
ALL_TOKENS, MOST_TOKENS, FEWEST_TOKENS = 12_000, 800, 100  # shown on the whole page, in a sample
LONGEST_TEXT = 4_000  # characters of a prompt, or of a completion without tokens
LEVELS = (0.1, 0.5, 1.0, 2.0, 3.0, 5.0)  # nats below which a token is shaded less
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


def write_report(run_dirs: Sequence[Path], target: Path) -> Path:
    """Write the page of one or more runs to `target` (a directory gets `report.html` in it) and return its path."""
    if not run_dirs:
        raise ValueError("a report needs at least one run directory.")
    target = target / NAME if target.is_dir() else target
    target.parent.mkdir(parents=True, exist_ok=True)
    page = _page(read_runs(run_dirs))
    write_whole(target, page.encode(errors="backslashreplace"))
    return target


def _page(runs: Sequence[RunData]) -> str:
    here = Path(__file__)
    title = " · ".join(run.name for run in runs[:4]) + (" …" if len(runs) > 4 else "")
    style, code = (here.with_suffix(suffix).read_text() for suffix in (".css", ".js"))
    sections = [
        _cards(runs),
        _legend(runs),
        _curves(runs),
        _times(runs),
        _distributions(runs),
        _samples(runs),
        _config(runs),
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


def _cards(runs: Sequence[RunData]) -> str:
    return "".join(
        f'<div class="card r{index}"><p><i class="swatch" {colour(index)}></i><b>{escape(run.name)}</b> '
        f'<code class="soft">{escape(str(run.path))}</code></p>{_facts(run)}</div>'
        for index, run in enumerate(runs)
    )


def _facts(run: RunData) -> str:
    if not run.series:
        return f"<p>{escape(run.name)} has no metrics yet: no step has been logged.</p>"
    verdict = read_verdict(run.path)
    bad = f'<p class="warn"><b>{escape(verdict.bad)}</b></p>' if verdict.bad else ""
    rows = [
        f"<div><dt>{escape(fact.label)}</dt><dd{' class=warn' if fact.warn else ''}>{escape(fact.text)}"
        f"<small>{escape(fact.note)}</small></dd></div>"
        for fact in facts(verdict)
    ]
    return f"{bad}<dl>{''.join(rows)}</dl>{_held_out(held_out_table(verdict))}"


def _held_out(rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return ""
    head = "".join(f"<th>{escape(cell)}</th>" for cell in rows[0])
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows[1:])
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


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
    keys = list(dict.fromkeys(key for run in runs for key in run.series if not key.startswith(TIME)))
    known = [key for key in CURVES if key in keys]
    known[2:2] = sorted(key for key in keys if key.startswith(EVALUATION) and key not in CURVES)
    more = sorted(key for key in keys if key not in known)
    count = sum(key in run.series for run in runs for key in keys)
    points = min(max(ALL_POINTS // max(count, 1), FEWEST_POINTS), MOST_POINTS)

    def grid(keys: Sequence[str]) -> str:
        charts = (
            curve(
                CURVES.get(key, key.replace("_", " ").replace("/", ", ")),
                key,
                [(index, run.series[key]) for index, run in enumerate(runs) if key in run.series],
                points,
            )
            for key in keys
        )
        return f'<div class="grid">{"".join(charts)}</div>'

    return (f"<h2>Curves</h2>{grid(known)}" if known else "") + (f"<h2>More</h2>{grid(more)}" if more else "")


def _times(runs: Sequence[RunData]) -> str:
    drawn = "".join(phases(run, index) for index, run in enumerate(runs))
    return f'<h2>Where the time went</h2><div class="grid wide">{drawn}</div>' if drawn else ""


def _distributions(runs: Sequence[RunData]) -> str:
    keys = dict.fromkeys(key for run in runs for key in run.distributions)
    drawn = "".join(
        distribution(run, index, key) for key in keys for index, run in enumerate(runs) if key in run.distributions
    )
    note = '<p class="soft">Stronger colour: more of them. Line: median. Bars at the right: the last steps.</p>'
    return f'<h2>Distributions</h2>{note}<div class="grid wide">{drawn}</div>' if drawn else ""


def _samples(runs: Sequence[RunData]) -> str:
    chosen = [(index, run, _chosen(run.samples)) for index, run in enumerate(runs) if run.samples]
    if not chosen:
        return ""
    count = sum(len(samples) for _, _, steps in chosen for _, _, samples in steps)
    limit = min(max(ALL_TOKENS // count, FEWEST_TOKENS), MOST_TOKENS)
    parts = []
    for index, run, steps in chosen:
        if len(runs) > 1:
            parts.append(f'<h3 class="r{index}"><i class="swatch" {colour(index)}></i>{escape(run.name)}</h3>')
        for place, (step, number, samples) in enumerate(steps):
            opened = " open" if place == len(steps) - 1 else ""
            cards = "".join(_sample(kind, sample, limit) for kind, sample in samples)
            parts.append(
                f'<details class="r{index}"{opened}><summary>Step {step:,} <small>{number} samples</small></summary>'
                f'<div class="samples">{cards}</div></details>'
            )
    shades = "".join(f'<i class="t{level}">{math.exp(-nats):.0%}</i>' for level, nats in enumerate(LEVELS, start=1))
    key = f'<p class="soft key">Shading: tokens less likely than {shades}. Point at one for its log-prob.</p>'
    return f"<h2>Samples</h2>{key}{''.join(parts)}"


Chosen = list[tuple[int, int, list[tuple[str, Mapping[str, Any]]]]]


def _chosen(samples: Sequence[Mapping[str, Any]]) -> Chosen:
    """Some steps, first and last among them; of each, how many samples it has, its best, its worst and a random one."""
    by_step: dict[int, list[Mapping[str, Any]]] = {}
    for sample in samples:
        by_step.setdefault(sample["step"], []).append(sample)
    steps = sorted(by_step)
    places = {round(index * (len(steps) - 1) / (SAMPLE_STEPS - 1)) for index in range(SAMPLE_STEPS)}
    found: Chosen = []
    for step in (steps[place] for place in sorted(places)):
        here = by_step[step]
        scored = [sample for sample in here if _is_number(sample.get("reward"))]
        picked: list[tuple[str, Mapping[str, Any]]] = []
        if len(scored) > 1:
            ordered = sorted(scored, key=lambda sample: float(sample["reward"]))
            picked = [("best", ordered[-1]), ("worst", ordered[0])]
        rest = [sample for sample in here if not any(sample is other for _, other in picked)]
        picked += [("random", sample) for sample in random.Random(step).sample(rest, min(len(rest), 1))]
        found.append((step, len(here), picked))
    return found


def _sample(kind: str, sample: Mapping[str, Any], limit: int) -> str:
    tags = [f'<span class="tag kind">{kind}</span>']
    if sample.get("reward") is not None:
        tags.append(f'<span class="tag">reward {escape(_number(sample["reward"]))}</span>')
    for name, value in (sample.get("parts") or {}).items():
        tags.append(f'<span class="tag">{escape(str(name))} {escape(_number(value))}</span>')
    if sample.get("tokens"):
        tags.append(f'<span class="tag">{len(sample["tokens"]):,} tokens</span>')
    return (
        f'<div class="card">{"".join(tags)}<div class="text mono prompt">{escape(_cut(sample.get("prompt", "")))}</div>'
        f'<div class="text mono">{_tokens(sample, limit)}</div></div>'
    )


def _tokens(sample: Mapping[str, Any], limit: int) -> str:
    strings, logprobs = sample.get("token_strings") or (), sample.get("logprobs") or ()
    if not strings or len(strings) != len(logprobs):
        return escape(_cut(sample.get("completion", "")))
    tokens = sample.get("tokens") or ()
    ids = tokens if len(tokens) == len(strings) else [""] * len(strings)
    spans = []
    head = len(strings) if len(strings) <= limit else limit * 3 // 4
    tail = len(strings) if len(strings) <= limit else len(strings) - limit // 4
    for place in [*range(head), *range(tail, len(strings))]:
        if place == tail and tail > head:
            spans.append(f"<small> … {tail - head:,} tokens left out … </small>")
        logprob = float(logprobs[place]) if _is_number(logprobs[place]) else math.nan
        text = escape(str(strings[place])).replace("\n", "↵\n")
        spans.append(
            f'<i class="{_shade(logprob)}" data-p="{logprob:.3f}" data-i="{escape(str(ids[place]))}">{text}</i>'
        )
    return "".join(spans)


def _shade(logprob: float) -> str:
    if not math.isfinite(logprob):
        return "tx"
    return f"t{sum(-logprob >= level for level in LEVELS)}"


def _config(runs: Sequence[RunData]) -> str:
    keys = list(dict.fromkeys(key for run in runs for key in run.config))
    if not keys:
        return ""
    differing = [key for key in keys if any(run.config.get(key) != runs[0].config.get(key) for run in runs)]
    rows = []
    for key in [*differing, *(key for key in keys if key not in differing)]:
        cells = "".join(f"<td>{escape(str(run.config.get(key, '–')))}</td>" for run in runs)
        rows.append(
            f"<tr{' class=differs' if key in differing else ''}><td><code>{escape(key)}</code></td>{cells}</tr>"
        )
    names = "".join(f"<th>{escape(run.name)}</th>" for run in runs) if len(runs) > 1 else ""
    head = f"<thead><tr><th></th>{names}</tr></thead>" if names else ""
    return f'<h2>Config</h2><div class="scroll"><table>{head}<tbody>{"".join(rows)}</tbody></table></div>'


def _cut(text: str) -> str:
    left = len(text) - LONGEST_TEXT
    return text if left <= 0 else f"{text[:LONGEST_TEXT]} … {left:,} characters left out"


def _number(value: Any) -> str:
    return short(float(value)) if _is_number(value) else str(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
