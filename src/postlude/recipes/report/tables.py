"""The report's tables: summary, held-out metrics, configs and their differences, machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from postlude.recipes.report.charts import run_label
from postlude.recipes.report.data import RunData
from postlude.recipes.report.formatting import escape
from postlude.recipes.report.summary import RunSummary, SummaryLine, held_out_table, summary_lines

MISSING = "–"


def summaries(runs: Sequence[RunData]) -> str:
    """Returns the summary of each run, failures first."""
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
    """Returns device, ranks, version and commit of a run."""
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
    """Returns the summaries of several runs, one row each."""
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
    """Returns the first, best and last held-out metrics of each run."""
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
    """Returns all keys of all configs, folded."""
    keys = list(dict.fromkeys(key for run in runs for key in run.config))
    if not keys:
        return ""
    table = _values(runs, [run.config for run in runs], keys)
    return f"<h2>Config</h2><details><summary>{len(keys)} keys</summary>{table}</details>"


def machine(runs: Sequence[RunData]) -> str:
    """Returns the machine and the versions of the last start of each run."""
    keys = list(dict.fromkeys(key for run in runs for key in run.machine))
    return f"<h2>Machine</h2>{_values(runs, [run.machine for run in runs], keys)}" if keys else ""


def _values(runs: Sequence[RunData], columns: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> str:
    """Returns a table with one row a key and one column a run."""
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
