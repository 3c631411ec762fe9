"""Allocation of cache pages on the host: `PagePool` is for a `PagedCache`, `RowAllocator` for a `RowCache`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from postlude.generate.completion_state import CompletionState
from postlude.generate.decode_cache import PageCopy
from postlude.generate.row_cache import RowCache
from postlude.ops.paged_attention import PAGE_SIZE

MARGIN = 32  # tokens that must still fit when a completion joins or a row grows


@dataclass(eq=False)
class RunningCompletion:
    """A completion with its row and its pages."""

    state: CompletionState
    row: int
    pages: list[int]
    scheduled_length: int
    """Its number of tokens, including the prompt and the most tokens that unread steps can have sampled."""
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

    @abstractmethod
    def fits_alone(self, completion: CompletionState) -> bool:
        """Whether the completion fits when it runs alone."""

    def add(self, completions: Sequence[CompletionState], total: int) -> None:  # noqa: B027 - not all have to
        """Adds completions that will need room. `total` completions then run or wait."""

    @abstractmethod
    def has_room(self, completion: CompletionState, running: Sequence[RunningCompletion]) -> bool:
        """Whether the completion can join the running ones now, with `MARGIN` tokens to spare."""

    @abstractmethod
    def allocate(self, row: int, tokens: int) -> list[int]:
        """Allocates pages for a sequence of `tokens` tokens in this row."""

    @abstractmethod
    def share(self, pages: Sequence[int], row: int, tokens: int) -> tuple[list[int], list[PageCopy]]:
        """Returns pages for another sequence with the same first `tokens` tokens, and the copies that they need."""

    def release(self, pages: Sequence[int]) -> None:  # noqa: B027 - not all have to
        """Drops one reference to each of these pages."""

    @abstractmethod
    def extend(self, running: Sequence[RunningCompletion]) -> list[RunningCompletion] | None:
        """Allocates room for the newest token of each. Returns those with new pages; None if there is too little."""


class PagePool(PageAllocator):
    """Allocates pages of `PAGE_SIZE` tokens: it has the free ones, and the number of references to each of the others.

    Each row has room for its newest token and `drafts_per_row` drafts, and at most `pages_per_row` pages.
    """

    shares_pages = True

    def __init__(self, count: int, pages_per_row: int, *, drafts_per_row: int = 0) -> None:
        self.pages_per_row = pages_per_row
        self.drafts_per_row = drafts_per_row
        self.free = list(range(count - 1, -1, -1))
        self._reference_counts = [0] * count

    def fits_alone(self, completion: CompletionState) -> bool:
        """See `PageAllocator`."""
        return pages_for(completion.max_length) <= self.pages_per_row

    def has_room(self, completion: CompletionState, running: Sequence[RunningCompletion]) -> bool:
        """See `PageAllocator`. Includes a copy of the last page of its prompt."""
        return pages_for(min(completion.length + 1 + MARGIN, completion.max_length)) + 1 <= len(self.free)

    def allocate(self, row: int, tokens: int) -> list[int]:
        """See `PageAllocator`."""
        return self._allocate(pages_for(tokens))

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
                self.free.append(page)

    def extend(self, running: Sequence[RunningCompletion]) -> list[RunningCompletion] | None:
        """See `PageAllocator`."""
        growing = [
            completion
            for completion in running
            if len(completion.pages) * PAGE_SIZE
            < min(completion.scheduled_length + self.drafts_per_row, completion.state.max_length)
        ]
        if len(growing) > len(self.free):
            return None
        for completion in growing:
            completion.pages += self._allocate(1)
        return growing

    def _allocate(self, count: int) -> list[int]:
        pages = [self.free.pop() for _ in range(count)]
        self._add_reference(pages)
        return pages

    def _add_reference(self, pages: Sequence[int]) -> None:
        for page in pages:
            self._reference_counts[page] += 1


class RowAllocator(PageAllocator):
    """Allocates the pages of a `RowCache`, one per row. All have `capacity` tokens, which grows with the longest one.

    The cache holds rows · capacity ≤ `cache_tokens` tokens. Each row has room for its newest token and
    `drafts_per_row` drafts.
    """

    shares_pages = False

    def __init__(self, cache: RowCache, cache_tokens: int, max_sequences: int, *, drafts_per_row: int = 0) -> None:
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

    def allocate(self, row: int, tokens: int) -> list[int]:
        """See `PageAllocator`."""
        self._needed = max(self._needed, tokens)
        return [row]

    def share(self, pages: Sequence[int], row: int, tokens: int) -> tuple[list[int], list[PageCopy]]:
        """See `PageAllocator`."""
        return self.allocate(row, tokens + 1), [(page, row, tokens) for page in pages if page != row]

    def extend(self, running: Sequence[RunningCompletion]) -> list[RunningCompletion] | None:
        """See `PageAllocator`."""
        self._needed = max((completion.scheduled_length for completion in running), default=0)
        return None if self._capacity_for(len(running), self._needed) is None else []

    def resize_cache(self, running: Sequence[RunningCompletion]) -> None:
        """Resizes the cache, for waiting completions too. Running completions are in the first rows."""
        capacity = self._capacity_for(len(running), self._needed)
        assert capacity is not None
        self.capacity = capacity
        self.cache.resize(min(self._rows, self.cache_tokens // capacity), capacity)

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
