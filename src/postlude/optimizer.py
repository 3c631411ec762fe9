"""AdamW, SGD and the learning-rate schedule, as values, without torch: configs are made of them.

`engine/optimizers.py` builds what they describe over a model's parameters.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal, get_args

from postlude.checks import Bounds, Fraction, NonNegative, Positive, check_bounds, check_choice
from postlude.options import MomentStorage, WeightStorage

DecayShape = Literal["constant", "linear", "cosine"]
SCALE_BYTES = 4 / 64  # of a number in eight bits: its share of the scale that a block has


@dataclass(frozen=True, kw_only=True)
class LRSchedule:
    """The learning rate's factor over steps: up from zero over `warmup` steps, then `shape` down to `floor`.

    `steps` is the number of optimizer steps at whose end the floor is reached; it stays there. A constant shape needs
    none, and a recipe takes those of the whole run where none are given.
    """

    shape: DecayShape = "constant"
    """How the learning rate goes down."""
    warmup: Annotated[int, Bounds(least=0)] = 0
    """Steps in which it goes up."""
    steps: Annotated[int, Bounds(least=1)] | None = None
    """The optimizer step at which it reaches the floor; none takes the last of the run."""
    floor: Annotated[float, Bounds(least=0, most=1)] = 0.0
    """What it goes down to, as a share of lr."""

    def __post_init__(self) -> None:
        check_choice("the shape of a schedule", self.shape, get_args(DecayShape))
        check_bounds(self)
        if self.shape != "constant" and self.steps is not None and self.steps <= self.warmup:
            raise ValueError(
                f"a {self.shape} schedule with warmup={self.warmup} needs more `steps` than that, but has {self.steps}."
            )

    def with_steps(self, steps: int) -> LRSchedule:
        """The schedule of a run of so many optimizer steps: by its own `steps`, or by these."""
        if self.shape == "constant" or self.steps is not None:
            return self
        return replace(self, steps=max(steps, self.warmup + 1))

    def factor(self, step: int) -> float:
        """What the learning rate is multiplied by in step `step`, counted from 0."""
        if step < self.warmup:
            return (step + 1) / self.warmup
        if self.shape == "constant":
            return 1.0
        if self.steps is None:
            raise ValueError(f"a {self.shape} schedule needs `steps`, the number of optimizer steps that it is over.")
        progress = min((step - self.warmup) / (self.steps - self.warmup), 1.0)
        left = 1.0 - progress if self.shape == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
        return self.floor + (1.0 - self.floor) * left


@dataclass(frozen=True, kw_only=True)
class AdamW:
    """Adam with weight decay on matrices alone. Gradients are clipped to `max_grad_norm` unless it is None."""

    lr: NonNegative = 1e-6
    """The learning rate."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.999)
    """How long the two moments remember."""
    eps: Positive = 1e-8
    """Added to the denominator."""
    weight_decay: NonNegative = 0.0
    """Pull of matrices towards zero."""
    max_grad_norm: Positive | None = 1.0
    """The most the gradient's norm may be; none leaves it."""
    schedule: LRSchedule = field(default_factory=LRSchedule)
    """The learning rate over steps."""
    moments: MomentStorage = "fp32"
    """How the moments of matrices are kept: in fp32, or in eight bits, in blocks of 64 with a scale each."""
    offload: bool = False
    """Whether the state of matrices is kept in host memory, and brought to the device piece by piece for a step."""

    def __post_init__(self) -> None:
        check_choice("how moments are kept", self.moments, get_args(MomentStorage))
        check_bounds(self)

    def fp32_per_parameter(self, weights: WeightStorage = "fp32") -> float:
        """What it keeps on the device for a parameter, in numbers of fp32, but for the few that vectors have."""
        if self.offload:
            return 0.0
        moments = 2.0 if self.moments == "fp32" else 2 * (1 + SCALE_BYTES) / 4
        return moments + (0.5 if weights == "split" else 0.0)


@dataclass(frozen=True, kw_only=True)
class SGD:
    """Gradient descent with momentum."""

    lr: NonNegative = 1e-3
    """The learning rate."""
    momentum: Fraction = 0.0
    """How long the direction is remembered."""
    weight_decay: NonNegative = 0.0
    """Pull of matrices towards zero."""
    max_grad_norm: Positive | None = 1.0
    """The most the gradient's norm may be; none leaves it."""
    schedule: LRSchedule = field(default_factory=LRSchedule)
    """The learning rate over steps."""

    def __post_init__(self) -> None:
        check_bounds(self)

    def fp32_per_parameter(self, weights: WeightStorage = "fp32") -> float:
        """What it keeps on the device for a parameter, in numbers of fp32."""
        return float(self.momentum > 0)


OptimizerConfig = AdamW | SGD
