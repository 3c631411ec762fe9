"""The output seam: what a processor receives after the final norm, before anything is projected.

A processor is any callable `(inputs: OutputInputs, context) -> anything`. The model's own logits and token losses are
processors too, so the default path and yours are the same path.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from postlude.data import Microbatch
from postlude.layout import Layout
from postlude.model.config import ModelConfig
from postlude.model.parallel import ValueHead
from postlude.ops.collectives import gather_alike, gather_from_sequence
from postlude.ops.linear_logprobs import LogitConfig, TokenStats, linear_logprobs
from postlude.ops.linear_objective import LinearObjective, TokenObjective, linear_objective
from postlude.ops.logprobs_at import linear_logprobs_at
from postlude.world.mesh import SINGLE_RANK, Axis

NO_VALUE_HEAD = "this model has no value head: make it with Engine(..., critic=True) or LanguageModel(value_head=True)."


@dataclass(frozen=True)
class OutputHead:
    """The output projection of this rank, tying resolved.

    `weight` [rows, H] holds vocabulary entries from `logit_config.vocab_start` on; `how` says the rest of how
    logits are made of it, and who holds its other rows. `value_head` is there if the model was built with one.
    """

    weight: Tensor
    logit_config: LogitConfig
    tp: Axis = SINGLE_RANK
    value_head: ValueHead | None = None
    counted: tuple[Tensor, int] | None = None
    """Targets [T] and how many of them are not -100, where the host knows: the microbatch's own."""

    def gather(self, hidden: Tensor) -> Tensor:
        """This rank's hidden states [T / tp, H] -> all [T, H], each rank to project them to its own rows."""
        return gather_from_sequence(hidden, self.tp.group)

    def logits(self, hidden: Tensor) -> Tensor:
        """[T / tp, H] -> [T, vocab], in hidden's dtype, alike on every rank.

        Holds them all: prefer `logprobs` where that is what you need.
        """
        logits = self.logit_config.shape(F.linear(self.gather(hidden), self.weight, self.logit_config.bias))
        size = self.logit_config.vocab_size or self.logit_config.vocab_start + len(self.weight)
        if self.tp.group is not None:
            width = -(-size // self.tp.size)
            logits = gather_alike(F.pad(logits, (0, width - logits.shape[1])).T, self.tp.group).T
        return logits[:, :size]

    def logprobs(
        self,
        hidden: Tensor,
        targets: Tensor,
        *,
        target_count: int | None = None,
        temperature: float | Tensor = 1.0,
        entropy: bool = False,
        topk: int = 0,
        lse: bool = False,
        hit: bool = False,
    ) -> TokenStats:
        """fp32 log-prob of `targets` [T] and, on request, entropy and more, without holding logits.

        Positions whose target is -100 are not projected: their value and gradient are 0. How many others there are is
        known of the microbatch's own targets. Of targets made from them, `target_count` says it, as in
        `postlude.linear_logprobs`; without it the host waits for the device to count them.
        """
        return linear_logprobs(
            self.gather(hidden),
            self.weight,
            targets,
            target_count=self._count(targets, target_count),
            temperature=temperature,
            logit_config=self.logit_config,
            entropy=entropy,
            topk=topk,
            lse=lse,
            hit=hit,
        )

    def objective(
        self,
        hidden: Tensor,
        targets: Tensor,
        token_objective: TokenObjective,
        columns: Any = None,
        *,
        target_count: int | None = None,
        temperature: float | Tensor = 1.0,
        entropy: bool = False,
        lse: bool = False,
        hit: bool = False,
    ) -> LinearObjective:
        """A loss that treats each token by itself, in one sweep: cheaper than `logprobs` and a loss of its own.

        `token_objective(logprob, entropy, columns)` returns a loss a token; the result's `loss` is their sum. See
        `postlude.linear_objective`, and `logprobs` for `target_count`.
        """
        return linear_objective(
            self.gather(hidden),
            self.weight,
            targets,
            token_objective,
            columns,
            target_count=self._count(targets, target_count),
            temperature=temperature,
            logit_config=self.logit_config,
            entropy=entropy,
            lse=lse,
            hit=hit,
        )

    def logprobs_at(
        self,
        hidden: Tensor,
        targets: Tensor,
        ids: Tensor,
        *,
        target_count: int | None = None,
        temperature: float | Tensor = 1.0,
    ) -> tuple[TokenStats, Tensor]:
        """As `logprobs`, and the log-probs of `ids` [T, k] at every position beside them, fp32 [T, k]."""
        return linear_logprobs_at(
            self.gather(hidden),
            self.weight,
            targets,
            ids,
            target_count=self._count(targets, target_count),
            temperature=temperature,
            logit_config=self.logit_config,
        )

    def values(self, hidden: Tensor) -> Tensor:
        """The value head's number at every position: [T / tp, H] -> [T] fp32, alike on every rank."""
        if self.value_head is None:
            raise ValueError(NO_VALUE_HEAD)
        return gather_alike(self.value_head(hidden), self.tp.group)

    def _count(self, targets: Tensor, given: int | None) -> int | None:
        if given is None and self.counted is not None and targets is self.counted[0]:
            return self.counted[1]
        return given

    def topk(self, hidden: Tensor, k: int, *, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
        """The k likeliest tokens at every position: log-probs fp32 [T, k] and ids [T, k]. No gradient."""
        anything = torch.zeros(hidden.shape[0] * self.tp.size, dtype=torch.int64, device=hidden.device)
        with torch.no_grad():
            stats = self.logprobs(hidden, anything, target_count=len(anything), topk=k, temperature=temperature)
        assert stats.topk_logprobs is not None
        assert stats.topk_ids is not None
        return stats.topk_logprobs, stats.topk_ids


@dataclass(frozen=True)
class OutputInputs:
    """What an output processor receives, once a microbatch, on the last stage.

    `hidden` [T / tp, H] is after the final norm: this rank's shard of the microbatch's T tokens. The head's methods
    take it as it is and answer for all T, alike on every tensor-parallel rank; `gather` does so for values of your own.
    `reports` are side values of this stage's blocks for the log, such as router balance. `ahead` gives the same of each
    multi-token-prediction depth, where the model has any.
    """

    hidden: Tensor
    head: OutputHead
    microbatch: Microbatch
    layout: Layout
    config: ModelConfig
    reports: Mapping[str, Tensor] = field(default_factory=dict)
    ahead: MTPDepths | None = None

    def depths(self, *, stop_trunk: bool = False, stop_head: bool = False) -> Iterator[OutputInputs]:
        """What each multi-token-prediction depth gives, run when it is asked for; see `MTPDepths`."""
        if self.ahead is None:
            raise ValueError(
                f"pattern {self.config.pattern} has no multi-token-prediction depths; write them after a '/', as in "
                f"{self.config.pattern}/[*-]."
            )
        return self.ahead(self, stop_trunk=stop_trunk, stop_head=stop_head)

    def gather(self, values: Tensor) -> Tensor:
        """Values made from `hidden` token by token [T / tp, ...] -> those of all T tokens, alike on every rank."""
        return gather_alike(values, self.head.tp.group)


class MTPDepths(Protocol):
    """What the multi-token-prediction depths of a model make of one microbatch, when they are asked."""

    def __call__(self, inputs: OutputInputs, *, stop_trunk: bool, stop_head: bool) -> Iterator[OutputInputs]:
        """The output of each depth in turn, given as the trunk's `inputs` are: its positions predict further ahead.

        With `stop_trunk` no gradient reaches what was there before the depths: the trunk and the embedding. With
        `stop_head` none reaches the head.
        """
        ...


@dataclass(frozen=True)
class MTPOptions:
    """How a processor asks for depths. One that says so beforehand, in an attribute `asks`, has them made by a plan.

    Their steps are then steps of the schedule plan, which hides their exchanges, before the processor is called. Those
    that it does not announce are made when it asks, and all of each at once.
    """

    stop_trunk: bool = False


class OutputProcessor(Protocol):
    """Turns hidden states and the head into whatever the caller wants.

    It may have an attribute `asks`: see `MTPOptions`.
    """

    def __call__(self, inputs: OutputInputs, context: Any) -> Any:
        """What this returns is what the model returns."""
        ...


def logits_processor(inputs: OutputInputs, context: Any) -> Tensor:
    """The default: logits [T, vocab]."""
    return inputs.head.logits(inputs.hidden)


def token_loss_processor(inputs: OutputInputs, context: Any) -> Tensor:
    """Negative log-prob of `context` (targets [T]; None for the microbatch's own), fp32 [T], 0 without a target."""
    targets = inputs.microbatch.targets if context is None else context
    return -inputs.head.logprobs(inputs.hidden, targets).logprob
