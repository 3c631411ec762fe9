"""The tables of `headline.py`: what docs/benchmarks.md and the README show of its JSON. It needs no torch.

A figure is the median of its rounds, with the least and the greatest beside it. A ratio is that of two medians of the
same run. Tables stand between lines such as `<!-- headline -->` and `<!-- /headline -->`.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from report import heading, placed, row

CaseResult = dict[str, Any]
Key = tuple[str, str]
"""A group and one of its cases, as `headline_cases.py` names them."""
NONE = "–"
FLOOR = "floor: plain GEMMs"
METHODS = ("postlude linear_logprobs", "postlude linear_objective", "Liger fused linear CE")


@dataclass(frozen=True)
class Measured:
    """The cases of a run, by group and name, and what else it says about itself."""

    about: dict[str, Any]
    cases: dict[Key, list[CaseResult]]
    """The figures of each round, in order."""

    def values(self, key: Key, figure: str) -> list[float]:
        return [result[figure] for result in self.cases.get(key, []) if result.get(figure) is not None]

    def median(self, key: Key, figure: str) -> float | None:
        values = self.values(key, figure)
        return statistics.median(values) if values else None

    def failure_reason(self, key: Key) -> str:
        """Returns why there is no figure."""
        failed = [result["failed"] for name in (key, (key[0], "all")) for result in self.cases.get(name, [])]
        return str(failed[-1]) if failed else "not measured"


def read(results: dict[str, Any]) -> Measured:
    cases: dict[Key, list[CaseResult]] = {}
    for case in results["cases"]:
        if case["round"]:  # 0 is the warm-up, with models of one layer
            cases.setdefault((case["group"], case["case"]), []).append(case)
    return Measured({name: value for name, value in results.items() if name != "cases"}, cases)


def rate(value: float) -> str:
    return f"{value:,.0f} tokens/s"


def seconds(value: float) -> str:
    return f"{value:.2f} s"


def spread(values: Sequence[float], show: Callable[[float], str], rounds: int) -> str:
    """Returns the least and the greatest without their unit, how far they are apart, and of how few rounds they are."""
    if len(values) < 2:
        return "one round" if values else NONE
    smallest, largest = min(values), max(values)
    ends = [show(value).split(" ")[0] for value in (smallest, largest)]
    fewer = f", {len(values)} rounds" if len(values) < rounds else ""
    return f"{ends[0]} to {ends[1]} ({(largest - smallest) / statistics.median(values):.1%}){fewer}"


@dataclass(frozen=True)
class Target:
    """What is wanted at least, or with `at_most` at most: of the ratio, or of a figure of the case."""

    value: float
    description: str
    figure: str = ""
    at_most: bool = False

    def verdict(self, value: float) -> str:
        met = value <= self.value if self.at_most else value >= self.value
        return f"{self.description}: {'met' if met else 'missed'}"


@dataclass(frozen=True)
class Line:
    """A row: a case's figure, and its ratio to a peer's figure or to a floor."""

    description: str
    key: Key
    peer: Key | None = None
    peer_description: str = ""
    figure: str = "tokens_per_second"
    peer_figure: str = ""
    """The peer's, if it is another."""
    show: Callable[[float], str] = rate
    share: str = ""
    """A figure that is itself the ratio, such as the share of the roofline."""
    target: Target | None = None

    def cells(self, measured: Measured) -> list[str]:
        value = measured.median(self.key, self.figure)
        if value is None:
            return [self.description, measured.failure_reason(self.key), *[NONE] * 4]
        return [
            self.description,
            "**" + self.show(value) + "**" + self.mfu_and_memory(measured),
            spread(measured.values(self.key, self.figure), self.show, measured.about.get("rounds", 0)),
            *self.comparison(measured, value),
        ]

    def mfu_and_memory(self, measured: Measured) -> str:
        """Returns MFU and memory where there are any."""
        mfu, gib = (measured.median(self.key, name) for name in ("mfu", "peak_gib"))
        rows = measured.cases[self.key][0].get("rows")
        notes = [f"MFU {mfu:.1%}"] if mfu is not None else []
        notes += [f"{gib:.0f} GiB"] if gib is not None and mfu is not None else []
        notes += [f"{rows} rows at a time"] if rows is not None else []
        return "".join(f", {part}" for part in notes)

    def comparison(self, measured: Measured, value: float) -> list[str]:
        """Returns the peer or floor, the ratio, and whether it is as wanted."""
        ratio: float | None = None
        ratio_text, against = NONE, self.peer_description or NONE
        if self.share:
            ratio = measured.median(self.key, self.share)
            ratio_text = NONE if ratio is None else f"{ratio:.0%}"
        elif self.peer is not None:
            other = measured.median(self.peer, self.peer_figure or self.figure)
            against += f", {self.show(other)}" if other is not None else f": {measured.failure_reason(self.peer)}"
            ratio = value / other if other else None
            ratio_text = NONE if ratio is None else f"{ratio:.2f}×"
        judged = measured.median(self.key, self.target.figure) if self.target and self.target.figure else ratio
        verdict = NONE if self.target is None or judged is None else self.target.verdict(judged)
        return [against, ratio_text, verdict]


LIGER = "transformers + Liger, packed, flex attention, SFT"
FLEX = "transformers, packed, flex attention, SFT"
PADDED = "transformers, padded rows, full logits (own script)"
LIGER_06B: Key = ("peer liger 0.6b", "flex-liger-sft")
LIGER_8B: Key = ("peer liger 8b", "flex-liger-sft")
UPDATE_06B: Key = ("train 0.6b", "update")
UPDATE_8B: Key = ("train 8b", "update")
UPDATE_MOE: Key = ("train 30b-a3b", "update")

TRAINING = (
    Line("0.6B, update", UPDATE_06B, LIGER_06B, LIGER),
    Line("0.6B, SFT", ("train 0.6b", "sft"), LIGER_06B, LIGER),
    Line("0.6B, update in FP8", ("train 0.6b fp8", "update-fp8"), UPDATE_06B, "in bf16"),
    Line("8B, 10 layers, update", UPDATE_8B, LIGER_8B, LIGER, target=Target(0.63, "MFU 63%", "mfu")),
    Line(
        "8B, 10 layers, update in FP8",
        ("train 8b", "update-fp8"),
        UPDATE_8B,
        "in bf16",
        target=Target(1.15, "1.15×"),
    ),
    Line(
        "8B, 10 layers, update of adapters, rank 32",
        ("train 8b lora", "update"),
        UPDATE_8B,
        "of all weights",
        target=Target(1.3, "1.30×"),
    ),
    Line("30B-A3B, 6 layers, update", UPDATE_MOE, target=Target(0.48, "MFU 48%", "mfu")),
    Line("30B-A3B, 6 layers, update in FP8", ("train 30b-a3b", "update-fp8"), UPDATE_MOE, "in bf16"),
    Line(
        "0.6B, update, batch-invariant",
        ("batch-invariant 0.6b", "batch-invariant, update"),
        ("batch-invariant 0.6b", "ordinary, update"),
        "ordinary",
    ),
    Line(f"peer: {LIGER}, 0.6B", LIGER_06B),
    Line(f"peer: {LIGER}, 8B, 10 layers", LIGER_8B),
    Line(f"peer: {FLEX}, 0.6B", ("peer flex 0.6b", "flex-sft")),
    Line(f"peer: {PADDED}, GRPO update, 0.6B", ("peer padded 0.6b", "trl")),
)


def generation() -> Iterator[Line]:
    target_shares = {16: 0.40, 128: 0.60, 512: 0.75}
    for rows, share in target_shares.items():
        yield Line(
            f"0.6B, {rows} completions of 256",
            ("generate 0.6b", f"{rows} completions"),
            peer_description="roofline of decoding",
            share="roofline_share",
            target=Target(share, f"{share:.0%}"),
        )
    yield Line(
        "0.6B, 512 of uneven lengths",
        ("generate 0.6b", "512 uneven completions"),
        ("generate 0.6b", "512 completions"),
        "of 256 each",
        target=Target(0.8, "0.80×"),
    )
    others = {
        "16, all of one prompt of 512": ("generate 0.6b groups", "16 completions, 16 of each prompt of 512"),
        "128, 16 of each prompt of 512": ("generate 0.6b groups", "128 completions, 16 of each prompt of 512"),
        "512, 16 of each prompt of 512": ("generate 0.6b groups", "512 completions, 16 of each prompt of 512"),
        "64 of 128 tokens after 1,024": ("generate 0.6b contexts", "64 completions of prompts of 1024"),
        "64 of 128 tokens after 4,096": ("generate 0.6b contexts", "64 completions of prompts of 4096"),
        "256 requests, 100 to 1,024 tokens in and out": (
            "generate 0.6b mixed",
            "256 requests, 100 to 1,024 tokens in and out",
        ),
    }
    for label, key in others.items():
        yield Line(f"0.6B, {label}", key, peer_description="roofline of decoding", share="roofline_share")
    for rows in target_shares:
        case = f"{rows} completions"
        yield Line(
            f"0.6B, {rows} with an adapter of rank 32",
            ("generate 0.6b adapter", case),
            ("generate 0.6b", case),
            "without",
            target=Target(0.9, "0.90×"),
        )
    for rows in target_shares:
        keys = [("batch-invariant 0.6b", f"{mode}, {rows} completions") for mode in ("batch-invariant", "ordinary")]
        yield Line(f"0.6B, {rows} of 128, batch-invariant", keys[0], keys[1], "ordinary")
    for name, label, target in (("weights", "weights", Target(1.4, "1.40×")), ("kv", "keys and values", None)):
        yield Line(
            f"8B, 10 layers, 128 of 128, {label} in FP8",
            ("generate 8b", name),
            ("generate 8b", "bf16"),
            "bf16",
            target=target,
        )
    for label, group in (("kernels on disk", "compiled"), ("nothing compiled", "not compiled")):
        key = (f"first call, {group}", "16 completions")
        yield Line(
            f"0.6B, first call of a process, 16 of 256, {label}",
            key,
            key,
            "second call",
            figure="first_call_seconds",
            peer_figure="seconds",
            show=seconds,
            target=Target(3.0, "3 s", "first_call_seconds", at_most=True),
        )


COLUMNS = ("case", "median", "least to greatest of the rounds", "peer or floor", "ratio", "wanted")


def lines_of(measured: Measured, lines: Sequence[Line]) -> list[str]:
    """Returns the table of all lines whose case was tried, with or without success."""
    tried = [line for line in lines if line.key in measured.cases or (line.key[0], "all") in measured.cases]
    return heading(*COLUMNS) + [row(*line.cells(measured)) for line in tried]


def head_lines(measured: Measured) -> list[str]:
    """Returns the table of the head: its own figures are ratios to the floor of the same round."""
    lines = heading(
        "tokens × hidden × vocabulary", "method", "in a loop", "× floor", "rounds", "once, × floor", "rounds", "extra"
    )
    for group, case in measured.cases:
        if group != "head" or not case.endswith(METHODS):
            continue
        shape, _, method = case.partition(" ")
        key = (group, case)
        cells = [shape.replace("x", " × "), method]
        milliseconds, extra = measured.median(key, "total_ms"), measured.median(key, "extra_gib")
        if milliseconds is None:
            lines.append(row(*cells, measured.failure_reason(key), *[NONE] * 5))
            continue
        cells.append(f"{milliseconds:.1f} ms")
        for figure in ("total_ratio", "once_ratio"):
            values = measured.values(key, figure)
            ends = f"{min(values):.2f} to {max(values):.2f}" if len(values) > 1 else "one round"
            cells += [f"**{statistics.median(values):.2f}**", ends]
        lines.append(row(*cells, NONE if extra is None else f"{extra:.2f} GiB"))
    return lines


def about(measured: Measured) -> str:
    run, versions = measured.about, measured.about["versions"]
    with_ = f"torch {versions['torch']}, Triton {versions['triton']}, transformers {versions['transformers']}"
    started = run["started"].replace("T", " ").replace("+00:00", " UTC")
    skipped = len(run["left_out"])
    turns = "1 turn of a group was" if skipped == 1 else f"{skipped} turns of groups were"
    cut = f"; {turns} left out at the limit of time" if skipped else ""
    return (
        f"`{run['command']}` on one {run['machine']}, {with_}, Liger {versions['liger_kernel']}, "
        f"driver {versions['driver']}, commit {versions['commit']}, {started}: "
        f"{run['rounds']} {'rounds' if run['rounds'] > 1 else 'round'} in {run['seconds']:.0f} s{cut}."
    )


def report(measured: Measured) -> list[str]:
    """Returns the section of docs/benchmarks.md."""
    return [
        about(measured), "", "**Training**", "", *lines_of(measured, TRAINING), "", "**Generation**", "",
        *lines_of(measured, list(generation())), "", "**The fused LM head**, forward and backward", "",
        *head_lines(measured),
    ]  # fmt: skip


def step_rows(measured: Measured) -> list[str]:
    """Returns the README's table of training steps: beside the strongest peer of the run."""

    def cell(key: Key) -> str:
        speed, mfu, gib = (measured.median(key, name) for name in ("tokens_per_second", "mfu", "peak_gib"))
        if speed is None:
            return measured.failure_reason(key)
        return f"{speed:,.0f} tokens/s, MFU {mfu or 0:.0%}" + ("" if gib is None else f", {gib:.0f} GiB")

    lines = heading("shape", "Postlude, packed, fp32 weights and moments", "strongest peer, all in bf16", "ratio")
    shapes = (
        ("Qwen3-0.6B", UPDATE_06B, ((LIGER, LIGER_06B), (FLEX, ("peer flex 0.6b", "flex-sft")))),
        ("Qwen3-8B, 10 of its 36 layers", UPDATE_8B, ((LIGER, LIGER_8B),)),
        ("Qwen3-30B-A3B, 6 of its 48 layers", UPDATE_MOE, ()),
    )
    for label, case, peers in shapes:
        rates = {peer: measured.median(peer[1], "tokens_per_second") or 0.0 for peer in peers}
        best = max(rates, key=lambda peer: rates[peer], default=None)
        speed = measured.median(case, "tokens_per_second")
        beside = NONE if best is None else f"{best[0]}: {cell(best[1])}"
        ratio = f"{speed / rates[best]:.2f}×" if best and speed and rates[best] else NONE
        lines.append(row(label, f"**{cell(case)}**", beside, ratio))
    return lines


def head_rows(measured: Measured) -> list[str]:
    """Returns the README's table of the head."""
    lines = heading(
        "tokens × hidden × vocabulary", "`linear_logprobs`", "`linear_objective`", "Liger (mean loss alone)"
    )
    shapes = dict.fromkeys(case.partition(" ")[0] for group, case in measured.cases if group == "head")
    for shape in shapes:
        cells = []
        for method in METHODS:
            key = ("head", f"{shape} {method}")
            ratio, extra = measured.median(key, "total_ratio"), measured.median(key, "extra_gib")
            cells.append(
                measured.failure_reason(key)
                if ratio is None
                else f"{ratio:.2f}" + ("" if extra is None else f", {extra:.1f} GiB")
            )
        lines.append(row(shape.replace("x", " × "), *(f"**{cell}**" for cell in cells[:2]), cells[2]))
    return lines


TABLES = {"headline": report, "headline-steps": step_rows, "headline-head": head_rows}


def draw(results: Path, pages: Sequence[Path]) -> None:
    """Writes the tables into the pages that have a place for them."""
    measured = read(json.loads(results.read_text()))
    for page in pages:
        page.write_text(drawn(measured, page.read_text()))


def drawn(measured: Measured, text: str) -> str:
    """Returns the page with the tables of this run."""
    kinds = [kind for kind in TABLES if f"<!-- {kind} -->" in text]
    if not kinds:
        places = ", ".join(f"<!-- {kind} -->" for kind in TABLES)
        raise SystemExit(f"the page has no place for a table: it needs one of the lines {places} and its end.")
    for kind in kinds:
        text = placed(text, kind, "\n".join(TABLES[kind](measured)))
    return text


def result_line(result: CaseResult) -> str:
    """Returns the figures of a case in one line of a terminal."""
    if "failed" in result:
        return str(result["failed"])
    names = (
        "tokens_per_second", "mfu", "peak_gib", "roofline_share", "first_call_seconds", "prompts_seconds", "seconds",
        "total_ms", "total_ratio", "once_ratio", "extra_gib", "warm_after",
    )  # fmt: skip
    values = {name: result[name] for name in names if result.get(name) is not None}
    return ", ".join(f"{name} {round(v, 3) if isinstance(v, float) else v}" for name, v in values.items())
