"""Multi-token prediction: adds the loss of every MTP depth to an objective."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from postlude.checks import Bounds
from postlude.objectives.loss import Loss, Objective, mean
from postlude.objectives.loss_weights import Denominators, check_per_token, weighted_nll, weighted_targets
from postlude.user_code import load_callable

if TYPE_CHECKING:
    from torch import Tensor

    from postlude.model import MTPOptions, OutputInputs


class MTPProcessor(Protocol):
    """A per-token loss for every depth. The caller shifts, weighs, scales and logs."""

    def __call__(self, depth: int, inputs: OutputInputs, context: Any) -> Tensor:
        """Returns the losses [T] of depth 1, 2, …; `inputs.microbatch` is aligned to the predicted tokens."""
        ...


def load_mtp_processor(location: str) -> MTPProcessor:
    """Loads path/to/file.py:name, a function of depth, inputs and context. The file is run: name only trusted ones."""
    processor: MTPProcessor = load_callable(location, kind="function of depth, inputs and context")
    try:
        inspect.signature(processor).bind(1, None, None)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"{location} does not take what it is given: {error}. An MTP processor is called as "
            "processor(depth, inputs, context) and returns a loss for each token, [T]."
        ) from error
    return processor


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
        """The options of the depths, which a schedule plan needs before it runs the objective."""
        from postlude.model import MTPOptions

        return MTPOptions(stop_trunk=self.stop_trunk)

    @property
    def has_outputs(self) -> bool:
        """Whether the objective's `Loss.outputs` are returned."""
        return bool(getattr(self.objective, "has_outputs", False))

    def denominators(self, depths: int) -> Denominators:
        """Returns the denominators of the objective, and those of each depth."""
        inner = getattr(self.objective, "denominators", None)
        depth_denominators = tuple((self.over, depth) for depth in range(1, depths + 1))
        return depth_denominators if inner is None else (*inner(depths), *depth_denominators)

    def __call__(self, inputs: OutputInputs) -> Loss:
        loss = self.objective(inputs)
        share = self.weight / max(1, len(inputs.config.pattern.mtp))
        for depth, shifted in enumerate(inputs.depths(stop_trunk=self.stop_trunk, stop_head=self.stop_head), start=1):
            loss = loss + share * self._loss(depth, shifted)
        return loss

    def _loss(self, depth: int, inputs: OutputInputs) -> Loss:
        if self.processor is not None:
            values = _losses(self.processor(depth, inputs, self.context), inputs)
            return Loss(values, self.over, {f"mtp_{depth}/loss": mean(values, self.over, depth=depth)}, depth=depth)
        targets, weights, count = weighted_targets(inputs.microbatch, self.over)
        result = inputs.head.objective(inputs.hidden, targets, weighted_nll, weights, target_count=count, top1=True)
        assert result.stats.top1 is not None
        metrics = {
            f"mtp_{depth}/nll": mean(-result.stats.logprob, self.over, depth=depth),
            f"mtp_{depth}/accepted": mean(result.stats.top1.float(), self.over, depth=depth),
        }
        return Loss(result.loss, self.over, metrics, depth=depth)


def _losses(values: Tensor, inputs: OutputInputs) -> Tensor:
    """Returns what a processor returned for a depth. Raises ValueError if it is not one loss for each token."""
    import torch

    is_tensor = isinstance(values, torch.Tensor)
    if not is_tensor or values.shape != (len(inputs.microbatch),):
        returned = f"a tensor of shape {tuple(values.shape)}" if is_tensor else f"a {type(values).__name__}"
        raise ValueError(
            f"the MTP processor returned {returned}, but this microbatch has {len(inputs.microbatch)} tokens. Return "
            "one loss for each of them, [T]; inputs.gather(values) makes them of values for `hidden`."
        )
    return values
