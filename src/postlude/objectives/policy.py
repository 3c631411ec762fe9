"""Policy gradients: PPO and what came of it, from token-level clipping to sequence-level ratios.

Columns, each one number a token:

- "advantages": how much better than expected the token, or its whole answer, turned out.
- "old_logprobs": its log-prob under the policy that this step started from. Not read with ratio="on_policy".
- "rollout_logprobs": its log-prob as the engine that sampled it said. Read with `correction`; if it is there without,
  the mismatch is reported.
- "reference_logprobs": its log-prob under the reference policy. Read with `kl`.
- "positive": 1 for the tokens of answers that were right. Read with `positive_nll`.
- the weights that `over` names.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from postlude.checks import Bounds, NonNegative, Positive, check_bounds, check_choice
from postlude.objectives.checks import per_token
from postlude.objectives.correction import Corrected, RolloutCorrection
from postlude.objectives.kl import ReferenceKL, bounded, estimate
from postlude.objectives.loss import Loss, Metric, largest, mean
from postlude.objectives.weights import learned, sequence_mean, spread

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
    """What is known of each token beside its log-prob, [T] each; None where it is not wanted."""

    weights: Tensor
    advantages: Tensor
    old: Tensor | None = None  # None: the policy itself
    reference: Tensor | None = None
    positive: Tensor | None = None
    correction: Tensor | None = None
    log_ratio: Tensor | None = None  # of whole sequences, with its gradient; None: each token's own


@dataclass(frozen=True, kw_only=True)
class PolicyGradient:
    """A token's loss, averaged by the weights `over` names over the whole batch:

        w_rollout · surrogate + kl.coefficient · KL(p ‖ p_ref) - entropy · H(p) + positive_nll · 1[right] · (-log p)

    **Surrogate**, of the advantage A and the ratio r:

        "clip"       max(-A · r, -A · clamp(r, 1 - clip_low, 1 + clip_high)), and at most -A · dual_clip where A < 0
        "cispo"      -A · sg(clamp(r, 1 - clip_low, 1 + clip_high)) · log p
        "reinforce"  -A · log p

    **Ratio** of the policy to the one the step started from:

        "token"      p / p_old of each token (PPO, GRPO, DAPO)
        "sequence"   exp of the mean of log(p / p_old) over the learned tokens of the sequence (GSPO)
        "on_policy"  p / sg(p): 1, with the gradient of log p. The policy itself stands for the old one everywhere

    Differences of log-probs are held to ± 20 where they are exponentiated. `correction` gives w_rollout, which has no
    gradient; `kl` the penalty; `entropy` is a bonus with its gradient. `temperature` is the sampler's.

    **Averages.** `over="tokens"` or a mask: a mean over tokens, as in DAPO. A column that `weights(masks,
    mean="sequences")` made: over each answer, then over answers, as in GRPO and GSPO. With `length`, the weighted sum
    is divided by length · number of sequences instead (Dr. GRPO), those with nothing to learn included.
    """

    surrogate: Surrogate = "clip"
    """Which surrogate is minimised."""
    ratio: Ratio = "token"
    """What the ratio is of."""
    clip_low: NonNegative = 0.2
    """How far the ratio may fall below 1."""
    clip_high: NonNegative = 0.2
    """How far the ratio may rise above 1."""
    dual_clip: Annotated[float, Bounds(above=1)] | None = None
    """A bound on the loss of bad answers, as a multiple of the advantage; none for no bound."""
    correction: RolloutCorrection | None = None
    """Weights for a sampler that is not quite the trained policy."""
    kl: ReferenceKL | None = None
    """A penalty for leaving the reference policy."""
    entropy: float = 0.0
    """Weight of the entropy bonus."""
    positive_nll: NonNegative = 0.0
    """Weight of the log-likelihood of right answers."""
    temperature: Positive = 1.0
    """The sampler's temperature."""
    over: str = "response_mask"
    """The column of weights the loss is a mean over."""
    length: Positive | None = None
    """A constant to divide by instead of the number of tokens (Dr. GRPO)."""

    def __post_init__(self) -> None:
        check_choice("surrogate", self.surrogate, get_args(Surrogate))
        check_choice("ratio", self.ratio, get_args(Ratio))
        check_bounds(self)
        per_token(self.over)
        if self.clip_low > 1.0:
            raise ValueError(f"clip_low is {self.clip_low:g}, but a ratio is never below 0. Use 1 for no lower bound.")
        if self.dual_clip is not None and self.surrogate != "clip":
            raise ValueError(f'dual_clip bounds the clipped surrogate, but surrogate is "{self.surrogate}".')
        if (self.surrogate, self.ratio) == ("reinforce", "sequence"):
            raise ValueError('surrogate="reinforce" uses no ratio. Use ratio="token" or "on_policy" with it.')

    def denominators(self, depths: int) -> tuple[tuple[str, int], ...]:
        """What it is a mean over: the name of weights, and how many tokens further ahead than the next they are."""
        return ((self.over, 0),) if self.length is None else (("sequences", 0),)

    def __call__(self, inputs: OutputInputs) -> Loss:
        """Evaluate it on one microbatch."""
        from postlude.data import IGNORE

        microbatch, head = inputs.microbatch, inputs.head
        targets, weights, count = learned(microbatch, self.over)
        how: dict[str, Any] = {"target_count": count, "temperature": self.temperature, "entropy": True}
        kept = targets != IGNORE
        columns = self.columns(microbatch, weights, kept)
        if self.one_sweep:
            columns, corrected = self._corrected(microbatch, columns, columns.old, kept)
            found = head.objective(inputs.hidden, targets, self.token_losses, columns, **how)
            return Loss(found.loss, self.over, self.metrics(microbatch, found.stats, columns, corrected))
        stats = head.logprobs(inputs.hidden, targets, **how)
        old = stats.logprob.detach() if columns.old is None else columns.old
        columns, corrected = self._corrected(microbatch, columns, old, kept)
        if self.ratio == "sequence":
            logs = sequence_mean(microbatch, stats.logprob - old, kept)
            columns = replace(columns, log_ratio=spread(microbatch, logs))
        losses = self.token_losses(stats.logprob, stats.entropy, columns)
        metrics = self.metrics(microbatch, stats, columns, corrected)
        if self.length is None:
            return Loss(losses.sum(), self.over, metrics)
        return Loss(microbatch.sequence_sum(losses) / self.length, "sequences", metrics)

    @property
    def one_sweep(self) -> bool:
        """Whether all that is wanted is a sum over tokens of what depends on the token's own log-prob alone."""
        by_token = self.ratio == "token" or (self.ratio == "on_policy" and self.correction is None)
        return by_token and self.length is None

    def columns(self, microbatch: Microbatch, weights: Tensor, kept: Tensor) -> PolicyColumns:
        """Read what these settings need. Of tokens that are not `kept`, columns may hold anything: it is taken as 0."""

        def read(name: str) -> Tensor:
            return microbatch.column(name).float().where(kept, 0.0)

        return PolicyColumns(
            weights,
            read(ADVANTAGES),
            old=None if self.ratio == "on_policy" else read(OLD),
            reference=None if self.kl is None else read(REFERENCE),
            positive=read(POSITIVE) if self.positive_nll else None,
        )

    def token_losses(self, logprob: Tensor, entropy: Tensor | None, columns: PolicyColumns) -> Tensor:
        """The weighted loss of each token, [n]."""
        losses = self.surrogates(logprob, self.log_ratios(logprob, columns).exp(), columns.advantages)
        if columns.correction is not None:
            losses = losses * columns.correction
        if self.kl is not None and columns.reference is not None:
            old = logprob.detach() if columns.old is None else columns.old
            losses = losses + self.kl(logprob, columns.reference, old)
        if self.entropy and entropy is not None:
            losses = losses - self.entropy * entropy
        if columns.positive is not None:
            losses = losses - self.positive_nll * columns.positive * logprob
        return losses * columns.weights

    def log_ratios(self, logprob: Tensor, columns: PolicyColumns) -> Tensor:
        """Log of r, [n]."""
        if columns.log_ratio is not None:
            return bounded(columns.log_ratio)
        return bounded(logprob - (logprob.detach() if columns.old is None else columns.old))

    def surrogates(self, logprob: Tensor, ratio: Tensor, advantages: Tensor) -> Tensor:
        """The surrogate of each token, [n]."""
        if self.surrogate == "reinforce":
            return -advantages * logprob
        clipped = ratio.clamp(1.0 - self.clip_low, 1.0 + self.clip_high)
        if self.surrogate == "cispo":
            return -advantages * clipped.detach() * logprob
        losses = (-advantages * ratio).maximum(-advantages * clipped)
        if self.dual_clip is not None:
            losses = losses.minimum(-advantages * self.dual_clip).where(advantages < 0, losses)
        return losses

    def metrics(
        self, microbatch: Microbatch, stats: TokenStats, columns: PolicyColumns, corrected: Corrected | None
    ) -> dict[str, Metric]:
        """What to watch: ratios and what was clipped, divergences, entropy, and how far rollout and training differ."""
        assert stats.entropy is not None  # asked for
        logprob, entropy = stats.logprob.detach(), stats.entropy.detach()
        advantages, over = columns.advantages, self.over
        old = logprob if columns.old is None else columns.old
        ratio = self.log_ratios(logprob, columns).detach().exp()
        low, high = ratio < 1.0 - self.clip_low, ratio > 1.0 + self.clip_high
        if self.surrogate == "clip":  # elsewhere the maximum is the unclipped one
            low, high = low & (advantages < 0), high & (advantages > 0)
        found = {
            "ratio": mean(ratio, over),
            "ratio_max": largest(ratio, over),
            "kl_old": mean(estimate(old, logprob), over),  # KL(old ‖ policy): the old policy is what was sampled
            "entropy": mean(entropy, over),
        }
        if self.surrogate != "reinforce":
            found |= {"clipped_low": mean(low.float(), over), "clipped_high": mean(high.float(), over)}
        if self.dual_clip is not None:
            found["clipped_dual"] = mean(((advantages < 0) & (ratio > self.dual_clip)).float(), over)
        if self.kl is not None and columns.reference is not None:
            found["kl_reference"] = mean(estimate(logprob, columns.reference, self.kl.estimator), over)
        if ROLLOUT in microbatch.columns:
            rollout = microbatch.column(ROLLOUT).float()
            found["rollout_kl"] = mean(estimate(rollout, old), over)
            found["rollout_logprob_diff_max"] = largest((old - rollout).abs(), over)
        if corrected is not None:
            found |= {"correction": mean(corrected.weights, over), "corrected": mean(corrected.changed, over)}
        return found

    def _corrected(
        self, microbatch: Microbatch, columns: PolicyColumns, old: Tensor | None, kept: Tensor
    ) -> tuple[PolicyColumns, Corrected | None]:
        if self.correction is None or old is None:
            return columns, None
        corrected = self.correction(microbatch, old, microbatch.column(ROLLOUT).float(), kept)
        return replace(columns, correction=corrected.weights), corrected
