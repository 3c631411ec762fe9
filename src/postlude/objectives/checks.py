"""Sentences about settings of objectives that cannot be meant. Those about any number are in `postlude/checks.py`."""

from __future__ import annotations


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
