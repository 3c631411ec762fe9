"""Scheduler: continuous batching. It decides which completions run, and steps them until all are done.

`GraphScheduler` and `EagerScheduler` define a step. Waiting completions join as others finish, first come, first
served. If the running completions outgrow the cache, the one with the fewest tokens is preempted: it waits again, and
its tokens are prefilled when it joins.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from postlude.generate.completion_state import CompletionState, PromptState
from postlude.generate.decode_cache import PageCopy, PrefillSequence
from postlude.generate.decode_rows import (
    COUNT,
    KEY,
    LENGTH,
    LIMIT,
    LOG_MIN_P,
    NO_TOKEN,
    PREVIOUS,
    TOKEN,
    TOP_K,
    UNREAD,
    sample_next,
)
from postlude.generate.logit_rules import LogitRules
from postlude.generate.model_step import ModelStep
from postlude.generate.pages import CachedPrefix, PageAllocator, RunningCompletion
from postlude.generate.prefix_cache import PrefixRoot
from postlude.generate.sampler import SamplerSettings
from postlude.model.context import States, Stores
from postlude.ops.packing import copy_to_host, to_device

CACHED_PER_PREFILLED = 8  # a forward joins no more prefixes once they have this many times `max_prefill_tokens` tokens


@dataclass(frozen=True)
class _PrefillState:
    """The cache and the logits after a prompt, for completions of it that start later."""

    pages: list[int]
    logits: Tensor
    states: Mapping[str, States]
    stores: Mapping[str, Stores]


@dataclass(frozen=True)
class _StepResults:
    """The results of a step that the host has not read yet: [tokens, rows, 3], see `DecodeRows.results`."""

    completions: list[tuple[int, RunningCompletion]]
    """Each with its row in that step."""
    results: Tensor
    top: Tensor | None
    """The likeliest tokens, see `LogitRules.top`, if a completion has rules."""
    masks: Tensor | None
    """See `LogitRules.masks`, if a completion returns its sampling mask."""
    event: torch.cuda.Event | None


@dataclass
class JoiningCompletions:
    """Completions that start to run in one step, and the sequences to prefill for them."""

    completions: list[RunningCompletion] = field(default_factory=list)
    sources: list[int | PromptState] = field(default_factory=list)
    """For each completion, the index in `sequences` that it starts from, or a prompt that was prefilled before."""
    sequences: list[PrefillSequence] = field(default_factory=list)
    prefixes: list[CachedPrefix[Any]] = field(default_factory=list)
    """The beginning of each sequence that is not prefilled."""
    prompts: list[PromptState | None] = field(default_factory=list)
    """For each sequence, its prompt if several completions share it, else None."""
    copies: list[PageCopy] = field(default_factory=list)
    prefill_tokens: int = 0
    """The number of new tokens of `sequences`."""

    def add_sequence(
        self, tokens: Sequence[int], pages: list[int], prefix: CachedPrefix[Any], prompt: PromptState | None = None
    ) -> None:
        """Adds a sequence to prefill. The keys and values of its new tokens go to these pages."""
        self.sequences.append(PrefillSequence(tokens, pages, prefix.length))
        self.prefixes.append(prefix)
        self.prompts.append(prompt)
        self.prefill_tokens += len(tokens) - prefix.length


class Scheduler(ABC):
    """Runs completions. More can be added while others run."""

    max_unread_steps: int
    """The number of steps that may run on the device before the host reads their tokens."""

    def __init__(
        self,
        model_step: ModelStep,
        allocator: PageAllocator,
        *,
        max_sequences: int,
        max_prefill_tokens: int,
    ) -> None:
        self.model_step, self.model, self.allocator = model_step, model_step.model, allocator
        self.rows, self.cache, self.device = model_step.rows, model_step.cache, model_step.cache.device
        self.max_sequences, self.max_prefill_tokens = min(max_sequences, self.rows.size), max_prefill_tokens
        self.waiting: deque[CompletionState] = deque()
        self.running: list[RunningCompletion] = []
        self.unread_results: deque[_StepResults] = deque()
        self.prefilled: dict[PromptState, _PrefillState] = {}
        self.filtered = False  # whether a completion has top-k, top-p or min-p
        self.ended_rows: list[int] = []  # rows that are still active on the device, although their completion has ended
        self.rows.numbers.zero_()

    @property
    def busy(self) -> bool:
        """Whether completions are left."""
        return bool(self.waiting or self.running or self.unread_results)

    def fits_alone(self, completion: CompletionState) -> bool:
        """Whether the completion fits in the cache when it runs alone."""
        return len(completion.stop_tokens) <= len(self.rows.stops) and self.allocator.fits_alone(completion)

    def add(self, completions: Sequence[CompletionState]) -> None:
        """Adds completions. They join the running ones when there is room."""
        self.waiting.extend(completions)
        self.allocator.add(completions, len(self.running) + len(self.waiting))
        self.filtered = self.filtered or any(completion.prompt.sampling.filtered for completion in completions)

    def finish(self) -> None:
        """Steps until no completions are left."""
        while self.busy:
            self.step()

    def step(self) -> None:
        """Adds waiting completions, samples a token of each running one, and reads all but `max_unread_steps` steps."""
        self._advance()
        while self.unread_results and (
            len(self.unread_results) > self.max_unread_steps or not any(running.unfinished for running in self.running)
        ):
            self._read_results()

    @abstractmethod
    def _advance(self) -> None:
        """Adds waiting completions, and samples a token of each running one."""

    def preempt_all(self) -> None:
        """Reads all results, preempts all completions and empties the cache, so that new weights prefill everything."""
        while self.unread_results:
            self._read_results()
        for running in reversed(self.running[:]):
            self._preempt(running)
        while self.prefilled:
            self._drop_prompt(next(reversed(self.prefilled)))

    def abort(self, completion: CompletionState) -> None:
        """Ends a completion whose request was aborted."""
        for running in self.running:
            if running.state is completion:
                self.ended_rows.append(running.row)
                self._remove(running)
                return
        self.waiting.remove(completion)
        if not completion.tokens:
            completion.prompt.unstarted -= 1
        if not completion.prompt.unstarted and completion.prompt in self.prefilled:
            self._drop_prompt(completion.prompt)

    # --- results

    def _send_results(self, completions: Sequence[RunningCompletion], tokens: int) -> None:
        """Starts to copy the results of a step, which sampled up to `tokens` tokens of each, to the host."""
        event, rules = None, self.rows.rules
        results = copy_to_host(self.rows.results[:tokens])
        top = copy_to_host(rules.top[:tokens]) if rules is not None and self._has_rules(completions) else None
        masks = copy_to_host(rules.masks[:tokens]) if rules is not None and self._has_masks(completions) else None
        if self.rows.results.is_cuda:
            event = torch.cuda.Event()
            event.record()
        rows = [(running.row, running) for running in completions]
        self.unread_results.append(_StepResults(rows, results, top, masks, event))

    def _send_decoded(self, decoded: Sequence[RunningCompletion]) -> None:
        """Starts to copy the results of a step that decoded these completions."""
        self._send_results(decoded, self.rows.tokens_per_step)
        for running in decoded:
            running.scheduled_length += self.rows.tokens_per_step

    def _read_results(self) -> None:
        """Waits for the results of the oldest unread step, and adds its tokens to the completions."""
        step = self.unread_results.popleft()
        if step.event is not None:
            step.event.synchronize()
        results = step.results.tolist()
        top = step.top.tolist() if step.top is not None else None
        for row, running in step.completions:
            tokens = [by_row[row] for by_row in results]
            if not running.removed and tokens[0][0] >= 0:
                masks = step.masks[:, row].numpy() if step.masks is not None else None
                self._add_tokens(running, tokens, [by_row[row] for by_row in top] if top is not None else (), masks)

    def _add_tokens(
        self,
        running: RunningCompletion,
        tokens: Sequence[Sequence[float]],
        top: Sequence[Sequence[Sequence[float]]],
        masks: NDArray[np.int32] | None,
    ) -> None:
        """Adds the tokens of a step to a completion: each is a token, or a negative number, and two log-probs.

        `top` are the likeliest tokens at each, and `masks` those that could be sampled, if they are known.
        """
        state = running.state
        for second, _, _ in tokens[1:]:
            state.drafted += 1
            state.accepted += second != NO_TOKEN
        for place, (token, logprob, sampled_logprob) in enumerate(tokens):
            if token < 0:
                running.scheduled_length -= 1
                continue
            if state.prompt.sampling.top_logprobs:
                likeliest = top[place][: state.prompt.sampling.top_logprobs]
                state.top_logprobs.append([(int(other), value) for other, value in likeliest])
            if masks is not None and state.prompt.sampling.masked:
                state.add_mask(masks[place])
            if state.add(int(token), logprob, sampled_logprob):
                self._remove_finished(running)
                return

    def _remove_finished(self, running: RunningCompletion) -> None:
        """Removes a completion that finished or failed."""
        if running.state.error is not None:
            self.cache.clear(running.row)
        elif self.model_step.routing_record is not None:
            self.model_step.routing_record.copy_to(running.state, running.pages)
        if running.state.stopped_by is not None or running.state.error is not None:
            self.ended_rows.append(running.row)
        self._remove(running)

    def _remove(self, running: RunningCompletion) -> None:
        if running.state.error is None:  # its newest token, and those that a drafter has not read, are not in the cache
            tokens = [*running.state.prompt.tokens, *running.state.tokens]
            self._add_prefix(running.root, tokens[: len(tokens) + 1 - 2 * self.rows.tokens_per_step], running.pages)
        running.removed = True
        self.running.remove(running)
        self.allocator.release(running.pages)
        self._on_change(running)

    def _add_prefix(self, root: PrefixRoot[Any] | None, tokens: Sequence[int], pages: Sequence[int]) -> None:
        """Keeps the keys and values of `tokens` in `pages` for later sequences, unless blocks have other states too."""
        if root is not None and not self.cache.recurrent:
            self.allocator.add_prefix(root, tokens, pages)

    def _preempt(self, running: RunningCompletion) -> None:
        """Makes a completion wait again. Its tokens are kept, and are prefilled when it joins."""
        self.ended_rows.append(running.row)
        self._remove(running)
        self.waiting.appendleft(running.state)

    def _drop_prompt(self, prompt: PromptState) -> None:
        """Frees what is kept of a prompt for its next completions."""
        self.allocator.release(self.prefilled.pop(prompt).pages)

    def _idle_ended_rows(self) -> None:
        """Makes rows idle whose completion ended on the host: a stop string, an error, a preemption, an abort."""
        if self.ended_rows:
            self.rows.stop(self._integers(self.ended_rows))
            self.ended_rows = []

    # --- rows and pages

    def _compact(self, size: int) -> None:
        """Moves the running completions to the first `size` rows."""
        outside = [running for running in self.running if running.row >= size]
        if outside:
            used_rows = {running.row for running in self.running}
            free = [row for row in range(size) if row not in used_rows]
            moves = list(zip(outside, free, strict=False))
            sources, targets = self._integers([(running.row, row) for running, row in moves]).unbind(1)
            self.rows.move(sources, targets)
            self.cache.move(
                sources, targets, [(running.row, row, running.scheduled_length - 1) for running, row in moves]
            )
            for running, row in moves:
                running.row = row
                self._on_change(running)

    @abstractmethod
    def _on_change(self, running: RunningCompletion, *, grew: bool = False) -> None:
        """Handles a completion that joins, leaves, gets another row, or `grew`: got another page."""

    def _make_room(self) -> None:
        """Takes pages for the newest token of every completion. If there are too few, some are preempted."""
        while (extended := self.allocator.extend(self.running)) is None:
            self._free_pages()
        for running in extended:
            self._on_change(running, grew=True)

    def _free_pages(self) -> None:
        """Frees a prompt that is kept for later completions, or else preempts the completion with the fewest tokens."""
        while self.unread_results:
            self._read_results()
        if self.prefilled:
            self._drop_prompt(next(reversed(self.prefilled)))
        elif len(self.running) > 1:
            self._preempt(min(self.running, key=lambda running: len(running.state.tokens)))
            self._idle_ended_rows()
        # else the completions whose results were read have ended, and freed pages

    # --- joining

    def _has_room(self, completion: CompletionState) -> bool:
        """Whether there is room for the completion and `MARGIN` more tokens.

        If no other completion runs there always is: prefilled prompts are dropped for it.
        """
        if not self.running and not self.unread_results and not self.allocator.has_room(completion, self.running):
            while self.prefilled:
                self._drop_prompt(next(reversed(self.prefilled)))
        return self.allocator.has_room(completion, self.running)

    def _admit(self) -> JoiningCompletions:
        """Gives rows and pages to waiting completions, while there is room."""
        joining = JoiningCompletions()
        used_rows = {running.row for running in self.running}
        free = deque(row for row in range(self.rows.size) if row not in used_rows)
        while self.waiting and len(self.running) < self.max_sequences and self._has_room(self.waiting[0]):
            total = joining.prefill_tokens + self._prefill_tokens(self.waiting[0], joining)
            cached = sum(prefix.length for prefix in joining.prefixes)
            if joining.prefill_tokens and (
                total > self.max_prefill_tokens or cached >= CACHED_PER_PREFILLED * self.max_prefill_tokens
            ):
                break
            running = self._place(self.waiting.popleft(), free.popleft(), joining)
            self.running.append(running)
            joining.completions.append(running)
        return joining

    def _prefill_tokens(self, completion: CompletionState, joining: JoiningCompletions) -> int:
        """Returns how many tokens have to be prefilled for a completion."""
        if not completion.tokens and self._is_prefilled(completion.prompt, joining):
            return 0
        return completion.length - self._find_prefix(completion).length

    def _find_prefix(self, completion: CompletionState) -> CachedPrefix[Any]:
        """Returns the beginning of a completion's tokens that is cached."""
        prompt = completion.prompt
        return self.allocator.find_prefix(prompt.adapter, [*prompt.tokens, *completion.tokens])

    def _is_prefilled(self, prompt: PromptState, joining: JoiningCompletions) -> bool:
        return prompt in self.prefilled or prompt in joining.prompts

    def _place(self, completion: CompletionState, row: int, joining: JoiningCompletions) -> RunningCompletion:
        """Gives a completion its pages, and adds to `joining` what has to be prefilled and copied for it."""
        prompt, length, prefix = completion.prompt, completion.length, self._find_prefix(completion)
        if completion.tokens or (prompt.unstarted == 1 and not self._is_prefilled(prompt, joining)):
            pages = self.allocator.allocate(row, length + 1, prefix)
            joining.sources.append(len(joining.sequences))
            joining.add_sequence([*prompt.tokens, *completion.tokens], pages, prefix)
            reused = prefix.length
        else:
            reused = length if self._is_prefilled(prompt, joining) else prefix.length
            if not self._is_prefilled(prompt, joining):
                joining.add_sequence(prompt.tokens, self.allocator.allocate(row, length, prefix), prefix, prompt)
            index = None if prompt in self.prefilled else joining.prompts.index(prompt)
            source = self.prefilled[prompt].pages if index is None else [*joining.sequences[index].pages]
            pages, copies = self.allocator.share(source, row, length)
            joining.copies += copies
            joining.sources.append(prompt if index is None else index)
        if not completion.tokens:
            prompt.unstarted -= 1
            completion.reused_prompt_tokens = reused
        if completion.began is None:
            completion.began = time.monotonic()
        return RunningCompletion(completion, row, pages, length + 1, prefix.root)

    def _start_and_sample(self, joining: JoiningCompletions, prefill_logits: Tensor) -> None:
        """Starts joining completions, and samples their first token.

        `prefill_logits` [m, vocab] are those after the sequences that were prefilled for them.
        """
        indices = self._integers([running.row for running in joining.completions])
        logits = self._start(joining, indices, prefill_logits)
        self._write_rows(joining.completions, indices)
        settings = self._sampler_settings(joining.completions)
        self._constrain(joining.completions)
        self.rows.use_rules = self._has_rules(joining.completions)
        self.rows.use_masks = self._has_masks(joining.completions)
        sample_next(logits, indices, self.rows, filtered=self.filtered, settings=settings)
        self._send_results(joining.completions, 1)

    @staticmethod
    def _has_rules(completions: Sequence[RunningCompletion]) -> bool:
        samplings = [running.state.prompt.sampling for running in completions]
        return any(sampling.has_rules or sampling.masked for sampling in samplings)

    @staticmethod
    def _has_masks(completions: Sequence[RunningCompletion]) -> bool:
        return any(running.state.prompt.sampling.masked for running in completions)

    def _constrain(self, completions: Sequence[RunningCompletion]) -> None:
        """Writes to rows which tokens the grammars of completions, whose newest tokens were read, allow next."""
        masks = {running.row: running.state.grammar.allowed() for running in completions if running.state.grammar}
        if masks and self.rows.rules is not None:
            self.rows.rules.allow(self._integers(list(masks)), list(masks.values()))

    def _sampler_settings(self, completions: Sequence[RunningCompletion]) -> SamplerSettings | None:
        """Returns the sampler settings of these completions; None if the sampler reads them from their rows."""
        return None

    def _start(self, joining: JoiningCompletions, row_indices: Tensor, logits: Tensor) -> Tensor:
        """Starts joining completions in their rows, from `logits` [m, vocab] after the sequences prefilled for them.

        Copies shared pages that completions will write to. Returns the logits of all completions, [n, vocab].
        """
        earlier = list(dict.fromkeys(source for source in joining.sources if isinstance(source, PromptState)))
        earlier_states = [self.prefilled[prompt] for prompt in earlier]
        for sequence, prefix in zip(joining.sequences, joining.prefixes, strict=True):
            self._add_prefix(prefix.root, sequence.tokens, sequence.pages)
        for index, prompt in enumerate(joining.prompts):
            pages = [*joining.sequences[index].pages]
            if prompt is not None and prompt.unstarted:
                states = self.cache.prefill_states(index)
                stores = self.cache.save(pages, len(prompt.tokens))
                self.prefilled[prompt] = _PrefillState(
                    pages if self.allocator.shares_pages else [], logits[index].clone(), states, stores
                )
            elif prompt is not None:
                self.allocator.release(pages)
        if joining.copies:
            self.cache.copy(joining.copies)
        for prompt in earlier:
            started = [
                running.row
                for running in joining.completions
                if running.state.prompt is prompt and not running.state.tokens
            ]
            self.cache.restore(started, [self.prefilled[prompt].stores])
            if not prompt.unstarted:
                self._drop_prompt(prompt)
        sources = self._integers(
            [
                len(logits) + earlier.index(source) if isinstance(source, PromptState) else source
                for source in joining.sources
            ]
        )
        self.cache.start_rows(row_indices, sources, [prefill.states for prefill in earlier_states])
        earlier_logits = [torch.stack([prefill.logits for prefill in earlier_states])] if earlier_states else []
        return torch.cat((*([logits] if len(logits) else []), *earlier_logits)).index_select(0, sources)

    def _write_rows(self, joined: Sequence[RunningCompletion], row_indices: Tensor) -> None:
        """Writes the state of these completions to their rows on the device."""
        numbers: list[dict[int, int]] = []
        settings, stops, vocab = [], [], self.model.config.vocab_size
        for running in joined:
            state, sampling = running.state, running.state.prompt.sampling
            top_k = min(sampling.top_k or vocab, vocab)
            tokens = {TOKEN: 0, LENGTH: state.length, COUNT: len(state.tokens), LIMIT: sampling.max_new_tokens}
            numbers.append({**tokens, KEY: state.key, TOP_K: top_k, PREVIOUS: 0, UNREAD: 1})
            settings.append([sampling.temperature, sampling.top_p, sampling.min_p])
            stop_tokens = list(state.stop_tokens)
            stops.append(stop_tokens + [-1] * (len(self.rows.stops) - len(stop_tokens)))
            self._on_change(running)
        by_index = [[of_row[index] for of_row in numbers] for index in range(len(self.rows.numbers))]
        self.rows.numbers.index_copy_(1, row_indices, self._integers(by_index))
        self.rows.stops.index_copy_(1, row_indices, self._integers(stops).T)
        columns = torch.tensor(settings, dtype=torch.float32).T.contiguous()
        columns[LOG_MIN_P].log_()
        self.rows.settings.index_copy_(1, row_indices, to_device(columns, self.device))
        if self.rows.rules is None and self._has_rules(joined):
            self.rows.rules = LogitRules(self.rows.size, vocab, self.rows.tokens_per_step, self.device)
        if self.rows.rules is not None:
            self.rows.rules.write(row_indices, [running.state for running in joined])

    def _integers(self, values: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
        return to_device(torch.tensor(values, dtype=torch.int64), self.device)
