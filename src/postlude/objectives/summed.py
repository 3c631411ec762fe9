"""Losses that are sums over tokens, of targets that the caller names: those of the Tinker API.

The target of a position is an entry of the column "target_tokens", which need not be the next token. With [K] targets a
position, each has its own weight. Nothing is divided by a count: give the engine `counts=SUM`.

Columns, each in the shape of "target_tokens" (q is the policy that sampled):

- "weights": of `CrossEntropy`, any real numbers.
- "logprobs": log q of each target.
- "advantages": the advantage A of each target.
- "clip_low_threshold", "clip_high_threshold": bounds of the ratio of each target, in place of the settings. Optional.
- "sequence_ratio_mask": not 0 at the tokens whose ratios GSPO averages.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

from postlude.checks import NonNegative, check_bounds
from postlude.objectives.loss import Loss
from postlude.objectives.loss_weights import Denominators, broadcast_to_tokens, sequence_mean
from postlude.objectives.policy import cispo_surrogate, clipped_surrogate

if TYPE_CHECKING:
    from torch import Tensor

    from postlude.data import Microbatch
    from postlude.model import OutputInputs

TARGETS, WEIGHTS, LOGPROBS, ADVANTAGES = "target_tokens", "weights", "logprobs", "advantages"
CLIP_LOW, CLIP_HIGH, RATIO_MASK = "clip_low_threshold", "clip_high_threshold", "sequence_ratio_mask"
SUM: Mapping[str, float] = MappingProxyType({"tokens": 1.0})
"""The counts of a loss that is a sum. A model with routers' auxiliary losses also needs "all_tokens"."""


@dataclass(frozen=True, kw_only=True)
class SummedLoss:
    """The sum over all targets of `token_losses`. `PassResult.outputs` has their log-probs, "logprobs"."""

    columns: ClassVar[tuple[str, ...]] = (LOGPROBS, ADVANTAGES)
    """The columns besides "target_tokens" that the loss needs."""
    optional_columns: ClassVar[tuple[str, ...]] = ()
    several_targets: ClassVar[bool] = False
    """Whether a position may have several targets."""
    has_outputs: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_bounds(self)

    def denominators(self, depths: int) -> Denominators:
        return (("tokens", 0),)

    def token_losses(self, logprob: Tensor, entropy: Tensor | None, columns: Mapping[str, Tensor]) -> Tensor:
        """Returns the loss of each target, given log p; all tensors have one shape."""
        raise NotImplementedError(f"{type(self).__name__} must define token_losses().")

    def __call__(self, inputs: OutputInputs) -> Loss:
        from postlude.data import IGNORE

        microbatch, head = inputs.microbatch, inputs.head
        target_column, columns = microbatch.column(TARGETS), self.read_columns(microbatch)
        if target_column.ndim == 1:
            targets = target_column.masked_fill(microbatch.targets == IGNORE, IGNORE)
            result = head.objective(
                inputs.hidden, targets, self.token_losses, columns, target_count=microbatch.target_count
            )
            return Loss(result.loss, outputs={LOGPROBS: result.stats.logprob})
        _, logprobs = head.logprobs_at(inputs.hidden, microbatch.targets, target_column)
        losses = self.token_losses(logprobs, None, columns)
        return Loss(losses.sum(), outputs={LOGPROBS: logprobs.detach()})

    def read_columns(self, microbatch: Microbatch) -> dict[str, Tensor]:
        """Returns the columns of the loss in fp32: 0 at the last position of a sequence, which has no target."""
        optional = [name for name in self.optional_columns if name in microbatch.columns]
        return {name: microbatch.column(name).float() for name in (*self.columns, *optional)}


@dataclass(frozen=True, kw_only=True)
class CrossEntropy(SummedLoss):
    """-Σ w · log p"""

    columns: ClassVar[tuple[str, ...]] = (WEIGHTS,)
    several_targets: ClassVar[bool] = True

    def token_losses(self, logprob: Tensor, entropy: Tensor | None, columns: Mapping[str, Tensor]) -> Tensor:
        return -columns[WEIGHTS] * logprob


@dataclass(frozen=True, kw_only=True)
class ImportanceSampling(SummedLoss):
    """-Σ A · p / q"""

    def token_losses(self, logprob: Tensor, entropy: Tensor | None, columns: Mapping[str, Tensor]) -> Tensor:
        return -columns[ADVANTAGES] * (logprob - columns[LOGPROBS]).exp()


@dataclass(frozen=True, kw_only=True)
class Clipped(SummedLoss):
    """A loss with bounds on the ratio r = p / q."""

    clip_low_threshold: NonNegative = 0.8
    """The minimum ratio."""
    clip_high_threshold: NonNegative = 1.2
    """The largest ratio."""
    optional_columns: ClassVar[tuple[str, ...]] = (CLIP_LOW, CLIP_HIGH)

    def clip(self, ratio: Tensor, columns: Mapping[str, Tensor]) -> Tensor:
        """Returns the ratio within the bounds of each token, or of the settings. A low bound wins over a high one."""
        high: Any = columns.get(CLIP_HIGH, ratio.new_tensor(self.clip_high_threshold))
        low: Any = columns.get(CLIP_LOW, ratio.new_tensor(self.clip_low_threshold))
        return ratio.minimum(high).maximum(low)


@dataclass(frozen=True, kw_only=True)
class PPO(Clipped):
    """-Σ min(r · A, clip(r) · A),   r = p / q"""

    def token_losses(self, logprob: Tensor, entropy: Tensor | None, columns: Mapping[str, Tensor]) -> Tensor:
        return self.surrogate((logprob - columns[LOGPROBS]).exp(), columns)

    def surrogate(self, ratio: Tensor, columns: Mapping[str, Tensor]) -> Tensor:
        return clipped_surrogate(ratio, self.clip(ratio, columns), columns[ADVANTAGES])


@dataclass(frozen=True, kw_only=True)
class CISPO(Clipped):
    """-Σ sg(clip(r)) · A · log p,   r = p / q,   sg: stop-gradient"""

    def token_losses(self, logprob: Tensor, entropy: Tensor | None, columns: Mapping[str, Tensor]) -> Tensor:
        ratio = (logprob.detach() - columns[LOGPROBS]).exp()
        return cispo_surrogate(logprob, self.clip(ratio, columns), columns[ADVANTAGES])


@dataclass(frozen=True, kw_only=True)
class DRO(SummedLoss):
    """-Σ (A · log p - beta / 2 · (log p - log q)²)"""

    beta: NonNegative = 0.05
    """Weight of the squared log-ratio."""

    def token_losses(self, logprob: Tensor, entropy: Tensor | None, columns: Mapping[str, Tensor]) -> Tensor:
        return 0.5 * self.beta * (logprob - columns[LOGPROBS]).square() - columns[ADVANTAGES] * logprob


@dataclass(frozen=True, kw_only=True)
class GSPO(PPO):
    """-Σ min(r · A, clip(r) · A),   r = s · p / sg(p),   log s = mean of log sg(p) - log q over the masked tokens

    The mean is over the tokens of the sequence whose "sequence_ratio_mask" is not 0.
    """

    columns: ClassVar[tuple[str, ...]] = (LOGPROBS, ADVANTAGES, RATIO_MASK)

    def __call__(self, inputs: OutputInputs) -> Loss:
        from postlude.data import IGNORE

        microbatch, columns = inputs.microbatch, self.read_columns(inputs.microbatch)
        ignored = microbatch.targets == IGNORE
        targets = microbatch.column(TARGETS).masked_fill(ignored, IGNORE)
        logprob = inputs.head.logprobs(inputs.hidden, targets, target_count=microbatch.target_count).logprob
        fixed = logprob.detach()
        log_ratios = sequence_mean(microbatch, fixed - columns[LOGPROBS], ~ignored & (columns[RATIO_MASK] != 0))
        ratio = (broadcast_to_tokens(microbatch, log_ratios) + logprob - fixed).exp()
        return Loss(self.surrogate(ratio, columns).sum(), outputs={LOGPROBS: fixed})


SUMMED_LOSSES: Mapping[str, type[SummedLoss]] = MappingProxyType(
    {
        "cross_entropy": CrossEntropy,
        "importance_sampling": ImportanceSampling,
        "ppo": PPO,
        "cispo": CISPO,
        "dro": DRO,
        "gspo": GSPO,
    }
)
