"""Makes tables of the results of step benchmarks, for docs/benchmarks.md.

python benchmarks/report.py benchmarks/results/*_h200.json --page docs/benchmarks.md

With --page, tables are written into the page, between lines such as `<!-- train_step -->` and
`<!-- /train_step -->`; without, they are printed. For results of the same case, the file named last counts.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

Case = dict[str, Any]
PEERS = {"update": "trl", "padded": "trl", "padded-all": "trl", "logprobs": "trl-logprobs", "sft": "liger-sft"}
USUAL = {"recompute": "none", "weights": "fp32", "moments": "fp32", "offload": False}


def read(paths: Iterable[Path]) -> dict[str, list[Case]]:
    """By benchmark, its cases."""
    by_command: dict[str, dict[Any, Case]] = {}
    for path in paths:
        result = json.loads(path.read_text())
        command = str(result.get("command", ""))
        kind = Path(command.split(" ", maxsplit=1)[0]).stem + ("_vllm" if " --vllm " in command else "")
        if kind not in TABLES:
            continue  # of another benchmark
        for case in result["cases"]:
            case_key = tuple(
                case.get(name) for name in ("shape", "mix", "case", "engine", "axis", "pass", "budget", "max_staleness")
            )
            key = (*case_key, *(case.get(name, usual) for name, usual in USUAL.items()))
            by_command.setdefault(kind, {})[key] = case
    return {kind: list(cases.values()) for kind, cases in by_command.items()}


def row(*cells: object) -> str:
    return "| " + " | ".join(str(cell) for cell in cells) + " |"


def gib(value: float | None) -> str:
    """As far as a reader cares; a CPU has none."""
    return "–" if value is None else f"{value:.0f}"


def heading(*cells: str) -> list[str]:
    return [row(*cells), "|" + "---|" * len(cells)]


def describe(case: Case) -> str:
    """Returns the description of a case, which earlier versions stored as "says"."""
    return str(case["description"] if "description" in case else case["says"])


def case_label(case: Case) -> str:
    """Returns the name of a case, with the options that are not the defaults."""
    description = describe(case)
    if description.startswith("Postlude, packed"):
        description += f", budget {case['budget']:,}"
        description += "".join(
            f", {name}={case[name]}" for name, usual in USUAL.items() if case.get(name, usual) != usual
        )
    if "out_of_memory_at_rows" in case:
        description += f"; {case['out_of_memory_at_rows']} rows at a time: out of memory, so {case['rows']}"
    return description


def train_step(cases: Sequence[Case]) -> list[str]:
    lines = heading("shape, lengths", "case", "real tokens/s", "MFU", "peak GiB", "times its peer")
    shapes = list(dict.fromkeys((case["shape"], case["mix"]) for case in cases))
    for case in sorted(cases, key=lambda case: shapes.index((case["shape"], case["mix"]))):
        labels = f"{case['shape']}, {case['mix']}"
        if "failed" in case:
            lines.append(row(labels, case_label(case), case["failed"], "", "", ""))
            continue
        peer = PEERS.get(case["case"])
        same_shape = [
            other["tokens_per_second"]
            for other in cases
            if (other["shape"], other["mix"], other["case"]) == (case["shape"], case["mix"], peer)
            and "failed" not in other
        ]
        ratio = f"{case['tokens_per_second'] / same_shape[0]:.2f}×" if same_shape else ""
        figures = f"{case['tokens_per_second']:,}", f"{case['mfu']:.1%}", gib(case["peak_gib"])
        lines.append(row(labels, case_label(case), *figures, ratio))
    return lines


def rl_iteration(cases: Sequence[Case]) -> list[str]:
    lines = heading("shape", "case", "rollout s", "log-probs s", "update s", "in all s", "Postlude is")
    for case in cases:
        if "failed" in case:
            lines.append(row(case["shape"], describe(case), case["failed"], "", "", "", ""))
            continue
        postlude_case = next(other for other in cases if (other["shape"], other["case"]) == (case["shape"], "postlude"))
        ratio = "" if case is postlude_case else f"{case['in_all'] / postlude_case['in_all']:.1f}× as fast"
        lines.append(
            row(
                case["shape"], describe(case), *(f"{s:.2f}" for s in (*case["seconds"].values(), case["in_all"])), ratio
            )
        )
    return lines


def growth(cases: Sequence[Case]) -> list[str]:
    lines = heading("by", "pass", "from … to", "seconds", "GiB above the state", "exponents", "superlinear")
    for case in cases:
        ran = [point for point in case["points"] if "seconds" in point]
        if not ran:
            lines.append(row(case["axis"], case["pass"], case["points"][0]["failed"], "", "", "", ""))
            continue
        ends = [ran[0], ran[-1]] if len(ran) > 1 else ran
        powers = ", ".join(f"{name} {power}" for name, power in case["exponents"].items() if power is not None)
        spans = (" … ".join(f"{end.get(key, 0):,}" for end in ends) for key in ("size", "seconds", "extra_gib"))
        lines.append(row(case["axis"], case["pass"], *spans, powers, ", ".join(case["superlinear"]) or "–"))
    return lines


def weight_sync(cases: Sequence[Case]) -> list[str]:
    lines = heading("shape", "GiB", "way", "seconds", "the first time", "GiB a second", "GiB beside")
    for case in cases:
        labels = case["shape"], f"{case['gib']:.1f}", describe(case)
        if "failed" in case:
            lines.append(row(*labels, case["failed"], "", "", ""))
            continue
        beside = "–" if case["extra_gib"] is None else f"{round(case['extra_gib'], 1) + 0.0:.1f}"
        lines.append(
            row(*labels, f"{case['seconds']:.3f}", f"{case['first_s']:.3f}", f"{case['gib_per_second']:.1f}", beside)
        )
    return lines


def asynchrony(cases: Sequence[Case]) -> list[str]:
    lines = heading(
        "max_staleness", "seconds per step", "waiting for completions", "weights", "training", "idle", "gain"
    )
    for case in cases:
        phases = case["phases"]
        waiting = phases["rollout"] + phases["reward"]
        seconds = (case["seconds_a_step"], waiting, phases["weights"], phases["train"])
        cells = (f"{value:.2f}" for value in seconds)
        lines.append(row(str(case["max_staleness"]), *cells, f"{case['idle']:.0%}", f"{case['gain']:.2f}×"))
    return lines


def generate_vllm(cases: Sequence[Case]) -> list[str]:
    lines = heading("shape", "workload", "Postlude", "vLLM", "vLLM, log-probs", "times vLLM", "with log-probs")
    for shape, workload in dict.fromkeys((case["shape"], case["case"]) for case in cases):
        found = {case["engine"]: case for case in cases if (case["shape"], case["case"]) == (shape, workload)}
        engines = [found.get(name, {"failed": "–"}) for name in ("postlude", "vllm", "vllm, log-probs")]
        cells = [case.get("failed") or f"{case['tokens_per_second']:,} ({case['best']:,})" for case in engines]
        medians = [case.get("tokens_per_second") for case in engines]
        ratios = [f"{medians[0] / other:.2f}×" if medians[0] and other else "–" for other in medians[1:]]
        lines.append(row(shape, workload, *cells, f"**{ratios[0]}**", ratios[1]))
    return lines


TABLES = {
    "generate_vllm": generate_vllm,
    "train_step": train_step,
    "rl_iteration": rl_iteration,
    "growth": growth,
    "weight_sync": weight_sync,
    "asynchrony": asynchrony,
}


def placed(page: str, kind: str, table: str) -> str:
    """The page with another table between the lines that name it."""
    first, last = f"<!-- {kind} -->\n", f"<!-- /{kind} -->"
    if first not in page or last not in page:
        raise SystemExit(f"the page has no place for {kind}: it needs the lines {first.strip()} and {last}.")
    before, after = page.split(first, 1)
    return f"{before}{first}{table}\n{last}{after.split(last, 1)[1]}"


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="+", help="JSON that the benchmarks wrote")
    parser.add_argument("--page", type=Path, help="where to put the tables")
    arguments = parser.parse_args(words)
    results = read(arguments.results)
    page = arguments.page.read_text() if arguments.page else ""
    for kind, cases in results.items():
        table = "\n".join(TABLES[kind](cases))
        if arguments.page:
            page = placed(page, kind, table)
        else:
            print(f"\n{kind}\n\n{table}")
    if arguments.page:
        arguments.page.write_text(page)


if __name__ == "__main__":
    main()
