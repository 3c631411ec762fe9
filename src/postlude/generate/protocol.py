"""Requests, completions and the protocols of rollout engines, so that one engine can stand in for another."""

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
    """A prompt of token ids, how its completions are sampled, and how many."""

    prompt: tuple[int, ...]
    sampling: SamplingParams
    n: int = 1
    first: int = 0
    """The number of the first completion: the second one alone is that of `n=1, first=1`."""

    def __post_init__(self) -> None:
        if self.n < 1:
            raise ValueError(f"n={self.n}: give at least 1 completion a prompt.")

    @property
    def seed(self) -> int:
        """The seed of the first completion, 63 bits, for a server that takes one seed a request."""
        return rng_key(self.sampling.seed, self.first) % (1 << 63)


class VersionSpan(NamedTuple):
    """The tokens from `start` to before `end` of a completion were sampled with the weights called `version`."""

    version: str
    start: int
    end: int


@dataclass(frozen=True)
class FinishedCompletion:
    """Completion `number` of the `n` of a submitted request, or the error that it failed with."""

    ticket: int
    number: int
    answer: Completion | None
    error: Exception | None = None


@dataclass(frozen=True)
class Completion:
    """One completion, as it was sampled: its tokens are never decoded and encoded again.

    The token that ended it is among `tokens`, and so are the tokens of a stop string. The exception is an engine
    that gets text only, `GenerationClient(..., api="text")`: its `tokens` are encoded from the text, and both lists of
    log-probs are empty, so that a trainer cannot use them by mistake.
    """

    tokens: list[int]
    logprobs: list[float]
    """The log-prob of each token under softmax(logits / temperature) over the vocabulary; temperature 1 if it was 0.

    This is what a trainer computes with `head.logprobs(..., temperature=...)`, so the ratio of the two starts at 1.
    """
    sampled_logprobs: list[float]
    """The log-prob of each token in the distribution it was sampled from, which top-k, top-p and min-p cut.

    Equal to `logprobs` if nothing was cut; 0 if sampling was greedy.
    """
    finish_reason: FinishReason
    """"stop": a stop token or a stop string ended it. "length": it reached max_new_tokens."""
    text: str | None = None
    """The tokens decoded without special ones, up to the stop string if one ended it; None without a tokenizer."""
    drafted: int = 0
    """How many draft tokens were checked; 0 if the engine does not draft."""
    accepted: int = 0
    """How many of those drafts were right. Each saved a step, and changed nothing else."""
    routing: Tensor | None = None
    """The experts that the tokens of prompt and completion were routed to, [tokens, routers, top_k] int16 on the CPU,
    if they are recorded: a batch's column "routing". The last token was not routed, and has -1."""
    versions: tuple[VersionSpan, ...] = ()
    """The weight versions that its tokens were sampled with, if the engine names them."""


@dataclass(frozen=True)
class Progress:
    """The new tokens of one completion and their log-probs, and at the end the whole completion."""

    place: int
    """The index of its request among those that were submitted together."""
    number: int
    tokens: Sequence[int]
    logprobs: Sequence[float]
    completion: Completion | None


@runtime_checkable
class RolloutEngine(Protocol):
    """Anything that samples completions of prompts."""

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams | Sequence[SamplingParams],
        n: int = 1,
        *,
        first: int = 0,
    ) -> list[list[Completion]]:
        """Returns `n` completions of each prompt of token ids, in the caller's order, numbered from `first`.

        `sampling` is one for all, or one a prompt.
        """
        ...


@runtime_checkable
class AsyncRolloutEngine(RolloutEngine, Protocol):
    """An engine that takes prompts while others run, and returns each completion when it is done."""

    def submit(self, request: Request) -> int:
        """Ask for completions without waiting. Returns the ticket that names them."""
        ...

    def poll(self, timeout: float | None = 0.0) -> list[FinishedCompletion]:
        """Returns the completions since the last poll. Waits up to `timeout` seconds for the first, forever if None."""
        ...


class ConversationEngine(AsyncRolloutEngine, Protocol):
    """An engine that conversations are held with."""

    batched_polls: bool
    """Whether one poll returns all that was submitted, so that it pays to submit what belongs together before."""


class PollAdapter:
    """submit and poll for an engine that has `generate` alone, such as the native generator.

    The next `poll` generates all that was submitted, at once. The seed of each request decides its completions, so they
    are the same whatever is generated beside them.
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
        """See `RolloutEngine`."""
        return self._engine.generate(prompts, sampling, n, first=first)

    def submit(self, request: Request) -> int:
        """Generate these completions with the next `poll`."""
        ticket = next(self._tickets)
        self._waiting[ticket] = request
        return ticket

    def poll(self, timeout: float | None = 0.0) -> list[FinishedCompletion]:
        """Generate all that was submitted, however long it takes."""
        waiting, self._waiting = self._waiting, {}
        finished: list[FinishedCompletion] = []
        for n, first in dict.fromkeys((request.n, request.first) for request in waiting.values()):
            alike = {ticket: request for ticket, request in waiting.items() if (request.n, request.first) == (n, first)}
            prompts = [request.prompt for request in alike.values()]
            samplings = [request.sampling for request in alike.values()]
            groups = self._engine.generate(prompts, samplings, n, first=first)
            for ticket, group in zip(alike, groups, strict=True):
                finished += [FinishedCompletion(ticket, number, each) for number, each in enumerate(group)]
        return finished
