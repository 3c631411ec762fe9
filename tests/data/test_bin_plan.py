"""plan_bins: budget, groups, balance and number of bins, compared with naive packers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from postlude.data import plan_bins
from postlude.data.bins import balance_bins, bin_cost, fewest_bins


@st.composite
def lengths_and_budget(draw):
    scale = draw(st.sampled_from([1, 10_000]))  # without and with attention that weighs
    budget = draw(st.integers(1, 60))
    lengths = draw(st.lists(st.integers(1, budget), min_size=1, max_size=40))
    return [scale * length for length in lengths], scale * budget


def bins_needed(lengths, budget, choose):
    """Returns the number of bins if each sequence, longest first, goes where `choose` says among bins with room."""
    rooms = []
    for length in sorted(lengths, reverse=True):
        fitting = [index for index, room in enumerate(rooms) if room >= length]
        if fitting:
            rooms[choose(fitting, rooms)] -= length
        else:
            rooms.append(budget - length)
    return len(rooms)


def first_fit(fitting, rooms):
    return fitting[0]


def best_fit(fitting, rooms):
    return min(fitting, key=rooms.__getitem__)


def cheapest_fit_decreasing(lengths, budget, count):
    """Puts sequences, longest first, each into the cheapest bin with room: balance_bins without its heaps."""
    bins = [[] for _ in range(count)]
    for member in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        fitting = [members for members in bins if sum(lengths[index] for index in members) + lengths[member] <= budget]
        if not fitting:
            return None
        min(fitting, key=lambda members: bin_cost(members, lengths)).append(member)
    return bins


def costs_descending(bins, lengths):
    return sorted((bin_cost(members, lengths) for members in bins), reverse=True)


@given(lengths_and_budget(), st.integers(1, 9))
def test_every_sequence_is_in_one_bin_within_budget_in_input_order(case, multiple_of):
    lengths, budget = case
    bins = plan_bins(lengths, budget, multiple_of=multiple_of)
    assert sorted(member for members in bins for member in members) == list(range(len(lengths)))
    assert all(sum(lengths[member] for member in members) <= budget for members in bins)
    assert all(members == sorted(members) for members in bins)


@given(lengths_and_budget(), st.integers(1, 9))
def test_no_more_bins_than_first_fit_and_best_fit_rounded_up_to_the_multiple(case, multiple_of):
    lengths, budget = case
    count = len(plan_bins(lengths, budget))
    assert -(-sum(lengths) // budget) <= count
    assert count == min(bins_needed(lengths, budget, choose) for choose in (first_fit, best_fit))
    assert len(plan_bins(lengths, budget, multiple_of=multiple_of)) == -(-count // multiple_of) * multiple_of


@pytest.mark.parametrize(
    ("lengths", "budget", "wasteful"),
    [([18, 11, 8, 4, 3, 2, 2], 24, best_fit), ([14, 8, 7, 4, 3, 3], 20, first_fit)],
    ids=["best fit wastes one", "first fit wastes one"],
)
def test_better_of_first_fit_and_best_fit_is_used(lengths, budget, wasteful):
    assert bins_needed(lengths, budget, wasteful) == 3
    assert len(plan_bins(lengths, budget)) == 2


@pytest.mark.parametrize("budget", [6, 7], ids=["does not fit", "is more expensive"])
def test_cheapest_fit_is_not_used(budget):
    # Cheapest fit makes 3 2 2 and 3 2, best fit 3 3 and 2 2 2.
    assert plan_bins([3, 3, 2, 2, 2], budget) == [[0, 1], [2, 3, 4]]


def test_full_bin_still_takes_a_later_sequence_that_fits():
    # 145 does not fit beside 160 150 150, though that bin is the cheaper one; 140 fills it to the last token.
    lengths = [1000 * length for length in (400, 160, 150, 150, 145, 140)]
    assert plan_bins(lengths, 600_000) == [[0, 4], [1, 2, 3, 5]]


@given(lengths_and_budget(), st.integers(0, 5))
def test_balancing_equals_the_naive_one_and_never_increases_the_cost(case, spare):
    lengths, budget = case
    before = fewest_bins(lengths, budget) + [[] for _ in range(spare)]
    costs = [bin_cost([index], lengths) for index in range(len(lengths))]
    after = costs_descending(balance_bins(before, lengths, costs, budget), lengths)
    naive = cheapest_fit_decreasing(lengths, budget, len(before))
    assert after[0] <= costs_descending(before, lengths)[0]
    assert after == min(costs_descending(bins, lengths) for bins in (before, naive) if bins is not None)


def test_balancing_uses_the_bins_added_by_rounding_up():
    bins = plan_bins([10] * 16, 160, multiple_of=8)
    assert [len(members) for members in bins] == [2] * 8


def test_long_sequences_cost_more_than_their_tokens():
    # One long sequence costs more than short ones of as many tokens, so its bin gets fewer tokens.
    lengths = [40_000] + [1_000] * 80
    bins = plan_bins(lengths, 100_000, multiple_of=2)
    tokens_beside = {0 in members: sum(lengths[member] for member in members) for members in bins}
    assert tokens_beside[True] < tokens_beside[False]


@given(lengths_and_budget(), st.integers(1, 9))
def test_bins_are_sorted_by_decreasing_cost(case, multiple_of):
    lengths, budget = case
    bins = plan_bins(lengths, budget, multiple_of=multiple_of)
    assert [bin_cost(members, lengths) for members in bins] == costs_descending(bins, lengths)


@given(lengths_and_budget(), st.randoms(use_true_random=False))
def test_the_costs_do_not_depend_on_the_order_of_the_sequences(case, generator):
    lengths, budget = case
    shuffled = generator.sample(lengths, len(lengths))
    assert costs_descending(plan_bins(lengths, budget), lengths) == costs_descending(
        plan_bins(shuffled, budget), shuffled
    )


def test_no_lengths_need_no_bins():
    assert plan_bins([], 8, multiple_of=4) == []


@pytest.mark.parametrize(
    ("lengths", "budget", "multiple_of", "sentence"),
    [
        ([1], 0, 1, "budget is 0, but the minimum is 1. Give a positive budget."),
        ([1], 4, 0, "multiple_of is 0, but the minimum is 1. Give a positive multiple_of."),
        ([1, 0], 4, 1, "sequence 1 has length 0, but the minimum is 1. Leave out empty sequences."),
        (
            [1, 9, 3],
            4,
            1,
            "sequence 1 has 9 tokens, over the budget of 4. "
            "Raise the budget to at least 9, or pack with truncate=True.",
        ),
    ],
)
def test_errors_name_the_value_the_limit_and_the_fix(lengths, budget, multiple_of, sentence):
    with pytest.raises(ValueError) as error:  # noqa: PT011
        plan_bins(lengths, budget, multiple_of=multiple_of)
    assert str(error.value) == sentence
