"""What every rollout engine takes and gives, so that one can stand in for another."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

from torch import Tensor

from postlude.rollout.sampling import Sampling

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class Completion:
    """One answer, as it was sampled: its tokens are never decoded and encoded again.

    The token that ended it is among `tokens`, and so are the tokens of a stop string. The one exception is an engine
    told to make do with text, such as `HTTPEngine(..., text_only=tokenizer)`: its `tokens` are the text's, and both
    lists of log-probs are empty, so that whoever needs one a token cannot take them by mistake.
    """

    tokens: list[int]
    logprobs: list[float]
    """Of each token, under softmax(logits / temperature) over the whole vocabulary (temperature 1 where it was 0).

    This is what a trainer computes with `head.logprobs(..., temperature=...)`, so the ratio of the two starts at 1.
    """
    sampled_logprobs: list[float]
    """Of each token, under the distribution it was drawn from: what top-k, top-p and min-p left, renormalised.

    Equal to `logprobs` where nothing was cut; 0 where the likeliest token was taken for certain.
    """
    finish_reason: FinishReason
    """"stop": a stop token or a stop string ended it. "length": it reached max_new_tokens."""
    text: str | None = None
    """The tokens decoded without special ones, up to the stop string if one ended it; None without a tokenizer."""
    drafted: int = 0
    """How many of its tokens were guessed ahead; 0 of an engine that does not guess."""
    accepted: int = 0
    """How many of those guesses were right. Each saved a step, and changed nothing else."""
    routing: Tensor | None = None
    """Which experts the tokens of prompt and answer were sent to, [tokens, routers, top_k] int16 on the CPU, where that
    was asked for: a batch's column "routing". The last token was never sent anywhere, and has -1."""


@runtime_checkable
class RolloutEngine(Protocol):
    """Anything that samples answers to prompts."""

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling | Sequence[Sampling], n: int = 1
    ) -> list[list[Completion]]:
        """Give `n` answers to each prompt of token ids, in the caller's order.

        `sampling` is one for all, or one a prompt.
        """
        ...


@runtime_checkable
class WeightReceiver(Protocol):
    """An engine with weights of its own, which must be told when training has changed them.

    The native generator is none: it reads the trained model itself.
    """

    def update_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Take new weights under their Hugging Face names. Answers asked for afterwards come from them."""
        ...
