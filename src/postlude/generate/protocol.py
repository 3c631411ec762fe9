"""What every rollout engine takes and gives, so that one can stand in for another."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from postlude.generate.counter_rng import rng_key
from postlude.generate.sampling_params import SamplingParams

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class Request:
    """A prompt of token ids, how its answers are drawn, and how many there are to be."""

    prompt: tuple[int, ...]
    sampling: SamplingParams
    n: int = 1
    first: int = 0
    """The number of the first of them: the second answer alone is that of `n=1, first=1`."""

    def __post_init__(self) -> None:
        if self.n < 1:
            raise ValueError(f"n={self.n}: give at least 1 answer a prompt.")

    @property
    def seed(self) -> int:
        """Of the first answer, for a server that takes one seed a request: 63 bits, mixed of both numbers."""
        return rng_key(self.sampling.seed, self.first) % (1 << 63)


class VersionSpan(NamedTuple):
    """The tokens from `start` to before `end` of an answer were sampled with the weights called `version`."""

    version: str
    start: int
    end: int


@dataclass(frozen=True)
class FinishedCompletion:
    """What became of one answer to a request that was submitted: number `number` of its `n`, or why there is none."""

    ticket: int
    number: int
    answer: Completion | None
    error: Exception | None = None


@dataclass(frozen=True)
class Completion:
    """One answer, as it was sampled: its tokens are never decoded and encoded again.

    The token that ended it is among `tokens`, and so are the tokens of a stop string. The one exception is an engine
    told to make do with text, `GenerationClient(..., api="text")`: its `tokens` are the text's, and both lists of
    log-probs are empty, so that whoever needs one a token cannot take them by mistake.
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
    versions: tuple[VersionSpan, ...] = ()
    """With which weights its tokens were sampled, where the engine has weights of its own that it names."""


@dataclass(frozen=True)
class Progress:
    """What has come of one answer since the last time: tokens and their log-probs, and at the end the whole."""

    place: int
    """Of its request among those that were asked for together."""
    number: int
    tokens: Sequence[int]
    logprobs: Sequence[float]
    completion: Completion | None


@runtime_checkable
class RolloutEngine(Protocol):
    """Anything that samples answers to prompts."""

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams | Sequence[SamplingParams],
        n: int = 1,
        *,
        first: int = 0,
    ) -> list[list[Completion]]:
        """Give `n` answers to each prompt of token ids, in the caller's order, numbered from `first`.

        `sampling` is one for all, or one a prompt.
        """
        ...


@runtime_checkable
class AsyncRolloutEngine(RolloutEngine, Protocol):
    """One that takes prompts while it answers others. Each answer is told when it is done."""

    def submit(self, request: Request) -> int:
        """Ask for answers, and go on. Returns the ticket by which they will be known."""
        ...

    def poll(self, timeout: float | None = 0.0) -> list[FinishedCompletion]:
        """What has been done since the last time: waits up to `timeout` seconds for the first, for ever if None."""
        ...


class ConversationEngine(AsyncRolloutEngine, Protocol):
    """An engine that conversations are held with."""

    batched_polls: bool
    """Whether one poll returns all that was submitted, so that it pays to submit what belongs together before."""


class PollAdapter:
    """submit and poll of an engine that answers prompts together, such as the native generator.

    What was submitted is answered by the next `poll`, all at once. The seed of each request's own sampling decides its
    answers, so they are the same whatever is answered beside them.
    """

    def __init__(self, engine: RolloutEngine) -> None:
        self._engine = engine
        self._waiting: dict[int, Request] = {}
        self._tickets = itertools.count()

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams | Sequence[SamplingParams],
        n: int = 1,
        *,
        first: int = 0,
    ) -> list[list[Completion]]:
        """As the engine itself."""
        return self._engine.generate(prompts, sampling, n, first=first)

    def submit(self, request: Request) -> int:
        """Ask for answers with the next `poll`."""
        ticket = next(self._tickets)
        self._waiting[ticket] = request
        return ticket

    def poll(self, timeout: float | None = 0.0) -> list[FinishedCompletion]:
        """Answer all that was submitted, however long it takes."""
        waiting, self._waiting = self._waiting, {}
        found: list[FinishedCompletion] = []
        for n, first in dict.fromkeys((request.n, request.first) for request in waiting.values()):
            own = {ticket: each for ticket, each in waiting.items() if (each.n, each.first) == (n, first)}
            prompts, samplings = [each.prompt for each in own.values()], [each.sampling for each in own.values()]
            for ticket, answers in zip(own, self._engine.generate(prompts, samplings, n, first=first), strict=True):
                found += [FinishedCompletion(ticket, number, answer) for number, answer in enumerate(answers)]
        return found
