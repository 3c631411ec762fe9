"""Sentences about settings that cannot be meant: what an objective's `__post_init__` says."""

from __future__ import annotations

import math
from collections.abc import Sequence


def one_of(name: str, value: str, choices: Sequence[str]) -> None:
    """Refuse a value that is not among the choices."""
    if value not in choices:
        raise ValueError(f"{name} is {value!r}, but the choices are {', '.join(map(repr, choices))}.")


def at_least(name: str, value: float, least: float) -> None:
    """Refuse a number below `least`, and what is not finite."""
    if not (math.isfinite(value) and value >= least):
        raise ValueError(f"{name} is {value:g}, but it must be a number of at least {least:g}.")


def above(name: str, value: float, bound: float) -> None:
    """Refuse a number that is not above `bound`, and what is not finite."""
    if not (math.isfinite(value) and value > bound):
        raise ValueError(f"{name} is {value:g}, but it must be a number above {bound:g}.")


def interval(name: str, bounds: tuple[float, float] | None) -> None:
    """Refuse bounds (low, high) that hold no importance weight: those are 0 or more, and high may be infinite."""
    if bounds is None:
        return
    low, high = bounds
    if not 0 <= low < high:
        raise ValueError(f"{name} is ({low:g}, {high:g}), but its bounds are 0 ≤ low < high. Swap or widen them.")


def per_token(over: str) -> None:
    """Refuse weights that are not one a token."""
    if over == "sequences":
        raise ValueError(
            'over is "sequences", but this loss has a value for each token. Name a column of weights; '
            'weights(masks, mean="sequences") makes one that counts every sequence alike.'
        )
