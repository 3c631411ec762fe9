"""Sampling: how answers are drawn and when they end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How one prompt's answers are drawn.

    Logits are divided by `temperature`; 0 takes the likeliest token. Then `top_k` leaves the likeliest k tokens,
    `top_p` the fewest of those left that together have probability p, and `min_p` those at least p times as likely as
    the likeliest. 0, 1.0 and 0.0 leave all. Tokens as likely as the last one left stay with it.

    An answer ends with any of `stop_tokens`, with the end-of-sequence token unless `ignore_eos`, when a string of
    `stop` appears in its text, or after `max_new_tokens`.

    `seed` and the answer's number choose the random numbers, and, with one sampling for all prompts, the prompt's place
    in the call: the same of these give the same answer whatever else is generated beside it.
    """

    max_new_tokens: int = 128
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    stop_tokens: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "top_k", "seed"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name}={value!r}: give a whole number.")
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens={self.max_new_tokens}: an answer has at least 1 token.")
        if not 0.0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature={self.temperature}: give 0 for the likeliest token, or a positive number.")
        if self.top_k < 0:
            raise ValueError(f"top_k={self.top_k}: give how many tokens to choose from, or 0 for all.")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p={self.top_p}: give a probability above 0; 1 leaves all tokens.")
        if not 0.0 <= self.min_p <= 1.0:
            raise ValueError(f"min_p={self.min_p}: give a share between 0 and 1 of the likeliest token's probability.")
        for name, kind in (("stop", str), ("stop_tokens", int)):
            values = getattr(self, name)
            if not isinstance(values, tuple) or not all(isinstance(value, kind) for value in values):
                raise TypeError(f"{name}={values!r}: give a tuple of {kind.__name__}; of one value it is (value,).")
        if "" in self.stop:
            raise ValueError(f"stop={self.stop!r}: every stop string has at least one letter.")

    @property
    def limited(self) -> bool:
        """Whether tokens are drawn from fewer than all."""
        return bool(self.top_k) or self.top_p < 1.0 or bool(self.min_p)

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken."""
        return self.temperature == 0.0


def one_each(sampling: Sampling | Sequence[Sampling], prompts: int) -> list[Sampling]:
    """The sampling of every prompt."""
    if isinstance(sampling, Sampling):
        return [sampling] * prompts
    if len(sampling) != prompts:
        raise ValueError(
            f"there are {prompts} prompts, but {len(sampling)} samplings. Give one for each prompt, or one for all."
        )
    return list(sampling)
