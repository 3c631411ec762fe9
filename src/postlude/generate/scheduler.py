"""Scheduler: decides which completions run, and steps them until every one is done.

`RecordedScheduler` and `UnrecordedScheduler` say what a step is. Completions join as others finish, first come first
served. If running completions outgrow the cache, the shortest wait again: their tokens are kept, and prefilled later.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from postlude.generate.completion_state import CompletionState, PromptState
from postlude.generate.decode_cache import Copy, DecodeCache
from postlude.generate.decode_rows import LOG_MIN_P, DecodeRows
from postlude.generate.pages import Pages, RunningCompletion
from postlude.model import LanguageModel
from postlude.model.context import States, Stores
from postlude.ops.packing import to_device

STOPS = 8  # stop tokens of a completion for which there is room at least


@dataclass(frozen=True)
class _PrefillState:
    """What is after the last token of a prompt, for completions that start from it later."""

    pages: list[int]
    logits: Tensor
    states: Mapping[str, States]
    stores: Mapping[str, Stores]


@dataclass(frozen=True)
class _Sampled:
    """The results of a step on their way to the host: [rows, 3], see `DecodeRows.results`."""

    completions: list[tuple[int, RunningCompletion]]
    """Each with the row it had at that step."""
    results: Tensor
    event: torch.cuda.Event | None
    drafted: bool
    """Whether these are second tokens, which there are where the draft was right."""


@dataclass
class Joining:
    """Completions that join together, and the sequences that have to be prefilled for them."""

    completions: list[RunningCompletion] = field(default_factory=list)
    sources: list[int | PromptState] = field(default_factory=list)
    """What each starts from: an index of `sequences`, or a prompt that was prefilled before."""
    sequences: list[list[int]] = field(default_factory=list)
    pages: list[list[int]] = field(default_factory=list)
    prompts: list[PromptState | None] = field(default_factory=list)
    """For each sequence, the prompt that several completions share, if it is one."""
    copies: list[Copy] = field(default_factory=list)
    tokens: int = 0

    def prefill(self, sequence: Sequence[int], pages: list[int], prompt: PromptState | None = None) -> None:
        """Add a sequence to prefill. Its keys go to these pages."""
        self.sequences.append([*sequence])
        self.pages.append(pages)
        self.prompts.append(prompt)
        self.tokens += len(sequence)


class Scheduler(ABC):
    """Runs completions. More can be added while others run.

    With a `group`, its ranks need each other in every forward: they step together until the last has nothing left.
    """

    ahead: int
    """How many steps the device may run before the host reads their tokens."""

    def __init__(
        self,
        model: LanguageModel,
        rows: DecodeRows,
        cache: DecodeCache,
        pages: Pages,
        *,
        max_sequences: int,
        max_prefill_tokens: int,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.model, self.rows, self.cache, self.pages, self.group = model, rows, cache, pages, group
        self.max_sequences, self.max_prefill_tokens = min(max_sequences, rows.size), max_prefill_tokens
        self.device = rows.numbers.device
        self.waiting: deque[CompletionState] = deque()
        self.running: list[RunningCompletion] = []
        self.sampled: deque[_Sampled] = deque()
        self.prefilled: dict[PromptState, _PrefillState] = {}
        self.ended_rows: list[int] = []  # rows that the device would go on with, though their completion has ended
        self.rows.numbers.zero_()

    @property
    def busy(self) -> bool:
        """Whether there is anything left to do."""
        return bool(self.waiting or self.running or self.sampled)

    def can_ever_hold(self, completion: CompletionState) -> bool:
        """Whether it has room when it runs alone."""
        return len(completion.stop_tokens) <= len(self.rows.stops) and self.pages.can_ever_hold(completion)

    def add(self, completions: Sequence[CompletionState]) -> None:
        """Add completions, which join when there is room."""
        self.waiting.extend(completions)
        self.pages.add(completions, len(self.running) + len(self.waiting))

    def finish(self) -> None:
        """Step until this rank, and those that step together with it, have nothing left."""
        while self._any_rank_busy():
            self.step()

    def step(self) -> None:
        """Let completions join, sample a token of each, and read those of an earlier step."""
        self._advance()
        while self.sampled and (len(self.sampled) > self.ahead or not any(each.unfinished for each in self.running)):
            self._read()

    @abstractmethod
    def _advance(self) -> None:
        """Let completions join, and sample a token of each."""

    def restart(self) -> None:
        """Read what is on its way, and prefill all again: what is cached of them is forgotten."""
        while self.sampled:
            self._read()
        for each in reversed(self.running[:]):
            self._evict(each)
        while self.prefilled:
            self._forget(next(reversed(self.prefilled)))

    def withdraw(self, completion: CompletionState) -> None:
        """Stop a completion that nobody wants any more."""
        for each in self.running:
            if each.state is completion:
                self.ended_rows.append(each.row)
                self._leave(each)
                return
        self.waiting.remove(completion)
        if not completion.tokens:
            completion.prompt.unstarted -= 1
        if not completion.prompt.unstarted and completion.prompt in self.prefilled:
            self._forget(completion.prompt)

    def _any_rank_busy(self) -> bool:
        """Whether this rank, or one that steps together with it, has anything left to do."""
        if self.group is None:
            return self.busy
        flag = torch.tensor([float(self.busy)], device=self.device)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self.group)
        return bool(flag.item())

    # --- results

    def _send(self, completions: Sequence[RunningCompletion], *, drafted: bool = False) -> None:
        """Send the results of a step to the host."""
        results, event = self.rows.results, None
        if results.is_cuda:
            on_host = torch.empty(results.shape, dtype=results.dtype, pin_memory=True)
            on_host.copy_(results, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        else:
            on_host = results.clone()
        self.sampled.append(_Sampled([(each.row, each) for each in completions], on_host, event, drafted))

    def _read(self) -> None:
        """Give completions the tokens of the oldest step that is on its way."""
        sampled = self.sampled.popleft()
        if sampled.event is not None:
            sampled.event.synchronize()
        results = sampled.results.tolist()
        for row, each in sampled.completions:
            token, logprob, sampled_logprob = results[row]
            if sampled.drafted:
                each.state.drafted += 1
                each.state.accepted += token != -1
            if each.gone or token < 0:
                continue
            each.state.undrafted = 1 + sampled.drafted
            if each.state.add(int(token), logprob, sampled_logprob):
                self._done(each)
            elif not self.ahead:
                each.reach = each.state.length

    def _done(self, each: RunningCompletion) -> None:
        """Let go of a completion that finished or failed."""
        if each.state.stopped_by is not None or each.state.error is not None:
            self.ended_rows.append(each.row)
        self._leave(each)

    def _leave(self, each: RunningCompletion) -> None:
        each.gone = True
        self.running.remove(each)
        self.pages.give_back(each.pages)
        self._changed(each)

    def _evict(self, each: RunningCompletion) -> None:
        """Let a completion wait again. Its tokens are kept, and are prefilled later."""
        self.ended_rows.append(each.row)
        self._leave(each)
        self.waiting.appendleft(each.state)

    def _forget(self, prompt: PromptState) -> None:
        """Drop what is kept of a prompt."""
        self.pages.give_back(self.prefilled.pop(prompt).pages)

    def _stop_ended(self) -> None:
        """Make rows idle whose completion ended by what only the host sees."""
        if self.ended_rows:
            self.rows.stop(self._integers(self.ended_rows))
            self.ended_rows = []

    # --- rows and pages

    def _move_into(self, size: int) -> None:
        """Move the running completions to the first `size` rows."""
        outside = [each for each in self.running if each.row >= size]
        if outside:
            taken = {each.row for each in self.running}
            free = [row for row in range(size) if row not in taken]
            moves = list(zip(outside, free, strict=False))
            sources, targets = self._integers([(each.row, row) for each, row in moves]).unbind(1)
            self.rows.move(sources, targets)
            self.cache.move(sources, targets, [(each.row, row, each.reach - 1) for each, row in moves])
            for each, row in moves:
                each.row = row
                self._changed(each)

    @abstractmethod
    def _changed(self, each: RunningCompletion) -> None:
        """A completion joined or left, or has another row or more pages."""

    def _make_room(self) -> None:
        """Take room for the next token of every completion. If there is not enough, the shortest wait again."""
        while (extended := self.pages.extend(self.running)) is None:
            self._free_some()
        for each in extended:
            self._changed(each)

    def _free_some(self) -> None:
        """Drop a prompt that is kept for others, or else evict a completion."""
        while self.sampled:
            self._read()
        if self.prefilled:
            self._forget(next(reversed(self.prefilled)))
        elif len(self.running) > 1:
            self._evict(min(self.running, key=lambda each: len(each.state.tokens)))
            self._stop_ended()
        # else what was read gave back enough

    # --- joining

    def _has_room(self, completion: CompletionState) -> bool:
        """Whether there is room for it and some tokens more. One alone always has room."""
        if not self.running and not self.sampled and not self.pages.has_room(completion, self.running):
            while self.prefilled:
                self._forget(next(reversed(self.prefilled)))
        return self.pages.has_room(completion, self.running)

    def _admit(self) -> Joining:
        """Give rows and pages to those that wait, while there is room."""
        joining = Joining()
        taken = {each.row for each in self.running}
        free = deque(row for row in range(self.rows.size) if row not in taken)
        while self.waiting and len(self.running) < self.max_sequences and self._has_room(self.waiting[0]):
            if joining.tokens and joining.tokens + self._to_prefill(self.waiting[0], joining) > self.max_prefill_tokens:
                break
            each = self._place(self.waiting.popleft(), free.popleft(), joining)
            self.running.append(each)
            joining.completions.append(each)
        return joining

    def _to_prefill(self, completion: CompletionState, joining: Joining) -> int:
        """Returns how many tokens of it have to be prefilled."""
        return 0 if not completion.tokens and self._is_prefilled(completion.prompt, joining) else completion.length

    def _is_prefilled(self, prompt: PromptState, joining: Joining) -> bool:
        return prompt in self.prefilled or prompt in joining.prompts

    def _place(self, completion: CompletionState, row: int, joining: Joining) -> RunningCompletion:
        """Give a completion its pages, and say what has to be prefilled for it."""
        prompt, length = completion.prompt, completion.length
        if completion.tokens or (prompt.unstarted == 1 and not self._is_prefilled(prompt, joining)):
            pages = self.pages.take(row, length + 1)
            joining.sources.append(len(joining.sequences))
            joining.prefill([*prompt.tokens, *completion.tokens], pages)
        else:
            if not self._is_prefilled(prompt, joining):
                joining.prefill(prompt.tokens, self.pages.take(row, length), prompt)
            index = None if prompt in self.prefilled else joining.prompts.index(prompt)
            source = self.prefilled[prompt].pages if index is None else joining.pages[index]
            pages, copies = self.pages.share(source, row, length)
            joining.copies += copies
            joining.sources.append(prompt if index is None else index)
        if not completion.tokens:
            prompt.unstarted -= 1
        return RunningCompletion(completion, row, pages, length + 1)

    def _start(self, joining: Joining, rows: Tensor, logits: Tensor) -> Tensor:
        """Start the completions that join, with `logits` [m, vocab] after the sequences that were prefilled for them.

        Copies what completions write to. Returns the logits of all, [n, vocab].
        """
        earlier = list(dict.fromkeys(source for source in joining.sources if isinstance(source, PromptState)))
        older = [self.prefilled[prompt] for prompt in earlier]
        for index, prompt in enumerate(joining.prompts):
            if prompt is not None and prompt.unstarted:
                pages, states = joining.pages[index], self.cache.last_states(index)
                stores = self.cache.save(pages, len(prompt.tokens))
                self.prefilled[prompt] = _PrefillState(
                    pages if self.ahead else [], logits[index].clone(), states, stores
                )
            elif prompt is not None:
                self.pages.give_back(joining.pages[index])
        if joining.copies:
            self.cache.copy(joining.copies)
        for prompt in earlier:
            started = [
                each.row for each in joining.completions if each.state.prompt is prompt and not each.state.tokens
            ]
            self.cache.restore(started, self.prefilled[prompt].stores)
            if not prompt.unstarted:
                self._forget(prompt)
        sources = self._integers(
            [
                len(logits) + earlier.index(source) if isinstance(source, PromptState) else source
                for source in joining.sources
            ]
        )
        self.cache.enter(rows, sources, [prefill.states for prefill in older])
        kept = [torch.stack([prefill.logits for prefill in older])] if older else []
        return torch.cat((*([logits] if len(logits) else []), *kept)).index_select(0, sources)

    def _enter_rows(self, joined: Sequence[RunningCompletion], rows: Tensor) -> None:
        """Write to the device where these completions stand."""
        numbers, settings, stops, vocab = [], [], [], self.model.config.vocab_size
        for each in joined:
            state, sampling = each.state, each.state.prompt.sampling
            top_k = min(sampling.top_k or vocab, vocab)
            numbers.append([0, state.length, len(state.tokens), sampling.max_new_tokens, state.key, top_k])
            settings.append([sampling.temperature, sampling.top_p, sampling.min_p])
            ends = list(state.stop_tokens)
            stops.append(ends + [-1] * (len(self.rows.stops) - len(ends)))
            self._changed(each)
        self.rows.numbers.index_copy_(1, rows, self._integers(numbers).T)
        self.rows.stops.index_copy_(1, rows, self._integers(stops).T)
        columns = torch.tensor(settings, dtype=torch.float32).T.contiguous()
        columns[LOG_MIN_P].log_()
        self.rows.settings.index_copy_(1, rows, to_device(columns, self.device))

    def _integers(self, values: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
        return to_device(torch.tensor(values, dtype=torch.int64), self.device)


def max_stops(completions: Sequence[CompletionState]) -> int:
    """Returns for how many stop tokens of a completion there is room."""
    return max([STOPS, *(len(completion.stop_tokens) for completion in completions)])
