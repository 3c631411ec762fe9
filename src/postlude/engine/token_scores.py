"""Values per token without gradients, which `Engine.evaluate_tokens` computes: log-probs, entropies, top-k."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from postlude.model import OutputInputs

TokenProcessor = Callable[[OutputInputs], Mapping[str, Tensor]]  # returns values [T, ...] by name


@dataclass(frozen=True)
class TokenScores:
    """Per sequence in the caller's order, on the CPU: entry i is of token i given those before it. Entry 0 is 0."""

    logprob: list[Tensor]
    entropy: list[Tensor] | None = None


def logprob_processor(entropy: bool) -> TokenProcessor:
    """Returns a processor for the log-probs of the targets and, on request, the entropies."""

    def processor(inputs: OutputInputs) -> dict[str, Tensor]:
        stats = inputs.head.logprobs(inputs.hidden, inputs.microbatch.targets, entropy=entropy)
        return {"logprob": stats.logprob} | ({} if stats.entropy is None else {"entropy": stats.entropy})

    return processor


def topk_processor(k: int, vocab_size: int) -> TokenProcessor:
    """Returns a processor for the k likeliest tokens at every position."""
    if not 1 <= k <= vocab_size:
        raise ValueError(f"topk(k={k}): k counts tokens of the vocabulary; use 1 to {vocab_size}.")

    def processor(inputs: OutputInputs) -> dict[str, Tensor]:
        logprobs, ids = inputs.head.topk(inputs.hidden, k)
        return {"logprobs": logprobs, "ids": ids}

    return processor
