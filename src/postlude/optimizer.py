"""AdamW, SGD and the learning-rate schedule, as values; and the optimizer they make over a model's parameters.

The values need no torch: configs are made of them. What is built of them imports it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, get_args

from postlude.checks import above, at_least, one_of, share

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
    warmup: int = 0
    """Steps in which it goes up."""
    steps: int | None = None
    """The step at which it reaches the floor."""
    floor: float = 0.0
    """What it goes down to, as a share of lr."""

    def __post_init__(self) -> None:
        one_of("the shape of a schedule", self.shape, get_args(Shape))
        at_least("warmup", self.warmup, 0)
        if self.steps is not None:
            at_least("steps", self.steps, 1)
        if not 0.0 <= self.floor <= 1.0:
            raise ValueError(f"floor is {self.floor:g}, but a share of the learning rate lies between 0 and 1.")
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

    lr: float = 1e-6
    """The learning rate."""
    betas: tuple[float, float] = (0.9, 0.999)
    """How long the two moments remember."""
    eps: float = 1e-8
    """Added to the denominator."""
    weight_decay: float = 0.0
    """Pull of matrices towards zero."""
    max_grad_norm: float | None = 1.0
    """The most the gradient's norm may be; none leaves it."""
    schedule: Schedule = field(default_factory=Schedule)
    """The learning rate over steps."""

    def __post_init__(self) -> None:
        _check(self)
        for place, beta in enumerate(self.betas):
            share(f"betas[{place}]", beta)
        above("eps", self.eps, 0.0)

    def build(self, parameters: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
        """The optimizer over these parameters."""
        import torch

        groups = _groups(parameters, self.weight_decay)
        return torch.optim.AdamW(groups, lr=self.lr, betas=self.betas, eps=self.eps, fused=True)


@dataclass(frozen=True, kw_only=True)
class SGD:
    """Gradient descent with momentum."""

    lr: float = 1e-3
    """The learning rate."""
    momentum: float = 0.0
    """How long the direction is remembered."""
    weight_decay: float = 0.0
    """Pull of matrices towards zero."""
    max_grad_norm: float | None = 1.0
    """The most the gradient's norm may be; none leaves it."""
    schedule: Schedule = field(default_factory=Schedule)
    """The learning rate over steps."""

    def __post_init__(self) -> None:
        _check(self)
        share("momentum", self.momentum)

    def build(self, parameters: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
        """The optimizer over these parameters."""
        import torch

        groups = _groups(parameters, self.weight_decay)
        # Not fused: DTensors have no fused step of it.
        return torch.optim.SGD(groups, lr=self.lr, momentum=self.momentum, foreach=True)


OptimizerConfig = AdamW | SGD


def _check(optimizer: OptimizerConfig) -> None:
    """Refuse what no optimizer can mean."""
    at_least("lr", optimizer.lr, 0.0)
    at_least("weight_decay", optimizer.weight_decay, 0.0)
    if optimizer.max_grad_norm is not None:
        above("max_grad_norm", optimizer.max_grad_norm, 0.0)


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
