"""Data types and protocols shared by all rollout engines: requests, completions, generate, submit and poll."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol, runtime_checkable

from postlude.generate.counter_rng import rng_key
from postlude.generate.sampling_params import SamplingParams

if TYPE_CHECKING:
    from torch import Tensor

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class Request:
    """A prompt of token ids, its sampling parameters, and the number of completions."""

    prompt: tuple[int, ...]
    sampling: SamplingParams
    n: int = 1
    first_index: int = 0
    """The index of the first completion, for seeds: `n=1, first_index=1` gives the second completion of `n=2`."""
    adapter: str | None = None
    """The adapter to sample with, by its name in the engine; None for the engine's default."""
    client: tuple[str, ...] = ()
    """Who asks, such as an address and one of its connections: in a `Session`, completions of several addresses that
    wait take turns, and at the turns of an address those of its connections."""

    def __post_init__(self) -> None:
        if self.n < 1:
            raise ValueError(f"n={self.n}: give at least 1 completion per prompt.")

    @property
    def seed(self) -> int:
        """The first completion's seed (63 bits), for servers that take one seed per request."""
        return rng_key(self.sampling.seed, self.first_index) % (1 << 63)


class VersionSpan(NamedTuple):
    """The tokens from `start` to before `end` of a completion were sampled with this version of the weights."""

    version: str
    start: int
    end: int


@dataclass(frozen=True)
class FinishedCompletion:
    """Completion `index` (from 0) of the request that `submit` returned `request_id` for, or its error."""

    request_id: int
    index: int
    completion: Completion | None
    error: Exception | None = None


@dataclass(frozen=True)
class Completion:
    """One completion, as it was sampled: its tokens are never decoded and encoded again.

    The token that ended it is among `tokens`, and so are the tokens of a stop string, of llama.cpp all but the last.
    """

    tokens: list[int]
    logprobs: list[float]
    """The log-prob of each token under softmax(logits / temperature) over the vocabulary; greedy uses temperature 1.

    A trainer's `head.logprobs(..., temperature=...)` are the same. See `GenerationClient` for servers that differ.
    """
    sampled_logprobs: list[float]
    """The log-prob of each token in the distribution it was sampled from: after top-k, top-p and min-p, renormalised.

    Equal to `logprobs` without top-k, top-p and min-p; 0 if sampling was greedy.
    """
    finish_reason: FinishReason
    """"stop": a stop token or a stop string ended it. "length": it reached max_new_tokens."""
    text: str | None = None
    """The tokens decoded without special ones, up to the stop string if one ended it; None without a tokenizer."""
    reused_prompt_tokens: int = field(default=0, compare=False)
    """Tokens of its prompt that were not prefilled for it, since another completion or an earlier turn began with them;
    0 if the engine does not report it."""
    drafted: int = 0
    """Speculative tokens that were proposed and checked; 0 without speculative decoding."""
    accepted: int = 0
    """Speculative tokens that were accepted. Each saved a decode step; the completion is the same without."""
    routing: Tensor | None = None
    """Expert ids of the tokens of prompt and completion, [tokens, routers, top_k] int16 on the CPU, if they are
    recorded. They become a batch's column "routing". The last token was never an input, and has -1."""
    top_logprobs: Sequence[Sequence[tuple[int, float]]] = ()
    """For each token the likeliest ones at its place, and their log-probs, as `SamplingParams.top_logprobs` asks."""
    sampling_mask: Sequence[Sequence[int]] | None = None
    """For each token those that could be sampled at its place, after top-k, top-p and min-p, if they are asked for
    with `SamplingParams.return_sampling_mask`; None too if all could, or if sampling was greedy."""
    versions: tuple[VersionSpan, ...] = ()
    """The weights version of each range of tokens, if the engine reports it."""
    queue_seconds: float | None = field(default=None, compare=False)
    """Seconds that it waited before it ran, if the engine reports it."""
    first_token_seconds: float | None = field(default=None, compare=False)
    """Seconds until its first token, with those that it waited."""

    @property
    def policy_logprobs(self) -> list[float]:
        """The log-probs that a trainer compares its own with: among the tokens of the sampling mask if there is one."""
        return self.logprobs if self.sampling_mask is None else self.sampled_logprobs


@dataclass(frozen=True)
class SamplingUsage:
    """How busy an engine is."""

    running: int = 0
    """Completions that get tokens."""
    waiting: int = 0
    """Completions that wait for room, or for the turn of their adapter."""
    used_tokens: int = 0
    """Tokens of the cache that are in use."""
    cache_tokens: int = 0
    """Tokens that the cache has room for."""

    def __add__(self, other: SamplingUsage) -> SamplingUsage:
        return SamplingUsage(
            self.running + other.running,
            self.waiting + other.waiting,
            self.used_tokens + other.used_tokens,
            self.cache_tokens + other.cache_tokens,
        )


@dataclass(frozen=True)
class Progress:
    """The tokens of one completion since the last update, and their log-probs. `completion` is set at the end."""

    request_index: int
    """The index of its request among those that were submitted together."""
    index: int
    """The index of the completion in its request, from 0."""
    tokens: Sequence[int]
    logprobs: Sequence[float]
    completion: Completion | None
    top_logprobs: Sequence[Sequence[tuple[int, float]]] = ()
    """The likeliest tokens in place of these, as in `Completion`."""


@runtime_checkable
class RolloutEngine(Protocol):
    """Anything that samples completions of prompts."""

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams | Sequence[SamplingParams],
        n: int = 1,
        *,
        first_index: int = 0,
    ) -> list[list[Completion]]:
        """Returns `n` completions of each prompt of token ids, in the caller's order, from `first_index` on.

        `sampling` is one for all prompts, or one per prompt.
        """


@runtime_checkable
class AsyncRolloutEngine(Protocol):
    """An engine that accepts requests while others run, and returns each completion when it finishes."""

    fixed_order: bool
    """Whether requests that are submitted while others run wait for their end, so that the same requests always run
    together. Their bits may depend on it: then all replies to completions should be awaited and submitted together."""

    def submit(self, request: Request) -> int:
        """Submits a request without waiting. Returns its id, which the `FinishedCompletion`s repeat."""

    def poll(self, timeout: float | None = 0.0) -> list[FinishedCompletion]:
        """Returns completions finished since the last call. Waits up to `timeout` seconds for one, forever if None."""


@runtime_checkable
class CancellingEngine(AsyncRolloutEngine, Protocol):
    """An engine that can end a request before its completions are finished."""

    def cancel(self, request_id: int) -> None:
        """Ends a request, if it runs. Completions of it that have finished may still be returned."""
