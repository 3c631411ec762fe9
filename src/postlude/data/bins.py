"""Which sequences share a microbatch, and which rank runs it: planned from their lengths alone."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heapify, heappop, heappush
from itertools import accumulate

# A decoder layer of width h spends 24·h² FLOPs on a token's matrices and 2·h·length on its causal attention: they are
# equal at length 12·h, here with h = 4096. Only the balance of the bins depends on it, never their number.
ATTENTION_PARITY_LENGTH = 12 * 4096


@dataclass(frozen=True)
class BinPlan:
    """The microbatches of a batch, from the lengths of its sequences: the same on every rank that knows these."""

    lengths: Sequence[int]
    """Tokens of each sequence, as far as they are kept."""
    bins: Sequence[Sequence[int]]
    """The sequences of each microbatch, ascending. Of r data-parallel ranks, rank k runs k, k + r, k + 2r, …"""

    @cached_property
    def starts(self) -> list[int]:
        """Where each sequence starts when all are laid end to end, and where the last one ends."""
        return list(accumulate(self.lengths, initial=0))

    @property
    def tokens(self) -> int:
        """The number of tokens in all sequences."""
        return self.starts[-1]

    def members(self, numbers: Sequence[int]) -> list[int]:
        """The sequences of these microbatches, one after the other."""
        return [member for number in numbers for member in self.bins[number]]


def plan_sharded_bins(
    lengths: Sequence[int],
    owners: Sequence[int],
    ranks: int,
    budget: int,
    *,
    groups: Sequence[Hashable] | None = None,
) -> list[list[int]]:
    """As `plan_bins`, where each sequence is run by the data-parallel rank that holds it, `owners` of `ranks`.

    Every rank gets bins of its own, as many as the rank that needs most, and bin k is rank k % ranks'.
    """
    if len(owners) != len(lengths):
        raise ValueError(f"there are {len(owners)} owners for {len(lengths)} sequences. Give one per sequence.")
    own: list[list[int]] = [[] for _ in range(ranks)]
    for index, owner in enumerate(owners):
        if not 0 <= owner < ranks:
            raise ValueError(
                f"sequence {index} is held by data-parallel rank {owner}, but there are ranks 0 to {ranks - 1}."
            )
        own[owner].append(index)
    if groups is not None:
        where: dict[Hashable, int] = {}
        for index, (group, owner) in enumerate(zip(groups, owners, strict=False)):
            if where.setdefault(group, owner) != owner:
                raise ValueError(
                    f"sequence {index} of group {group!r} is held by data-parallel rank {owner}, but others of its "
                    f"group by rank {where[group]}. Let one rank hold what stays together."
                )

    def planned(members: list[int], multiple_of: int) -> list[list[int]]:
        their_groups = None if groups is None else [groups[member] for member in members]
        bins = plan_bins([lengths[member] for member in members], budget, multiple_of=multiple_of, groups=their_groups)
        return [[members[index] for index in each] for each in bins]

    count = max(len(planned(members, 1)) for members in own)
    bins = [planned(members, count) or [[] for _ in range(count)] for members in own]
    return [bins[rank][number] for number in range(count) for rank in range(ranks)]


def plan_bins(
    lengths: Sequence[int], budget: int, *, multiple_of: int = 1, groups: Sequence[Hashable] | None = None
) -> list[list[int]]:
    """Divide sequences of these `lengths` into bins of at most `budget` tokens: lists of ascending indices.

    The number of bins comes first: the better of best-fit and first-fit decreasing, rounded up to `multiple_of`.
    The cost (matrices plus quadratic attention) is then evened out over that many bins, as far as the budget allows.
    Bins come costliest first and empty ones last, so neighbours, which data-parallel ranks run at the same time, cost
    alike. The same lengths always give the same bins. Sequences of one of `groups`, one per sequence, stay together.
    """
    if groups is not None:
        members = _members(groups, lengths, budget)
        together = plan_bins([sum(lengths[each] for each in part) for part in members], budget, multiple_of=multiple_of)
        return [sorted(each for part in parts for each in members[part]) for parts in together]
    for name, value in (("budget", budget), ("multiple_of", multiple_of)):
        if value < 1:
            raise ValueError(f"{name} is {value}, but the least is 1. Give a positive {name}.")
    for index, length in enumerate(lengths):
        if length < 1:
            raise ValueError(f"sequence {index} has length {length}, but the least is 1. Leave out empty sequences.")
        if length > budget:
            raise ValueError(
                f"sequence {index} has {length} tokens, over the budget of {budget}. "
                f"Raise the budget to at least {length}, or pack with truncate=True."
            )
    bins = fewest_bins(lengths, budget)
    bins += [[] for _ in range(-len(bins) % multiple_of)]
    bins = even_bins(bins, lengths, budget)
    return sorted((sorted(members) for members in bins), key=lambda members: -bin_cost(members, lengths))


def _members(groups: Sequence[Hashable], lengths: Sequence[int], budget: int) -> list[list[int]]:
    """The sequences of each group, in the order in which groups appear."""
    if len(groups) != len(lengths):
        raise ValueError(f"there are {len(groups)} groups for {len(lengths)} sequences. Give one per sequence.")
    members: dict[Hashable, list[int]] = {}
    for index, group in enumerate(groups):
        members.setdefault(group, []).append(index)
    for group, part in members.items():
        total = sum(lengths[index] for index in part)
        if total > budget:
            raise ValueError(
                f"sequences {', '.join(map(str, part))} of group {group!r} stay together and have {total} tokens, over "
                f"the budget of {budget}. Raise the budget to at least {total}, or shorten them."
            )
    return list(members.values())


def bin_cost(members: Sequence[int], lengths: Sequence[int]) -> int:
    """Return the relative cost of running these sequences in one microbatch; an integer, so that ties are exact."""
    return sum(_cost(lengths[member]) for member in members)


def fewest_bins(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Return the smaller of the best-fit and first-fit decreasing bins: neither is always the better one."""
    longest_first = _longest_first(lengths)
    bins = _best_fit(longest_first, lengths, budget)
    if len(bins) * budget - sum(lengths) < budget:  # no fewer bins could hold the tokens
        return bins
    return min(bins, _first_fit(longest_first, lengths, budget), key=len)


def even_bins(bins: list[list[int]], lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Return as many bins of more even cost, or `bins` where the budget leaves no room for better ones.

    Of two divisions, the better has the cheaper costliest bin; at a tie the second costliest decides, and so on.
    """

    def unevenness(division: list[list[int]]) -> list[int]:
        return sorted((bin_cost(members, lengths) for members in division), reverse=True)

    evened = _cheapest_fit(_longest_first(lengths), lengths, budget, len(bins))
    return bins if evened is None else min(bins, evened, key=unevenness)


def _cost(length: int) -> int:
    return length * (ATTENTION_PARITY_LENGTH + length)


def _longest_first(lengths: Sequence[int]) -> list[int]:
    return sorted(range(len(lengths)), key=lambda index: -lengths[index])


def _best_fit(order: Sequence[int], lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Put each sequence in the fullest bin that can take it."""
    bins: list[list[int]] = []
    bins_by_room: dict[int, list[int]] = {}
    rooms: list[int] = []  # the keys of bins_by_room, ascending
    for member in order:
        length = lengths[member]
        place = bisect_left(rooms, length)
        if place == len(rooms):
            chosen, room = len(bins), budget
            bins.append([])
        else:
            room = rooms[place]
            chosen = bins_by_room[room].pop()
            if not bins_by_room[room]:
                del bins_by_room[room], rooms[place]
        bins[chosen].append(member)
        if room > length:
            if room - length not in bins_by_room:
                bins_by_room[room - length] = []
                insort(rooms, room - length)
            bins_by_room[room - length].append(chosen)
    return bins


def _first_fit(order: Sequence[int], lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Put each sequence in the first bin that can take it, found by descent in a tree of the most room."""
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


def _cheapest_fit(order: Sequence[int], lengths: Sequence[int], budget: int, count: int) -> list[list[int]] | None:
    """Put each sequence in the cheapest of `count` bins that can take it; None when at some point none can.

    `order` is longest first: a bin found too full is set aside until the lengths have come down to its room.
    """
    bins: list[list[int]] = [[] for _ in range(count)]
    room = [budget] * count
    open_bins = [(0, chosen) for chosen in range(count)]  # (cost, bin)
    set_aside: list[tuple[int, int, int]] = []  # (-room, cost, bin)
    heapify(open_bins)
    for member in order:
        length = lengths[member]
        while set_aside and -set_aside[0][0] >= length:
            heappush(open_bins, heappop(set_aside)[1:])
        while open_bins and room[open_bins[0][1]] < length:
            cost, chosen = heappop(open_bins)
            heappush(set_aside, (-room[chosen], cost, chosen))
        if not open_bins:
            return None
        cost, chosen = heappop(open_bins)
        bins[chosen].append(member)
        room[chosen] -= length
        heappush(open_bins, (cost + _cost(length), chosen))
    return bins
