"""GraphScheduler: decode steps that a GPU replays as CUDA graphs, before the host has read their tokens.

The device samples tokens and detects stop tokens and the length limit. The host reads the tokens up to
`max_unread_steps` later, and acts only when completions end, join or need another page. It finds a stop string late,
and then drops the tokens that were sampled after it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from postlude.generate.adapters import NamedAdapters
from postlude.generate.completion_state import CompletionState, max_stops
from postlude.generate.cuda_graphs import DecodeGraphs, DecodeStep, addresses, bucket
from postlude.generate.decode_rows import DecodeRows
from postlude.generate.draft import TOKENS_PER_STEP
from postlude.generate.model_step import ModelStep
from postlude.generate.paged_cache import PagedCache
from postlude.generate.pages import PagePool, RunningCompletion, pages_for
from postlude.generate.scheduler import Scheduler
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
    def of(completions: Sequence[CompletionState], cache_tokens: int, max_sequences: int) -> DecodeCapacity:
        """Returns the capacity for these completions, in a cache of about `cache_tokens` tokens."""
        lengths = [completion.max_length for completion in completions]
        pages_per_row, total = pages_for(max(lengths)), sum(pages_for(length) + 1 for length in lengths)
        # A single completion always fits, with a copy of its prompt's last page.
        return DecodeCapacity(
            rows=bucket(min(len(completions), max_sequences)),
            pages=max(pages_per_row + 1, min(cache_tokens // PAGE_SIZE, total)),
            pages_per_row=pages_per_row,
            stops=max_stops(completions),
        )

    @staticmethod
    def for_session(
        completions: Sequence[CompletionState], cache_tokens: int, rows: int, max_length: int
    ) -> DecodeCapacity:
        """Returns the capacity for so many of these and later completions, each of at most `max_length` tokens."""
        pages_per_row = pages_for(max_length)
        pages = min(pages_for(cache_tokens), rows * (pages_per_row + 1)) + 1
        return DecodeCapacity(bucket(rows), pages, pages_per_row, max_stops(completions))


@dataclass(frozen=True)
class GraphBuffers:
    """The rows, pages and CUDA graphs of a model, which are kept from one call of `generate` to the next."""

    model_step: ModelStep
    cache: PagedCache
    pool: PagePool
    graphs: DecodeGraphs
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
        keep_prefixes: bool = False,
    ) -> GraphBuffers:
        """Returns buffers of this capacity. Fuses the weights of projections with the same input."""
        for layers in (layers for block in model.blocks for layers in block.fused_projections()):
            fuse_weights(layers)
        tokens_per_step = TOKENS_PER_STEP if draft else 1
        rows = DecodeRows(capacity.rows, capacity.stops, device, tokens_per_step)
        cache = PagedCache(capacity.pages, capacity.rows, capacity.pages_per_row, device, fp8=fp8_kv)
        pool = PagePool(
            capacity.pages, capacity.pages_per_row, drafts_per_row=tokens_per_step - 1, keep_prefixes=keep_prefixes
        )
        model_step = ModelStep(model, rows, cache, draft=draft, record_routing=record_routing)
        graphs = DecodeGraphs(model_step, cache, adapters)
        return GraphBuffers(model_step, cache, pool, graphs, capacity, addresses(model))

    @property
    def is_small(self) -> bool:
        """Whether the cache is small: see `is_small`."""
        return is_small(self.cache.size_in_bytes, self.cache.device)

    def fit(self, capacity: DecodeCapacity, *, draft: bool, record_routing: bool) -> bool:
        """Whether they have this capacity, and the weights are still at the addresses that the graphs read.

        `draft`, `record_routing`: whether they must draft, or record the experts of tokens, or must not.
        """
        have = self.capacity
        return (
            draft == (self.model_step.drafter is not None)
            and record_routing == (self.model_step.routing_record is not None)
            and have.rows >= capacity.rows
            and have.pages >= capacity.pages
            and have.pages_per_row >= capacity.pages_per_row
            and have.stops >= capacity.stops
            and self.weight_addresses == addresses(self.model_step.model)
        )


def is_small(size_in_bytes: int, device: torch.device) -> bool:
    """Whether that is at most `SMALL_FRACTION` of the device's memory."""
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
    else:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return size_in_bytes <= SMALL_FRACTION * total


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
        buffers.pool.reset()
        super().__init__(
            buffers.model_step,
            buffers.pool,
            max_sequences=max_sequences,
            max_prefill_tokens=max_prefill_tokens,
        )
        self.paged_cache, self.graphs = buffers.cache, buffers.graphs
        # The next content of the cache's table.
        self.table = torch.zeros(self.paged_cache.table.shape, dtype=torch.int32)
        self.changed_pages: dict[int, list[int]] = {}  # by row, of completions that joined, moved or grew
        self.rows_changed = False  # by completions that joined, left or moved
        self.tile_shape: TileShape | None = None  # of the tiles of rows that share pages; None if no pages are shared
        self.add(completions)

    def _advance(self) -> None:
        """See `Scheduler`."""
        while self._may_join():
            self._join()
        if any(running.unfinished for running in self.running):
            self._decode()

    def _decode(self) -> None:
        """Samples a token of every running completion, or two."""
        if any(running.state.grammar is not None for running in self.running):
            while self.unread_results:  # what a grammar allows depends on the newest token
                self._read_results()
            if not self.running:
                return
        self._make_room()
        self._idle_ended_rows()
        size = bucket(len(self.running))
        self._compact(size)
        self._send_table()
        self._constrain(self.running)
        has_rules, has_masks = self._has_rules(self.running), self._has_masks(self.running)
        self.graphs(DecodeStep(size, self.filtered, has_rules, has_masks, self.tile_shape))
        self._send_decoded(self.running)

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
            pinned = self.table.pin_memory() if self.paged_cache.table.is_cuda else self.table
            self.paged_cache.table.copy_(pinned, non_blocking=True)
        if self.rows_changed:
            self._send_shared_pages()
            self.rows_changed = False

    def _send_shared_pages(self) -> None:
        """Copies to the device which rows share their first pages, if reading these together saves enough."""
        tiles = shared_tiles({running.row: running.pages for running in self.running})
        self.tile_shape = None
        if sum(tile.saved for tile in tiles) >= self.min_saved_pages:
            shared = SharedPages.of(self.rows.size, tiles)
            self.paged_cache.shared.copy_(shared)
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
        logits = torch.empty(0, device=self.device)
        if joining.sequences:
            logits = self.model_step(0, joining.sequences)
        self._start_and_sample(joining, logits)
