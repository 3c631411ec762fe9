"""AdamW, SGD and the learning-rate schedule, as values; and the optimizer they make over a model's parameters.

The values need no torch: configs are made of them. What is built of them imports it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from postlude.checks import NonNegative, Positive, Share, Within, check, one_of

if TYPE_CHECKING:
    import torch
    from torch import nn

Shape = Literal["constant", "linear", "cosine"]


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The learning rate's factor over steps: up from zero over `warmup` steps, then `shape` down to `floor`.

    `steps` is the number of steps at whose end the floor is reached; it stays there. A constant shape needs none.
    """

    shape: Shape = "constant"
    """How the learning rate goes down."""
    warmup: Annotated[int, Within(least=0)] = 0
    """Steps in which it goes up."""
    steps: Annotated[int, Within(least=1)] | None = None
    """The step at which it reaches the floor."""
    floor: Annotated[float, Within(least=0, most=1)] = 0.0
    """What it goes down to, as a share of lr."""

    def __post_init__(self) -> None:
        one_of("the shape of a schedule", self.shape, get_args(Shape))
        check(self)
        if self.shape != "constant" and (self.steps is None or self.steps <= self.warmup):
            raise ValueError(
                f"a {self.shape} schedule with warmup={self.warmup} needs more `steps` than that, but has {self.steps}."
            )

    def factor(self, step: int) -> float:
        """What the learning rate is multiplied by in step `step`, counted from 0."""
        if step < self.warmup:
            return (step + 1) / self.warmup
        if self.shape == "constant" or self.steps is None:
            return 1.0
        progress = min((step - self.warmup) / (self.steps - self.warmup), 1.0)
        left = 1.0 - progress if self.shape == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
        return self.floor + (1.0 - self.floor) * left


@dataclass(frozen=True, kw_only=True)
class AdamW:
    """Adam with weight decay on matrices alone. Gradients are clipped to `max_grad_norm` unless it is None."""

    lr: NonNegative = 1e-6
    """The learning rate."""
    betas: tuple[Share, Share] = (0.9, 0.999)
    """How long the two moments remember."""
    eps: Positive = 1e-8
    """Added to the denominator."""
    weight_decay: NonNegative = 0.0
    """Pull of matrices towards zero."""
    max_grad_norm: Positive | None = 1.0
    """The most the gradient's norm may be; none leaves it."""
    schedule: Schedule = field(default_factory=Schedule)
    """The learning rate over steps."""

    def __post_init__(self) -> None:
        check(self)

    def build(self, parameters: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
        """The optimizer over these parameters."""
        import torch

        groups = _groups(parameters, self.weight_decay)
        return torch.optim.AdamW(groups, lr=self.lr, betas=self.betas, eps=self.eps, fused=True)


@dataclass(frozen=True, kw_only=True)
class SGD:
    """Gradient descent with momentum."""

    lr: NonNegative = 1e-3
    """The learning rate."""
    momentum: Share = 0.0
    """How long the direction is remembered."""
    weight_decay: NonNegative = 0.0
    """Pull of matrices towards zero."""
    max_grad_norm: Positive | None = 1.0
    """The most the gradient's norm may be; none leaves it."""
    schedule: Schedule = field(default_factory=Schedule)
    """The learning rate over steps."""

    def __post_init__(self) -> None:
        check(self)

    def build(self, parameters: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
        """The optimizer over these parameters."""
        import torch

        groups = _groups(parameters, self.weight_decay)
        # Not fused: DTensors have no fused step of it.
        return torch.optim.SGD(groups, lr=self.lr, momentum=self.momentum, foreach=True)


OptimizerConfig = AdamW | SGD


def _groups(parameters: Mapping[str, nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """One group a mesh, since a fused step wants its parameters on one, with and without decay."""
    from torch.distributed.tensor import DTensor

    groups: dict[Any, dict[str, Any]] = {}
    for parameter in parameters.values():
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        decay = weight_decay if parameter.ndim > 1 else 0.0
        group = groups.setdefault((mesh, decay), {"params": [], "weight_decay": decay})
        group["params"].append(parameter)
    return list(groups.values())
