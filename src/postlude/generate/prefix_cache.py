"""PrefixCache: a radix tree of the pages of earlier sequences, for later sequences that begin with the same tokens."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Page = TypeVar("Page", bound=Hashable)
Children = dict[tuple[int, ...], "_Node[Page]"]


@dataclass(eq=False)
class PrefixRoot(Generic[Page]):
    """The sequences of one adapter, or of the model without one, with the same weights."""

    adapter: str | None
    children: Children[Page] = field(default_factory=dict)


@dataclass(eq=False)
class _Node(Generic[Page]):
    """A full page, whose keys and values depend on the tokens of all nodes above it."""

    page: Page
    tokens: tuple[int, ...]
    parent: PrefixRoot[Page] | _Node[Page]
    children: Children[Page] = field(default_factory=dict)


class PrefixCache(Generic[Page]):
    """The pages of earlier sequences by their tokens, `page_size` each. The least recently used are evicted first.

    What a page holds may depend on the `lookahead` tokens after it too. Pages belong to the adapter and the weights
    that they were computed with: `forget` drops them when those change.
    """

    def __init__(self, page_size: int, *, lookahead: int = 0) -> None:
        self.page_size = page_size
        self.lookahead = lookahead
        self._roots: dict[str | None, PrefixRoot[Page]] = {}
        self._nodes: OrderedDict[Page, _Node[Page]] = OrderedDict()  # least recently used first

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, page: Page) -> bool:
        return page in self._nodes

    def __iter__(self) -> Iterator[Page]:
        return iter(self._nodes)

    def root(self, adapter: str | None) -> PrefixRoot[Page]:
        """Returns the root of this adapter's sequences with the current weights."""
        return self._roots.setdefault(adapter, PrefixRoot(adapter))

    def find(self, root: PrefixRoot[Page], tokens: Sequence[int]) -> list[Page]:
        """Returns the pages of the longest beginning of `tokens` that is cached. It leaves at least one token out."""
        path: list[_Node[Page]] = []
        children = root.children
        for key in self._keys(tokens, len(tokens) - 1):
            if key not in children:
                break
            path.append(children[key])
            children = path[-1].children
        self._use(path)
        return [node.page for node in path]

    def add(self, root: PrefixRoot[Page], tokens: Sequence[int], page: Callable[[int], Page]) -> None:
        """Adds the full pages of `tokens` that are not cached yet: `page(index)` returns one of them.

        Does nothing if the weights or the adapter of `root` have changed.
        """
        if self._roots.get(root.adapter) is not root:
            return
        path: list[_Node[Page]] = []
        parent: PrefixRoot[Page] | _Node[Page] = root
        for index, key in enumerate(self._keys(tokens, len(tokens))):
            if key not in parent.children:
                node = _Node(page(index), key, parent)
                assert node.page not in self._nodes
                parent.children[key] = self._nodes[node.page] = node
            parent = parent.children[key]
            path.append(parent)
        self._use(path)

    def evict(self, unused: Callable[[Page], bool]) -> list[Page]:
        """Removes the least recently used page that is `unused`, and the pages of longer sequences. Returns them."""
        in_use: list[Page] = []
        for page, node in self._nodes.items():
            if unused(page):
                del node.parent.children[node.tokens]
                break
            in_use.append(page)
        else:
            raise ValueError(f"all {len(self)} cached pages are in use, so none can be evicted.")
        for used_page in in_use:  # so that the next search does not begin with them
            self._nodes.move_to_end(used_page)
        return self._remove([node])

    def forget(self, *adapters: str | None) -> list[Page]:
        """Removes and returns the pages of these adapters, whose weights have changed; without any, all pages."""
        roots = [self._roots.pop(adapter, None) for adapter in adapters or tuple(self._roots)]
        return self._remove([node for root in roots if root is not None for node in root.children.values()])

    def _keys(self, tokens: Sequence[int], limit: int) -> Iterator[tuple[int, ...]]:
        """Yields the tokens of each page within the first `limit`, with those that it depends on besides."""
        limit = min(limit, len(tokens) - self.lookahead)
        for end in range(self.page_size, limit + 1, self.page_size):
            yield tuple(tokens[end - self.page_size : end + self.lookahead])

    def _use(self, path: Sequence[_Node[Page]]) -> None:
        """Makes these the most recently used, a page before the one it continues."""
        for node in reversed(path):
            self._nodes.move_to_end(node.page)

    def _remove(self, nodes: list[_Node[Page]]) -> list[Page]:
        """Removes nodes, and all below them."""
        pages = []
        while nodes:
            node = nodes.pop()
            nodes += node.children.values()
            del self._nodes[node.page]
            pages.append(node.page)
        return pages
