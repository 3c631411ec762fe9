"""Multi-token prediction beside an objective: every depth of the model learns the token it looks ahead to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from postlude.checks import Bounds
from postlude.objectives.checks import per_token
from postlude.objectives.loss import Loss, Objective, mean
from postlude.objectives.weights import learned

if TYPE_CHECKING:
    from torch import Tensor

    from postlude.model import MTPOptions, OutputInputs


class MTPProcessor(Protocol):
    """A per-token loss of one's own for every depth. Shifting, weighing, scaling and logging are done around it."""

    def __call__(self, depth: int, inputs: OutputInputs, context: Any) -> Tensor:
        """Losses [T] of depth 1, 2, …; targets and columns of `inputs.microbatch` are those of the token predicted."""
        ...


@dataclass(frozen=True, kw_only=True)
class MTP:
    """`objective`, and the mean over depths of what each depth's prediction costs:

        objective + weight / depths · Σ_d Σ wₜ · lossₜ / Σ wₜ,   w and loss those of the token d further ahead

    The loss is the negative log-likelihood, or what `processor(depth, inputs, context)` returns for each token. `over`
    names the weights: "tokens" for one each, or a column such as "loss_mask". With `stop_trunk` no gradient reaches the
    trunk and the embedding, with `stop_head` none reaches the head; with both, the depths learn and nothing else does.

    Metrics: `mtp_1/nll` and so on, and `mtp_1/accepted`, the share of tokens that the depth would have drafted right.
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
        per_token(self.over)

    @property
    def mtp_options(self) -> MTPOptions:
        """How depths are asked for: a schedule plan wants to know beforehand."""
        from postlude.model import MTPOptions

        return MTPOptions(stop_trunk=self.stop_trunk)

    def denominators(self, depths: int) -> tuple[tuple[str, int], ...]:
        """What the objective says that it is a mean over, and the weights of each depth."""
        inner = getattr(self.objective, "denominators", None)
        ahead = tuple((self.over, depth) for depth in range(1, depths + 1))
        return ahead if inner is None else (*inner(depths), *ahead)

    def __call__(self, inputs: OutputInputs) -> Loss:
        """Evaluate both on one microbatch."""
        loss = self.objective(inputs)
        share = self.weight / max(1, len(inputs.config.pattern.mtp))
        for depth, ahead in enumerate(inputs.depths(stop_trunk=self.stop_trunk, stop_head=self.stop_head), start=1):
            loss = loss + share * self._loss(depth, ahead)
        return loss

    def _loss(self, depth: int, ahead: OutputInputs) -> Loss:
        targets, weights, count = learned(ahead.microbatch, self.over)
        if self.processor is not None:
            values = self.processor(depth, ahead, self.context)
            return Loss(values, self.over, {f"mtp_{depth}/loss": mean(values, self.over, depth=depth)}, depth=depth)
        found = ahead.head.objective(ahead.hidden, targets, _weighted_nll, weights, target_count=count, hit=True)
        assert found.stats.hit is not None  # asked for
        metrics = {
            f"mtp_{depth}/nll": mean(-found.stats.logprob, self.over, depth=depth),
            f"mtp_{depth}/accepted": mean(found.stats.hit.float(), self.over, depth=depth),
        }
        return Loss(found.loss, self.over, metrics, depth=depth)


def _weighted_nll(logprob: Tensor, entropy: Tensor | None, weights: Tensor) -> Tensor:
    return -logprob * weights
