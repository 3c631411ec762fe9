"""The report's samples: the best, the worst and a random completion of some steps, token by token."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

from postlude.recipes.report.charts import colour
from postlude.recipes.report.data import RunData
from postlude.recipes.report.formatting import escape, format_number

SAMPLE_STEPS = 6
ALL_TOKENS, MOST_TOKENS, FEWEST_TOKENS = 12_000, 800, 100  # shown on the whole page, in a sample
LONGEST_TEXT = 4_000  # characters of a prompt, or of a completion without tokens
LEVELS = (0.1, 0.5, 1.0, 2.0, 3.0, 5.0)  # nats below which a token is shaded less


def samples(runs: Sequence[RunData]) -> str:
    """Returns the section of samples, or ""."""
    chosen = [(index, run, _chosen(run.samples)) for index, run in enumerate(runs) if run.samples]
    if not chosen:
        return ""
    count = sum(len(picked) for _, _, steps in chosen for _, _, picked in steps)
    limit = min(max(ALL_TOKENS // count, FEWEST_TOKENS), MOST_TOKENS)
    sections = []
    for index, run, steps in chosen:
        if len(runs) > 1:
            sections.append(f'<h3 class="r{index}"><i class="swatch" {colour(index)}></i>{escape(run.name)}</h3>')
        for position, (step, number, picked) in enumerate(steps):
            opened = " open" if position == len(steps) - 1 else ""
            cards = "".join(_sample(kind, sample, limit) for kind, sample in picked)
            sections.append(
                f'<details class="r{index}"{opened}><summary>Step {step:,} <small>{number} samples</small></summary>'
                f'<div class="samples">{cards}</div></details>'
            )
    shades = "".join(f'<i class="t{level}">{math.exp(-nats):.0%}</i>' for level, nats in enumerate(LEVELS, start=1))
    key = f'<p class="soft key">Shading: tokens less likely than {shades}. Point at one for its log-prob.</p>'
    return f"<h2>Samples</h2>{key}{''.join(sections)}"


Chosen = list[tuple[int, int, list[tuple[str, Mapping[str, Any]]]]]


def _chosen(samples: Sequence[Mapping[str, Any]]) -> Chosen:
    """Returns some steps, the first and the last included, each with its number of samples and the chosen ones."""
    by_step: dict[int, list[Mapping[str, Any]]] = {}
    for sample in samples:
        by_step.setdefault(sample["step"], []).append(sample)
    steps = sorted(by_step)
    places = {round(index * (len(steps) - 1) / (SAMPLE_STEPS - 1)) for index in range(SAMPLE_STEPS)}
    chosen: Chosen = []
    for step in (steps[index] for index in sorted(places)):
        step_samples = by_step[step]
        scored = [sample for sample in step_samples if _is_number(sample.get("reward"))]
        picked: list[tuple[str, Mapping[str, Any]]] = []
        if len(scored) > 1:
            ordered = sorted(scored, key=lambda sample: float(sample["reward"]))
            picked = [("best", ordered[-1]), ("worst", ordered[0])]
        unpicked = [sample for sample in step_samples if not any(sample is other for _, other in picked)]
        picked += [("random", sample) for sample in random.Random(step).sample(unpicked, min(len(unpicked), 1))]
        chosen.append((step, len(step_samples), picked))
    return chosen


def _sample(kind: str, sample: Mapping[str, Any], limit: int) -> str:
    tags = [f'<span class="tag kind">{kind}</span>']
    if sample.get("reward") is not None:
        tags.append(f'<span class="tag">reward {escape(_number(sample["reward"]))}</span>')
    components = sample.get("components") or {}
    for name, value in components.items():
        tags.append(f'<span class="tag">{escape(name)} {escape(_number(value))}</span>')
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
    for index in [*range(head), *range(tail, len(strings))]:
        if index == tail and tail > head:
            spans.append(f"<small> … {tail - head:,} tokens left out … </small>")
        logprob = float(logprobs[index]) if _is_number(logprobs[index]) else math.nan
        text = escape(strings[index]).replace("\n", "↵\n")
        spans.append(f'<i class="{_shade(logprob)}" data-p="{logprob:.3f}" data-i="{escape(ids[index])}">{text}</i>')
    return "".join(spans)


def _shade(logprob: float) -> str:
    if not math.isfinite(logprob):
        return "tx"
    return f"t{sum(-logprob >= level for level in LEVELS)}"


def _cut(text: str) -> str:
    omitted = len(text) - LONGEST_TEXT
    return text if omitted <= 0 else f"{text[:LONGEST_TEXT]} … {omitted:,} characters left out"


def _number(value: Any) -> str:
    return format_number(float(value)) if _is_number(value) else str(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
