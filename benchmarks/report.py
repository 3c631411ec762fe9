"""Tables and a chart of what the step benchmarks found, for docs/benchmarks.md.

PYTHONPATH=src python benchmarks/report.py benchmarks/results/*_h200.json --chart docs/images/train_step_h200.svg

Of results for the same case, shape and lengths, those of the file named last count.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

Case = dict[str, Any]
BESIDE = "trl"  # what others are compared with
COLOURS = {True: "#2f6fde", False: "#b8bcc4"}  # Postlude's, and others'


def read(paths: Iterable[Path]) -> dict[str, list[Case]]:
    """By benchmark, its cases, each with the day and machine it was read on."""
    found: dict[str, dict[Any, Case]] = {}
    for path in paths:
        result = json.loads(path.read_text())
        if "command" not in result:
            continue  # of another benchmark
        kind = Path(result["command"].split()[0]).stem
        for case in result["cases"]:
            key = tuple(case.get(name) for name in ("shape", "mix", "budget", "case", "recompute", "axis", "pass"))
            own = {"day": result["day"], "machine": result["machine"], "file": path.name}
            found.setdefault(kind, {})[key] = case | own
    return {kind: list(cases.values()) for kind, cases in found.items()}


def row(*cells: object) -> str:
    return "| " + " | ".join(str(cell) for cell in cells) + " |"


def gib(value: float | None) -> str:
    """As far as a reader cares; a CPU has none."""
    return "–" if value is None else f"{value:.0f}"


def heading(*cells: str) -> list[str]:
    return [row(*cells), "|" + "---|" * len(cells)]


def train_step(cases: Sequence[Case]) -> list[str]:
    lines = heading("shape, lengths", "case", "real tokens/s", "MFU", "peak GiB", "beside TRL-style")
    for case in cases:
        where = f"{case['shape']}, {case['mix']}"
        same = [
            each for each in cases if (each["shape"], each["mix"], each["case"]) == (case["shape"], case["mix"], BESIDE)
        ]
        says = case["says"]
        if says.startswith("Postlude, packed"):
            says = f"{says}, budget {case['budget']:,}" + (
                f", recompute={case['recompute']}" if case["recompute"] != "none" else ""
            )
        if "out_of_memory_at_rows" in case:
            says += f"; {case['out_of_memory_at_rows']} rows at a time: out of memory, so {case['rows']}"
        if "failed" in case:
            lines.append(row(where, says, case["failed"], "", "", ""))
            continue
        beside = [each["tokens_per_second"] for each in same if "failed" not in each]
        ratio = f"{case['tokens_per_second'] / beside[0]:.2f}×" if beside and case["case"] != BESIDE else ""
        figures = f"{case['tokens_per_second']:,}", f"{case['mfu']:.1%}", gib(case["peak_gib"])
        lines.append(row(where, says, *figures, ratio))
    return lines


def rl_iteration(cases: Sequence[Case]) -> list[str]:
    lines = heading("shape", "case", "rollout s", "log-probs s", "update s", "in all s", "Postlude's share of it")
    for case in cases:
        if "failed" in case:
            lines.append(row(case["shape"], case["says"], case["failed"], "", "", "", ""))
            continue
        ours = next(each for each in cases if (each["shape"], each["case"]) == (case["shape"], "postlude"))
        ratio = "" if case is ours else f"{case['in_all'] / ours['in_all']:.1f}× as fast"
        lines.append(
            row(case["shape"], case["says"], *(f"{s:.2f}" for s in case["seconds"].values()), case["in_all"], ratio)
        )
    return lines


def growth(cases: Sequence[Case]) -> list[str]:
    lines = heading("by", "pass", "from … to", "seconds", "GiB above the state", "exponents", "superlinear")
    for case in cases:
        ran = [point for point in case["points"] if "seconds" in point]
        ends = [ran[0], ran[-1]]
        powers = ", ".join(f"{name} {power}" for name, power in case["exponents"].items())
        spans = (" … ".join(f"{end.get(key, 0):,}" for end in ends) for key in ("size", "seconds", "extra_gib"))
        lines.append(row(case["axis"], case["pass"], *spans, powers, ", ".join(case["superlinear"]) or "–"))
    return lines


def chart(cases: Sequence[Case]) -> str:
    """Tokens a second of every case that ran, as bars, a group a shape and mix."""
    ran = [case for case in cases if "failed" not in case and case["case"] not in ("logprobs", "trl-logprobs")]
    groups = list(dict.fromkeys((case["shape"], case["mix"]) for case in ran))
    lines, y, width, left = [], 10.0, 760, 330
    for group in groups:
        own = [case for case in ran if (case["shape"], case["mix"]) == group]
        most = max(case["tokens_per_second"] for case in own)
        y += 20
        lines.append(f'<text x="8" y="{y}" font-weight="bold" fill="#222222">{group[0]}, {group[1]} lengths</text>')
        for case in own:
            y += 18
            long = case["tokens_per_second"] / most * (width - left - 170)
            colour = COLOURS[case["says"].startswith("Postlude")]
            said = f"{case['tokens_per_second']:,} tokens/s, {gib(case['peak_gib'])} GiB"
            lines.append(f'<text x="{left - 8}" y="{y}" text-anchor="end" fill="#555555">{case["says"]}</text>')
            lines.append(f'<rect x="{left}" y="{y - 10}" width="{long:.1f}" height="12" fill="{colour}"/>')
            lines.append(f'<text x="{left + long + 6:.1f}" y="{y}" fill="#222222">{said}</text>')
        y += 8
    size = f'width="{width}" height="{y + 12:.0f}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="10">'
    return "\n".join([head, f'<rect {size} fill="#ffffff"/>', *lines, "</svg>", ""])


TABLES = {"train_step": train_step, "rl_iteration": rl_iteration, "growth": growth}


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="+", help="JSON that the benchmarks wrote")
    parser.add_argument("--chart", type=Path, help="where to draw the training steps' tokens a second")
    arguments = parser.parse_args(words)
    found = read(arguments.results)
    for kind, cases in found.items():
        days = sorted({f"{case['machine']}, {case['day']}" for case in cases})
        print(f"\n{kind} ({'; '.join(days)})\n\n" + "\n".join(TABLES[kind](cases)))
    if arguments.chart:
        arguments.chart.write_text(chart(found["train_step"]))


if __name__ == "__main__":
    main()
