"""Verdict: how a score is read from the text that a judge writes."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

SCORE = r"(?i)score[\s*_`\"]*[:：=][\s*_`\"\[(]*([-+]?(?:\d+(?:\.\d+)?|\.\d+)(?:e[-+]?\d+)?)"
"""Finds the number in "Score: 7", also with the marks of Markdown around it, as in "**Score:** 7" or "Score: **7**"."""


@dataclass(frozen=True)
class Verdict:
    """How a score is read from the judge's answer: group 1 of the last match of `pattern`.

    That is a number or, with `scores`, one of its keys, in lower case. A number must lie between `lowest` and
    `highest`.
    """

    pattern: str = SCORE
    scores: Mapping[str, float] = field(default_factory=dict)
    lowest: float | None = None
    highest: float | None = None

    def __post_init__(self) -> None:
        try:
            groups = re.compile(self.pattern).groups
        except re.error as error:
            raise ValueError(f"pattern {self.pattern!r} is no regular expression: {error}.") from error
        if groups < 1:
            raise ValueError(f"pattern {self.pattern!r} has no group in parentheses, which is read as the score.")
        for key, score in self.scores.items():
            if key != key.lower() or not math.isfinite(score):
                raise ValueError(
                    f"scores has {key!r}: {score}, but keys are in lower case and a score is a finite number."
                )

    def read(self, answer: str) -> float:
        """Returns the score of an answer, or raises ValueError if there is none."""
        matches = list(re.finditer(self.pattern, answer))
        if not matches:
            raise ValueError(f"has no match of {self.pattern!r}")
        text = matches[-1][1] or ""
        if self.scores:
            if text.strip().lower() not in self.scores:
                raise ValueError(f"says {text!r}, which is none of {', '.join(self.scores)}")
            return self.scores[text.strip().lower()]
        try:
            score = float(text)
        except ValueError:
            raise ValueError(f"says {text!r}, which is no number") from None
        low = -math.inf if self.lowest is None else self.lowest
        high = math.inf if self.highest is None else self.highest
        if not (math.isfinite(score) and low <= score <= high):
            raise ValueError(f"says {score:g}, which is not between {low:g} and {high:g}")
        return score
