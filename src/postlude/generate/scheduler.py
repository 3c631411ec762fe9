"""One call of generate on rows and pages, a step ahead of what the host knows.

The device draws tokens and sees for itself where an answer ends; the host reads what was drawn a step or two later. It
steps in where answers end, join or need another page. A stop string it finds late: what was drawn after it is dropped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from postlude.generate.completion_state import MARGIN, CompletionState, PromptState
from postlude.generate.cuda_graphs import Steps, all_logits_at, bucket, microbatch_of
from postlude.generate.paged_cache import LOG_MIN_P, PagedCache, Rows, sample_next
from postlude.model import LanguageModel
from postlude.model.context import States
from postlude.model.parallel import fuse_weights
from postlude.ops.packing import Packing, to_device
from postlude.ops.paged_attention import PAGE_SIZE

AHEAD = 2  # steps that are under way while the host reads an earlier one's tokens
SMALL = 8  # a cache is small that takes one part in so many of the device's memory
STOPS = 8  # tokens that may end an answer, for which there is room at least


@dataclass(frozen=True)
class Need:
    """What answers ask of rows and pages."""

    rows: int
    pages: int
    longest: int
    """Pages of the longest answer, prompt included."""
    stops: int

    @staticmethod
    def of(answers: Sequence[CompletionState], budget: int, max_sequences: int) -> Need:
        """Of these answers, where the cache holds about `budget` tokens."""
        lengths = [answer.most for answer in answers]
        longest, all_of_them = _pages(max(lengths)), sum(_pages(length) + 1 for length in lengths)
        # One answer alone always fits, beside a copy of its prompt's last page.
        return Need(
            rows=bucket(min(len(answers), max_sequences)),
            pages=max(longest + 1, min(budget // PAGE_SIZE, all_of_them)),
            longest=longest,
            stops=max(STOPS, *(len(answer.stop_tokens) for answer in answers)),
        )

    @staticmethod
    def of_any(budget: int, max_sequences: int) -> Need:
        """Of answers that are not known yet, each of which fits into a cache of about `budget` tokens."""
        pages = _pages(budget)
        return Need(rows=bucket(max_sequences), pages=pages + 1, longest=pages, stops=STOPS)


class DecodeBuffers:
    """Rows, pages and recorded steps, which one call of generate leaves to the next."""

    def __init__(self, model: LanguageModel, need: Need, device: torch.device) -> None:
        self.need = need
        for layers in (layers for block in model.blocks for layers in block.fused_projections()):
            fuse_weights(layers)
        self.rows = Rows(need.rows, need.longest, need.stops, device)
        self.cache = PagedCache(need.pages, need.rows, device)
        self.steps = Steps(model, self.rows, self.cache)

    @property
    def small(self) -> bool:
        """Whether they take no more than a part in `SMALL` of the device's memory."""
        device = self.cache.device
        if device.type != "cuda":
            return True
        return SMALL * self.cache.size_in_bytes <= torch.cuda.get_device_properties(device).total_memory

    def fit(self, need: Need) -> bool:
        """Whether they are enough, and the weights still where the recorded steps read them."""
        own = self.need
        enough = min(own.rows - need.rows, own.pages - need.pages, own.longest - need.longest, own.stops - need.stops)
        return enough >= 0 and self.steps.still_true()


class Pages:
    """Which pages are free, and how many hold each of the others."""

    def __init__(self, count: int) -> None:
        self.free = list(range(count - 1, -1, -1))
        self._holders = [0] * count

    def take(self, count: int) -> list[int]:
        """So many that were free."""
        taken = [self.free.pop() for _ in range(count)]
        self.share(taken)
        return taken

    def share(self, pages: Sequence[int]) -> None:
        """One more holds each of these."""
        for page in pages:
            self._holders[page] += 1

    def give_back(self, pages: Sequence[int]) -> None:
        """One fewer holds each of these."""
        for page in pages:
            self._holders[page] -= 1
            if not self._holders[page]:
                self.free.append(page)


@dataclass(frozen=True)
class _PromptPrefill:
    """A prompt's pages, and the logits [vocab] and states after its last token, for answers that are still to begin."""

    pages: list[int]
    logits: Tensor
    states: Mapping[str, States]


@dataclass(eq=False)
class _Running:
    """An answer in its row."""

    answer: CompletionState
    row: int
    pages: list[int]
    reach: int
    """How many tokens it has, prompt included, with those that are under way."""
    most: int
    """How many it may have."""
    gone: bool = False

    @property
    def going_on(self) -> bool:
        """Whether it may want another token than those under way."""
        return self.reach < self.most


@dataclass(frozen=True)
class _Flight:
    """A step under way: who gets a token of it, and where it comes to on the host."""

    passengers: list[tuple[int, _Running]]
    """Each by the row it had then."""
    told: Tensor
    event: torch.cuda.Event | None


@dataclass
class _Joining:
    """Answers that begin together, and what of them has to pass the model first."""

    answers: list[_Running] = field(default_factory=list)
    sources: list[int | PromptState] = field(default_factory=list)
    """What each begins from: one of `sequences`, or a prompt that has passed the model before."""
    sequences: list[list[int]] = field(default_factory=list)
    pages: list[list[int]] = field(default_factory=list)
    opened: list[PromptState | None] = field(default_factory=list)
    """For each of the sequences, whose prompt it is, where more answers begin from it."""
    copied: list[tuple[int, int]] = field(default_factory=list)
    tokens: int = 0

    def passes(self, sequence: Sequence[int], pages: list[int], prompt: PromptState | None = None) -> None:
        """One more sequence has to pass the model, its keys to these pages."""
        self.sequences.append([*sequence])
        self.pages.append(pages)
        self.opened.append(prompt)
        self.tokens += len(sequence)


class PagedRun:
    """Answers stepped until every one is finished; others may be added meanwhile."""

    def __init__(
        self,
        model: LanguageModel,
        slots: DecodeBuffers,
        answers: Sequence[CompletionState],
        max_sequences: int,
        prefill: int,
    ):
        self.model, self.rows, self.cache, self.steps = model, slots.rows, slots.cache, slots.steps
        self.max_sequences, self.prefill_budget = min(max_sequences, self.rows.size), prefill
        self.device = self.rows.numbers.device
        self.waiting: deque[CompletionState] = deque()
        self.running: list[_Running] = []
        self.flights: deque[_Flight] = deque()
        self.pages = Pages(self.cache.pages)
        self.openings: dict[PromptState, _PromptPrefill] = {}
        self.table = torch.zeros(self.rows.table.shape, dtype=torch.int32)  # as it is to be on the device
        self.table_changed = False
        self.late: list[int] = []  # rows that go on though their answer has ended
        self.limited = False
        self.rows.numbers.zero_()
        self.add(answers)

    @property
    def busy(self) -> bool:
        """Whether there is anything left to do."""
        return bool(self.waiting or self.running or self.flights)

    def room_for(self, answer: CompletionState) -> bool:
        """Whether it would ever have room."""
        return len(answer.stop_tokens) <= len(self.rows.stops) and _pages(answer.most) <= self.rows.table.shape[1]

    def add(self, answers: Sequence[CompletionState]) -> None:
        """More answers, which join when there is room."""
        self.waiting.extend(answers)
        self.limited = self.limited or any(answer.prompt.sampling.limited for answer in answers)

    def finish(self) -> None:
        """Step until there is nothing left."""
        while self.busy:
            self.step()

    def step(self) -> None:
        """Let answers join, ask for a token of each, and read those of an earlier step."""
        while self._may_join():
            self._join()
        if any(each.going_on for each in self.running):
            self._step()
        while self.flights and (len(self.flights) > AHEAD or not any(each.going_on for each in self.running)):
            self._land()

    def restart(self) -> None:
        """Read what is under way, and let all pass the model anew: what is cached of them is forgotten."""
        while self.flights:
            self._land()
        for each in reversed(self.running[:]):
            self._wait_again(each)
        while self.openings:
            self.pages.give_back(self.openings.popitem()[1].pages)

    def withdraw(self, answer: CompletionState) -> None:
        """Nobody wants this one any more."""
        for each in self.running:
            if each.answer is answer:
                self.late.append(each.row)
                self._leave(each)
                return
        self.waiting.remove(answer)
        answer.forgo()
        if not answer.prompt.not_begun and answer.prompt in self.openings:
            self.pages.give_back(self.openings.pop(answer.prompt).pages)

    def _step(self) -> None:
        """Ask for a token of every running answer."""
        self._make_room()
        self._stop_late()
        size = self._draw_together()
        self._send_table()
        self.steps(size, limited=self.limited)
        self._depart(self.running)
        for each in self.running:
            each.reach = min(each.reach + 1, each.most)

    # --- what comes back

    def _depart(self, passengers: Sequence[_Running]) -> None:
        told = self.rows.told
        event = None
        if told.is_cuda:
            landing = torch.empty(told.shape, dtype=told.dtype, pin_memory=True)
            landing.copy_(told, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        else:
            landing = told.clone()
        self.flights.append(_Flight([(each.row, each) for each in passengers], landing, event))

    def _land(self) -> None:
        """Give the answers the tokens of the oldest step under way."""
        flight = self.flights.popleft()
        if flight.event is not None:
            flight.event.synchronize()
        told = flight.told.tolist()
        for row, each in flight.passengers:
            token, logprob, sampled = told[row]
            if each.gone or token < 0:
                continue
            answer = each.answer
            if answer.add(int(token), logprob, sampled):
                if answer.stopped_by is not None or answer.error is not None:
                    self.late.append(each.row)
                self._leave(each)

    def _leave(self, each: _Running) -> None:
        each.gone = True
        self.running.remove(each)
        self.pages.give_back(each.pages)

    def _wait_again(self, each: _Running) -> None:
        """Its tokens are kept, and pass the model again later."""
        self.late.append(each.row)
        self._leave(each)
        self.waiting.appendleft(each.answer)

    def _stop_late(self) -> None:
        """Rows whose answer ended by what only the host sees become idle."""
        if self.late:
            self.rows.stop(self._integers(self.late))
            self.late = []

    # --- rows and pages

    def _draw_together(self) -> int:
        """Bring the running answers to as few rows as a step is recorded for; how many those are."""
        size = bucket(len(self.running))
        outside = [each for each in self.running if each.row >= size]
        if outside:
            taken = {each.row for each in self.running}
            free = [row for row in range(size) if row not in taken]
            moves = list(zip(outside, free, strict=False))
            sources, targets = self._integers([(each.row, row) for each, row in moves]).unbind(1)
            self.rows.move(sources, targets)
            self.cache.move(sources, targets)
            for each, row in moves:
                each.row = row
                self._set_table(each)
        return size

    def _make_room(self) -> None:
        """A page for the next token of every answer. Where there are none left, the shortest answers wait again."""
        while True:
            wanting = [each for each in self.running if len(each.pages) * PAGE_SIZE < each.reach]
            if len(wanting) <= len(self.pages.free):
                break
            self._free_some()
        for each in wanting:
            each.pages += self.pages.take(1)
            self._set_table(each)

    def _free_some(self) -> None:
        """Let go of prompts that are kept for others, or else of an answer, which then passes the model again later."""
        while self.flights:
            self._land()
        if self.openings:
            _, opening = self.openings.popitem()
            self.pages.give_back(opening.pages)
        elif len(self.running) > 1:
            self._wait_again(min(self.running, key=lambda each: len(each.answer.tokens)))
            self._stop_late()
        # else what landed gave back enough

    def _set_table(self, each: _Running) -> None:
        self.table[each.row, : len(each.pages)] = torch.tensor(each.pages, dtype=torch.int32)
        self.table_changed = True

    def _send_table(self) -> None:
        if self.table_changed:
            pinned = self.table.pin_memory() if self.rows.table.is_cuda else self.table
            self.rows.table.copy_(pinned, non_blocking=True)
            self.table_changed = False

    # --- answers that join

    def _may_join(self) -> bool:
        """Whether there are rows for those that wait: several, since to join costs a forward."""
        if not self.waiting:
            return False
        free = self.max_sequences - len(self.running)
        enough = min(len(self.waiting), max(1, self.max_sequences // 8))
        return (free >= enough or not self.running) and self._room_for(self.waiting[0])

    def _room_for(self, answer: CompletionState) -> bool:
        """Whether there are pages for it and some tokens more; for one alone there always are."""
        needed = min(answer.length + 1 + MARGIN, answer.most)
        if not self.running and not self.flights and _pages(needed) + 1 > len(self.pages.free):
            while self.openings:
                self.pages.give_back(self.openings.popitem()[1].pages)
        return _pages(needed) + 1 <= len(self.pages.free)

    def _join(self) -> None:
        """Let answers join as long as there is room, first come first served."""
        self._stop_late()
        taken = {each.row for each in self.running}
        free = deque(row for row in range(self.rows.size) if row not in taken)
        joining = _Joining()
        while self.waiting and len(self.running) < self.max_sequences and self._room_for(self.waiting[0]):
            if joining.tokens and joining.tokens + self._to_pass(self.waiting[0], joining) > self.prefill_budget:
                break
            each = self._place(self.waiting.popleft(), free.popleft(), joining)
            self.running.append(each)
            joining.answers.append(each)
        rows = self._integers([each.row for each in joining.answers])
        logits = self._begin(joining, rows)
        self._enter_rows(joining.answers, rows)
        sample_next(logits, rows, self.rows, limited=self.limited)
        self._depart(joining.answers)

    def _to_pass(self, answer: CompletionState, joining: _Joining) -> int:
        """How many tokens of it have to pass the model."""
        shared = not answer.tokens and (answer.prompt in self.openings or answer.prompt in joining.opened)
        return 0 if shared else answer.length

    def _place(self, answer: CompletionState, row: int, joining: _Joining) -> _Running:
        """Give an answer a row and its pages, and say what has to pass the model for it."""
        prompt, length = answer.prompt, answer.length
        if answer.tokens or (prompt.not_begun == 1 and prompt not in self.openings and prompt not in joining.opened):
            pages = self.pages.take(_pages(length + 1))
            joining.sources.append(len(joining.sequences))
            joining.passes([*prompt.tokens, *answer.tokens], pages)
        else:
            source = self._prompt_pages(prompt, joining)
            shared = source[: length // PAGE_SIZE]  # whole ones, which nobody writes to any more
            self.pages.share(shared)
            own = self.pages.take(1)
            if length % PAGE_SIZE:
                joining.copied.append((source[-1], own[0]))
            pages = [*shared, *own]
            joining.sources.append(prompt if prompt in self.openings else joining.opened.index(prompt))
        if not answer.tokens:
            prompt.begin()
        return _Running(answer, row, pages, length + 1, answer.most)

    def _prompt_pages(self, prompt: PromptState, joining: _Joining) -> list[int]:
        """Those that hold, or will hold, a prompt for several answers."""
        if prompt in self.openings:
            return self.openings[prompt].pages
        if prompt not in joining.opened:
            joining.passes(prompt.tokens, self.pages.take(_pages(len(prompt.tokens))), prompt)
        return joining.pages[joining.opened.index(prompt)]

    def _begin(self, joining: _Joining, rows: Tensor) -> Tensor:
        """Pass through the model what has to, and copy what answers write to: the logits of all, [n, vocab]."""
        passed = self._pass(joining.sequences, joining.pages)
        earlier = list(dict.fromkeys(source for source in joining.sources if isinstance(source, PromptState)))
        older = [self.openings[prompt] for prompt in earlier]
        for place, prompt in enumerate(joining.opened):
            if prompt is not None and prompt.not_begun:
                states = self.cache.last_states(place)
                self.openings[prompt] = _PromptPrefill(joining.pages[place], passed[place].clone(), states)
            elif prompt is not None:
                self.pages.give_back(joining.pages[place])
        if joining.copied:
            self.cache.copy(*self._integers(joining.copied).unbind(1))
        for prompt in earlier:
            if not prompt.not_begun:
                self.pages.give_back(self.openings.pop(prompt).pages)
        sources = self._integers(
            [len(passed) + earlier.index(each) if isinstance(each, PromptState) else each for each in joining.sources]
        )
        self.cache.enter(rows, sources, [opening.states for opening in older])
        kept = [torch.stack([opening.logits for opening in older])] if older else []
        return torch.cat((*([passed] if len(passed) else []), *kept)).index_select(0, sources)

    def _pass(self, sequences: list[list[int]], pages: list[list[int]]) -> Tensor:
        """Whole sequences through the model, their keys to these pages: the logits after each, [n, vocab]."""
        if not sequences:
            return torch.empty(0, device=self.device)
        packing = Packing.from_lengths([len(sequence) for sequence in sequences], self.device)
        tokens = self._integers([token for sequence in sequences for token in sequence])
        microbatch = microbatch_of(tokens, packing, packing.positions())
        self.cache.begin(packing, pages)
        lasts = packing.cu_seqlens[1:].long() - 1
        passed: Tensor = self.model(
            microbatch, output_processor=all_logits_at, output_processor_context=lasts, decode_state=self.cache
        )
        return passed

    def _enter_rows(self, joined: Sequence[_Running], rows: Tensor) -> None:
        """Write to the device where these answers stand."""
        numbers, settings, stops, vocab = [], [], [], self.model.config.vocab_size
        for each in joined:
            answer, sampling = each.answer, each.answer.prompt.sampling
            top_k = min(sampling.top_k or vocab, vocab)
            numbers.append([0, answer.length, len(answer.tokens), sampling.max_new_tokens, answer.key, top_k])
            settings.append([sampling.temperature, sampling.top_p, sampling.min_p])
            ends = list(answer.stop_tokens)
            stops.append(ends + [-1] * (len(self.rows.stops) - len(ends)))
            self._set_table(each)
        self.rows.numbers.index_copy_(1, rows, self._integers(numbers).T)
        self.rows.stops.index_copy_(1, rows, self._integers(stops).T)
        columns = torch.tensor(settings, dtype=torch.float32).T.contiguous()
        columns[LOG_MIN_P].log_()
        self.rows.settings.index_copy_(1, rows, to_device(columns, self.device))

    def _integers(self, values: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
        return to_device(torch.tensor(values, dtype=torch.int64), self.device)


def _pages(tokens: int) -> int:
    return -(-tokens // PAGE_SIZE)
