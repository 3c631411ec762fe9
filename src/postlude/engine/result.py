"""The results of a pass and of an optimizer step, and values per token: log-probs, entropies, top-k."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

from postlude.data.microbatch import IGNORE
from postlude.model import OutputInputs

if TYPE_CHECKING:
    from torch import Tensor

    from postlude.objectives.loss import Reduction

Outputs: TypeAlias = "Mapping[str, list[Tensor]]"
TokenProcessor = Callable[[OutputInputs], Mapping[str, Tensor]]  # returns values [T, ...] by name


@dataclass(frozen=True)
class PassResult:
    """The result of a `forward_backward`, the same on every rank."""

    loss: float
    metrics: Mapping[str, float]
    microbatches: int
    tokens: int
    shared_tokens: int = 0
    """How many of the tokens were not computed, since another sequence of their microbatch begins with them too."""
    reductions: Mapping[str, Reduction] = field(default_factory=dict)
    """The reduction of each metric, to combine metrics of several passes."""
    layer_vectors: Mapping[str, list[float]] = field(default_factory=dict)
    """Sums of each layer that have several numbers, such as the load of each expert: "moe/layer_03/load"."""
    outputs: Outputs = field(default_factory=dict)
    """The objective's `Loss.outputs`: a tensor [length, ...] per sequence, as `Engine.evaluate_tokens` returns them."""


@dataclass(frozen=True)
class StepResult:
    """The result of an `optimizer_step`. A step with a gradient that is not finite is skipped and changes nothing."""

    step: int
    grad_norm: float
    lr: float
    skipped: bool


@dataclass(frozen=True)
class TokenScores:
    """Per sequence in the caller's order, on the CPU: entry i is of token i given those before it. Entry 0 is 0."""

    logprob: list[Tensor]
    entropy: list[Tensor] | None = None


def logprob_processor(entropy: bool) -> TokenProcessor:
    def processor(inputs: OutputInputs) -> dict[str, Tensor]:
        targets, count, segments = inputs.microbatch.targets, inputs.microbatch.target_count, inputs.microbatch.segments
        if inputs.head.sampling_masks is not None:  # equal positions may have been sampled with different weights
            segments = None
        if segments is not None:  # equal predictions are computed once
            is_copy = segments.first_copies != torch.arange(len(targets), device=targets.device)
            targets, count = targets.masked_fill(is_copy, IGNORE), segments.distinct_targets
        stats = inputs.head.logprobs(inputs.hidden, targets, target_count=count, entropy=entropy)
        values = {"logprob": stats.logprob} | ({} if stats.entropy is None else {"entropy": stats.entropy})
        return values if segments is None else {name: value[segments.first_copies] for name, value in values.items()}

    return processor


def topk_processor(k: int, vocab_size: int) -> TokenProcessor:
    if not 1 <= k <= vocab_size:
        raise ValueError(f"topk(k={k}): k counts tokens of the vocabulary; use 1 to {vocab_size}.")

    def processor(inputs: OutputInputs) -> dict[str, Tensor]:
        logprobs, ids = inputs.head.topk(inputs.hidden, k)
        return {"logprobs": logprobs, "ids": ids}

    return processor
