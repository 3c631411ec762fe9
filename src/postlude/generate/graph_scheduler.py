"""GraphScheduler: decode steps that a GPU replays as CUDA graphs, before the host has read their tokens.

The device samples tokens and detects stop tokens and the length limit. The host reads the tokens up to
`max_unread_steps` later, and acts only when completions end, join or need another page. It finds a stop string late,
and then drops the tokens that were sampled after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from postlude.data import Microbatch
from postlude.generate.adapters import NamedAdapters
from postlude.generate.completion_state import CompletionState
from postlude.generate.cuda_graphs import DecodeGraphs, DecodeStep, addresses, bucket
from postlude.generate.decode_rows import DecodeRows, sample_next
from postlude.generate.draft import TOKENS_PER_STEP, Drafter
from postlude.generate.forward import logits_at, prefill_microbatch
from postlude.generate.paged_cache import PagedCache
from postlude.generate.pages import PagePool, RunningCompletion, pages_for
from postlude.generate.routing_record import RoutingRecord
from postlude.generate.scheduler import Scheduler, max_stops
from postlude.model import LanguageModel
from postlude.model.parallel import fuse_weights
from postlude.ops.paged_attention import PAGE_SIZE
from postlude.ops.shared_pages import SharedPages, TileShape, shared_tiles

SMALL_FRACTION = 1 / 8  # a cache of at most this fraction of the device's memory is small


@dataclass(frozen=True)
class DecodeCapacity:
    """The numbers of rows and pages that completions need."""

    rows: int
    pages: int
    pages_per_row: int
    """The number of pages of the longest completion, prompt included."""
    stops: int
    """The maximum number of stop tokens of a completion."""

    @staticmethod
    def of(completions: Sequence[CompletionState], budget: int, max_sequences: int) -> DecodeCapacity:
        """Returns the capacity for these completions, in a cache of about `budget` tokens."""
        lengths = [completion.max_length for completion in completions]
        pages_per_row, total = pages_for(max(lengths)), sum(pages_for(length) + 1 for length in lengths)
        # A single completion always fits, with a copy of its prompt's last page.
        return DecodeCapacity(
            rows=bucket(min(len(completions), max_sequences)),
            pages=max(pages_per_row + 1, min(budget // PAGE_SIZE, total)),
            pages_per_row=pages_per_row,
            stops=max_stops(completions),
        )

    @staticmethod
    def for_session(completions: Sequence[CompletionState], budget: int, max_sequences: int) -> DecodeCapacity:
        """Returns the capacity for these and any later completions, in a cache of about `budget` tokens."""
        pages = pages_for(budget)
        return DecodeCapacity(
            rows=bucket(max_sequences), pages=pages + 1, pages_per_row=pages, stops=max_stops(completions)
        )


@dataclass(frozen=True)
class GraphBuffers:
    """The rows, pages and CUDA graphs of a model, which are kept from one call of `generate` to the next."""

    model: LanguageModel
    rows: DecodeRows
    cache: PagedCache
    graphs: DecodeGraphs
    drafter: Drafter | None
    routing_record: RoutingRecord | None
    capacity: DecodeCapacity
    weight_addresses: tuple[int, ...]

    @staticmethod
    def of(
        model: LanguageModel,
        adapters: NamedAdapters,
        capacity: DecodeCapacity,
        device: torch.device,
        *,
        draft: bool = False,
        record_routing: bool = False,
        fp8_kv: bool = False,
    ) -> GraphBuffers:
        """Returns buffers of this capacity. Fuses the weights of projections with the same input."""
        for layers in (layers for block in model.blocks for layers in block.fused_projections()):
            fuse_weights(layers)
        tokens_per_step = TOKENS_PER_STEP if draft else 1
        rows = DecodeRows(capacity.rows, capacity.pages_per_row, capacity.stops, device, tokens_per_step)
        cache = PagedCache(capacity.pages, capacity.rows, device, fp8=fp8_kv)
        drafter = Drafter(model, rows, cache) if draft else None
        routing_record = RoutingRecord(model, cache) if record_routing else None
        graphs = DecodeGraphs(model, adapters, rows, cache, drafter, routing_record)
        return GraphBuffers(model, rows, cache, graphs, drafter, routing_record, capacity, addresses(model))

    @property
    def is_small(self) -> bool:
        """Whether the cache takes at most `SMALL_FRACTION` of the device's memory."""
        device = self.cache.device
        if device.type != "cuda":
            return True
        return self.cache.size_in_bytes <= SMALL_FRACTION * torch.cuda.get_device_properties(device).total_memory

    def fit(self, capacity: DecodeCapacity, *, record_routing: bool) -> bool:
        """Whether they have this capacity, and the weights are still at the addresses that the graphs read.

        `record_routing`: whether they must record the experts of tokens, or must not.
        """
        have = self.capacity
        return (
            record_routing == (self.routing_record is not None)
            and have.rows >= capacity.rows
            and have.pages >= capacity.pages
            and have.pages_per_row >= capacity.pages_per_row
            and have.stops >= capacity.stops
            and self.weight_addresses == addresses(self.model)
        )


class GraphScheduler(Scheduler):
    """Runs steps on a `PagedCache`. A prefill is a separate forward, so completions join several at a time."""

    max_unread_steps = 2
    min_saved_pages = 32
    """Pages that sharing must save in a step: reading them takes as long as another kernel in each layer."""

    def __init__(
        self,
        buffers: GraphBuffers,
        completions: Sequence[CompletionState],
        *,
        max_sequences: int,
        max_prefill_tokens: int,
    ) -> None:
        super().__init__(
            buffers.model,
            buffers.rows,
            buffers.cache,
            PagePool(
                buffers.capacity.pages, buffers.capacity.pages_per_row, drafts_per_row=buffers.rows.tokens_per_step - 1
            ),
            max_sequences=max_sequences,
            max_prefill_tokens=max_prefill_tokens,
        )
        self.paged_cache, self.graphs = buffers.cache, buffers.graphs
        self.drafter, self.routing_record = buffers.drafter, buffers.routing_record
        self.table = torch.zeros(self.rows.table.shape, dtype=torch.int32)  # the next content of the device's table
        self.changed_pages: dict[int, list[int]] = {}  # by row, of completions that joined, moved or grew
        self.rows_changed = False  # by completions that joined, left or moved
        self.tile_shape: TileShape | None = None  # of the tiles of rows that share pages; None if no pages are shared
        self.filtered = False
        self.add(completions)

    def add(self, completions: Sequence[CompletionState]) -> None:
        """See `Scheduler`."""
        super().add(completions)
        self.filtered = self.filtered or any(completion.prompt.sampling.filtered for completion in completions)

    def _advance(self) -> None:
        """See `Scheduler`."""
        while self._may_join():
            self._join()
        if any(running.unfinished for running in self.running):
            self._decode()

    def _decode(self) -> None:
        """Samples a token of every running completion, or two."""
        self._make_room()
        self._idle_ended_rows()
        size = bucket(len(self.running))
        self._compact(size)
        self._send_table()
        self.graphs(DecodeStep(size, self.filtered, self.tile_shape))
        self._send_results(self.running, self.rows.tokens_per_step)
        for running in self.running:
            running.scheduled_length += self.rows.tokens_per_step

    def _on_change(self, running: RunningCompletion, *, grew: bool = False) -> None:
        """See `Scheduler`."""
        self.rows_changed = self.rows_changed or not grew
        if not running.removed:
            self.changed_pages[running.row] = running.pages

    def _send_table(self) -> None:
        if self.changed_pages:
            width, lists = self.table.shape[1], self.changed_pages.values()
            padded = [[*pages, *([0] * (width - len(pages)))] for pages in lists]  # one tensor for all, on the host
            self.table[list(self.changed_pages)] = torch.tensor(padded, dtype=torch.int32)
            self.changed_pages = {}
            pinned = self.table.pin_memory() if self.rows.table.is_cuda else self.table
            self.rows.table.copy_(pinned, non_blocking=True)
        if self.rows_changed:
            self._send_shared_pages()
            self.rows_changed = False

    def _send_shared_pages(self) -> None:
        """Finds out which rows share their first pages, unless too few to gain by reading them together."""
        tiles = shared_tiles({running.row: running.pages for running in self.running})
        self.tile_shape = None
        if sum(tile.saved for tile in tiles) >= self.min_saved_pages:
            shared = SharedPages.of(self.rows.size, tiles)
            self.rows.shared.copy_(shared)
            self.tile_shape = shared.shape

    def _may_join(self) -> bool:
        """Whether enough rows are free for waiting completions: an eighth of all, since a prefill is a forward."""
        if not self.waiting:
            return False
        free = self.max_sequences - len(self.running)
        enough = min(len(self.waiting), max(1, self.max_sequences // 8))
        return (free >= enough or not self.running) and self._has_room(self.waiting[0])

    def _join(self) -> None:
        """Prefills joining completions, and samples their first token."""
        self._idle_ended_rows()
        joining = self._admit()
        indices = self._integers([running.row for running in joining.completions])
        logits = self._start(joining, indices, self._prefill(joining.sequences, joining.pages))
        self._write_rows(joining.completions, indices)
        sample_next(logits, indices, self.rows, filtered=self.filtered)
        self._send_results(joining.completions, 1)

    def _prefill(self, sequences: list[list[int]], pages: list[list[int]]) -> Tensor:
        """Runs whole sequences, whose keys and values go to these pages. Returns the logits after each sequence."""
        if not sequences:
            return torch.empty(0, device=self.device)
        microbatch = self._begin_prefill(pages, sequences)
        last = microbatch.packing.cu_seqlens[1:].long() - 1
        logits: Tensor
        logits, hidden = self.model(
            microbatch, output_processor=logits_at, output_processor_context=last, decode_state=self.cache
        )
        if self.routing_record is not None:
            self.routing_record.store()
        if self.drafter is not None:
            self.drafter.prefill(hidden, sequences, partial(self._begin_prefill, pages))
        return logits

    def _begin_prefill(self, pages: Sequence[Sequence[int]], sequences: Sequence[Sequence[int]]) -> Microbatch:
        """Returns a microbatch of whole sequences in these pages, and sets up the cache for it."""
        microbatch = prefill_microbatch(sequences, self.device)
        self.paged_cache.begin_prefill(microbatch.packing, pages)
        return microbatch

    def _remove_finished(self, running: RunningCompletion) -> None:
        """See `Scheduler`."""
        if self.routing_record is not None and running.state.error is None:
            self.routing_record.copy_to(running.state, running.pages)
        super()._remove_finished(running)
