"""The output interface: what a processor receives after the final norm, before anything is projected.

A processor is any callable `(inputs: OutputInputs, context) -> Any`. The model's own logits and token losses are
processors too, so custom processors use the same interface.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from postlude.data import Microbatch
from postlude.layout import Layout
from postlude.model.config import ModelConfig
from postlude.model.parallel import Adapter, ValueHead
from postlude.ops.collectives import gather_from_sequence, gather_replicated
from postlude.ops.linear_logprobs import LogitConfig, TokenStats, linear_logprobs
from postlude.ops.linear_logprobs.invariant import logit_products
from postlude.ops.linear_objective import LinearObjective, TokenObjective, linear_objective, objective_of_stats
from postlude.ops.logprobs_at import linear_logprobs_at, masked_logprobs
from postlude.world.mesh import SINGLE_RANK, Axis

NO_VALUE_HEAD = "this model has no value head: make it with Engine(..., critic=True) or LanguageModel(value_head=True)."


@dataclass(frozen=True)
class OutputHead:
    """The output projection of this rank.

    `weight` [vocab / tp, H], the embedding's if they are tied, holds the vocabulary entries from
    `logit_config.vocab_start` on. `logit_config` says how logits are computed and which ranks hold the other entries.
    `value_head` is set if the model was built with one. With an `adapter` the weight is [vocab / tp, H + r], where r is
    its rank rounded up to 64: B and zeros. `gather` appends scale · A · hidden and zeros, so one product computes both.
    """

    weight: Tensor
    logit_config: LogitConfig
    tp: Axis = SINGLE_RANK
    value_head: ValueHead | None = None
    adapter: Adapter | None = None
    known_target_count: tuple[Tensor, int] | None = None
    """The microbatch's targets [T] and how many of them are not -100."""
    temperature: float = 1.0
    """The microbatch's temperature: that of log-probs unless a call names another. `logits` are not divided by it."""
    sampling_masks: Tensor | None = None
    """The microbatch's column "sampling_mask" [T, k]: `logprobs` and `objective` normalise over these tokens alone."""

    def gather(self, hidden: Tensor) -> Tensor:
        """Gathers hidden states for a projection to this rank's vocabulary: [T / tp, H] -> [T, H], or [T, H + r]."""
        gathered = gather_from_sequence(hidden, self.tp.group)
        return gathered if self.adapter is None else self.adapter.extend_rows(gathered)

    def logits(self, hidden: Tensor) -> Tensor:
        """Returns logits, [T / tp, H] -> [T, vocab], the same on every rank.

        Materialises all, in hidden's dtype (fp32 if batch-invariant without gradients). Prefer `logprobs` if possible.
        """
        logits = self.logit_config.transform(logit_products(self.gather(hidden), self.weight, self.logit_config.bias))
        size = self.logit_config.vocab_size or self.logit_config.vocab_start + len(self.weight)
        if self.tp.group is not None:
            width = -(-size // self.tp.size)
            logits = gather_replicated(F.pad(logits, (0, width - logits.shape[1])).T, self.tp.group).T
        return logits[:, :size]

    def logprobs(
        self,
        hidden: Tensor,
        targets: Tensor,
        *,
        target_count: int | None = None,
        temperature: float | Tensor | None = None,
        entropy: bool = False,
        topk: int = 0,
        lse: bool = False,
        top1: bool = False,
    ) -> TokenStats:
        """Returns the fp32 log-prob of `targets` [T] and, on request, entropy and more, without materialising logits.

        They are at the temperature that the batch was sampled with, unless `temperature` names another, [T] or one
        number. Positions whose target is -100 are not projected: their value and gradient are 0. The number of others
        is known for the microbatch's own targets. For other targets pass `target_count`, as in
        `postlude.linear_logprobs`; without it the host waits for the device to count them.

        With a column "sampling_mask" log-prob, entropy and lse are those of the distribution over each position's mask.
        With `topk` or `top1` all results are over the vocabulary, log-probs too.
        """
        if self.sampling_masks is not None and not topk and not top1:
            return self._masked_logprobs(hidden, targets, self.sampling_masks, temperature, entropy=entropy, lse=lse)
        return linear_logprobs(
            self.gather(hidden),
            self.weight,
            targets,
            logit_config=self._config(targets, target_count, temperature),
            entropy=entropy,
            topk=topk,
            lse=lse,
            top1=top1,
        )

    def objective(
        self,
        hidden: Tensor,
        targets: Tensor,
        token_objective: TokenObjective,
        columns: Any = None,
        *,
        target_count: int | None = None,
        temperature: float | Tensor | None = None,
        entropy: bool = False,
        lse: bool = False,
        top1: bool = False,
    ) -> LinearObjective:
        """Returns the sum of a per-token loss, fused with the head: cheaper than `logprobs` and a separate loss.

        `token_objective(logprob, entropy, columns)` returns a loss per token; the result's `loss` is their sum. See
        `postlude.linear_objective`, and `logprobs` for `target_count`, `top1` and sampling masks.
        """
        if self.sampling_masks is not None and not top1:
            stats = self._masked_logprobs(hidden, targets, self.sampling_masks, temperature, entropy=entropy, lse=lse)
            return objective_of_stats(stats, targets, token_objective, columns, self.logit_config.ignore_index)
        return linear_objective(
            self.gather(hidden),
            self.weight,
            targets,
            token_objective,
            columns,
            logit_config=self._config(targets, target_count, temperature),
            entropy=entropy,
            lse=lse,
            top1=top1,
        )

    def logprobs_at(
        self,
        hidden: Tensor,
        targets: Tensor,
        ids: Tensor,
        *,
        target_count: int | None = None,
        temperature: float | Tensor | None = None,
    ) -> tuple[TokenStats, Tensor]:
        """Returns `logprobs`, and the log-probs of `ids` [T, k] at every position, fp32 [T, k]."""
        logit_config = self._config(targets, target_count, temperature)
        return linear_logprobs_at(self.gather(hidden), self.weight, targets, ids, logit_config=logit_config)

    def values(self, hidden: Tensor) -> Tensor:
        """Returns the value head's output: [T / tp, H] -> [T] fp32, the same on every rank."""
        if self.value_head is None:
            raise ValueError(NO_VALUE_HEAD)
        return gather_replicated(self.value_head(hidden), self.tp.group)

    def _masked_logprobs(
        self, hidden: Tensor, targets: Tensor, masks: Tensor, temperature: float | Tensor | None, **requested: bool
    ) -> TokenStats:
        logit_config = self._config(targets, None, temperature)
        return masked_logprobs(self.gather(hidden), self.weight, targets, masks, logit_config=logit_config, **requested)

    def _config(self, targets: Tensor, target_count: int | None, temperature: float | Tensor | None) -> LogitConfig:
        if target_count is None and self.known_target_count is not None and targets is self.known_target_count[0]:
            target_count = self.known_target_count[1]
        temperature = self.temperature if temperature is None else temperature
        return self.logit_config.replace(target_count=target_count, temperature=temperature)

    def topk(self, hidden: Tensor, k: int, *, temperature: float | None = None) -> tuple[Tensor, Tensor]:
        """Returns the k likeliest tokens at every position: log-probs fp32 [T, k] and ids [T, k]. No gradient."""
        zeros = torch.zeros(hidden.shape[0] * self.tp.size, dtype=torch.int64, device=hidden.device)
        with torch.no_grad():
            stats = self.logprobs(hidden, zeros, target_count=len(zeros), topk=k, temperature=temperature)
        assert stats.topk_logprobs is not None
        assert stats.topk_ids is not None
        return stats.topk_logprobs, stats.topk_ids


@dataclass(frozen=True)
class OutputInputs:
    """The input of an output processor, once per microbatch, on the last stage.

    `hidden` [T / tp, H] is after the final norm: this rank's shard of the microbatch's T tokens. The head's methods
    take it as it is and return results for all T, the same on every tensor-parallel rank; `gather` does so for other
    values. `mtp` runs the MTP depths, if the model has any.
    """

    hidden: Tensor
    head: OutputHead
    microbatch: Microbatch
    layout: Layout
    config: ModelConfig
    mtp: MTPDepths | None = None

    def depths(self, *, stop_trunk: bool = False, stop_head: bool = False) -> Iterator[OutputInputs]:
        """Yields the inputs of each MTP depth, computed on request; see `MTPDepths`."""
        if self.mtp is None:
            raise ValueError(
                f"pattern {self.config.pattern} has no multi-token-prediction depths; write them after a '/', as in "
                f"{self.config.pattern}/[*-]."
            )
        return self.mtp(self, stop_trunk=stop_trunk, stop_head=stop_head)

    def gather(self, values: Tensor) -> Tensor:
        """Gathers values computed per token of `hidden`, [T / tp, ...] -> [T, ...], the same on every rank."""
        return gather_replicated(values, self.head.tp.group)


class MTPDepths(Protocol):
    """Runs the MTP depths of a model on one microbatch."""

    def __call__(self, inputs: OutputInputs, *, stop_trunk: bool, stop_head: bool) -> Iterator[OutputInputs]:
        """Yields the trunk's `inputs` with each depth's hidden states, whose positions predict further ahead.

        With `stop_trunk` no gradient reaches the trunk and the embedding. With `stop_head` none reaches the head.
        """
        ...


@dataclass(frozen=True)
class MTPOptions:
    """A processor's use of MTP depths. With an attribute `mtp_options` it gets them from the schedule plan.

    The depths' steps are then steps of the plan, which overlaps their exchanges, before the processor is called.
    Without the attribute, depths run when the processor requests them, without overlap.
    """

    stop_trunk: bool = False


class OutputProcessor(Protocol):
    """Computes any result from hidden states and the head.

    It may have an attribute `mtp_options`.
    """

    def __call__(self, inputs: OutputInputs, context: Any) -> Any:
        """Returns what `LanguageModel.forward` returns on the last stage."""
        ...


def logits_processor(inputs: OutputInputs, context: Any) -> Tensor:
    """Returns logits [T, vocab]: the default processor."""
    return inputs.head.logits(inputs.hidden)


def token_loss_processor(inputs: OutputInputs, context: Any) -> Tensor:
    """Returns the negative log-prob of `context` (targets [T]; None: the microbatch's), fp32 [T], 0 where ignored."""
    targets = inputs.microbatch.targets if context is None else context
    return -inputs.head.logprobs(inputs.hidden, targets).logprob
