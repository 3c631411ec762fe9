"""The report's tables (summary, held-out metrics, configs, machine), and samples token by token."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

from postlude.recipes.report.charts import colour, run_label
from postlude.recipes.report.data import RunData
from postlude.recipes.report.formatting import escape, format_number
from postlude.recipes.report.summary import RunSummary, SummaryLine, held_out_table, summary_lines

MISSING = "–"


def summaries(runs: Sequence[RunData]) -> str:
    failures = "".join(
        f'<p class="bad" role="alert">{f"{run_label(run, index)}: " if len(runs) > 1 else ""}'
        f"{escape(run.summary.failure)}</p>"
        for index, run in enumerate(runs)
        if run.summary.failure
    )
    empty = "".join(
        f"<p>{escape(run.name)} has no metrics yet: no step has been logged.</p>" for run in runs if not run.series
    )
    full = [(index, run) for index, run in enumerate(runs) if run.series]
    if len(full) == 1 and len(runs) == 1:
        return f"{failures}{_card(full[0][1])}"
    return f"{failures}{empty}{_side_by_side(full)}" if full else f"{failures}{empty}{_paths(runs)}"


def _paths(runs: Sequence[RunData]) -> str:
    return "".join(f'<p class="soft mono">{escape(run.path)}</p>' for run in runs)


def _card(run: RunData) -> str:
    facts = summary_lines(run.summary)
    state = f'<p class="state">{_state(run.summary)}<code class="soft">{escape(run.path)}</code>{_machine(run)}</p>'
    large = [fact for index, fact in enumerate(facts) if index == 0 or "→" in fact.text]  # the metrics that changed
    large_facts, other_facts = (
        "".join(_fact(fact) for fact in facts if (fact in large) == is_large) for is_large in (True, False)
    )
    return f'<div class="card">{state}<dl class="heroes">{large_facts}</dl><dl>{other_facts}</dl></div>'


def _machine(run: RunData) -> str:
    machine = run.machine
    words = [
        str(machine.get("device") or ""),
        f"{machine['ranks']} ranks" if machine.get("ranks", 1) != 1 else "",
        f"torch {machine['versions.torch']}" if "versions.torch" in machine else "",
        f"commit {str(machine['commit'])[:8]}" if machine.get("commit") else "",
    ]
    return f" <small>{escape(' · '.join(filter(None, words)))}</small>"


def _state(summary: RunSummary) -> str:
    outcome = summary.outcome.status if summary.outcome else "no end recorded"
    kind = "fine" if outcome == "finished" else "poor" if summary.failure else "open"
    return f'<span class="tag {kind}">{escape(outcome)}</span> '


def _fact(fact: SummaryLine) -> str:
    first, arrow, last = fact.text.partition(" → ")
    text = f'<i class="was">{escape(first)}</i> → {escape(last)}' if arrow else escape(first)
    return (
        f"<div><dt>{escape(fact.label)}</dt><dd{' class=warn' if fact.warn else ''}>{text}"
        f"<small>{escape(fact.note)}</small></dd></div>"
    )


def _side_by_side(runs: Sequence[tuple[int, RunData]]) -> str:
    summaries = [(index, run, {fact.label: fact for fact in summary_lines(run.summary)}) for index, run in runs]
    names = list(dict.fromkeys(label for _, _, facts in summaries for label in facts))
    rows = []
    for index, run, facts in summaries:
        cells = [run_label(run, index), _state(run.summary)]
        for name in names:
            fact = facts.get(name, SummaryLine(name, MISSING))
            kind = " class=warn" if fact.warn else ""
            cells.append(f'<span{kind} data-tip="{escape(fact.note)}">{escape(fact.text)}</span>')
        rows.append((f"r{index}", cells))
    return _table(["run", "", *map(escape, names)], rows) + _paths([run for _, run in runs])


def held_out(runs: Sequence[RunData]) -> str:
    tables = [(index, run, held_out_table(run.summary)) for index, run in enumerate(runs)]
    tables = [(index, run, table) for index, run, table in tables if table]
    names = list(dict.fromkeys(name for _, _, table in tables for name in table[0][1:]))
    rows = []
    for index, run, (head, *body) in tables:
        for row in body:
            read = dict(zip(head[1:], row[1:], strict=True))
            cells = [escape(row[0]), *(escape(read.get(name, MISSING)) for name in names)]
            rows.append((f"r{index}", [run_label(run, index), *cells] if len(runs) > 1 else cells))
    if not rows:
        return ""
    lead = ["run", ""] if len(runs) > 1 else [""]
    return f"<h2>Held out</h2>{_table([*lead, *map(escape, names)], rows)}"


def differences(runs: Sequence[RunData]) -> str:
    """Returns the keys whose values differ between configs."""
    if len(runs) < 2:
        return ""
    keys = dict.fromkeys(key for run in runs for key in run.config)
    differing = [key for key in keys if any(run.config.get(key) != runs[0].config.get(key) for run in runs)]
    if not differing:
        return "<h2>Configs</h2><p>All configs are the same.</p>"
    return f"<h2>How the configs differ</h2>{_values(runs, [run.config for run in runs], differing)}"


def config(runs: Sequence[RunData]) -> str:
    keys = list(dict.fromkeys(key for run in runs for key in run.config))
    if not keys:
        return ""
    table = _values(runs, [run.config for run in runs], keys)
    return f"<h2>Config</h2><details><summary>{len(keys)} keys</summary>{table}</details>"


def machine(runs: Sequence[RunData]) -> str:
    keys = list(dict.fromkeys(key for run in runs for key in run.machine))
    return f"<h2>Machine</h2>{_values(runs, [run.machine for run in runs], keys)}" if keys else ""


def _values(runs: Sequence[RunData], columns: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> str:
    rows = [
        ("", [f"<code>{escape(key)}</code>", *(escape(column.get(key, MISSING)) for column in columns)]) for key in keys
    ]
    head = ["", *(run_label(run, index) for index, run in enumerate(runs))] if len(runs) > 1 else []
    return _table(head, rows, "values")


def _table(head: Sequence[str], rows: Sequence[tuple[str, Sequence[str]]], kind: str = "figures") -> str:
    """Returns a table of HTML cells. The class of a row hides it together with its run."""
    top = f"<thead><tr>{''.join(f'<th>{cell}</th>' for cell in head)}</tr></thead>" if head else ""
    body = "".join(f'<tr class="{of}">{"".join(f"<td>{cell}</td>" for cell in row)}</tr>' for of, row in rows)
    return f'<div class="scroll"><table class="{kind}">{top}<tbody>{body}</tbody></table></div>'


SAMPLE_STEPS = 6
MOST_SAMPLES = 8  # of a run with one step of samples
ALL_TOKENS, MOST_TOKENS, FEWEST_TOKENS = 12_000, 800, 100  # shown on the whole page, in a sample
LONGEST_TEXT = 4_000  # characters of a prompt, or of a completion without tokens
MOST_TURNS = 24  # of a sample: the first half and the last
PROMPT = " prompt"  # the class of what a model read
LEVELS = (0.1, 0.5, 1.0, 2.0, 3.0, 5.0)  # nats below which a token is shaded less


def samples(runs: Sequence[RunData]) -> str:
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
        if len(steps) == 1:  # an evaluation
            chosen.append((step, len(step_samples), [("sample", sample) for sample in step_samples[:MOST_SAMPLES]]))
            continue
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
    if sample.get("error"):
        tags.append(f'<p class="soft">Failed: {escape(_cut(str(sample["error"])))}</p>')
    return f'<div class="card">{"".join(tags)}{_texts(sample, limit)}</div>'


def _texts(sample: Mapping[str, Any], limit: int) -> str:
    """Returns what the model read and wrote, turn by turn."""
    strings, logprobs, turns = sample.get("token_strings") or (), sample.get("logprobs") or (), sample.get("turns")
    if not turns or sum(turn["tokens"] for turn in turns) != len(strings) or len(strings) != len(logprobs):
        has_logprobs = bool(strings) and len(strings) == len(logprobs)
        written = _tokens(sample, limit) if has_logprobs else escape(_cut(sample.get("completion", "")))
        return _text(escape(_cut(sample.get("prompt", ""))), PROMPT) + _text(written)
    texts, start, sequence = list[str](), 0, turns[0]["sequence"]
    omitted = range(MOST_TURNS // 2, len(turns) - MOST_TURNS // 2)
    limit = max(limit // min(len(turns), MOST_TURNS), FEWEST_TOKENS // 4)
    for number, turn in enumerate(turns):
        end = start + turn["tokens"]
        if number not in omitted:
            if turn["sequence"] != sequence:
                texts.append(f'<p class="soft">Sequence {turn["sequence"] + 1:,}</p>')
            part = {name: list(sample.get(name) or ())[start:end] for name in ("tokens", "token_strings", "logprobs")}
            texts += [_text(escape(_cut(turn["read"])), PROMPT), _text(_tokens(part, limit))]
        elif number == omitted[0]:
            texts.append(f'<p class="soft">… {len(omitted):,} turns left out …</p>')
        start, sequence = end, turn["sequence"]
    return "".join(texts)


def _text(content: str, kind: str = "") -> str:
    return f'<div class="text mono{kind}">{content}</div>'


def _tokens(sample: Mapping[str, Any], limit: int) -> str:
    strings, logprobs, tokens = sample["token_strings"], sample["logprobs"], sample.get("tokens") or ()
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
