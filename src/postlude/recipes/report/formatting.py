"""Formats of numbers and text in the terminal, the report and the model card."""

from __future__ import annotations

import html
import math
import re

from postlude.error_output import escape_controls

DIRECTION = re.compile(r"[\u200e\u200f\u202a-\u202e\u2066-\u2069]")  # of text: each can reverse what follows
PERCENT = "\N{NO-BREAK SPACE}%"


def format_number(value: float) -> str:
    """Returns four digits, or all digits of a whole number below ten million."""
    size = abs(value)
    if not math.isfinite(value) or value == 0:
        return f"{value:g}"
    if size >= 10_000:
        return f"{value:,.0f}" if size < 1e7 else f"{value:.2e}"
    if size < 1e-3:
        return f"{value:.1e}"
    return f"{value:.4g}"


def format_duration(seconds: float) -> str:
    """Returns seconds as 0.42 s, 12 s, 3:05 or 2:10:00."""
    if not math.isfinite(seconds):
        return "–"
    if seconds < 60:
        return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, seconds_left = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds_left:02d}" if hours else f"{minutes}:{seconds_left:02d}"


def format_share(part: float, total: float) -> str:
    """Returns a share in per cent; never 0 % of something or 100 % of less than all."""
    if not total:
        return "–"
    percent = 100 * part / total
    if 0 < percent < 1:
        return f"<1{PERCENT}"
    return f">99{PERCENT}" if 99 < percent < 100 else f"{percent:.0f}{PERCENT}"


def format_bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def escape(text: object) -> str:
    """Returns text as HTML that shows it: markup stays text, and what would control the display becomes its number."""
    visible = DIRECTION.sub(lambda match: f"\\u{ord(match[0]):04x}", escape_controls(str(text)))
    return html.escape(visible)
