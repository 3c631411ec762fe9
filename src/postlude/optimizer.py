"""AdamW, SGD and the learning-rate schedule as values. Part of configs, so they need no torch.

`engine/optimizers.py` builds the optimizers over a model's parameters.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal, get_args

from postlude.checks import Bounds, Fraction, NonNegative, Positive, check_bounds, check_choice
from postlude.options import Common, MomentStorage, WeightStorage

DecayShape = Literal["constant", "linear", "cosine"]
SCALE_BYTES = 4 / 64  # of the scale of a block, per 8-bit number


@dataclass(frozen=True, kw_only=True)
class LRSchedule:
    """The learning rate's factor over steps: linearly up over `warmup` steps, then down by `shape` to `floor`.

    A constant shape needs no `steps`, and a recipe uses those of the whole run by default.
    """

    shape: Common[DecayShape] = "constant"
    """Shape of the decay."""
    warmup: Common[Annotated[int, Bounds(least=0)]] = 0
    """Warm-up steps."""
    steps: Annotated[int, Bounds(least=1)] | None = None
    """The optimizer step at which the floor is reached; none is the last of the run."""
    floor: Annotated[float, Bounds(least=0, most=1)] = 0.0
    """The lowest learning rate, as a fraction of lr."""

    def __post_init__(self) -> None:
        check_choice("the shape of a schedule", self.shape, get_args(DecayShape))
        check_bounds(self)
        if self.shape != "constant" and self.steps is not None and self.steps <= self.warmup:
            raise ValueError(
                f"a {self.shape} schedule with warmup={self.warmup} needs more `steps` than that, but has {self.steps}."
            )

    def with_steps(self, steps: int) -> LRSchedule:
        """Returns the schedule of a run of so many optimizer steps: with its own `steps`, or these."""
        if self.shape == "constant" or self.steps is not None:
            return self
        return replace(self, steps=max(steps, self.warmup + 1))

    def factor(self, step: int) -> float:
        """Returns the factor of the learning rate in step `step`, counted from 0."""
        if step < self.warmup:
            return (step + 1) / self.warmup
        if self.shape == "constant":
            return 1.0
        if self.steps is None:
            raise ValueError(f"a {self.shape} schedule needs `steps`, the number of optimizer steps that it is over.")
        progress = min((step - self.warmup) / (self.steps - self.warmup), 1.0)
        decay = 1.0 - progress if self.shape == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
        return self.floor + (1.0 - self.floor) * decay


@dataclass(frozen=True, kw_only=True)
class AdamW:
    """AdamW with weight decay on matrices only. Gradients are clipped to `max_grad_norm` unless it is None."""

    lr: Common[NonNegative] = 1e-6
    """The learning rate."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.999)
    """Decay rates of the two moments."""
    eps: Positive = 1e-8
    """Added to the denominator."""
    weight_decay: NonNegative = 0.0
    """Weight decay of matrices."""
    max_grad_norm: Positive | None = 1.0
    """Maximum norm of the gradient, to which it is clipped; none disables clipping."""
    schedule: Common[LRSchedule] = field(default_factory=LRSchedule)
    """Schedule of the learning rate."""
    moments: MomentStorage = "fp32"
    """How the moments of matrices are stored: in fp32, or in eight bits, in blocks of 64 with a scale each."""
    offload: bool = False
    """Keeps the state of matrices in host memory, and copies it to the device piece by piece for a step."""

    def __post_init__(self) -> None:
        check_choice("how moments are kept", self.moments, get_args(MomentStorage))
        check_bounds(self)

    def fp32_per_parameter(self, weights: WeightStorage = "fp32") -> float:
        """Returns the fp32 numbers that it keeps on the device per parameter. Vectors are not counted exactly."""
        if self.offload:
            return 0.0
        moments = 2.0 if self.moments == "fp32" else 2 * (1 + SCALE_BYTES) / 4
        return moments + (0.5 if weights == "split" else 0.0)


@dataclass(frozen=True, kw_only=True)
class SGD:
    """Stochastic gradient descent with momentum."""

    lr: Common[NonNegative] = 1e-3
    """The learning rate."""
    momentum: Fraction = 0.0
    """Decay rate of the momentum."""
    weight_decay: NonNegative = 0.0
    """Weight decay of matrices."""
    max_grad_norm: Positive | None = 1.0
    """Maximum norm of the gradient, to which it is clipped; none disables clipping."""
    schedule: Common[LRSchedule] = field(default_factory=LRSchedule)
    """Schedule of the learning rate."""

    def __post_init__(self) -> None:
        check_bounds(self)

    def fp32_per_parameter(self, weights: WeightStorage = "fp32") -> float:
        """Returns the fp32 numbers that it keeps on the device per parameter."""
        return float(self.momentum > 0)


OptimizerConfig = AdamW | SGD
