"""Assigns sequences to microbatches, and microbatches to ranks, by lengths, groups, owners and shared prefixes."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heapify, heappop, heappush
from itertools import accumulate
from typing import Any

import numpy as np

from postlude.data.prefix_tree import PrefixOrder, SegmentTree
from postlude.options import SharePrefixes

# The length at which causal attention costs as much as the linear layers. Per token, a decoder layer of width h spends
# 24·h² FLOPs in its linear layers and 2·h·length in attention: they are equal at length 12·h, here with h = 4096.
# Only the balance of the bins depends on it, never their number.
ATTENTION_PARITY_LENGTH = 12 * 4096
MIN_SHARED_TOKENS = 64  # a shorter common beginning costs more tables than it saves
MIN_SAVED_SHARE = 0.1  # of the batch's cost: below it, tables and copies of hidden states cost about what is saved


@dataclass(frozen=True)
class BinPlan:
    """The microbatches of a batch, equal on every rank."""

    lengths: Sequence[int]
    """The length of each sequence after truncation."""
    bins: Sequence[Sequence[int]]
    """The indices of the sequences of each microbatch. Data-parallel rank r of n runs bins r, r + n, r + 2n, …"""
    prefixes: PrefixOrder | None = None
    """The tokens that sequences share, if those are computed once."""

    @cached_property
    def starts(self) -> list[int]:
        """The index of each sequence's first token among all tokens, and the total."""
        return list(accumulate(self.lengths, initial=0))

    @property
    def tokens(self) -> int:
        return self.starts[-1]

    @property
    def shared_tokens(self) -> int:
        """The number of tokens that are not computed, since another sequence of their microbatch has them."""
        return 0 if self.prefixes is None else sum(sum(self.prefixes.among(members).common) for members in self.bins)

    def tree(self, bin_index: int) -> SegmentTree | None:
        """Returns the segments of a microbatch whose sequences share tokens."""
        if self.prefixes is None:
            return None
        return SegmentTree.of(self.prefixes, self.bins[bin_index], self.lengths)

    def members(self, bin_indices: Sequence[int]) -> list[int]:
        return [member for index in bin_indices for member in self.bins[index]]


def find_shared_prefixes(
    sequences: Sequence[Any], lengths: Sequence[int], share: SharePrefixes, routing: Any = None
) -> PrefixOrder | None:
    """Returns the order of a batch whose shared tokens are computed once, or None where no sharing pays."""
    if share == "off" or len(sequences) < 2:
        return None
    minimum = MIN_SHARED_TOKENS if share == "auto" else 1
    if sum(length >= minimum for length in lengths) < 2:
        return None
    if routing is not None and not _is_complete(routing, lengths):
        return None  # reading the batch refuses it in a sentence
    order = PrefixOrder.of(sequences, routing, minimum=minimum)
    least = MIN_SAVED_SHARE * sum(map(_cost, lengths)) if share == "auto" else 0
    return order if order.shares and sum(map(_cost, order.common)) >= least else None


def plan_sharded_bins(
    lengths: Sequence[int],
    owners: Sequence[int],
    ranks: int,
    budget: int,
    *,
    groups: Sequence[Hashable] | None = None,
    prefixes: PrefixOrder | None = None,
) -> list[list[int]]:
    """Plans bins where each sequence i runs on the data-parallel rank that holds it, `owners[i]`.

    Every rank gets as many bins as the rank that needs most. Bin k belongs to rank k % ranks.
    """
    _check_lengths(lengths, budget)
    if len(owners) != len(lengths):
        raise ValueError(f"there are {len(owners)} owners for {len(lengths)} sequences. Give one per sequence.")
    members_of: list[list[int]] = [[] for _ in range(ranks)]
    for index, owner in enumerate(owners):
        if not 0 <= owner < ranks:
            raise ValueError(
                f"sequence {index} is held by data-parallel rank {owner}, but there are ranks 0 to {ranks - 1}."
            )
        members_of[owner].append(index)
    for first, *others in () if groups is None else _members_by_group(groups, len(lengths)):
        for index in others:
            if owners[index] != owners[first]:
                raise ValueError(
                    f"sequence {index} of group {groups and groups[index]!r} is held by data-parallel rank "
                    f"{owners[index]}, but others of its group by rank {owners[first]}. Let one rank hold a whole "
                    "group."
                )

    def plan(members: list[int], count: int) -> list[list[int]]:
        """Returns a multiple of `count` bins. Sequences are joined as for one bin, so that no count needs more bins."""
        member_lengths = [lengths[member] for member in members]
        member_groups = None if groups is None else [groups[member] for member in members]
        member_prefixes = None if prefixes is None else prefixes.renumbered(members)
        units = _units(member_lengths, budget, 1, member_groups, member_prefixes)
        bins = _fill_bins(units, member_lengths, budget, count, member_prefixes)
        return [[members[index] for index in indices] for indices in bins]

    count = max(len(plan(members, 1)) for members in members_of)
    bins = [plan(members, count) or [[] for _ in range(count)] for members in members_of]
    return [bins[rank][index] for index in range(count) for rank in range(ranks)]


def plan_bins(
    lengths: Sequence[int],
    budget: int,
    *,
    multiple_of: int = 1,
    groups: Sequence[Hashable] | None = None,
    prefixes: PrefixOrder | None = None,
) -> list[list[int]]:
    """Divides sequences of these `lengths` into bins of at most `budget` tokens. Returns lists of ascending indices.

    The number of bins is the better of best-fit and first-fit decreasing, rounded up to `multiple_of`. The cost
    (linear layers plus attention) is then balanced over that many bins, as far as the budget allows. Bins come in
    descending cost, so that neighbours, which data-parallel ranks run at the same time, cost about the same. `groups`
    has one entry per sequence: sequences of the same group stay in one bin. Tokens that sequences of a bin share by
    `prefixes` count once, and sequences that share tokens stay in one bin as far as budget and balance allow.
    """
    if multiple_of < 1:
        raise ValueError(f"multiple_of is {multiple_of}, but the minimum is 1. Give a positive multiple_of.")
    _check_lengths(lengths, budget)
    return _fill_bins(_units(lengths, budget, multiple_of, groups, prefixes), lengths, budget, multiple_of, prefixes)


def _check_lengths(lengths: Sequence[int], budget: int) -> None:
    if budget < 1:
        raise ValueError(f"budget is {budget}, but the minimum is 1. Give a positive budget.")
    for index, length in enumerate(lengths):
        if length < 1:
            raise ValueError(f"sequence {index} has length {length}, but the minimum is 1. Leave out empty sequences.")
        if length > budget:
            raise ValueError(
                f"sequence {index} has {length} tokens, over the budget of {budget}. "
                f"Raise the budget to at least {length}, or pack with truncate=True."
            )


def _units(
    lengths: Sequence[int],
    budget: int,
    ranks: int,
    groups: Sequence[Hashable] | None,
    prefixes: PrefixOrder | None,
) -> list[list[int]]:
    """Returns the sequences that stay in one bin, of which each of `ranks` should get its part."""
    units = [[index] for index in range(len(lengths))] if groups is None else _members_by_group(groups, len(lengths))
    if prefixes is not None and units:
        units = _join_sharing(units, lengths, prefixes, budget, ranks)
    for unit in units:
        size, _ = _unit_size_and_cost(unit, lengths, prefixes)
        if size > budget:
            raise ValueError(
                f"sequences {', '.join(map(str, unit))} of group {groups and groups[unit[0]]!r} stay together and have "
                f"{size} tokens, over the budget of {budget}. Raise the budget to at least {size}, or shorten them."
            )
    return units


def _fill_bins(
    units: Sequence[Sequence[int]],
    lengths: Sequence[int],
    budget: int,
    multiple_of: int,
    prefixes: PrefixOrder | None,
) -> list[list[int]]:
    """Returns bins of whole units, in descending cost."""
    if not units:
        return []
    sizes, costs = zip(*(_unit_size_and_cost(unit, lengths, prefixes) for unit in units), strict=True)
    bins = fewest_bins(sizes, budget)
    bins += [[] for _ in range(-len(bins) % multiple_of)]
    bins = balance_bins(bins, sizes, costs, budget)
    bins.sort(key=lambda members: -sum(costs[unit] for unit in members))
    return [sorted(member for unit in members for member in units[unit]) for members in bins]


def _unit_size_and_cost(unit: Sequence[int], lengths: Sequence[int], prefixes: PrefixOrder | None) -> tuple[int, int]:
    """Returns the tokens that are computed for these sequences in one microbatch, and their relative cost."""
    if prefixes is None or len(unit) == 1:
        return sum(lengths[member] for member in unit), bin_cost(unit, lengths)
    among = prefixes.among(unit)
    return among.computed_tokens(lengths), bin_cost(unit, lengths) - sum(map(_cost, among.common))


def _join_sharing(
    units: list[list[int]], lengths: Sequence[int], prefixes: PrefixOrder, budget: int, ranks: int
) -> list[list[int]]:
    """Joins units whose sequences share tokens, up to a size that leaves each of `ranks` its part.

    Units are joined in the order of their first sequences, in which neighbours share most: a tree that is too large
    is divided where the least is computed twice, or nearly so.
    """
    unit_of = {member: number for number, unit in enumerate(units) for member in unit}
    largest = max(_unit_size_and_cost(unit, lengths, prefixes)[0] for unit in units)
    limit = min(budget, max(largest, -(-prefixes.computed_tokens(lengths) // ranks)))
    joined: list[list[int]] = []
    size, seen = 0, set()
    for member, common in zip(prefixes.order, prefixes.common, strict=True):
        number = unit_of[member]
        if number in seen:
            continue
        seen.add(number)
        unit_size, _ = _unit_size_and_cost(units[number], lengths, prefixes)
        if common and joined:
            both = [*joined[-1], *units[number]]
            both_size, _ = _unit_size_and_cost(both, lengths, prefixes)
            # The sequence that it shares tokens with may be in a unit before the last one.
            if both_size <= limit and both_size < size + unit_size:
                joined[-1], size = both, both_size
                continue
        joined.append(list(units[number]))
        size = unit_size
    return joined


def _members_by_group(groups: Sequence[Hashable], count: int) -> list[list[int]]:
    if len(groups) != count:
        raise ValueError(f"there are {len(groups)} groups for {count} sequences. Give one per sequence.")
    members: dict[Hashable, list[int]] = {}
    for index, group in enumerate(groups):
        members.setdefault(group, []).append(index)
    return list(members.values())


def bin_cost(members: Sequence[int], lengths: Sequence[int]) -> int:
    """Returns the relative cost of these sequences in one microbatch; an integer, so that ties are exact."""
    return sum(_cost(lengths[member]) for member in members)


def fewest_bins(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Returns the best-fit or the first-fit decreasing bins, whichever are fewer: neither is always better."""
    longest_first = _longest_first(lengths)
    bins = _best_fit(longest_first, lengths, budget)
    if len(bins) * budget - sum(lengths) < budget:  # no fewer bins could hold the tokens
        return bins
    return min(bins, _first_fit(longest_first, lengths, budget), key=len)


def balance_bins(bins: list[list[int]], sizes: Sequence[int], costs: Sequence[int], budget: int) -> list[list[int]]:
    """Returns the same number of bins with more equal costs, or `bins` if none fit the budget.

    The better division has the lower cost of the costliest bin; at a tie the second costliest decides, and so on.
    """

    def highest_first(division: list[list[int]]) -> list[int]:
        return sorted((sum(costs[member] for member in members) for members in division), reverse=True)

    balanced = _cheapest_fit(_longest_first(sizes), sizes, costs, budget, len(bins))
    return bins if balanced is None else min(bins, balanced, key=highest_first)


def _is_complete(routing: Any, lengths: Sequence[int]) -> bool:
    """Whether there are experts for every token, equally many."""
    shapes = [tuple(np.shape(experts)) for experts in routing]
    complete = all(len(shape) == 3 and shape[0] >= length for shape, length in zip(shapes, lengths, strict=False))
    return complete and len(shapes) == len(lengths) and len({shape[1:] for shape in shapes}) == 1


def _cost(length: int) -> int:
    return length * (ATTENTION_PARITY_LENGTH + length)


def _longest_first(lengths: Sequence[int]) -> list[int]:
    return sorted(range(len(lengths)), key=lambda index: -lengths[index])


def _best_fit(order: Sequence[int], lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Puts each sequence in the fullest bin that can take it."""
    bins: list[list[int]] = []
    bins_by_room: dict[int, list[int]] = {}
    rooms: list[int] = []  # the keys of bins_by_room, ascending
    for member in order:
        length = lengths[member]
        position = bisect_left(rooms, length)
        if position == len(rooms):
            bin_index, room = len(bins), budget
            bins.append([])
        else:
            room = rooms[position]
            bin_index = bins_by_room[room].pop()
            if not bins_by_room[room]:
                del bins_by_room[room], rooms[position]
        bins[bin_index].append(member)
        if room > length:
            if room - length not in bins_by_room:
                bins_by_room[room - length] = []
                insort(rooms, room - length)
            bins_by_room[room - length].append(bin_index)
    return bins


def _first_fit(order: Sequence[int], lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Puts each sequence in the first bin that can take it, found with a segment tree of the most free space."""
    bins: list[list[int]] = []
    leaves = 1 << (len(order) - 1).bit_length()
    most_room = [budget] * (2 * leaves)  # node k is over nodes 2k and 2k + 1; the last `leaves` nodes are the bins
    for member in order:
        node = 1
        while node < leaves:
            node *= 2
            node += most_room[node] < lengths[member]
        if node - leaves == len(bins):
            bins.append([])
        bins[node - leaves].append(member)
        most_room[node] -= lengths[member]
        while node > 1:
            node //= 2
            most_room[node] = max(most_room[2 * node], most_room[2 * node + 1])
    return bins


def _cheapest_fit(
    order: Sequence[int], lengths: Sequence[int], costs: Sequence[int], budget: int, count: int
) -> list[list[int]] | None:
    """Puts each sequence in the cheapest of `count` bins that can take it. Returns None if one fits in none.

    `order` is longest first: a bin that is too full is set aside until sequences are short enough to fit.
    """
    bins: list[list[int]] = [[] for _ in range(count)]
    room = [budget] * count
    open_bins = [(0, bin_index) for bin_index in range(count)]  # (cost, bin)
    set_aside: list[tuple[int, int, int]] = []  # (-room, cost, bin)
    heapify(open_bins)
    for member in order:
        length = lengths[member]
        while set_aside and -set_aside[0][0] >= length:
            heappush(open_bins, heappop(set_aside)[1:])
        while open_bins and room[open_bins[0][1]] < length:
            cost, bin_index = heappop(open_bins)
            heappush(set_aside, (-room[bin_index], cost, bin_index))
        if not open_bins:
            return None
        cost, bin_index = heappop(open_bins)
        bins[bin_index].append(member)
        room[bin_index] -= length
        heappush(open_bins, (cost + costs[member], bin_index))
    return bins
