"""Timelines as one SVG: a band per rank with compute above and exchanges below, on one time axis."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

from postlude.trace.spans import COMPUTE, LANES, Span, SpanKind, exchange_seconds

COLOURS: dict[SpanKind, str] = {
    "forward": "#7fb0ff",
    "backward": "#2f6fde",
    "weights": "#c8a400",
    "fsdp": "#9a6fb0",
    "exchange": "#7fc9a4",
    "exchange back": "#2c9c69",
    "wait": "#dfe3e8",
}
WORDS: dict[SpanKind, str] = {
    "forward": "forward",
    "backward": "backward",
    "weights": "weight gradients",
    "fsdp": "gathers and sums of FSDP",
    "exchange": "exchange",
    "exchange back": "exchange of gradients",
    "wait": "wait",
}
LEFT, RIGHT, WIDTH, TOP, TITLE = 70, 12, 1000, 44, 22
HEIGHTS = {LANES[0]: 24, LANES[1]: 9, LANES[2]: 9}
BAND, AXIS = sum(HEIGHTS.values()) + 12, 30
MIN_WIDTH = 0.2  # pixels; thinner spans are not drawn


@dataclass(frozen=True)
class Timeline:
    """The spans of a run from 0 on, and its title."""

    title: str
    spans: Sequence[Span]

    @property
    def seconds(self) -> float:
        return max((span.end for span in self.spans), default=0.0)

    @property
    def ranks(self) -> list[int]:
        return sorted({span.rank for span in self.spans})

    @property
    def summary(self) -> str:
        """The duration, and the share of exchanges that compute hid."""
        total, hidden = exchange_seconds(self.spans)
        took = f"{self.title}: {self.seconds * 1e3:.1f} ms"
        ranks = max(1, len(self.ranks))
        if not total:
            return f"{took}, no exchange"
        return f"{took}, of which {total / ranks * 1e3:.1f} ms with an exchange under way, {hidden / total:.0%} hidden"


def render_svg(timelines: Sequence[Timeline]) -> str:
    """Returns the SVG, timelines below each other on the same scale."""
    longest = max((timeline.seconds for timeline in timelines), default=0.0) or 1.0
    scale = WIDTH / longest
    height = TOP + AXIS + sum(TITLE + BAND * len(timeline.ranks) for timeline in timelines)
    width = LEFT + WIDTH + RIGHT
    kinds = [kind for kind in COLOURS if any(span.kind == kind for timeline in timelines for span in timeline.spans)]
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'font-family="ui-monospace, Menlo, monospace" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        *_legend(kinds),
    ]
    y = TOP
    lines += _axis(longest, y, height - AXIS, scale)
    for timeline in timelines:
        lines.append(f'<text x="12" y="{y + 12}" fill="#222222" font-weight="bold">{escape(timeline.summary)}</text>')
        y += TITLE
        for rank in timeline.ranks:
            lines.append(f'<text x="12" y="{y + 16}" fill="#222222">rank {rank}</text>')
            lines += _band([span for span in timeline.spans if span.rank == rank], y, scale)
            y += BAND
    return "\n".join([*lines, "</svg>", ""])


def _legend(kinds: Sequence[SpanKind]) -> list[str]:
    lines, x = [], 12
    for kind in kinds:
        lines.append(f'<rect x="{x}" y="14" width="9" height="9" fill="{COLOURS[kind]}"/>')
        lines.append(f'<text x="{x + 14}" y="23" fill="#222222">{WORDS[kind]}</text>')
        x += 34 + 7 * len(WORDS[kind])
    return lines


def _axis(longest: float, top: int, bottom: int, scale: float) -> list[str]:
    """Draws a line and a number every 1, 2 or 5 times a power of ten milliseconds, about ten in all."""
    rough = longest * 1e3 / 10
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    lines = []
    for index in range(int(longest * 1e3 / step) + 1):
        x = f"{LEFT + index * step / 1e3 * scale:.1f}"
        lines.append(f'<line x1="{x}" y1="{top + TITLE - 4}" x2="{x}" y2="{bottom}" stroke="#eceff2"/>')
        words = f"{index * step:g}" + (" ms" if index == 0 else "")
        lines.append(f'<text x="{x}" y="{bottom + 14}" fill="#666666" font-size="9">{words}</text>')
    return lines


def _band(spans: Sequence[Span], top: int, scale: float) -> list[str]:
    """Draws one rank. Waits come last, on top of the spans they lie in."""
    tops = {lane: top + sum(HEIGHTS[upper] + 1 for upper in LANES[:row]) for row, lane in enumerate(LANES)}
    lines = []
    for span in sorted(spans, key=lambda span: (span.kind == "wait", span.start)):
        x, width = LEFT + span.start * scale, (span.end - span.start) * scale
        if width < MIN_WIDTH:
            continue
        y, height = tops[span.lane], HEIGHTS[span.lane]
        words = escape(f"{span.label}, {(span.end - span.start) * 1e3:.2f} ms")
        lines.append(
            f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{height}" fill="{COLOURS[span.kind]}">'
            f"<title>{words}</title></rect>"
        )
        short = escape(span.label.split()[0])
        if span.kind in COMPUTE and width > 7 * len(short) + 4:
            lines.append(f'<text x="{x + 2:.1f}" y="{y + 16}" fill="#ffffff" font-size="10">{short}</text>')
    return lines
