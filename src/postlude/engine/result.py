"""What a pass and an optimizer step tell their caller."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from postlude.objectives.loss import Reduction


@dataclass(frozen=True)
class Result:
    """What a `forward_backward` found, the same on every rank."""

    loss: float
    metrics: Mapping[str, float]
    microbatches: int
    tokens: int
    reductions: Mapping[str, Reduction] = field(default_factory=dict)
    """How each metric was made of its values, by which those of several passes become one."""


@dataclass(frozen=True)
class StepResult:
    """What an `optimizer_step` did. A step with a gradient that is not finite is skipped, and changes nothing."""

    step: int
    grad_norm: float
    lr: float
    skipped: bool
