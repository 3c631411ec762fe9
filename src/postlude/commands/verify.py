"""`postlude verify`: compare layouts with one rank."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Sequence
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from postlude.hf.linear_layers import adapter_configs
from postlude.hf.read_model import Source, read_model
from postlude.layout import Layout
from postlude.options import chosen_layers
from postlude.verify.adapters import AdapterReport
from postlude.verify.cases import Case, fitting_layouts, has_routing_column, resolve_source
from postlude.verify.choices import FP8_DTYPE, TOLERANCES
from postlude.verify.compare import Report, compare_adapters_of, compare_all
from postlude.world.devices import check_device, default_device
from postlude.world.launcher import run_on_ranks


def run(options: argparse.Namespace) -> int:
    """Compares layouts with one rank and prints the differences. Returns 1 if one is too large."""
    console = Console()
    source, width = resolve_source(options.model)
    family, config = read_model(source)
    device = options.device or ("cpu" if options.fp8 else default_device())
    check_device(device)
    if options.backend == "nccl" and device == "cpu":
        raise ValueError(
            "--backend nccl needs a GPU, but ranks compute on the CPU; use --device cuda or --backend gloo."
        )
    dtype = _dtype(options.dtype, device, fp8=options.fp8)
    if options.fp8 and options.share_prefixes:
        raise ValueError(
            "--share-prefixes cannot be compared with --fp8: the gradient of a token that sequences share is rounded "
            "to FP8 once, as a sum, and one rank that computes every sequence alone rounds each part. Give one of them."
        )
    layouts = fitting_layouts(config) if options.grid else [Layout.parse(text) for text in options.layout or [""]]
    if options.lora is not None:
        adapter_configs(options.lora, config, family)  # refuses targets that do not exist
    for layout in layouts:
        config.check_layout(layout)  # no rank is started for what cannot be
    for name in ("fp8", "offload_activations"):
        chosen_layers(name, getattr(options, name), len(config.pattern))
    cases = _cases(options, layouts, source, initializer_range=width, compute_dtype=getattr(torch, dtype))
    reports = _compare(cases, options, device)
    if not reports:
        return 0  # a rank other than the first, whose reports these are
    default = TOLERANCES["float32" if options.fp8 else dtype]
    tolerance = default if options.tolerance is None else options.tolerance
    console.print(_table(reports, options.tolerance))
    if options.fp8:
        line = f"products in FP8, everything else in {dtype}: in a shorter dtype the last bit of a number between two "
        line += "values of e4m3 decides which of them it becomes, and layouts differ in last bits"
        console.print(line, highlight=False, soft_wrap=True)
    if has_routing_column(getattr(torch, dtype), config):
        line = f"{dtype}: layouts and one rank were given the same random experts for each token, because "
        line += "rounding changes what routers choose"
        console.print(line, highlight=False, soft_wrap=True)
    adapters = [] if options.lora is None else compare_adapters_of(cases[0])
    for comparison in adapters:
        console.print(_adapter_line(comparison), markup=False, highlight=False, soft_wrap=True)
    all_equal = _print_verdict(console, reports, tolerance, options.tolerance)
    limit = TOLERANCES["float32"] if options.tolerance is None else options.tolerance
    wrong = [comparison.other for comparison in adapters if not comparison.passes(limit)]
    for name_of_other in wrong:
        console.print(f"one rank differs from {name_of_other} by more than {limit:g}", markup=False, highlight=False)
    return int(bool(not all_equal or wrong))


def _cases(options: argparse.Namespace, layouts: Sequence[Layout], source: Source, **settings: Any) -> list[Case]:
    settings |= {
        name: getattr(options, name) for name in ("seed", "lora", "fp8", "recompute", "overlap", "offload_activations")
    }
    settings["share_prefixes"] = "always" if options.share_prefixes else "auto"
    settings["steps"] = settings["compute_dtype"] == torch.float32
    objectives = options.objective or (["grpo", "dpo"] if options.grid else ["grpo"])
    return [Case(source, objective, layout=layout, **settings) for layout in layouts for objective in objectives]


def _compare(cases: Sequence[Case], options: argparse.Namespace, device: str) -> list[Report]:
    """Runs the cases, those of one number of ranks together."""
    by_size: dict[int, list[Case]] = {}
    for case in cases:
        by_size.setdefault(case.layout.world_size, []).append(case)
    start = functools.partial(
        run_on_ranks, compare_all, timeout=options.timeout, device=device, backend=options.backend
    )
    return [report for size, group in sorted(by_size.items()) for report in start(group, device, nproc=size)]


def _print_verdict(console: Console, reports: Sequence[Report], tolerance: float, chosen: float | None) -> bool:
    """Prints the largest difference of each case that differs, and the verdict. Returns whether all are equal."""
    different = [report for report in reports if not report.passes(chosen)]
    for report in different:
        name, off = report.worst
        line = f"{report.case.layout} with {report.case.objective}: the gradient furthest off is {name}, by {off:.1e}"
        name, off = report.worst_layer_metric
        line += f"; the layer metric furthest off is {name}, by {off:.1e}" if off > tolerance else ""
        name, off = report.worst_of_steps
        line += f"; after two optimizer steps {name} is furthest off, by {off:.1e}" if off > tolerance else ""
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    count = len(reports)
    verdict = f"{len(different)} of {count} differ by more than" if different else f"all {count} equal within"
    rounded = any(report.rounding and report not in different for report in reports) and chosen is None
    or_rounding = ", or where one rank's own rounding is larger, twice that" if rounded else ""
    console.print(f"{verdict} {tolerance:g} of the largest value{or_rounding}", highlight=False, soft_wrap=True)
    return not different


def _dtype(chosen: str | None, device: str, *, fp8: bool) -> str:
    """Returns the dtype to compute in. Raises ValueError for one in which layouts cannot be compared with FP8."""
    if not fp8:
        return chosen or "float32"
    if device != "cpu" or chosen not in (None, FP8_DTYPE):
        raise ValueError(
            f"--fp8 compares in {FP8_DTYPE} on the CPU, but --device {device} --dtype {chosen or FP8_DTYPE} was asked "
            "for: in a shorter dtype layouts round numbers to FP8 differently. Leave out --dtype and --device."
        )
    return FP8_DTYPE


def _adapter_line(report: AdapterReport) -> str:
    """Returns a line that compares one rank's adapters with another model."""
    if report.skipped:
        return f"one rank beside {report.other}: not checked, as {report.skipped}"
    line = f"one rank beside {report.other}, in fp32: log-prob {report.logprob:.1e}"
    name, off = report.worst
    return line + (f", gradient {off:.1e} ({name})" if name else "")


def _table(reports: Sequence[Report], tolerance: float | None) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("layout", overflow="fold")
    for name in ("with", "loss", "log-prob", "entropy", "grad", "layers", "steps", ""):
        table.add_column(name, no_wrap=True)
    for report in reports:
        layout = str(report.case.layout)[7:-1].replace(" ", "") or "one rank"
        offs = (report.loss, report.logprob, report.entropy, report.worst[1], report.worst_layer_metric[1])
        steps = f"{report.worst_of_steps[1]:.0e}" if report.steps else "-"
        verdict = "equal" if report.passes(tolerance) else "[red]differs[/red]"
        table.add_row(layout, report.case.objective, *(f"{off:.0e}" for off in offs), steps, verdict)
    return table
