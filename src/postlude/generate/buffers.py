"""DecodeBuffers: the rows, the cache and the decode steps that a scheduler works on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from postlude.generate.completion_state import CompletionState
from postlude.generate.cuda_graphs import DecodeSteps, addresses, bucket
from postlude.generate.decode_cache import DecodeCache
from postlude.generate.decode_rows import DecodeRows
from postlude.generate.paged_cache import PagedCache
from postlude.generate.pages import PagePool, Pages, RowPages, pages_for
from postlude.generate.row_cache import RowCache
from postlude.model import LanguageModel
from postlude.model.parallel import fuse_weights
from postlude.ops.paged_attention import PAGE_SIZE

AHEAD = 2  # recorded steps that run while the host reads the tokens of an earlier one
SMALL = 8  # a cache is small that takes at most one part in so many of the device's memory
STOPS = 8  # stop tokens of a completion for which there is room at least


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


def max_stops(completions: Sequence[CompletionState]) -> int:
    """Returns for how many stop tokens of a completion there is room."""
    return max([STOPS, *(len(completion.stop_tokens) for completion in completions)])


@dataclass(frozen=True)
class DecodeBuffers:
    """What a scheduler works on. Recorded buffers serve one call of generate after another."""

    model: LanguageModel
    rows: DecodeRows
    cache: DecodeCache
    steps: DecodeSteps
    ahead: int
    """How many steps the device may run ahead of the host. With 0 the host knows every token before the next step."""
    step_rows: Callable[[int], int]
    """How many rows a step of so many completions takes."""
    new_pages: Callable[[], Pages]
    capacity: DecodeCapacity | None = None
    weights: tuple[int, ...] = ()

    @staticmethod
    def recorded(model: LanguageModel, capacity: DecodeCapacity, device: torch.device) -> DecodeBuffers:
        """Returns buffers whose steps a GPU replays: fixed pages, and weights that are laid side by side."""
        for layers in (layers for block in model.blocks for layers in block.fused_projections()):
            fuse_weights(layers)
        rows = DecodeRows(capacity.rows, capacity.longest, capacity.stops, device)
        cache = PagedCache(capacity.pages, capacity.rows, device)
        steps = DecodeSteps(model, rows, cache, recorded=device.type == "cuda")

        def new_pages() -> PagePool:
            return PagePool(capacity.pages, capacity.longest)

        return DecodeBuffers(model, rows, cache, steps, AHEAD, bucket, new_pages, capacity, addresses(model))

    @staticmethod
    def unrecorded(
        model: LanguageModel,
        cache: RowCache,
        completions: Sequence[CompletionState],
        budget: int,
        max_sequences: int,
        *,
        drafted: int,
    ) -> DecodeBuffers:
        """Returns buffers for steps that the host launches one by one: a page a row, which grows."""
        tp = model.mesh.tp.size
        rows = DecodeRows(-(-max_sequences // tp) * tp, 0, max_stops(completions), cache.device)

        def new_pages() -> RowPages:
            return RowPages(cache, budget, max_sequences, drafted=drafted, multiple=tp)

        steps = DecodeSteps(model, rows, cache, recorded=False)
        return DecodeBuffers(model, rows, cache, steps, 0, int, new_pages)

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
        if have is None or self.weights != addresses(self.model):
            return False
        return (
            have.rows >= capacity.rows
            and have.pages >= capacity.pages
            and have.longest >= capacity.longest
            and have.stops >= capacity.stops
        )
