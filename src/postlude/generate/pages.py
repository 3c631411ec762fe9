"""Allocation of cache pages on the host: `PagePool` is for a `PagedCache`, `RowAllocator` for a `RowCache`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic

from postlude.generate.completion_state import CompletionState
from postlude.generate.decode_cache import PageCopy
from postlude.generate.prefix_cache import Page, PrefixCache, PrefixRoot
from postlude.generate.row_cache import RowCache
from postlude.model.context import Stores
from postlude.ops.paged_attention import PAGE_SIZE

MARGIN = 32  # tokens that must still fit when a completion joins or a row grows
ROW_PAGE_SIZE = 16  # tokens of a page that is copied from a row, on a CPU


@dataclass(eq=False)
class CachedPrefix(Generic[Page]):
    """The first `length` tokens of a sequence, which are in pages of earlier ones."""

    root: PrefixRoot[Page] | None = None
    """Where the sequence's own pages can be added; None without a `PrefixCache`."""
    pages: list[Page] = field(default_factory=list)
    length: int = 0


@dataclass(frozen=True, eq=False)
class SavedPage:
    """A copy of some tokens of a row, by block: see `RowCache.save`."""

    stores: Mapping[str, Stores]

    @property
    def size_in_bytes(self) -> int:
        """The size of all copies."""
        return sum(store.nbytes for stores in self.stores.values() for store in stores)


@dataclass(eq=False)
class RunningCompletion:
    """A completion with its row and its pages."""

    state: CompletionState
    row: int
    pages: list[int]
    scheduled_length: int
    """Its number of tokens, including the prompt and the most tokens that unread steps can have sampled."""
    root: PrefixRoot[Any] | None = None
    """See `CachedPrefix`."""
    removed: bool = False
    """Whether it no longer runs."""

    @property
    def unfinished(self) -> bool:
        """Whether it may get more tokens than those that are being sampled."""
        return self.scheduled_length < self.state.max_length


class PageAllocator(ABC):
    """Allocates pages of a cache to the completions of a scheduler."""

    shares_pages: bool
    """Whether a prompt keeps its pages for its later completions; else the cache keeps copies (`DecodeCache.save`)."""
    prefixes: PrefixCache[Any] | None
    """Pages of earlier sequences. They take only the memory that is free: running completions come first."""

    def find_prefix(self, adapter: str | None, tokens: Sequence[int]) -> CachedPrefix[Any]:
        """Returns the beginning of `tokens` that earlier sequences of this adapter left in the cache."""
        if self.prefixes is None:
            return CachedPrefix()
        root = self.prefixes.root(adapter)
        pages = self.prefixes.find(root, tokens)
        return CachedPrefix(root, pages, len(pages) * self.prefixes.page_size)

    @abstractmethod
    def add_prefix(self, root: PrefixRoot[Any], tokens: Sequence[int], pages: Sequence[int]) -> None:
        """Keeps `tokens`, whose keys and values are in `pages`, for sequences that begin with them."""

    @abstractmethod
    def fits_alone(self, completion: CompletionState) -> bool:
        """Whether the completion fits when it runs alone."""

    def add(self, completions: Sequence[CompletionState], total: int) -> None:  # noqa: B027 - not all have to
        """Adds completions that will need room. `total` completions then run or wait."""

    @abstractmethod
    def has_room(self, completion: CompletionState, running: Sequence[RunningCompletion]) -> bool:
        """Whether the completion can join the running ones now, with `MARGIN` tokens to spare."""

    @abstractmethod
    def allocate(self, row: int, tokens: int, prefix: CachedPrefix[Any] | None = None) -> list[int]:
        """Allocates pages for a sequence of `tokens` tokens in this row, which begins with `prefix`."""

    @abstractmethod
    def share(self, pages: Sequence[int], row: int, tokens: int) -> tuple[list[int], list[PageCopy]]:
        """Returns pages for another sequence with the same first `tokens` tokens, and the copies that they need."""

    def release(self, pages: Sequence[int]) -> None:  # noqa: B027 - not all have to
        """Drops one reference to each of these pages."""

    @abstractmethod
    def used_tokens(self, running: Sequence[RunningCompletion]) -> int:
        """Returns how many tokens of the cache are in use. Any thread may ask."""

    @abstractmethod
    def extend(self, running: Sequence[RunningCompletion]) -> list[RunningCompletion] | None:
        """Allocates room for the newest token of each. Returns those with new pages; None if there is too little."""


class PagePool(PageAllocator):
    """Allocates pages of `PAGE_SIZE` tokens, and counts the references of completions and prompts to each.

    Each row has room for its newest token and `drafts_per_row` drafts, and at most `pages_per_row` pages. Pages without
    references are free, or with `keep_prefixes` in the prefix cache, which gives them up when free ones are short.
    """

    shares_pages = True

    def __init__(self, count: int, pages_per_row: int, *, drafts_per_row: int = 0, keep_prefixes: bool = False) -> None:
        self.pages_per_row = pages_per_row
        self.drafts_per_row = drafts_per_row
        self.prefixes: PrefixCache[int] | None = None
        if keep_prefixes:
            self.prefixes = PrefixCache(PAGE_SIZE, lookahead=drafts_per_row)
        self._reference_counts = [0] * count
        self.reset()

    def reset(self) -> None:
        """Drops the references of completions and prompts that ended without `release`."""
        count = len(self._reference_counts)
        self._reference_counts = [0] * count
        self._used = 0  # pages with references
        self._free = [page for page in range(count - 1, -1, -1) if self.prefixes is None or page not in self.prefixes]

    @property
    def available(self) -> int:
        """The number of pages that can be allocated."""
        return len(self._reference_counts) - self._used

    def forget_prefixes(self, *adapters: str | None) -> None:
        """Forgets the sequences of these adapters, whose weights have changed; without any, all."""
        if self.prefixes is not None:
            self._free += [page for page in self.prefixes.forget(*adapters) if not self._reference_counts[page]]

    def add_prefix(self, root: PrefixRoot[int], tokens: Sequence[int], pages: Sequence[int]) -> None:
        """See `PageAllocator`."""
        if self.prefixes is not None:
            self.prefixes.add(root, tokens, pages.__getitem__)

    def fits_alone(self, completion: CompletionState) -> bool:
        """See `PageAllocator`."""
        return pages_for(completion.max_length) <= self.pages_per_row

    def has_room(self, completion: CompletionState, running: Sequence[RunningCompletion]) -> bool:
        """See `PageAllocator`. Includes a copy of the last page of its prompt."""
        return pages_for(min(completion.length + 1 + MARGIN, completion.max_length)) + 1 <= self.available

    def allocate(self, row: int, tokens: int, prefix: CachedPrefix[int] | None = None) -> list[int]:
        """See `PageAllocator`."""
        shared = [] if prefix is None else prefix.pages
        self._add_reference(shared)
        return [*shared, *self._allocate(pages_for(tokens) - len(shared))]

    def share(self, pages: Sequence[int], row: int, tokens: int) -> tuple[list[int], list[PageCopy]]:
        """See `PageAllocator`. Full pages are shared, since they are never written again; the last one is copied.

        A drafter's key at the last token of a prompt depends on the token after it, so that page is not shared.
        """
        shared = pages[: (tokens - self.drafts_per_row) // PAGE_SIZE]
        self._add_reference(shared)
        new = self._allocate(pages_for(tokens + 1) - len(shared))
        not_shared = tokens - len(shared) * PAGE_SIZE  # tokens of the prompt in other pages: one page at most
        return [*shared, *new], [(pages[len(shared)], new[0], not_shared)] if not_shared else []

    def release(self, pages: Sequence[int]) -> None:
        """See `PageAllocator`."""
        for page in pages:
            self._reference_counts[page] -= 1
            if not self._reference_counts[page]:
                self._used -= 1
                if self.prefixes is None or page not in self.prefixes:
                    self._free.append(page)

    def used_tokens(self, running: Sequence[RunningCompletion]) -> int:
        """See `PageAllocator`."""
        return self._used * PAGE_SIZE

    def extend(self, running: Sequence[RunningCompletion]) -> list[RunningCompletion] | None:
        """See `PageAllocator`."""
        growing = [
            completion
            for completion in running
            if len(completion.pages) * PAGE_SIZE
            < min(completion.scheduled_length + self.drafts_per_row, completion.state.max_length)
        ]
        if len(growing) > self.available:
            return None
        for completion in growing:
            completion.pages += self._allocate(1)
        return growing

    def _allocate(self, count: int) -> list[int]:
        while len(self._free) < count:
            assert self.prefixes is not None  # the caller has looked at `available`
            evicted = self.prefixes.evict(lambda page: not self._reference_counts[page])
            self._free += [page for page in evicted if not self._reference_counts[page]]
        pages = [self._free.pop() for _ in range(count)]
        self._add_reference(pages)
        return pages

    def _add_reference(self, pages: Sequence[int]) -> None:
        for page in pages:
            self._used += not self._reference_counts[page]
            self._reference_counts[page] += 1


class RowAllocator(PageAllocator):
    """Allocates the pages of a `RowCache`, one per row. All have `capacity` tokens, which grows with the longest one.

    The cache holds rows · capacity ≤ `cache_tokens` tokens, and `prefixes` copies of at most the others. Each row has
    room for its newest token and `drafts_per_row` drafts.
    """

    shares_pages = False

    def __init__(
        self,
        cache: RowCache,
        cache_tokens: int,
        max_sequences: int,
        *,
        drafts_per_row: int = 0,
        prefixes: PrefixCache[SavedPage] | None = None,
    ) -> None:
        self.prefixes = prefixes
        self.cache = cache
        self.cache_tokens = cache_tokens
        self.drafts_per_row = drafts_per_row
        self.capacity = 0
        self.max_length = 0  # the largest one of any completion
        self._max_sequences = max_sequences
        self._rows = 0  # to allocate, up to max_sequences
        self._needed = 0  # tokens of the longest running sequence

    def fits_alone(self, completion: CompletionState) -> bool:
        """See `PageAllocator`."""
        return completion.max_length <= self.cache_tokens

    def add(self, completions: Sequence[CompletionState], total: int) -> None:
        """See `PageAllocator`."""
        self.max_length = max(self.max_length, *(completion.max_length for completion in completions), 0)
        if total > self._rows:  # at least doubled, since adding rows copies the cache
            self._rows = min(self._max_sequences, max(total, 2 * self._rows))

    def has_room(self, completion: CompletionState, running: Sequence[RunningCompletion]) -> bool:
        """See `PageAllocator`."""
        needed = max(self._needed if running else 0, completion.length + 1)
        return self._capacity_for(len(running) + 1, needed) is not None

    def allocate(self, row: int, tokens: int, prefix: CachedPrefix[SavedPage] | None = None) -> list[int]:
        """See `PageAllocator`."""
        self._needed = max(self._needed, tokens)
        return [row]

    def add_prefix(self, root: PrefixRoot[SavedPage], tokens: Sequence[int], pages: Sequence[int]) -> None:
        """See `PageAllocator`."""
        if self.prefixes is None:
            return
        size, room = self.prefixes.page_size, self._room(self.cache.rows * self.cache.capacity)

        def save(index: int) -> SavedPage:
            return SavedPage(self.cache.save(pages, (index + 1) * size, index * size))

        self.prefixes.add(root, tokens[: room * size + self.prefixes.lookahead], save)
        self._evict(room)

    def _room(self, row_tokens: int) -> int:
        """Returns how many saved pages there is room for beside rows of `row_tokens` tokens together."""
        return 0 if self.prefixes is None else (self.cache_tokens - row_tokens) // self.prefixes.page_size

    def _evict(self, room: int) -> None:
        while self.prefixes is not None and len(self.prefixes) > room:
            self.prefixes.evict(lambda page: True)

    def share(self, pages: Sequence[int], row: int, tokens: int) -> tuple[list[int], list[PageCopy]]:
        """See `PageAllocator`."""
        return self.allocate(row, tokens + 1), [(page, row, tokens) for page in pages if page != row]

    def used_tokens(self, running: Sequence[RunningCompletion]) -> int:
        """See `PageAllocator`."""
        return sum(completion.state.length for completion in running)

    def extend(self, running: Sequence[RunningCompletion]) -> list[RunningCompletion] | None:
        """See `PageAllocator`."""
        self._needed = max((completion.scheduled_length for completion in running), default=0)
        return None if self._capacity_for(len(running), self._needed) is None else []

    def resize_cache(self, running: Sequence[RunningCompletion]) -> None:
        """Resizes the cache, for waiting completions too. Running completions are in the first rows."""
        capacity = self._capacity_for(len(running), self._needed)
        assert capacity is not None
        self.capacity = capacity
        rows = min(self._rows, self.cache_tokens // capacity)
        self._evict(self._room(rows * capacity))
        self.cache.resize(rows, capacity)

    def _capacity_for(self, rows: int, needed: int) -> int | None:
        """Returns the capacity of a row if `rows` rows of at least `needed` tokens and drafts fit, else None."""
        if rows > self._rows:
            return None
        rows, needed = max(rows, 1), min(needed + self.drafts_per_row, self.max_length)
        if needed <= self.capacity and rows * self.capacity <= self.cache_tokens:
            return self.capacity
        available = self.cache_tokens // rows  # tokens of each row
        if available < min(needed + MARGIN, self.max_length):
            return None
        return min(max(needed + MARGIN, needed * 5 // 4), available, self.max_length)


def pages_for(tokens: int) -> int:
    """Returns the number of pages of `PAGE_SIZE` for `tokens` tokens."""
    return -(-tokens // PAGE_SIZE)
