"""Policy gradients: PPO, GRPO, DAPO, CISPO, GSPO, REINFORCE.

Columns, each one number per token:

- "advantages": the advantage of the token or of its completion.
- "old_logprobs": its log-prob under the policy that the ratio is taken to: the trainer's before this training step's
  first update, or the rollout engine's (the recipes' default). Not read with ratio="on_policy".
- "rollout_logprobs": its log-prob as the rollout engine reported it. Used by `correction`; otherwise, if
  present, only the mismatch is logged.
- "reference_logprobs": its log-prob under the reference policy. Read with `kl`.
- "positive": 1 for the tokens of correct completions. Read with `positive_nll`.
- the column that `over` names: the weights of the mean.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from postlude.checks import Bounds, NonNegative, Positive, check_bounds, check_choice
from postlude.objectives.correction import CorrectionWeights, RolloutCorrection, mismatch_metrics, ratio_metrics
from postlude.objectives.kl import ReferenceKL, clamp_log_ratio, estimate_kl
from postlude.objectives.loss import Loss, Metric, mean
from postlude.objectives.loss_weights import (
    Denominators,
    broadcast_to_tokens,
    check_per_token,
    sequence_mean,
    weighted_targets,
)
from postlude.options import Common

if TYPE_CHECKING:
    from torch import Tensor

    from postlude.data import Microbatch
    from postlude.model import OutputInputs
    from postlude.ops.linear_logprobs import TokenStats

ADVANTAGES, OLD, ROLLOUT = "advantages", "old_logprobs", "rollout_logprobs"
REFERENCE, POSITIVE = "reference_logprobs", "positive"

Surrogate = Literal["clip", "cispo", "reinforce"]
Ratio = Literal["token", "sequence", "on_policy"]


@dataclass(frozen=True)
class PolicyColumns:
    """The columns of each token, [T] each. A column that the settings do not need is None."""

    weights: Tensor
    advantages: Tensor
    old_logprobs: Tensor | None = None  # None: on-policy, the current log-probs
    reference_logprobs: Tensor | None = None
    positive: Tensor | None = None
    correction: Tensor | None = None
    log_ratio: Tensor | None = None  # sequence-level (GSPO), with gradient; None: per token


@dataclass(frozen=True, kw_only=True)
class PolicyGradient:
    """w_rollout · surrogate + kl.coefficient · KL(p ‖ p_ref) - entropy · H(p) + positive_nll · 1[positive] · (-log p)

    of each token, averaged over the whole batch by the weights that `over` names.

    **Surrogate**, of the advantage A and the ratio r (sg: stop-gradient):

        "clip"       max(-A · r, -A · clamp(r, 1 - clip_low, 1 + clip_high)), and at most -A · dual_clip where A < 0
        "cispo"      -A · sg(clamp(r, 1 - clip_low, 1 + clip_high)) · log p
        "reinforce"  -A · log p

    **Ratio** of the policy p to p_old, the one of the column "old_logprobs":

        "token"      p / p_old of each token (PPO, GRPO, DAPO)
        "sequence"   exp of the mean of log(p / p_old) over the trained tokens of the sequence (GSPO)
        "on_policy"  p / sg(p): 1, with the gradient of log p. sg(p) replaces p_old everywhere

    Differences of log-probs are clamped to ± 20 before they are exponentiated. `correction` computes w_rollout, which
    has no gradient. The entropy bonus is differentiated. Log-probs are at the temperature of the batch.

    **Means.** `over="tokens"` or a mask: a mean over tokens, as in DAPO. A column of `weights(masks,
    mean="sequences")`: over each completion, then over completions, as in GRPO and GSPO. With `length`, the sum is
    divided by length · number of sequences instead (Dr. GRPO), counting sequences of weight zero.
    """

    surrogate: Surrogate = "clip"
    """The surrogate loss."""
    ratio: Ratio = "token"
    """The policy ratio: of tokens, of sequences, or on-policy."""
    clip_low: NonNegative = 0.2
    """Clip range of the ratio below 1."""
    clip_high: NonNegative = 0.2
    """Clip range of the ratio above 1."""
    dual_clip: Annotated[float, Bounds(above=1)] | None = None
    """Bound on the loss where the advantage is negative, as a multiple of it; none for no bound."""
    correction: RolloutCorrection | None = None
    """Importance weights for the mismatch of rollout engine and trainer."""
    kl: Common[ReferenceKL | None] = None
    """Penalty for leaving the reference policy."""
    entropy: float = 0.0
    """Weight of the entropy bonus."""
    positive_nll: NonNegative = 0.0
    """Weight of the log-likelihood of correct completions."""
    over: str = "response_mask"
    """The column of weights of the mean."""
    length: Positive | None = None
    """Constant length to divide by instead of the number of tokens (Dr. GRPO)."""

    def __post_init__(self) -> None:
        check_choice("surrogate", self.surrogate, get_args(Surrogate))
        check_choice("ratio", self.ratio, get_args(Ratio))
        check_bounds(self)
        check_per_token(self.over)
        if self.clip_low > 1.0:
            raise ValueError(f"clip_low is {self.clip_low:g}, but a ratio is never below 0. Use 1 for no lower bound.")
        if self.dual_clip is not None and self.surrogate != "clip":
            raise ValueError(f'dual_clip bounds the clipped surrogate, but surrogate is "{self.surrogate}".')
        if (self.surrogate, self.ratio) == ("reinforce", "sequence"):
            raise ValueError('surrogate="reinforce" uses no ratio. Use ratio="token" or "on_policy" with it.')

    def denominators(self, depths: int) -> Denominators:
        """Returns the weights of its mean."""
        return ((self.over, 0),) if self.length is None else (("sequences", 0),)

    def __call__(self, inputs: OutputInputs) -> Loss:
        from postlude.data import IGNORE

        microbatch, head = inputs.microbatch, inputs.head
        targets, weights, count = weighted_targets(microbatch, self.over)
        options: dict[str, Any] = {"target_count": count, "entropy": True}
        has_weight = targets != IGNORE
        columns = self.columns(microbatch, weights, has_weight)
        if self.token_separable:
            columns, correction_weights = self._with_correction(microbatch, columns, columns.old_logprobs, has_weight)
            result = head.objective(inputs.hidden, targets, self.token_losses, columns, **options)
            return Loss(result.loss, self.over, self.metrics(microbatch, result.stats, columns, correction_weights))
        stats = head.logprobs(inputs.hidden, targets, **options)
        old = stats.logprob.detach() if columns.old_logprobs is None else columns.old_logprobs
        columns, correction_weights = self._with_correction(microbatch, columns, old, has_weight)
        if self.ratio == "sequence":
            log_ratios = sequence_mean(microbatch, stats.logprob - old, has_weight)
            columns = replace(columns, log_ratio=broadcast_to_tokens(microbatch, log_ratios))
        losses = self.token_losses(stats.logprob, stats.entropy, columns)
        metrics = self.metrics(microbatch, stats, columns, correction_weights)
        if self.length is None:
            return Loss(losses.sum(), self.over, metrics)
        return Loss(microbatch.sequence_sum(losses) / self.length, "sequences", metrics)

    @property
    def token_separable(self) -> bool:
        """Whether the loss is a sum over tokens of a function of the token's own log-prob."""
        by_token = self.ratio == "token" or (self.ratio == "on_policy" and self.correction is None)
        return by_token and self.length is None

    def columns(self, microbatch: Microbatch, weights: Tensor, has_weight: Tensor) -> PolicyColumns:
        """Returns the columns that these settings need. They are 0 where `has_weight` is false."""

        def read(name: str) -> Tensor:
            return microbatch.column(name).float().where(has_weight, 0.0)

        return PolicyColumns(
            weights,
            read(ADVANTAGES),
            old_logprobs=None if self.ratio == "on_policy" else read(OLD),
            reference_logprobs=None if self.kl is None else read(REFERENCE),
            positive=read(POSITIVE) if self.positive_nll else None,
        )

    def token_losses(self, logprob: Tensor, entropy: Tensor | None, columns: PolicyColumns) -> Tensor:
        """Returns the weighted loss of each token of `logprob`: all T, or in the fused head those that it projects."""
        losses = self.surrogates(logprob, self.log_ratios(logprob, columns).exp(), columns.advantages)
        if columns.correction is not None:
            losses = losses * columns.correction
        if self.kl is not None and columns.reference_logprobs is not None:
            old = logprob.detach() if columns.old_logprobs is None else columns.old_logprobs
            losses = losses + self.kl(logprob, columns.reference_logprobs, old)
        if self.entropy and entropy is not None:
            losses = losses - self.entropy * entropy
        if columns.positive is not None:
            losses = losses - self.positive_nll * columns.positive * logprob
        return losses * columns.weights

    def log_ratios(self, logprob: Tensor, columns: PolicyColumns) -> Tensor:
        """Returns log r, [tokens]."""
        if columns.log_ratio is not None:
            return clamp_log_ratio(columns.log_ratio)
        return clamp_log_ratio(logprob - (logprob.detach() if columns.old_logprobs is None else columns.old_logprobs))

    def surrogates(self, logprob: Tensor, ratio: Tensor, advantages: Tensor) -> Tensor:
        """Returns the surrogate of each token, [tokens]."""
        if self.surrogate == "reinforce":
            return -advantages * logprob
        clipped = ratio.clamp(1.0 - self.clip_low, 1.0 + self.clip_high)
        if self.surrogate == "cispo":
            return cispo_surrogate(logprob, clipped, advantages)
        losses = clipped_surrogate(ratio, clipped, advantages)
        if self.dual_clip is not None:
            losses = losses.minimum(-advantages * self.dual_clip).where(advantages < 0, losses)
        return losses

    def metrics(
        self,
        microbatch: Microbatch,
        stats: TokenStats,
        columns: PolicyColumns,
        correction_weights: CorrectionWeights | None,
    ) -> dict[str, Metric]:
        """Returns metrics: ratios, clipped fractions, divergences, entropy, mismatch of rollout engine and trainer."""
        assert stats.entropy is not None
        logprob, entropy = stats.logprob.detach(), stats.entropy.detach()
        advantages, over = columns.advantages, self.over
        old = logprob if columns.old_logprobs is None else columns.old_logprobs
        ratio = self.log_ratios(logprob, columns).detach().exp()
        low, high = ratio < 1.0 - self.clip_low, ratio > 1.0 + self.clip_high
        if self.surrogate == "clip":  # clipping is active only below 1 for A < 0, and above 1 for A > 0
            low, high = low & (advantages < 0), high & (advantages > 0)
        metrics = {
            "ratio": mean(ratio, over),
            **ratio_metrics(ratio, over),
            "kl_old": mean(estimate_kl(old, logprob), over),  # KL(old ‖ policy), at tokens sampled from the old policy
            "entropy": mean(entropy, over),
        }
        if self.surrogate != "reinforce":
            metrics |= {"clip_ratio/low": mean(low.float(), over), "clip_ratio/high": mean(high.float(), over)}
        if self.dual_clip is not None:
            metrics["clip_ratio/dual"] = mean(((advantages < 0) & (ratio > self.dual_clip)).float(), over)
        if self.kl is not None and columns.reference_logprobs is not None:
            metrics["kl"] = mean(estimate_kl(logprob, columns.reference_logprobs, self.kl.estimator), over)
        if ROLLOUT in microbatch.columns:
            metrics |= mismatch_metrics(microbatch.column(ROLLOUT).float(), old, over)
        if correction_weights is not None:
            metrics |= {
                "correction": mean(correction_weights.weights, over),
                "corrected": mean(correction_weights.changed, over),
            }
        return metrics

    def _with_correction(
        self, microbatch: Microbatch, columns: PolicyColumns, old: Tensor | None, has_weight: Tensor
    ) -> tuple[PolicyColumns, CorrectionWeights | None]:
        if self.correction is None or old is None:
            return columns, None
        correction_weights = self.correction(microbatch, old, microbatch.column(ROLLOUT).float(), has_weight)
        return replace(columns, correction=correction_weights.weights), correction_weights


def clipped_surrogate(ratio: Tensor, clipped: Tensor, advantages: Tensor) -> Tensor:
    """Returns -min(r · A, clip(r) · A) of each token."""
    return -(ratio * advantages).minimum(clipped * advantages)


def cispo_surrogate(logprob: Tensor, clipped: Tensor, advantages: Tensor) -> Tensor:
    """Returns -sg(clip(r)) · A · log p of each token."""
    return -clipped.detach() * advantages * logprob
