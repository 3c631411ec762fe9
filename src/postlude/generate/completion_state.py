"""CompletionState: the state of one completion on the host, while it waits or runs."""

from __future__ import annotations

import math
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from postlude.generate.grammar import Grammar
from postlude.generate.protocol import FinishReason, VersionSpan
from postlude.generate.sampling_params import MAX_MASKED_TOP_K, SamplingParams
from postlude.generate.text_stream import StopStrings

MIN_STOPS = 8  # stop tokens of a completion that rows have room for, at least


@dataclass(eq=False)
class PromptState:
    """One prompt, shared by its completions."""

    tokens: Sequence[int]
    sampling: SamplingParams
    unstarted: int
    """The number of its completions that have not started."""
    adapter: str | None = None
    """The adapter that it is sampled with; None for the model without one."""


@dataclass(eq=False)
class CompletionState:
    """One completion that waits, runs, or is done."""

    prompt: PromptState
    key: int
    """The key of its random numbers."""
    stop_tokens: frozenset[int]
    stop_strings: StopStrings | None
    grammar: Grammar | None = None
    client: tuple[str, ...] = ()
    """Who asked for it, as `Request.client`."""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    sampled_logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[list[tuple[int, float]]] = field(default_factory=list)
    """The likeliest tokens at each token, if they are asked for."""
    sampling_mask: list[array[int]] = field(default_factory=list)
    """The tokens that could be sampled at each token, if they are asked for."""
    finish_reason: FinishReason | None = None
    stopped_by: str | None = None
    reused_prompt_tokens: int = 0
    """Prompt tokens that were not prefilled for it."""
    drafted: int = 0
    """Speculative tokens that were checked."""
    accepted: int = 0
    """Speculative tokens that were accepted."""
    routing: Tensor | None = None
    """The experts that its tokens were routed to, set when it is finished, if they are recorded: see `wait_routing`."""
    routing_copied: torch.cuda.Event | None = None
    """The end of the copy of `routing` from the GPU."""
    versions: list[VersionSpan] = field(default_factory=list)
    """The weights versions that its tokens were sampled with, if they have names."""
    error: Exception | None = None
    """Why it failed. Other completions continue."""
    added: float = field(default_factory=time.monotonic)
    began: float | None = None
    """When it joined the running ones first."""
    first_token: float | None = None
    """When its first token was read."""

    @property
    def done(self) -> bool:
        """Whether it finished or failed."""
        return self.finish_reason is not None or self.error is not None

    @property
    def length(self) -> int:
        """The number of tokens of the prompt and the completion so far."""
        return len(self.prompt.tokens) + len(self.tokens)

    @property
    def max_length(self) -> int:
        """The maximum number of tokens of prompt and completion."""
        return len(self.prompt.tokens) + self.prompt.sampling.max_new_tokens

    def add(self, token: int, logprob: float, sampled_logprob: float) -> bool:
        """Appends the next token. Returns whether the completion is done."""
        if math.isnan(logprob):
            self.error = FloatingPointError(
                f"the model's logits after {self.length} tokens are NaN. Check its weights, and the training step that "
                "wrote them."
            )
            return True
        if self.error is not None:  # of its mask
            return True
        if self.first_token is None:
            self.first_token = time.monotonic()
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.sampled_logprobs.append(sampled_logprob)
        if self.grammar is not None:
            try:
                self.grammar.accept(token)
            except ValueError as error:
                self.error = error
                return True
        if token in self.stop_tokens:
            self.finish_reason = "stop"
        elif self.stop_strings is not None:
            try:
                self.stopped_by = self.stop_strings.find(self.tokens)
            except Exception as error:  # raised by the tokenizer for these tokens
                self.error = error
                return True
            self.finish_reason = "stop" if self.stopped_by is not None else None
        if self.finish_reason is None and len(self.tokens) == self.prompt.sampling.max_new_tokens:
            self.finish_reason = "length"
        return self.finish_reason is not None

    def add_mask(self, mask: NDArray[np.int32]) -> None:
        """Appends the tokens that could be sampled at the next token, as `LogitRules.masks` has them."""
        count, ids = int(mask[0]), mask[1:]
        if count > len(ids):
            self.error = ValueError(
                f"a token was sampled from {count:,} tokens, but a sampling mask holds at most {len(ids):,}. Set top_k "
                f"to at most {MAX_MASKED_TOP_K}, or do not ask for the sampling mask."
            )
        self.sampling_mask.append(array("i", ids[:count].tobytes()))

    def wait_routing(self) -> Tensor | None:
        """Returns `routing` when it has been copied, in memory that is not pinned."""
        if self.routing is None or self.routing_copied is None:
            return self.routing
        self.routing_copied.synchronize()
        return self.routing.clone()

    def record_version(self, version: str) -> None:
        """Records the weights version of the tokens that have none yet."""
        start = self.versions[-1].end if self.versions else 0
        if start < len(self.tokens):
            self.versions.append(VersionSpan(version, start, len(self.tokens)))


def max_stops(completions: Sequence[CompletionState]) -> int:
    """Returns how many stop tokens of a completion rows must have room for."""
    return max([MIN_STOPS, *(len(completion.stop_tokens) for completion in completions)])
