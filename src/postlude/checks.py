"""Sentences about settings that cannot be meant: what a value's `__post_init__` says."""

from __future__ import annotations

import math
from collections.abc import Sequence

MISTAKES = (ValueError, TypeError, OSError, ImportError, ArithmeticError)
"""What is raised of what a user wrote or has, in a sentence. Anything else is a fault of ours, and shown as one."""


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


def share(name: str, value: float) -> None:
    """Refuse a number that is not in [0, 1)."""
    if not 0.0 <= value < 1.0:
        raise ValueError(f"{name} is {value:g}, but it must be at least 0 and below 1.")
