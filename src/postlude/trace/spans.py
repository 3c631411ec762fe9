"""Span: what a rank did from when to when. A timeline is a list of spans, of a real or a simulated run.

`chrome_events` writes them as JSON for chrome://tracing and ui.perfetto.dev.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

SpanKind = Literal[
    "forward",
    "backward",
    "weights",
    "fsdp",
    "exchange",
    "exchange back",
    "wait",
    "part",
    "request",
    "queue",
    "sample",
    "reward",
]
"""Forward, backward and deferred weight gradients of a microbatch; FSDP's collectives; exchanges of rows with experts,
and of their gradients; and waits. In a run: a part of a step; a request for a completion, in which it waits and is
sampled; and a call of a reward or an environment."""
COMPUTE: tuple[SpanKind, ...] = ("forward", "backward", "weights")
EXCHANGES: tuple[SpanKind, ...] = ("exchange", "exchange back")
LANES = ("compute", "communication", "communication back")
LETTERS: dict[SpanKind, str] = {
    "forward": "F",
    "backward": "B",
    "weights": "W",
    "exchange": "F",
    "exchange back": "B",
    "wait": "wait ",
    "fsdp": "",
}
Interval = tuple[float, float]
COLOURS = {
    "forward": "thread_state_running",
    "backward": "thread_state_runnable",
    "weights": "thread_state_iowait",
    "wait": "grey",
    "exchange": "cq_build_passed",
    "exchange back": "cq_build_running",
    "fsdp": "terrible",
}


@dataclass(frozen=True, slots=True)
class Span:
    """Seconds from `start` to `end` on a clock that all ranks share. A wait may lie inside another span."""

    rank: int
    kind: SpanKind
    name: str
    start: float
    end: float
    microbatch: int | None = None
    attributes: Mapping[str, str | int | float] = field(default_factory=dict)
    parent: Span | None = None
    """The span that it is a part of, if that is known."""

    @property
    def lane(self) -> str:
        """The row it is drawn in: exchanges run during compute, one in each direction."""
        return LANES[EXCHANGES.index(self.kind) + 1] if self.kind in EXCHANGES else LANES[0]

    @property
    def label(self) -> str:
        """Such as "F2 layers.0 attention+moe.route"."""
        number = "" if self.microbatch is None else str(self.microbatch)
        return " ".join(filter(None, (f"{LETTERS[self.kind]}{number}".strip(), self.name)))


def starting_at_zero(spans: Iterable[Span]) -> list[Span]:
    """Returns the spans ordered by start, shifted so that the first starts at 0."""
    ordered = sorted(spans, key=lambda span: (span.start, -span.end))
    zero = ordered[0].start if ordered else 0.0
    return [
        Span(span.rank, span.kind, span.name, span.start - zero, span.end - zero, span.microbatch) for span in ordered
    ]


def exchange_seconds(spans: Sequence[Span]) -> tuple[float, float]:
    """Returns the seconds in which exchanges ran, summed over ranks, and those in which their rank computed too.

    Two at a time count once. A rank computes in forwards, backwards and weight gradients, without the waits inside.
    """
    total = hidden = 0.0
    for rank in {span.rank for span in spans}:
        of_rank = [span for span in spans if span.rank == rank]
        exchanging = union((span.start, span.end) for span in of_rank if span.kind in EXCHANGES)
        computing = union((span.start, span.end) for span in of_rank if span.kind in COMPUTE)
        waiting = union((span.start, span.end) for span in of_rank if span.kind in ("wait", "fsdp"))
        total += total_length(exchanging)
        covered = intersection(exchanging, computing)
        hidden += total_length(covered) - total_length(intersection(covered, waiting))
    return total, hidden


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Returns the union of the intervals as ordered intervals that do not touch."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def intersection(first: Sequence[Interval], second: Sequence[Interval]) -> list[Interval]:
    """Returns the intersection. Both are as `union` returns them."""
    overlaps, i, j = [], 0, 0
    while i < len(first) and j < len(second):
        start, end = (
            max(first[i][0], second[j][0]),
            min(first[i][1], second[j][1]),
        )
        if start < end:
            overlaps.append((start, end))
        if first[i][1] <= second[j][1]:
            i += 1
        else:
            j += 1
    return overlaps


def total_length(intervals: Iterable[Interval]) -> float:
    return sum(end - start for start, end in intervals)


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
