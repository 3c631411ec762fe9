"""Spans as JSON for chrome://tracing and ui.perfetto.dev: one process per rank, one row per lane."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from postlude.trace.spans import LANES, Span

COLOURS = {
    "forward": "thread_state_running",
    "backward": "thread_state_runnable",
    "weights": "thread_state_iowait",
    "wait": "grey",
    "exchange": "cq_build_passed",
    "exchange back": "cq_build_running",
    "fsdp": "terrible",
}


def chrome_events(spans: Iterable[Span], *, first_process: int = 0, title: str = "") -> list[dict[str, Any]]:
    """Returns the events of one run. Its ranks are the processes from `first_process` on."""
    spans = list(spans)
    events: list[dict[str, Any]] = []
    for rank in sorted({span.rank for span in spans}):
        process = {"ph": "M", "pid": first_process + rank}
        name = f"{title} rank {rank}".strip()
        events.append(process | {"tid": 0, "name": "process_name", "args": {"name": name}})
        events += [
            process | {"tid": row, "name": "thread_name", "args": {"name": lane}} for row, lane in enumerate(LANES)
        ]
    for span in spans:
        events.append(
            {
                "ph": "X",
                "pid": first_process + span.rank,
                "tid": LANES.index(span.lane),
                "name": span.label,
                "cat": span.kind,
                "cname": COLOURS[span.kind],
                "ts": round(span.start * 1e6, 3),  # microseconds
                "dur": round((span.end - span.start) * 1e6, 3),
            }
        )
    return events
