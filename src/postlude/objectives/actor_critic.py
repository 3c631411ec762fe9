"""A policy and its critic in one backward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from postlude.checks import Bounds, Positive
from postlude.objectives.loss import Loss, Objective
from postlude.objectives.loss_weights import Denominators
from postlude.objectives.value import ValueLoss

if TYPE_CHECKING:
    from postlude.model import OutputInputs


@dataclass(frozen=True, kw_only=True)
class ActorCritic:
    """policy + coefficient · value: PPO with a value head on the policy's own trunk."""

    policy: Objective
    """The loss of the policy."""
    value: ValueLoss
    """The loss of the critic."""
    coefficient: Positive = 0.5
    """Weight of the critic's loss."""

    def __post_init__(self) -> None:
        Bounds(above=0).check("coefficient", self.coefficient)

    def denominators(self, depths: int) -> Denominators:
        """Returns the weights of the means that are known before a pass."""
        policy = getattr(self.policy, "denominators", None)
        return (*(() if policy is None else policy(depths)), *self.value.denominators(depths))

    def __call__(self, inputs: OutputInputs) -> Loss:
        """Returns the loss of one microbatch."""
        return self.policy(inputs) + self.coefficient * self.value(inputs)
