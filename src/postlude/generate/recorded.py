"""RecordedScheduler: decode steps that a GPU replays, ahead of the host.

The device samples tokens and detects where a completion ends; the host reads the tokens up to `ahead` steps later. It
acts only when completions end, join or need another page. It finds a stop string late, and then drops the tokens that
were sampled after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from postlude.generate.completion_state import CompletionState
from postlude.generate.cuda_graphs import DecodeSteps, addresses, bucket
from postlude.generate.decode_rows import DecodeRows, sample_next
from postlude.generate.forward import logits_at, prefill_microbatch
from postlude.generate.paged_cache import PagedCache
from postlude.generate.pages import PagePool, RunningCompletion, pages_for
from postlude.generate.scheduler import Scheduler, max_stops
from postlude.model import LanguageModel
from postlude.model.parallel import fuse_weights
from postlude.ops.paged_attention import PAGE_SIZE

SMALL = 8  # a cache is small that takes at most one part in so many of the device's memory


@dataclass(frozen=True)
class DecodeCapacity:
    """The rows and pages that completions need."""

    rows: int
    pages: int
    longest: int
    """Pages of the longest completion, prompt included."""
    stops: int
    """Stop tokens of a completion."""

    @staticmethod
    def of(completions: Sequence[CompletionState], budget: int, max_sequences: int) -> DecodeCapacity:
        """Returns what these completions need, if the cache holds about `budget` tokens."""
        lengths = [completion.max_length for completion in completions]
        longest, total = pages_for(max(lengths)), sum(pages_for(length) + 1 for length in lengths)
        # One completion alone always fits, beside a copy of its prompt's last page.
        return DecodeCapacity(
            rows=bucket(min(len(completions), max_sequences)),
            pages=max(longest + 1, min(budget // PAGE_SIZE, total)),
            longest=longest,
            stops=max_stops(completions),
        )

    @staticmethod
    def of_any(completions: Sequence[CompletionState], budget: int, max_sequences: int) -> DecodeCapacity:
        """Returns what these and later completions need, each of which fits into a cache of about `budget` tokens."""
        pages = pages_for(budget)
        return DecodeCapacity(rows=bucket(max_sequences), pages=pages + 1, longest=pages, stops=max_stops(completions))


@dataclass(frozen=True)
class RecordedBuffers:
    """The rows, pages and recorded steps of a model. They serve one call of generate after another."""

    model: LanguageModel
    rows: DecodeRows
    cache: PagedCache
    steps: DecodeSteps
    capacity: DecodeCapacity
    weights: tuple[int, ...]

    @staticmethod
    def of(model: LanguageModel, capacity: DecodeCapacity, device: torch.device) -> RecordedBuffers:
        """Returns buffers of this capacity, and lays weights that are read together side by side."""
        for layers in (layers for block in model.blocks for layers in block.fused_projections()):
            fuse_weights(layers)
        rows = DecodeRows(capacity.rows, capacity.longest, capacity.stops, device)
        cache = PagedCache(capacity.pages, capacity.rows, device)
        return RecordedBuffers(model, rows, cache, DecodeSteps(model, rows, cache), capacity, addresses(model))

    @property
    def small(self) -> bool:
        """Whether the cache takes no more than a part in `SMALL` of the device's memory."""
        device = self.cache.device
        if device.type != "cuda":
            return True
        return SMALL * self.cache.size_in_bytes <= torch.cuda.get_device_properties(device).total_memory

    def fit(self, capacity: DecodeCapacity) -> bool:
        """Whether they are enough, and the weights still where the recorded steps read them."""
        have = self.capacity
        return (
            have.rows >= capacity.rows
            and have.pages >= capacity.pages
            and have.longest >= capacity.longest
            and have.stops >= capacity.stops
            and self.weights == addresses(self.model)
        )


class RecordedScheduler(Scheduler):
    """Steps on fixed pages. A prefill is a forward of its own, so completions join several at a time."""

    ahead = 2

    def __init__(
        self,
        buffers: RecordedBuffers,
        completions: Sequence[CompletionState],
        *,
        max_sequences: int,
        max_prefill_tokens: int,
    ) -> None:
        super().__init__(
            buffers.model,
            buffers.rows,
            buffers.cache,
            PagePool(buffers.capacity.pages, buffers.capacity.longest),
            max_sequences=max_sequences,
            max_prefill_tokens=max_prefill_tokens,
        )
        self.paged, self.steps = buffers.cache, buffers.steps
        self.table = torch.zeros(self.rows.table.shape, dtype=torch.int32)  # as it is to be on the device
        self.table_changed = False
        self.limited = False
        self.add(completions)

    def add(self, completions: Sequence[CompletionState]) -> None:
        """See `Scheduler`."""
        super().add(completions)
        self.limited = self.limited or any(completion.prompt.sampling.limited for completion in completions)

    def _advance(self) -> None:
        """See `Scheduler`."""
        while self._may_join():
            self._join()
        if any(each.unfinished for each in self.running):
            self._decode()

    def _decode(self) -> None:
        """Sample a token of every running completion."""
        self._make_room()
        self._stop_ended()
        size = bucket(len(self.running))
        self._move_into(size)
        self._send_table()
        self.steps(size, limited=self.limited)
        self._send(self.running)
        for each in self.running:
            each.reach = min(each.reach + 1, each.state.max_length)

    def _changed(self, each: RunningCompletion) -> None:
        """See `Scheduler`."""
        if not each.gone:
            self.table[each.row, : len(each.pages)] = torch.tensor(each.pages, dtype=torch.int32)
            self.table_changed = True

    def _send_table(self) -> None:
        if self.table_changed:
            pinned = self.table.pin_memory() if self.rows.table.is_cuda else self.table
            self.rows.table.copy_(pinned, non_blocking=True)
            self.table_changed = False

    def _may_join(self) -> bool:
        """Whether there are rows for those that wait: several, because a prefill is a forward."""
        if not self.waiting:
            return False
        free = self.max_sequences - len(self.running)
        enough = min(len(self.waiting), max(1, self.max_sequences // 8))
        return (free >= enough or not self.running) and self._has_room(self.waiting[0])

    def _join(self) -> None:
        """Prefill completions that join, and sample their first token."""
        self._stop_ended()
        joining = self._admit()
        rows = self._integers([each.row for each in joining.completions])
        logits = self._start(joining, rows, self._prefill(joining.sequences, joining.pages))
        self._enter_rows(joining.completions, rows)
        sample_next(logits, rows, self.rows, limited=self.limited)
        self._send(joining.completions)

    def _prefill(self, sequences: list[list[int]], pages: list[list[int]]) -> Tensor:
        """Run whole sequences through the model, their keys to these pages. Returns the logits after each."""
        if not sequences:
            return torch.empty(0, device=self.device)
        microbatch = prefill_microbatch(sequences, self.device)
        self.paged.prefill(microbatch.packing, pages)
        last = microbatch.packing.cu_seqlens[1:].long() - 1
        logits: Tensor
        logits, _ = self.model(
            microbatch, output_processor=logits_at, output_processor_context=last, decode_state=self.cache
        )
        return logits
