"""Formats of numbers in the terminal, the report and the model card."""

from __future__ import annotations

import math
from collections.abc import Sequence

PERCENT = "\N{NO-BREAK SPACE}%"
MOST_DIGITS = 17  # of a float: enough to distinguish any two


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
    """Returns a number of bytes in a fitting unit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def tick_labels(values: Sequence[float]) -> list[str]:
    """Returns labels of axis ticks, with the fewest digits that distinguish them."""
    for digits in range(1, MOST_DIGITS + 1):
        texts = [_label(value, digits) for value in values]
        exact = all(math.isclose(_read(label), value, rel_tol=1e-6) for label, value in zip(texts, values, strict=True))
        if len(set(texts)) == len(set(values)) and (exact or digits == MOST_DIGITS):
            return texts
    return [repr(value) for value in values]


UNITS = {"k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}


def _label(value: float, digits: int) -> str:
    size = abs(value)
    if size >= 1e15 or 0 < size < 1e-3:
        mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
        return f"{mantissa}e{int(exponent)}"
    for unit in reversed(UNITS):
        if size >= 10 * UNITS[unit] or (size >= UNITS[unit] > 1e3):
            return f"{_trimmed(value / UNITS[unit], digits)}{unit}"
    return _trimmed(value, digits)


def _trimmed(value: float, digits: int) -> str:
    """Returns so many digits, without an exponent."""
    text = f"{value:.{digits}g}"
    return text if "e" not in text else f"{float(text):.0f}"


def _read(label: str) -> float:
    return float(label[:-1]) * UNITS[label[-1]] if label[-1] in UNITS else float(label)
