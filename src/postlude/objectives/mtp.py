"""Multi-token prediction: adds the loss of every MTP depth to an objective."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from postlude.checks import Bounds
from postlude.objectives.checks import check_per_token
from postlude.objectives.loss import Loss, Objective, mean
from postlude.objectives.weights import weighted_nll, weighted_targets

if TYPE_CHECKING:
    from torch import Tensor

    from postlude.model import MTPOptions, OutputInputs


class MTPProcessor(Protocol):
    """A per-token loss for every depth. The caller shifts, weighs, scales and logs."""

    def __call__(self, depth: int, inputs: OutputInputs, context: Any) -> Tensor:
        """Returns the losses [T] of depth 1, 2, …; `inputs.microbatch` is aligned to the predicted tokens."""
        ...


@dataclass(frozen=True, kw_only=True)
class MTP:
    """objective + weight / depths · Σ_d Σ wₜ · lossₜ / Σ wₜ,   w and loss those of the token d further ahead

    The loss is the negative log-likelihood, or what `processor(depth, inputs, context)` returns for each token. `over`
    names the weights: "tokens" for 1 each, or a column such as "loss_mask". With `stop_trunk` no gradient reaches the
    trunk and the embedding, with `stop_head` none reaches the head.

    Metrics: `mtp_1/nll` and so on, and `mtp_1/accepted`, the share of tokens that the depth would draft correctly.
    """

    objective: Objective
    weight: float = 0.1
    over: str = "tokens"
    stop_trunk: bool = False
    stop_head: bool = False
    processor: MTPProcessor | None = None
    context: Any = None

    def __post_init__(self) -> None:
        Bounds(least=0).check("weight", self.weight)
        check_per_token(self.over)

    @property
    def mtp_options(self) -> MTPOptions:
        """The options of the depths, which a schedule plan needs beforehand."""
        from postlude.model import MTPOptions

        return MTPOptions(stop_trunk=self.stop_trunk)

    def denominators(self, depths: int) -> tuple[tuple[str, int], ...]:
        """Returns the denominators of the objective, and those of each depth."""
        inner = getattr(self.objective, "denominators", None)
        own = tuple((self.over, depth) for depth in range(1, depths + 1))
        return own if inner is None else (*inner(depths), *own)

    def __call__(self, inputs: OutputInputs) -> Loss:
        """Returns the loss of one microbatch."""
        loss = self.objective(inputs)
        share = self.weight / max(1, len(inputs.config.pattern.mtp))
        for depth, shifted in enumerate(inputs.depths(stop_trunk=self.stop_trunk, stop_head=self.stop_head), start=1):
            loss = loss + share * self._loss(depth, shifted)
        return loss

    def _loss(self, depth: int, inputs: OutputInputs) -> Loss:
        targets, weights, count = weighted_targets(inputs.microbatch, self.over)
        if self.processor is not None:
            values = self.processor(depth, inputs, self.context)
            return Loss(values, self.over, {f"mtp_{depth}/loss": mean(values, self.over, depth=depth)}, depth=depth)
        result = inputs.head.objective(inputs.hidden, targets, weighted_nll, weights, target_count=count, hit=True)
        assert result.stats.hit is not None
        metrics = {
            f"mtp_{depth}/nll": mean(-result.stats.logprob, self.over, depth=depth),
            f"mtp_{depth}/accepted": mean(result.stats.hit.float(), self.over, depth=depth),
        }
        return Loss(result.loss, self.over, metrics, depth=depth)
