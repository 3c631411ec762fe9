"""`postlude trace`: the timeline of all ranks in one training step, as SVG and for Perfetto."""

from __future__ import annotations

import argparse
import gc
import json
import socket
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console

from postlude.checks import check_writable
from postlude.data import Batch
from postlude.engine import Engine
from postlude.engine.options import EngineOptions
from postlude.hf.read_model import Source, read_model
from postlude.layout import Layout
from postlude.objectives import MTP, SFT
from postlude.options import ZERO_BUBBLE, Overlap
from postlude.trace.recorder import Recording
from postlude.trace.spans import Span, chrome_events, starting_at_zero
from postlude.trace.svg import Timeline, render_svg
from postlude.training_options import TrainingOptions
from postlude.verify.cases import resolve_source
from postlude.world.devices import check_device, default_device
from postlude.world.launcher import run_on_ranks

TITLES: dict[Overlap, str] = {False: "plain", True: "overlapped", ZERO_BUBBLE: ZERO_BUBBLE}
PICTURE, EVENTS = "timeline.svg", "trace.json"


@dataclass(frozen=True)
class Traced(TrainingOptions):
    """The step to record: `microbatches` of one sequence of `budget` tokens on every data-parallel rank."""

    source: Source
    microbatches: int
    compute_dtype: torch.dtype | None = None


def run(options: argparse.Namespace) -> int | None:
    check_writable("--to", options.to, "it")
    layout = Layout.parse(options.layout)
    min_microbatches = 2 * layout.pp
    if options.tokens < 2:
        raise ValueError(f"--tokens {options.tokens}: a microbatch has at least 2, one to predict the other from.")
    if options.nproc is not None and options.nproc != layout.world_size:
        raise ValueError(
            f"--nproc {options.nproc}: {layout} runs on {layout.world_size} rank(s). Leave --nproc out, or change the "
            "layout."
        )
    device = options.device or default_device()
    check_device(device)
    source, _ = resolve_source(options.model)
    read_model(source)[1].check_layout(layout)  # refuses an impossible layout before ranks start
    plain = Traced(
        source,
        layout=layout,
        microbatches=options.microbatches or max(4, min_microbatches),
        budget=options.tokens,
        compute_dtype=options.dtype and getattr(torch, options.dtype),
        recompute=options.recompute,
        seed=options.seed,
    )
    overlapped = replace(plain, overlap=options.overlap)
    chosen = [*([plain] if options.plain or not options.overlap else []), *([overlapped] if options.overlap else [])]
    recorded = run_on_ranks(record_all, chosen, nproc=layout.world_size, timeout=options.timeout, device=device)
    if not recorded:
        return None  # only rank 0 writes
    timelines = [Timeline(TITLES[run.overlap], spans) for run, spans in zip(chosen, recorded, strict=True)]
    write(timelines, options.to)
    console = Console()
    summaries = [timeline.summary for timeline in timelines]
    for line in (*summaries, f"wrote {options.to / PICTURE} and {options.to / EVENTS}"):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    return None


def write(timelines: list[Timeline], directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / PICTURE).write_text(render_svg(timelines), encoding="utf-8")
    events, first = [], 0
    for timeline in timelines:
        events += chrome_events(timeline.spans, first_process=first, title=timeline.title)
        first += len(timeline.ranks)
    (directory / EVENTS).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}) + "\n")


def record_all(chosen: list[Traced]) -> list[list[Span]]:
    """Records each step on the ranks. Rank 0 returns the spans of all ranks, the others []."""
    spans = []
    for run in chosen:
        spans.append(record(run))
        gc.collect()  # frees the engine before the next is made
    return spans if dist.get_rank() == 0 else []


def record(traced: Traced) -> list[Span]:
    """Returns the spans of all ranks in the second of two equal steps, starting at 0. Every rank calls it."""
    mtp = bool(read_model(traced.source)[1].pattern.mtp)
    options = EngineOptions.of(traced, compute_dtype=traced.compute_dtype, mtp=mtp)
    engine = Engine(traced.source, **vars(options))
    generator = torch.Generator().manual_seed(traced.seed)
    count = traced.microbatches * traced.layout.dp
    batch = Batch(
        [torch.randint(engine.config.vocab_size, (traced.budget,), generator=generator) for _ in range(count)]
    )
    objective = MTP(objective=SFT()) if mtp else SFT()
    engine.forward_backward(batch, objective)
    engine.zero_grad()
    dist.barrier()
    recording = Recording(dist.get_rank(), engine.device)
    engine.forward_backward(batch, objective, recorder=recording)
    return starting_at_zero(together(recording))


def together(recording: Recording) -> list[Span]:
    """Returns the spans of all ranks. Ranks of one machine share a clock; each machine starts at 0."""
    gathered: list[tuple[str, float, list[Span]]] = [("", 0.0, [])] * dist.get_world_size()
    dist.all_gather_object(gathered, (socket.gethostname(), recording.began, recording.spans()))
    zeros: dict[str, float] = {}
    for host, began, _ in gathered:
        zeros[host] = min(began, zeros.get(host, began))
    return [
        replace(span, start=span.start - zeros[host], end=span.end - zeros[host])
        for host, _, spans in gathered
        for span in spans
    ]
