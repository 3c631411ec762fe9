"""The critic's loss: how far its estimate of the return was off."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from postlude.checks import Positive, check_bounds
from postlude.objectives.checks import per_token
from postlude.objectives.loss import Loss, mean
from postlude.objectives.weights import learned

if TYPE_CHECKING:
    from postlude.model import OutputInputs

RETURNS = "returns"
"""What was earned from each token on."""

OLD_VALUES = "old_values"
"""What the critic expected before this step, as `engine.values` gives it. Read with `clip`."""


@dataclass(frozen=True, kw_only=True)
class ValueLoss:
    """Half the squared error of the critic, the larger of two where `clip` holds it near its old value:

        v = critic(hidden),   v' = v_old + clamp(v - v_old, -clip, clip)
        ½ · max((v - return)², (v' - return)²)

    averaged by the weights `over` names. v stands where a token is about to be chosen, and the token's "returns" and
    "old_values" stand there too.

    The critic is the engine's own, made with `Engine(..., critic=True)`. It shares the trunk with the policy, and the
    two train in one backward: `PolicyGradient()(inputs) + 0.5 * ValueLoss()(inputs)`.

    Columns: "returns"; "old_values" with `clip`; the weights that `over` names.
    """

    clip: Positive | None = 0.2
    over: str = "response_mask"

    def __post_init__(self) -> None:
        per_token(self.over)
        check_bounds(self)

    def denominators(self, depths: int) -> tuple[tuple[str, int], ...]:
        """What it is a mean over: the name of weights, and how many tokens further ahead than the next they are."""
        return ((self.over, 0),)

    def __call__(self, inputs: OutputInputs) -> Loss:
        """Evaluate it on one microbatch."""
        microbatch = inputs.microbatch
        kept = learned(microbatch, self.over).weights != 0  # elsewhere columns may hold anything: it is taken as 0
        values, returns = inputs.head.values(inputs.hidden), microbatch.column(RETURNS).float().where(kept, 0.0)
        errors = (values - returns).square()
        metrics = {"value": mean(values, self.over), "value_error": mean(errors, self.over)}
        if self.clip is not None:
            old = microbatch.column(OLD_VALUES).float().where(kept, 0.0)
            held = (old + (values - old).clamp(-self.clip, self.clip) - returns).square()
            metrics["value_clipped"] = mean((held > errors).float(), self.over)
            errors = errors.maximum(held)
        return Loss(0.5 * errors, self.over, metrics)
