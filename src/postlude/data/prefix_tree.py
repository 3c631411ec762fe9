"""Sequences that begin alike: how many tokens neighbours share, and the segments that they divide into.

A segment is a run of tokens that the same sequences share. Segments form trees: the path from a root to a segment is
the beginning of every sequence through it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True)
class PrefixOrder:
    """Sequences in an order in which those that begin alike are neighbours."""

    order: tuple[int, ...]
    """The indices of the sequences."""
    common: tuple[int, ...]
    """How many tokens each sequence of `order` shares with the one before it; 0 for the first."""

    @classmethod
    def of(cls, sequences: Sequence[Any], routing: Any = None, *, minimum: int = 1) -> PrefixOrder:
        """Returns the order of sequences, each [length] integers.

        Tokens are shared only with equal `routing` [length, routers, top_k], if given. Fewer than `minimum` common
        tokens count as none.
        """
        keys = [_as_array(sequence)[:, None] for sequence in sequences]
        if routing is not None:
            keys = [
                np.concatenate((key, _as_array(experts)[: len(key)].reshape(len(key), -1)), axis=1)
                for key, experts in zip(keys, routing, strict=True)
            ]
        # Big-endian bytes compare as the numbers do, if none is negative.
        encoded = [(key + 1).astype(">u8").tobytes() for key in keys]
        order = sorted(range(len(keys)), key=encoded.__getitem__)
        common = [0] * len(order)
        for place in range(1, len(order)):
            shared = _common_rows(keys[order[place - 1]], keys[order[place]])
            common[place] = shared if shared >= minimum else 0
        return cls(tuple(order), tuple(common))

    @classmethod
    def unshared(cls, indices: Sequence[int]) -> PrefixOrder:
        """Returns the order of sequences of which no token is computed for several."""
        return cls(tuple(indices), (0,) * len(indices))

    def among(self, members: Sequence[int]) -> PrefixOrder:
        if not members:
            return PrefixOrder((), ())
        places = np.sort([self._places[member] for member in members])
        # Members share the least that two neighbours between them share.
        common = np.minimum.reduceat(self._common[: places[-1] + 1], places[:-1] + 1) if len(places) > 1 else ()
        return PrefixOrder(tuple(self.order[place] for place in places), (0, *map(int, common)))

    @cached_property
    def _places(self) -> dict[int, int]:
        return {index: place for place, index in enumerate(self.order)}

    @cached_property
    def _common(self) -> NDArray[np.int64]:
        return np.array(self.common, dtype=np.int64)

    def renumbered(self, members: Sequence[int]) -> PrefixOrder:
        """Returns the order of some of the sequences, each by its index in `members`."""
        among, index_of = self.among(members), {member: index for index, member in enumerate(members)}
        return PrefixOrder(tuple(index_of[index] for index in among.order), among.common)

    def computed_tokens(self, lengths: Sequence[int]) -> int:
        """Returns the number of tokens of these sequences, shared ones counted once."""
        return sum(lengths[index] for index in self.order) - sum(self.common)

    @property
    def shares(self) -> bool:
        return any(self.common)


@dataclass(frozen=True)
class SegmentTree:
    """The segments of the sequences of one microbatch, depth first: parents before children."""

    parents: tuple[int, ...]
    """By segment, the one before it in its sequences, or -1."""
    starts: tuple[int, ...]
    """By segment, the position of its first token in its sequences."""
    lengths: tuple[int, ...]
    """By segment, the number of its tokens, at least 1."""
    holders: tuple[int, ...]
    """By segment, the place of one of its sequences in the microbatch."""
    last_segments: tuple[int, ...]
    """By sequence of the microbatch, its last segment."""

    @classmethod
    def of(cls, order: PrefixOrder, members: Sequence[int], lengths: Sequence[int]) -> SegmentTree | None:
        """Returns the tree of a microbatch with the sequences `members`, or None if they share nothing."""
        among = order.among(members)
        if not among.shares:
            return None
        place_of = {member: place for place, member in enumerate(members)}
        places, common = [place_of[index] for index in among.order], np.array(among.common)
        ends = [lengths[index] for index in among.order]
        segments: list[tuple[int, int, int, int]] = []  # parent, start, length, holder
        last_segments = [-1] * len(members)
        pending = [(0, len(places), 0, -1)]  # sequences [first, stop) that share `depth` tokens, and their segment
        while pending:
            first, stop, depth, parent = pending.pop()
            reach = ends[first] if stop - first == 1 else min(int(common[first + 1 : stop].min()), ends[first])
            if reach > depth:
                segments.append((parent, depth, reach - depth, places[first]))
                parent = len(segments) - 1
            if stop - first == 1:
                last_segments[places[first]] = parent
                continue
            cuts = [first, *(first + 1 + np.flatnonzero(common[first + 1 : stop] == reach)).tolist(), stop]
            for begin, end in reversed(list(pairwise(cuts))):
                pending.append((begin, end, reach, parent))
        parents, starts, sizes, holders = (tuple(values) for values in zip(*segments, strict=True))
        return cls(parents, starts, sizes, holders, tuple(last_segments))

    @cached_property
    def paths(self) -> tuple[tuple[int, ...], ...]:
        """By sequence of the microbatch, its segments in order."""
        paths = []
        for last in self.last_segments:
            path, segment = [], last
            while segment >= 0:
                path.append(segment)
                segment = self.parents[segment]
            paths.append(tuple(reversed(path)))
        return tuple(paths)

    @cached_property
    def multiplicities(self) -> tuple[int, ...]:
        """By segment, the number of sequences that share it."""
        counts = [0] * len(self.parents)
        for path in self.paths:
            for segment in path:
                counts[segment] += 1
        return tuple(counts)


def _as_array(values: Any) -> NDArray[np.int64]:
    return np.asarray(values.cpu() if isinstance(values, Tensor) else values, dtype=np.int64)


def _common_rows(first: NDArray[np.int64], second: NDArray[np.int64]) -> int:
    size = min(len(first), len(second))
    different = (first[:size] != second[:size]).any(1)
    return int(different.argmax()) if different.any() else size
