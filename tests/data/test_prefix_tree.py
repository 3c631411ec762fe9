"""Shared prefixes: the order, the segments and the bins, compared with their definitions."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from postlude.data.bins import find_shared_prefixes, plan_bins, plan_sharded_bins
from postlude.data.prefix_tree import PrefixOrder, SegmentTree
from postlude.ops.row_gather import RowGather
from tests.equality import assert_equal

BATCHES = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=7), min_size=2, max_size=9)


def common_tokens(first: list[int], second: list[int]) -> int:
    pairs = zip(first, second, strict=False)
    return next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))


def prefixes_of(sequences: list[list[int]]) -> set[tuple[int, ...]]:
    return {tuple(sequence[: end + 1]) for sequence in sequences for end in range(len(sequence))}


@given(BATCHES, st.data())
def test_each_beginning_is_in_one_segment(sequences, data):
    order = PrefixOrder.of(sequences)
    members = sorted(data.draw(st.sets(st.sampled_from(range(len(sequences))), min_size=1)))
    some = [sequences[member] for member in members]
    lengths = [len(sequence) for sequence in sequences]
    among = order.among(members)
    assert sorted(among.order) == members
    for place in range(1, len(members)):
        first, second = (sequences[among.order[place - 1 + offset]] for offset in (0, 1))
        assert among.common[place] == common_tokens(first, second)
    assert among.computed_tokens(lengths) == len(prefixes_of(some))

    tree = SegmentTree.of(order, members, lengths)
    if tree is None:
        assert len(prefixes_of(some)) == sum(map(len, some))
        return
    assert sum(tree.lengths) == len(prefixes_of(some))
    assert all(parent < segment for segment, parent in enumerate(tree.parents))
    segments = [
        some[holder][start : start + length]
        for holder, start, length in zip(tree.holders, tree.starts, tree.lengths, strict=True)
    ]
    for sequence, path in zip(some, tree.paths, strict=True):
        assert [token for segment in path for token in segments[segment]] == sequence
    for segment, count in enumerate(tree.multiplicities):
        assert count == sum(segment in path for path in tree.paths)


@given(BATCHES, st.integers(7, 20), st.integers(1, 3), st.booleans())
def test_bins_hold_every_sequence_once_within_the_budget(sequences, budget, multiple_of, grouped):
    lengths = [len(sequence) for sequence in sequences]
    groups = [index // 2 for index in range(len(lengths))] if grouped and budget >= 14 else None
    bins = plan_bins(lengths, budget, multiple_of=multiple_of, groups=groups, prefixes=PrefixOrder.of(sequences))
    assert sorted(member for members in bins for member in members) == list(range(len(sequences)))
    assert len(bins) % multiple_of == 0
    for members in bins:
        assert len(prefixes_of([sequences[member] for member in members])) <= budget
        for member in members if groups else ():
            assert set(members) >= {index for index, group in enumerate(groups) if group == groups[member]}


@settings(max_examples=300)
@given(BATCHES, st.integers(7, 20), st.integers(1, 4), st.data())
def test_sharded_bins_hold_every_sequence_once_on_its_owner(sequences, budget, ranks, data):
    lengths = [len(sequence) for sequence in sequences]
    owners = data.draw(st.lists(st.integers(0, ranks - 1), min_size=len(lengths), max_size=len(lengths)))
    prefixes = PrefixOrder.of(sequences)
    bins = plan_sharded_bins(lengths, owners, ranks, budget, prefixes=prefixes)
    assert sorted(member for members in bins for member in members) == list(range(len(sequences)))
    assert len(bins) % ranks == 0
    for number, members in enumerate(bins):
        assert all(owners[member] == number % ranks for member in members)
        assert prefixes.among(members).computed_tokens(lengths) <= budget


def test_groups_that_share_with_an_earlier_group_fit_the_budget():
    """The last pair begins like the first one, in the order of tokens, but is put next to the second one."""
    sequences = [[1, 0], [0], [1, 0, 1], [1, 0], [0, 0, 1], [1, 1, 1, 0]]
    prefixes, groups = PrefixOrder.of(sequences), [0, 0, 1, 1, 2, 2]
    bins = plan_bins([len(sequence) for sequence in sequences], 8, groups=groups, prefixes=prefixes)
    assert sorted(member for members in bins for member in members) == list(range(6))
    assert all(len(prefixes_of([sequences[member] for member in members])) <= 8 for members in bins)


def test_sequences_that_share_stay_together_as_far_as_ranks_need_work():
    prompts = [[1] * 40, [2] * 40]
    sequences = [[*prompt, 3, row] for row in range(4) for prompt in prompts]
    lengths, prefixes = [42] * 8, PrefixOrder.of(sequences)
    assert plan_bins(lengths, 60, prefixes=prefixes) == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert sorted(map(len, plan_bins(lengths, 100, multiple_of=4, prefixes=prefixes))) == [2, 2, 2, 2]


def test_short_beginnings_are_not_shared_automatically():
    long, short = [[7] * 80 + [row] * 20 for row in range(3)], [[7] * 60 + [row] * 20 for row in range(3)]
    assert find_shared_prefixes(long, [100] * 3, "auto").common == (0, 80, 80)
    assert find_shared_prefixes(short, [80] * 3, "auto") is None
    assert find_shared_prefixes(short, [80] * 3, "always").common == (0, 60, 60)
    assert find_shared_prefixes(long, [100] * 3, "off") is None
    little = [*long[:2], *[list(range(number, number + 500)) for number in range(1, 4)]]
    assert find_shared_prefixes(little, list(map(len, little)), "auto") is None


def test_tokens_with_other_experts_are_not_shared():
    routing = [torch.zeros(4, 1, 2, dtype=torch.int64) for _ in range(2)]
    routing[1][2] = 1
    assert PrefixOrder.of([[5, 6, 7, 8]] * 2).common == (0, 4)
    assert PrefixOrder.of([[5, 6, 7, 8]] * 2, routing).common == (0, 2)


@settings(max_examples=30)
@given(st.lists(st.integers(0, 6), min_size=1, max_size=60), st.integers(0, 2**31))
def test_gathered_rows_and_gradients_equal_indexing(rows, seed):
    torch.manual_seed(seed)
    source = torch.randn(7, 3, dtype=torch.float64, requires_grad=True)
    gathered = RowGather(np.array(rows), 7)(source)
    upstream = torch.randn_like(gathered)
    expected = source[torch.tensor(rows)]
    assert torch.equal(gathered, expected)
    actual, wanted = (torch.autograd.grad(tensor, source, upstream)[0] for tensor in (gathered, expected))
    assert_equal(actual, wanted, "gradient", tolerance=1e-12)
