"""`postlude verify`: layouts against one rank."""

from __future__ import annotations

import argparse
import functools

import torch
from rich.console import Console
from rich.table import Table

from postlude.hf.load import adapt, read_config
from postlude.launcher import on_ranks
from postlude.layout import Layout
from postlude.verify.cases import Case, fitting, source_of
from postlude.verify.choices import TOLERANCES
from postlude.verify.compare import Report, compare_all


def run(options: argparse.Namespace, console: Console) -> int:
    """Compare layouts with one rank, print how far apart they are, and return 1 where one is too far."""
    source, width = source_of(options.model)
    _, config = adapt(read_config(source))
    layouts = fitting(config) if options.grid else [Layout.parse(text) for text in options.layout or [""]]
    objectives = options.objective or (["grpo", "dpo"] if options.grid else ["grpo"])
    cases = [
        Case(
            source,
            layout,
            objective,
            options.recompute,
            compute_dtype=getattr(torch, options.dtype),
            initializer_range=width,
            seed=options.seed,
        )
        for layout in layouts
        for objective in objectives
    ]
    tolerance = TOLERANCES[options.dtype] if options.tolerance is None else options.tolerance
    by_size: dict[int, list[Case]] = {}
    for case in cases:
        by_size.setdefault(case.layout.world_size, []).append(case)
    start = functools.partial(on_ranks, compare_all, timeout=options.timeout, device=options.device)
    reports: list[Report] = [
        report for size, group in sorted(by_size.items()) for report in start(group, options.device, nproc=size)
    ]
    if not reports:
        return 0  # a rank other than the first, whose reports these are
    table = Table("layout", "ranks", "objective", "loss", "log-probs", "entropy", "gradients", "", title=options.model)
    for report in reports:
        passes = report.passes(tolerance)
        row = (str(report.case.layout)[7:-1] or "one rank", str(report.case.layout.world_size), report.case.objective)
        offs = (report.loss, report.logprob, report.entropy, report.worst[1])
        table.add_row(*row, *(f"{off:.1e}" for off in offs), "equal" if passes else "[red]not equal[/red]")
    console.print(table)
    different = [report for report in reports if not report.passes(tolerance)]
    for report in different:
        name, off = report.worst
        line = f"{report.case.layout} with {report.case.objective}: the gradient furthest off is {name}, by {off:.1e}"
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    count = len(reports)
    verdict = f"{len(different)} of {count} differ by more than" if different else f"all {count} equal within"
    console.print(f"{verdict} {tolerance:g} of the largest value", highlight=False)
    return int(bool(different))
