"""Span: what a rank did from when to when. A timeline is a list of them, of a real run or of a simulated one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

SpanKind = Literal["forward", "backward", "weights", "fsdp", "exchange", "exchange back", "wait"]
"""What a microbatch's activations, their gradients and the put-off gradients of weights take; FSDP's own collectives;
rows between ranks, and their gradients; and what a rank stands still for."""
KINDS: tuple[SpanKind, ...] = get_args(SpanKind)
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


@dataclass(frozen=True, slots=True)
class Span:
    """Seconds from `start` to `end` on a clock that all ranks share. A wait may lie inside what waits."""

    rank: int
    kind: SpanKind
    name: str
    start: float
    end: float
    microbatch: int | None = None

    @property
    def lane(self) -> str:
        """The row it is drawn in: exchanges are under way beside what the rank does, one in each direction."""
        return LANES[EXCHANGES.index(self.kind) + 1] if self.kind in EXCHANGES else LANES[0]

    @property
    def label(self) -> str:
        """Such as "F2 layers.0 attention+moe.route"."""
        number = "" if self.microbatch is None else str(self.microbatch)
        return " ".join(filter(None, (f"{LETTERS[self.kind]}{number}".strip(), self.name)))


def starting_at_zero(spans: Iterable[Span]) -> list[Span]:
    """The same in order of their start, which is 0 for the first."""
    ordered = sorted(spans, key=lambda span: (span.start, -span.end))
    zero = ordered[0].start if ordered else 0.0
    return [
        Span(span.rank, span.kind, span.name, span.start - zero, span.end - zero, span.microbatch) for span in ordered
    ]


def exchange_seconds(spans: Sequence[Span]) -> tuple[float, float]:
    """For how long exchanges were under way, ranks added up, and for how much of it their rank computed.

    Two at a time count once. A rank computes in its forwards, backwards and weight gradients, less the waits inside.
    """
    total = hidden = 0.0
    for rank in {span.rank for span in spans}:
        own = [span for span in spans if span.rank == rank]
        under_way = joined((span.start, span.end) for span in own if span.kind in EXCHANGES)
        computing = joined((span.start, span.end) for span in own if span.kind in COMPUTE)
        still = joined((span.start, span.end) for span in own if span.kind in ("wait", "fsdp"))
        total += length(under_way)
        covered = common(under_way, computing)
        hidden += length(covered) - length(common(covered, still))
    return total, hidden


def joined(intervals: Iterable[Interval]) -> list[Interval]:
    """The same moments as intervals in order that do not touch each other."""
    found: list[Interval] = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found


def common(some: Sequence[Interval], others: Sequence[Interval]) -> list[Interval]:
    """The moments that lie in both. Each is as `joined` returns it."""
    found, first, second = [], 0, 0
    while first < len(some) and second < len(others):
        start, end = max(some[first][0], others[second][0]), min(some[first][1], others[second][1])
        if start < end:
            found.append((start, end))
        if some[first][1] <= others[second][1]:
            first += 1
        else:
            second += 1
    return found


def length(intervals: Iterable[Interval]) -> float:
    """All of them together."""
    return sum(end - start for start, end in intervals)
