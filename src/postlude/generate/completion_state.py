"""Which answers run in a step: they join as others finish, within the cache's room. Plain Python."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from postlude.generate.protocol import FinishReason, VersionSpan
from postlude.generate.sampling_params import SamplingParams
from postlude.generate.stop_strings import StopStrings

MARGIN = 32  # tokens; room is made for at least so many more, since making room copies the cache


@dataclass(frozen=True)
class PrefillState:
    """What there is after a prompt's last token: the logits [vocab], and by block the states that do not grow."""

    logits: Tensor
    states: Mapping[str, tuple[Tensor, ...]]


@dataclass(eq=False)
class PromptState:
    """One prompt, shared by its answers."""

    tokens: Sequence[int]
    sampling: SamplingParams
    not_begun: int
    """Answers without a first token."""
    opening: PrefillState | None = None
    """What answers that are still to begin go on from."""

    def begin(self) -> None:
        """One more answer gets its first token."""
        self.not_begun -= 1
        if not self.not_begun:
            self.opening = None


@dataclass(eq=False)
class CompletionState:
    """One answer on its way."""

    prompt: PromptState
    key: int
    """Where its random numbers start."""
    stop_tokens: frozenset[int]
    stop_strings: StopStrings | None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    sampled_logprobs: list[float] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stopped_by: str | None = None
    unseen: int = 1
    """How many of its newest tokens a drafter has not been given yet."""
    drafted: int = 0
    """Guesses of its tokens that were looked at."""
    accepted: int = 0
    """Those that were right."""
    routing: Tensor | None = None
    """Once it is finished, which experts its tokens were sent to, where that is recorded."""
    versions: list[VersionSpan] = field(default_factory=list)
    """With which weights its tokens were sampled, where someone names them."""
    error: Exception | None = None
    """Why it will not be finished. It costs no other answer."""

    @property
    def done(self) -> bool:
        """Whether it is finished, or failed."""
        return self.finish_reason is not None or self.error is not None

    @property
    def length(self) -> int:
        """Tokens of the prompt and the answer so far."""
        return len(self.prompt.tokens) + len(self.tokens)

    @property
    def most(self) -> int:
        """Tokens of the prompt and as many as the answer may have."""
        return len(self.prompt.tokens) + self.prompt.sampling.max_new_tokens

    def add(self, token: int, logprob: float, sampled_logprob: float) -> bool:
        """Take the next token; whether it was the last one, or the answer failed."""
        if math.isnan(logprob):
            self.error = not_numbers(self)
            return True
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.sampled_logprobs.append(sampled_logprob)
        if token in self.stop_tokens:
            self.finish_reason = "stop"
        elif self.stop_strings is not None:
            try:
                self.stopped_by = self.stop_strings.found(self.tokens)
            except Exception as error:  # of the tokenizer, at these tokens
                self.error = error
                return True
            self.finish_reason = "stop" if self.stopped_by is not None else None
        if self.finish_reason is None and len(self.tokens) == self.prompt.sampling.max_new_tokens:
            self.finish_reason = "length"
        return self.finish_reason is not None

    def forgo(self) -> None:
        """It will not be: its prompt waits for one fewer."""
        if not self.tokens:
            self.prompt.begin()

    def sampled_with(self, version: str) -> None:
        """Say of the tokens that nothing was said of yet which weights they come from."""
        start = self.versions[-1].end if self.versions else 0
        if start < len(self.tokens):
            self.versions.append(VersionSpan(version, start, len(self.tokens)))


def not_numbers(answer: CompletionState) -> FloatingPointError:
    """What there is to say of logits that are not numbers."""
    return FloatingPointError(
        f"the model's logits after {answer.length} tokens are not numbers. Look at its weights, or at the training "
        "step that made them."
    )


Move = tuple[int, int, int]
"""Source row, target row, and how many tokens of it."""


@dataclass(frozen=True)
class Admission:
    """Answers that join the running ones, in the order of their rows."""

    prefilled: list[CompletionState]
    """Those whose prompt (and what they have so far) goes through the model."""
    copied: list[tuple[CompletionState, int]]
    """Those whose prompt is in the cache already, each with the row that has it."""


class Schedule:
    """Answers that run and those that wait.

    The cache holds rows · capacity ≤ `budget` tokens. When running answers outgrow it, the ones with the fewest tokens
    go back to wait; their tokens are kept and pass the model again later. Each row has room for its newest token and
    `drafted` more.
    """

    def __init__(
        self,
        answers: Sequence[CompletionState],
        budget: int,
        max_sequences: int,
        prefill_budget: int,
        *,
        drafted: int = 0,
    ) -> None:
        self.waiting: deque[CompletionState] = deque()
        self.running: list[CompletionState] = []
        self.capacity = 0
        self.budget = budget
        self.prefill_budget = prefill_budget
        self.drafted = drafted
        self.max_sequences, self._most = 0, max_sequences
        self.longest = 0
        self.add(answers)

    def add(self, answers: Sequence[CompletionState]) -> None:
        """More answers, which join when there is room."""
        self.waiting.extend(answers)
        under_way = len(self.running) + len(self.waiting)
        if under_way > self.max_sequences:  # twice as many rows as before, since more rows mean to copy the cache
            self.max_sequences = min(self._most, max(under_way, 2 * self.max_sequences))
        self.longest = max(self.longest, *(answer.most for answer in answers), 0)

    @property
    def rows(self) -> int:
        """How many rows the cache has at this capacity."""
        return min(self.max_sequences, self.budget // self.capacity) if self.capacity else 0

    def evict(self) -> list[Move]:
        """Make room for the next token of every running answer. Returns what must first be moved in the cache."""
        stay = sorted(range(len(self.running)), key=lambda row: len(self.running[row].tokens), reverse=True)
        out: list[int] = []
        while stay:  # one alone always fits
            capacity = self._capacity(len(stay), max(self.running[row].length for row in stay) + self.drafted)
            if capacity is not None:
                self.capacity = capacity
                break
            out.append(stay.pop())
        self.waiting.extendleft(self.running[row] for row in out)
        return self.retire(out)

    def restart(self) -> None:
        """All that run wait again, before the others: their tokens are kept, and pass the model anew."""
        self.waiting.extendleft(reversed(self.running))
        self.running.clear()
        for answer in self.waiting:
            answer.prompt.opening = None

    def withdraw(self, answer: CompletionState) -> list[Move]:
        """Nobody wants this one any more. Returns what that moves in the cache."""
        if answer in self.running:
            return self.retire([self.running.index(answer)])
        self.waiting.remove(answer)
        answer.forgo()
        return []

    def admit(self) -> Admission:
        """Let answers join as long as there is room, first come first served. Their rows follow those running."""
        prefilled: list[CompletionState] = []
        copied: list[CompletionState] = []
        tokens = 0
        longest = max((answer.length + self.drafted for answer in self.running), default=0)
        while self.waiting:
            answer = self.waiting[0]
            longest = max(longest, min(answer.length + 1 + self.drafted, self.longest))
            capacity = self._capacity(len(self.running) + len(prefilled) + len(copied) + 1, longest)
            if capacity is None:
                break
            if not answer.tokens and self._will_be_cached(answer.prompt, prefilled):
                copied.append(answer)
            elif tokens and tokens + answer.length > self.prefill_budget:
                break
            else:
                prefilled.append(answer)
                tokens += answer.length
            self.capacity = capacity
            self.waiting.popleft()
        self.running += prefilled
        row_of: dict[PromptState, int] = {}
        for row, answer in enumerate(self.running):
            row_of.setdefault(answer.prompt, row)
        self.running += copied
        return Admission(prefilled, [(answer, row_of[answer.prompt]) for answer in copied])

    def inherit(self, finished: Sequence[int]) -> list[int]:
        """Let the next answer take over the row of a finished one to its prompt, whose keys lie there: those rows."""
        heirs = []
        for row in finished:
            prompt, waiting = self.running[row].prompt, self.waiting
            if prompt.opening is not None and waiting and waiting[0].prompt is prompt and not waiting[0].tokens:
                self.running[row] = waiting.popleft()
                heirs.append(row)
        return heirs

    def retire(self, rows: Collection[int]) -> list[Move]:
        """Take `rows` out of the running ones and fill the gaps from the end. Returns what that moves in the cache."""
        gone = set(rows)
        count = len(self.running) - len(gone)
        gaps = sorted(row for row in gone if row < count)
        moved = [row for row in range(count, len(self.running)) if row not in gone]
        moves = []
        for source, target in zip(moved, gaps, strict=True):
            self.running[target] = self.running[source]
            moves.append((source, target, self.running[target].length - 1))  # the newest token is not in the cache yet
        del self.running[count:]
        return moves

    def _will_be_cached(self, prompt: PromptState, prefilled: list[CompletionState]) -> bool:
        """Whether this step has the prompt's keys, and its last logits, from another answer to it."""
        if any(answer.prompt is prompt and not answer.tokens for answer in prefilled):
            return True
        return prompt.opening is not None and any(answer.prompt is prompt for answer in self.running)

    def _capacity(self, rows: int, needed: int) -> int | None:
        """Tokens a row gets where so many rows of at least `needed` tokens fit; None where they do not."""
        if rows > self.max_sequences:
            return None
        if needed <= self.capacity and rows * self.capacity <= self.budget:
            return self.capacity
        fits = self.budget // rows
        if fits < min(needed + MARGIN, self.longest):
            return None
        return min(max(needed + MARGIN, needed * 5 // 4), fits, self.longest)
