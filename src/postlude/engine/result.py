"""What a pass and an optimizer step tell their caller."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Result:
    """What a `forward_backward` found, the same on every rank."""

    loss: float
    metrics: Mapping[str, float]
    microbatches: int
    tokens: int


@dataclass(frozen=True)
class StepResult:
    """What an `optimizer_step` did. A step with a gradient that is not finite is skipped, and changes nothing."""

    step: int
    grad_norm: float
    lr: float
    skipped: bool
