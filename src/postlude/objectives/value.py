"""The loss of a critic, and a policy and its critic in one backward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from postlude.checks import Bounds, Positive, check_bounds
from postlude.objectives.loss import Loss, Objective, mean
from postlude.objectives.loss_weights import Denominators, MeanOverTokens, check_per_token, weighted_targets

if TYPE_CHECKING:
    from postlude.model import OutputInputs

RETURNS = "returns"
"""The return from each token on."""

OLD_VALUES = "old_values"
"""The critic's values before this step, from `engine.values`. Read with `clip`."""


@dataclass(frozen=True, kw_only=True)
class ValueLoss(MeanOverTokens):
    """½ · max((v - return)², (v' - return)²),   v = critic(hidden),   v' = v_old + clamp(v - v_old, -clip, clip)

    averaged by the weights that `over` names. Without `clip` it is ½ · (v - return)². v belongs to the position that
    predicts a token, as do the token's "returns" and "old_values".

    The critic is the engine's, made with `Engine(..., critic=True)`. It shares the trunk with the policy, and the two
    train in one backward: `PolicyGradient()(inputs) + 0.5 * ValueLoss()(inputs)`.

    Columns: "returns"; "old_values" with `clip`; the weights that `over` names.
    """

    clip: Positive | None = 0.2
    """Maximum change of a value in a step; none for no bound."""
    over: str = "response_mask"
    """The column of weights of the mean."""
    stop_trunk: bool = False
    """Stop the gradient before the trunk: only the value head is trained."""

    def __post_init__(self) -> None:
        check_per_token(self.over)
        check_bounds(self)

    def __call__(self, inputs: OutputInputs) -> Loss:
        microbatch = inputs.microbatch
        # Where the weight is 0, columns may hold anything, even NaN.
        has_weight = weighted_targets(microbatch, self.over).weights != 0
        hidden = inputs.hidden
        if self.stop_trunk:
            hidden = hidden.detach() + 0.0 * hidden  # a pipeline stage sends a gradient to the one before, even zero
        values, returns = inputs.head.values(hidden), microbatch.column(RETURNS).float().where(has_weight, 0.0)
        errors = (values - returns).square()
        metrics = {"value": mean(values, self.over), "value_error": mean(errors, self.over)}
        if self.clip is not None:
            old = microbatch.column(OLD_VALUES).float().where(has_weight, 0.0)
            change = values - old
            bounded = (old + change.clamp(-self.clip, self.clip)).where(change.abs() > self.clip, values)
            clipped = (bounded - returns).square()
            metrics["value_clipped"] = mean((clipped > errors).float(), self.over)
            errors = errors.maximum(clipped)
        return Loss(0.5 * errors, self.over, metrics)


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

    @property
    def has_outputs(self) -> bool:
        """Whether the policy's `Loss.outputs` are returned."""
        return bool(getattr(self.policy, "has_outputs", False))

    def denominators(self, depths: int) -> Denominators:
        """Returns the weights of the means that are known before a pass."""
        policy = getattr(self.policy, "denominators", None)
        return (*(() if policy is None else policy(depths)), *self.value.denominators(depths))

    def __call__(self, inputs: OutputInputs) -> Loss:
        return self.policy(inputs) + self.coefficient * self.value(inputs)
