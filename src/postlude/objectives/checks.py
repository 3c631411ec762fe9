"""Checks of settings of objectives. Checks of any number are in `postlude/checks.py`."""

from __future__ import annotations


def check_interval(name: str, bounds: tuple[float, float] | None) -> None:
    """Refuses bounds (low, high) of importance weights unless 0 ≤ low < high; high may be infinite."""
    if bounds is None:
        return
    low, high = bounds
    if not 0 <= low < high:
        raise ValueError(f"{name} is ({low:g}, {high:g}), but its bounds are 0 ≤ low < high. Swap or widen them.")


def check_per_token(over: str) -> None:
    """Refuses weights that are not one per token."""
    if over == "sequences":
        raise ValueError(
            'over is "sequences", but this loss has a value for each token. Name a column of weights; '
            'weights(masks, mean="sequences") makes one that counts every sequence equally.'
        )
