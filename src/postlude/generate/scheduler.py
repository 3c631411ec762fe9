"""Scheduler: decides which completions run, prefills those that join, and steps the rest until every one is done.

The device samples tokens and detects where a completion ends. Recorded steps run ahead: the host reads the tokens up to
`ahead` steps later. It acts only when completions end, join or need more room. It finds a stop string late, and then
drops the tokens that were sampled after it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from postlude.generate.buffers import DecodeBuffers
from postlude.generate.completion_state import CompletionState, PromptState
from postlude.generate.decode_cache import Copy
from postlude.generate.decode_rows import LENGTH, LOG_MIN_P, TOKEN, sample_next
from postlude.generate.draft import Drafter
from postlude.generate.forward import logits_at, prefill_microbatch
from postlude.generate.pages import RunningCompletion
from postlude.generate.routing_record import RoutingRecord
from postlude.generate.sampler import SamplerSettings
from postlude.model.context import States, Stores
from postlude.ops.packing import to_device

RIGHT = -2.0  # in place of a second token: the draft was right, but its completion had ended


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
class _Joining:
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


class Scheduler:
    """Runs completions. More can be added while others run.

    With a `group`, its ranks need each other in every forward: they step together until the last has nothing left.
    """

    def __init__(
        self,
        buffers: DecodeBuffers,
        completions: Sequence[CompletionState],
        *,
        max_sequences: int,
        max_prefill_tokens: int,
        drafter: Drafter | None = None,
        routing: RoutingRecord | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.model, self.rows, self.cache, self.steps = buffers.model, buffers.rows, buffers.cache, buffers.steps
        self.pages, self.ahead, self.step_rows = buffers.new_pages(), buffers.ahead, buffers.step_rows
        self.max_sequences, self.max_prefill_tokens = min(max_sequences, self.rows.size), max_prefill_tokens
        self.drafter, self.routing, self.group = drafter, routing, group
        self.device = self.rows.numbers.device
        self.waiting: deque[CompletionState] = deque()
        self.running: list[RunningCompletion] = []
        self.sampled: deque[_Sampled] = deque()
        self.prefilled: dict[PromptState, _PrefillState] = {}
        self.table = torch.zeros(self.rows.table.shape, dtype=torch.int32)  # as it is to be on the device
        self.table_changed = False
        self.ended_rows: list[int] = []  # rows that the device would go on with, though their completion has ended
        self.limited = False
        self._settings: SamplerSettings | None = None  # of the running ones by row; None once they have changed
        self.rows.numbers.zero_()
        self.add(completions)

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
        self.limited = self.limited or any(completion.prompt.sampling.limited for completion in completions)

    def finish(self) -> None:
        """Step until this rank, and those that step together with it, have nothing left."""
        while self.step():
            pass

    def step(self) -> bool:
        """Let completions join, sample a token of each, and read those of an earlier step. Returns if there was work.

        Ranks that step together make the same forwards: those of a rank without work hold padding.
        """
        if self.group is None:
            busy = self.busy
            while self._may_join():
                self._join()
            if any(each.unfinished for each in self.running):
                self._decode()
        else:
            joins, busy = self._any_rank(self._may_join(), self.busy)
            if joins:
                self._join()
            if busy:
                self._decode()
        while self.sampled and (len(self.sampled) > self.ahead or not any(each.unfinished for each in self.running)):
            self._read()
        return busy

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
        completion.cancel()
        if not completion.prompt.unstarted and completion.prompt in self.prefilled:
            self._forget(completion.prompt)

    # --- decode

    def _decode(self) -> None:
        """Sample a token of every running completion, or two where the second was drafted right."""
        if not self.running:
            self._run_padding()
            return
        self._make_room()
        self._stop_ended()
        size = self._compact()
        self.pages.commit(self.running)
        self._send_table()
        if self.drafter is not None:
            self._decode_drafted(size, self.drafter)
        else:
            longest = 0 if self.ahead else max(each.reach for each in self.running)
            self.steps(size, limited=self.limited, settings=self._row_settings(), longest=longest)
            if self.routing is not None:
                self.routing.keep()
            self._send(self.running)
        for each in self.running:
            each.reach = min(each.reach + 1, each.state.max_length)

    def _decode_drafted(self, size: int, drafter: Drafter) -> None:
        """Two tokens of every row in one forward. The second is sampled where the first is the drafted one."""
        by_row, settings = sorted(self.running, key=lambda each: each.row), self._row_settings()
        assert settings is not None
        drafts, rows, count = drafter.guess([each.state for each in by_row], settings), self.rows, len(by_row)
        longest = max(each.reach for each in by_row) + 1
        logits = drafter.verify(rows.numbers[TOKEN, :size], drafts, rows.numbers[LENGTH, :size], longest)
        if self.routing is not None:
            self.routing.keep()
        sample_next(logits[:count, 0], rows.all[:count], rows, settings=settings)
        right = rows.numbers[TOKEN, :count] == drafts
        drafter.cache.settle(1 + right.long())
        self._send(by_row)
        rows.results[:count, 0] = torch.where(right, RIGHT, -1.0)
        second = (right & (rows.numbers[LENGTH, :count] > 0)).nonzero()[:, 0]
        sample_next(logits[second, 1], second, rows, settings=settings.at(second))
        self._send(by_row, drafted=True)

    def _run_padding(self) -> None:
        """Take part in the forwards of other ranks."""
        if self.drafter is not None:
            self.drafter.run_padding()
        self._forward([], [])

    def _row_settings(self) -> SamplerSettings | None:
        """Returns the settings of the running completions by row; None if the device has them all."""
        if self._settings is None and not self.ahead:
            by_row = sorted(self.running, key=lambda each: each.row)
            self._settings = self._settings_of(by_row)
        return self._settings

    def _settings_of(self, completions: Sequence[RunningCompletion]) -> SamplerSettings | None:
        if self.ahead:
            return None
        sampling, keys = [each.state.prompt.sampling for each in completions], [each.state.key for each in completions]
        return SamplerSettings.of(sampling, keys, self.model.config.vocab_size, self.device)

    def _any_rank(self, *flags: bool) -> list[bool]:
        """Returns for each flag whether it is set on any rank that steps together with this one."""
        on_device = torch.tensor(flags, dtype=torch.float32, device=self.device)
        dist.all_reduce(on_device, op=dist.ReduceOp.MAX, group=self.group)
        return [bool(flag) for flag in on_device.tolist()]

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
        if self.routing is not None and each.state.error is None:
            each.state.routing = self.routing.of(each.row, each.state.length)
        if each.state.stopped_by is not None or each.state.error is not None:
            self.ended_rows.append(each.row)
        if each.state.error is not None:
            self.cache.clear(each.row)
        self._leave(each)

    def _leave(self, each: RunningCompletion) -> None:
        each.gone = True
        self.running.remove(each)
        self.pages.give_back(each.pages)
        self._settings = None

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

    def _compact(self) -> int:
        """Move the running completions to as few rows as a step takes. Returns how many those are."""
        size = self.step_rows(len(self.running))
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
                self._set_table(each)
            self._settings = None
        tp = self.model.mesh.tp.size
        return -(-size // tp) * tp

    def _make_room(self) -> None:
        """Take room for the next token of every completion. If there is not enough, the shortest wait again."""
        while (extended := self.pages.extend(self.running)) is None:
            self._free_some()
        for each in extended:
            self._set_table(each)

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

    def _set_table(self, each: RunningCompletion) -> None:
        if self.table.shape[1]:
            self.table[each.row, : len(each.pages)] = torch.tensor(each.pages, dtype=torch.int32)
            self.table_changed = True

    def _send_table(self) -> None:
        if self.table_changed:
            pinned = self.table.pin_memory() if self.rows.table.is_cuda else self.table
            self.rows.table.copy_(pinned, non_blocking=True)
            self.table_changed = False

    # --- joining

    def _may_join(self) -> bool:
        """Whether there are rows for those that wait: several, because a prefill is a forward."""
        if not self.waiting:
            return False
        free = self.max_sequences - len(self.running)
        enough = min(len(self.waiting), max(1, self.max_sequences // 8))
        return (free >= enough or not self.running) and self._has_room(self.waiting[0])

    def _has_room(self, completion: CompletionState) -> bool:
        """Whether there is room for it and some tokens more. One alone always has room."""
        if not self.running and not self.sampled and not self.pages.has_room(completion, self.running):
            while self.prefilled:
                self._forget(next(reversed(self.prefilled)))
        return self.pages.has_room(completion, self.running)

    def _join(self) -> None:
        """Let completions join while there is room, first come first served."""
        self._stop_ended()
        if not self.ahead and self.running:
            self._compact()
        joining = self._admit()
        if not joining.completions:
            self._prefill([], [])
            return
        rows = self._integers([each.row for each in joining.completions])
        logits = self._start(joining, rows)
        self._enter_rows(joining.completions, rows)
        settings = self._settings_of(joining.completions)
        sample_next(logits, rows, self.rows, limited=self.limited, settings=settings)
        self._send(joining.completions)
        if not self.ahead:
            self._read()

    def _admit(self) -> _Joining:
        """Give rows and pages to those that wait, while there is room."""
        joining = _Joining()
        if not self._may_join():  # other ranks have completions that join
            return joining
        taken = {each.row for each in self.running}
        free = deque(row for row in range(self.rows.size) if row not in taken)
        while self.waiting and len(self.running) < self.max_sequences and self._has_room(self.waiting[0]):
            if joining.tokens and joining.tokens + self._to_prefill(self.waiting[0], joining) > self.max_prefill_tokens:
                break
            each = self._place(self.waiting.popleft(), free.popleft(), joining)
            self.running.append(each)
            joining.completions.append(each)
        self._settings = None
        return joining

    def _to_prefill(self, completion: CompletionState, joining: _Joining) -> int:
        """Returns how many tokens of it have to be prefilled."""
        return 0 if not completion.tokens and self._is_prefilled(completion.prompt, joining) else completion.length

    def _is_prefilled(self, prompt: PromptState, joining: _Joining) -> bool:
        return prompt in self.prefilled or prompt in joining.prompts

    def _place(self, completion: CompletionState, row: int, joining: _Joining) -> RunningCompletion:
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

    def _start(self, joining: _Joining, rows: Tensor) -> Tensor:
        """Prefill what has to be, and copy what completions write to. Returns the logits of all, [n, vocab]."""
        self.pages.commit(self.running)
        logits = self._prefill(joining.sequences, joining.pages)
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
        for each, source in zip(joining.completions, joining.sources, strict=True):
            if isinstance(source, PromptState):
                self.cache.restore(each.row, self.prefilled[source].stores)
        for prompt in earlier:
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

    def _prefill(self, sequences: list[list[int]], pages: list[list[int]]) -> Tensor:
        """Prefill sequences to these pages. Returns the logits after each, [n, vocab]."""
        if not sequences and self.group is None:
            return torch.empty(0, device=self.device)
        logits, hidden = self._forward(sequences, pages)
        if self.drafter is not None:
            self.drafter.follow_prefill(hidden, sequences, pages)
        return logits

    def _forward(self, sequences: list[list[int]], pages: list[list[int]]) -> tuple[Tensor, Tensor]:
        """Run the model on whole sequences. Returns the logits after each [n, vocab], and all hidden states [T, H]."""
        microbatch = prefill_microbatch(sequences, self.model.mesh.tp.size, self.device)
        self.cache.prefill(microbatch.packing, pages, microbatch.padding)
        last = microbatch.packing.cu_seqlens[1 : len(sequences) + 1].long() - 1
        logits, hidden = self.model(
            microbatch, output_processor=logits_at, output_processor_context=last, decode_state=self.cache
        )
        if self.routing is not None:
            self.routing.keep()
        return logits, hidden

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
            self._set_table(each)
        self.rows.numbers.index_copy_(1, rows, self._integers(numbers).T)
        self.rows.stops.index_copy_(1, rows, self._integers(stops).T)
        columns = torch.tensor(settings, dtype=torch.float32).T.contiguous()
        columns[LOG_MIN_P].log_()
        self.rows.settings.index_copy_(1, rows, to_device(columns, self.device))

    def _integers(self, values: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
        return to_device(torch.tensor(values, dtype=torch.int64), self.device)
