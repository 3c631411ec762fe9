"""Score: what a reward function says of a completion. A call that fails costs its own sample: `FailureCounter`."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from postlude.error_output import escape_controls
from postlude.pool.worker import to_number
from postlude.pool.worker_pool import CallResult, FailureKind

log = logging.getLogger(__name__)

TOTAL = "reward"


@dataclass(frozen=True)
class Score:
    """The reward of a completion and its components. `error` is set if the call that scores it failed."""

    reward: float
    components: Mapping[str, float] = field(default_factory=dict)
    """By name; one that has no value for this completion is NaN."""
    error: str | None = None
    excluded: bool = False
    """Whether the sample is left out of training: the call failed, and no `failed_reward` is set."""
    applies: bool = True
    """Whether the reward applies to the completion. If not, the sum of several leaves it out."""

    def plus(self, other: Score) -> Score:
        """Returns the sum of two scores, such as those of two turns. One that does not apply is left out."""
        components = {
            name: self.components.get(name, 0.0) + other.components.get(name, 0.0)
            for name in {**self.components, **other.components}
        }
        summed = [score for score in (self, other) if score.applies] or [self, other]
        error = next((score.error for score in summed if score.error), None)
        excluded, applies = any(score.excluded for score in summed), summed[0].applies
        return Score(sum(score.reward for score in summed), components, error, excluded, applies)


NO_SCORE = Score(0.0, applies=False)
"""Of a call that leaves the reward to others."""


class FailureCounter:
    """Counts failed calls by kind and logs the first of each kind.

    A failed call earns `failed_reward`; with None its sample is excluded.
    """

    def __init__(self, name: str, failed_reward: float | None) -> None:
        if failed_reward is not None and not math.isfinite(failed_reward):
            raise ValueError(f"failed_reward is {failed_reward}, but a reward is a finite number.")
        self.name, self.failed_reward = name, failed_reward
        self.failures: Counter[FailureKind] = Counter()

    def failed(self, result: CallResult, row: str = "") -> Score:
        """Counts a failed call, for a completion of `row`, and returns its score."""
        assert result.failure is not None
        return self._count(result.failure, failure_message(self.name, result, row))

    def invalid(self, error: ValueError) -> Score:
        """Counts a call that returned an invalid value and returns its score."""
        return self._count("invalid", f"{self.name} {error}")

    def _count(self, kind: FailureKind, message: str) -> Score:
        self.failures[kind] += 1
        if self.failures[kind] == 1:
            consequence = (
                "is left out (unless the weight is 0)"
                if self.failed_reward is None
                else f"gets reward {self.failed_reward:g}"
            )
            log.warning("%s The sample %s; such failures are counted.", escape_controls(message), consequence)
        return Score(self.failed_reward or 0.0, {kind: 1.0}, message, excluded=self.failed_reward is None)


def failure_message(name: str, result: CallResult, row: str = "") -> str:
    """Returns a sentence about a failed call that begins with the function's name and names its `row`."""
    if result.failure not in ("timed_out", "died"):
        return f"{name} failed{row and f' on {row}'}: {result.error}"
    return f"{str(result.error).rstrip('.')} on {row}." if row else str(result.error)


def is_reply(value: Any) -> bool:
    """Whether a value is text or messages for the model to read."""
    return isinstance(value, str) or (
        isinstance(value, list) and bool(value) and all(isinstance(entry, dict) for entry in value)
    )


def read_score(value: Any, row: str = "") -> Score:
    """Returns the score that a reward function meant by its value, or raises ValueError, which names the `row`.

    A number is the reward. In a dict, "reward" is the reward and the other entries are its components; without
    "reward", the reward is the sum of the components.
    """
    of = row and f" for {row}"
    if not isinstance(value, Mapping):
        return Score(_number(value, of))
    if not value:
        raise ValueError(f"returned an empty dict{of}, but a reward is a number or a dict of numbers.")
    numbers = {name: _number(entry, f' for "{name}"{row and f" of {row}"}') for name, entry in value.items()}
    if TOTAL in numbers:
        return Score(numbers.pop(TOTAL), numbers)
    return Score(math.fsum(numbers.values()), numbers)


def _number(value: Any, of: str = "") -> float:
    value = to_number(value)
    if not isinstance(value, int | float):  # True and False are ints
        text = repr(value) if len(repr(value)) <= 40 else f"{repr(value)[:37]}..."
        raise ValueError(f"returned {text}{of}, but a reward is a number or a dict of numbers.")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"returned {number}{of}, but a reward is finite.")
    return number
