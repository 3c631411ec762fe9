"""PrefixCache: what it finds was added with the same tokens, adapter and weights, and was not evicted since."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from postlude.generate.prefix_cache import PrefixCache, PrefixRoot

ADAPTERS = (None, "a")
TOKENS = st.lists(st.integers(0, 1), max_size=9)


@dataclass(eq=False)
class Page:
    """A page that knows which tokens it depends on, of which adapter and weights."""

    adapter: str | None
    version: int
    tokens: tuple[int, ...]


class Caches(RuleBasedStateMachine):
    """A cache of pages of two tokens beside a list of its pages, the least recently used first."""

    @initialize(lookahead=st.integers(0, 1))
    def start(self, lookahead: int) -> None:
        self.cache: PrefixCache[Page] = PrefixCache(2, lookahead=lookahead)
        self.pages: list[Page] = []
        self.version = dict.fromkeys(ADAPTERS, 0)
        self.old_root: PrefixRoot[Page] | None = None

    def beginnings(self, adapter: str | None, tokens: list[int], limit: int) -> list[tuple[str | None, int, tuple]]:
        ends = range(2, min(limit, len(tokens) - self.cache.lookahead) + 1, 2)
        return [(adapter, self.version[adapter], tuple(tokens[: end + self.cache.lookahead])) for end in ends]

    def use(self, pages: list[Page]) -> None:
        for page in reversed(pages):
            self.pages.remove(page)
            self.pages.append(page)

    def cached(self) -> dict[tuple[str | None, int, tuple], Page]:
        return {(page.adapter, page.version, page.tokens): page for page in self.pages}

    @rule(adapter=st.sampled_from(ADAPTERS), tokens=TOKENS)
    def find(self, adapter: str | None, tokens: list[int]) -> None:
        cached, expected = self.cached(), []
        for beginning in self.beginnings(adapter, tokens, len(tokens) - 1):
            if beginning not in cached:
                break
            expected.append(cached[beginning])
        assert self.cache.find(self.cache.root(adapter), tokens) == expected
        self.use(expected)

    @rule(adapter=st.sampled_from(ADAPTERS), tokens=TOKENS)
    def add(self, adapter: str | None, tokens: list[int]) -> None:
        beginnings = self.beginnings(adapter, tokens, len(tokens))

        def make(index: int) -> Page:
            self.pages.append(Page(*beginnings[index]))
            return self.pages[-1]

        self.cache.add(self.cache.root(adapter), tokens, make)
        cached = self.cached()
        self.use([cached[beginning] for beginning in beginnings])

    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        in_use = [page for page in self.pages if data.draw(st.booleans())]
        if len(in_use) == len(self.pages):
            with pytest.raises(ValueError, match="are in use"):
                self.cache.evict(lambda page: page not in in_use)
            return
        skipped = self.pages[: next(place for place, page in enumerate(self.pages) if page not in in_use)]
        oldest = self.pages[len(skipped)]
        evicted = self.cache.evict(lambda page: page not in in_use)
        longer = [
            page
            for page in self.pages
            if (page.adapter, page.version) == (oldest.adapter, oldest.version)
            and page.tokens[: len(oldest.tokens)] == oldest.tokens
        ]
        assert set(evicted) == set(longer)
        self.pages = [page for page in [*self.pages[len(skipped) :], *skipped] if page not in evicted]

    @rule(adapters=st.sets(st.sampled_from(ADAPTERS)))
    def change_weights(self, adapters: set[str | None]) -> None:
        self.old_root = self.cache.root(min(adapters or {None}, key=str))
        forgotten = self.cache.forget(*adapters)
        changed = adapters or set(ADAPTERS)
        assert set(forgotten) == {page for page in self.pages if page.adapter in changed}
        self.pages = [page for page in self.pages if page.adapter not in changed]
        for adapter in changed:
            self.version[adapter] += 1

    @rule(tokens=TOKENS)
    def add_with_old_weights(self, tokens: list[int]) -> None:
        if self.old_root is not None:
            self.cache.add(self.old_root, tokens, lambda index: Page("old", 0, ()))

    @invariant()
    def holds_the_same_pages(self) -> None:
        assert list(self.cache) == self.pages


Caches.TestCase.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
TestCaches = Caches.TestCase


@given(tokens=st.lists(st.integers(0, 9), max_size=20), lookahead=st.integers(0, 1))
def test_a_sequence_finds_itself_but_for_its_last_token(tokens: list[int], lookahead: int) -> None:
    cache: PrefixCache[int] = PrefixCache(4, lookahead=lookahead)
    cache.add(cache.root(None), tokens, lambda index: index)
    assert cache.find(cache.root(None), tokens) == list(range(max(len(tokens) - 1, 0) // 4))
    assert cache.find(cache.root("adapter"), tokens) == []
