"""The results of a pass and of an optimizer step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from torch import Tensor

    from postlude.objectives.loss import Reduction


Outputs: TypeAlias = "Mapping[str, list[Tensor]]"


@dataclass(frozen=True)
class PassResult:
    """The result of a `forward_backward`, the same on every rank."""

    loss: float
    metrics: Mapping[str, float]
    microbatches: int
    tokens: int
    shared_tokens: int = 0
    """How many of the tokens were not computed, since another sequence of their microbatch begins with them too."""
    reductions: Mapping[str, Reduction] = field(default_factory=dict)
    """The reduction of each metric, to combine metrics of several passes."""
    layer_vectors: Mapping[str, list[float]] = field(default_factory=dict)
    """Sums of each layer that have several numbers, such as the load of each expert: "moe/layer_03/load"."""
    outputs: Outputs = field(default_factory=dict)
    """The objective's `Loss.outputs`: a tensor [length, ...] per sequence, as `Engine.evaluate_tokens` returns them."""


@dataclass(frozen=True)
class StepResult:
    """The result of an `optimizer_step`. A step with a gradient that is not finite is skipped and changes nothing."""

    step: int
    grad_norm: float
    lr: float
    skipped: bool
