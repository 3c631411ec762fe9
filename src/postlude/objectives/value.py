"""The critic's loss: how far its estimate of the return was off."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from postlude.model import OutputInputs
from postlude.objectives.checks import above, per_token
from postlude.objectives.loss import Loss, mean

RETURNS = "returns"
"""What was earned from each token on."""

OLD_VALUES = "old_values"
"""What the critic expected before this step. Read with `clip`."""


@dataclass(frozen=True, kw_only=True)
class ValueLoss:
    """Half the squared error of the critic, the larger of two where `clip` holds it near its old value:

        v = critic(hidden),   v' = v_old + clamp(v - v_old, -clip, clip)
        ½ · max((v - return)², (v' - return)²)

    averaged by the weights `over` names. v stands where a token is about to be chosen, and the token's "returns" and
    "old_values" stand there too.

    `critic` maps hidden states [..., H] to [..., 1]. It belongs to the caller: the engine does not shard, save, clip or
    step it. Its gradient on a rank is of that rank's tokens, so sum it over all ranks that run the last stage before
    stepping; on one rank there is nothing to do. Gradients of the trunk are complete.

    Columns: "returns"; "old_values" with `clip`; the weights that `over` names.
    """

    critic: nn.Module
    clip: float | None = 0.2
    over: str = "response_mask"

    def __post_init__(self) -> None:
        per_token(self.over)
        if self.clip is not None:
            above("clip", self.clip, 0.0)

    def values(self, inputs: OutputInputs) -> Tensor:
        """What the critic expects at each position, [T] fp32. `engine.evaluate` takes it as a processor's result."""
        estimates: Tensor = self.critic(inputs.hidden)
        if estimates.shape != (inputs.hidden.shape[0], 1):
            raise ValueError(
                f"the critic made {tuple(estimates.shape)} of hidden states {tuple(inputs.hidden.shape)}, but one "
                f"value a token is ({inputs.hidden.shape[0]}, 1). End it with a linear layer of one output."
            )
        return inputs.gather(estimates).squeeze(-1).float()

    def __call__(self, inputs: OutputInputs) -> Loss:
        """Evaluate it on one microbatch."""
        values, returns = self.values(inputs), inputs.microbatch.column(RETURNS).float()
        errors = (values - returns).square()
        metrics = {"value": mean(values, self.over), "value_error": mean(errors, self.over)}
        if self.clip is not None:
            old = inputs.microbatch.column(OLD_VALUES).float()
            held = (old + (values - old).clamp(-self.clip, self.clip) - returns).square()
            metrics["value_clipped"] = mean((held > errors).float(), self.over)
            errors = torch.maximum(errors, held)
        return Loss(0.5 * errors, self.over, metrics)
