"""Advantages equal their definitions, computed with Python's statistics module."""

import statistics

import pytest
import torch

from postlude.objectives.advantages import gae, grpo, reinforce_plus_plus, rloo, whiten

REWARDS = [1.0, 0.0, 0.5, 2.0, 2.0, 0.25, 3.0]
GROUPS = ["a", "b", "a", "b", "c", "a", "d"]  # not side by side; the last two are alone


def groups_of(index: int) -> list[float]:
    return [reward for reward, group in zip(REWARDS, GROUPS, strict=True) if group == GROUPS[index]]


def test_grpo_centres_and_scales_each_group() -> None:
    for index, advantage in enumerate(grpo(REWARDS, GROUPS, eps=0.1).tolist()):
        members = groups_of(index)
        if len(members) == 1:
            assert advantage == 0.0
            continue
        expected = (REWARDS[index] - statistics.mean(members)) / (statistics.stdev(members) + 0.1)
        assert advantage == pytest.approx(expected, rel=1e-6)


def test_advantages_without_std_and_leave_one_out() -> None:
    plain, leave_one_out = grpo(REWARDS, GROUPS, scale_by_std=False), rloo(REWARDS, GROUPS)
    scaled = grpo(REWARDS, GROUPS, leave_one_out=True, eps=0.1)
    for index in range(len(REWARDS)):
        members = groups_of(index)
        assert plain[index] == pytest.approx(REWARDS[index] - statistics.mean(members), abs=1e-7)
        members.remove(REWARDS[index])
        expected = REWARDS[index] - statistics.mean(members) if members else 0.0
        assert leave_one_out[index] == pytest.approx(expected, abs=1e-7)
        if members:
            assert scaled[index] == pytest.approx(expected / (statistics.stdev(groups_of(index)) + 0.1), rel=1e-6)


def test_equal_rewards_give_zero_advantages() -> None:
    assert grpo([0.1] * 3 + [0.7], [0, 0, 0, 1]).tolist() == [0.0] * 4
    assert grpo(torch.tensor([1.0, 3.0]), torch.tensor([7, 7])).tolist() == pytest.approx([-(0.5**0.5), 0.5**0.5])


def test_reinforce_plus_plus_normalises_over_every_token() -> None:
    masks = [[0, 1, 1, 1], [0, 0, 1], [0, 1, 0, 1]]
    penalties = [[9.0, 0.1, 0.2, 0.3], [9.0, 9.0, 0.4], [9.0, 0.5, 9.0, 0.6]]
    actual = reinforce_plus_plus([1.0, 2.0, 0.0], masks, penalties=penalties, gamma=0.9)
    returns = [[-0.1 + 0.9 * (-0.2 + 0.9 * 0.7), -0.2 + 0.9 * 0.7, 0.7], [1.6], [-0.5 + 0.9 * -0.6, -0.6]]
    flat = [value for row in returns for value in row]
    average, deviation = statistics.mean(flat), statistics.pstdev(flat)
    for advantages, mask, expected in zip(actual, masks, returns, strict=True):
        masked = advantages[torch.tensor(mask) > 0].tolist()
        assert masked == pytest.approx([(value - average) / deviation for value in expected], rel=1e-5)
        assert advantages[torch.tensor(mask) == 0].abs().sum() == 0


def test_reinforce_plus_plus_takes_the_groups_mean_first() -> None:
    masks = [[0, 1], [0, 1], [0, 1], [0, 1]]
    actual = reinforce_plus_plus([1.0, 0.0, 5.0, 5.0], masks, groups=[0, 0, 1, 1])
    assert [float(row[1]) for row in actual] == pytest.approx([2**0.5, -(2**0.5), 0.0, 0.0], abs=1e-6)


def test_gae_is_the_discounted_sum_of_td_errors() -> None:
    rewards, values, gamma, lam = [0.1, 0.0, 1.0], [0.5, 0.2, 0.4], 0.9, 0.8
    surprises = [0.1 + 0.9 * 0.2 - 0.5, 0.0 + 0.9 * 0.4 - 0.2, 1.0 - 0.4]
    (advantages,), (returns,) = gae([rewards], [values], gamma=gamma, lam=lam)
    expected = [
        sum((gamma * lam) ** k * surprise for k, surprise in enumerate(surprises[start:])) for start in range(3)
    ]
    assert advantages.tolist() == pytest.approx(expected)
    assert returns.tolist() == pytest.approx([a + v for a, v in zip(expected, values, strict=True)])
    _, (returns,) = gae([rewards], [values], gamma=1.0, lam=1.0)
    assert returns.tolist() == pytest.approx([1.1, 1.0, 1.0])


def test_gae_skips_masked_tokens() -> None:
    inner, _ = gae([[0.1, 0.0, 1.0]], [[0.5, 0.2, 0.4]], gamma=0.9, lam=0.8)
    outer, returns = gae(
        [[7.0, 0.1, 0.0, 0.0, 1.0], [1.0]],
        [[7.0, 0.5, 7.0, 0.2, 0.4], [0.25]],
        masks=[[0, 1, 0, 1, 1], [1]],
        gamma=0.9,
        lam=0.8,
    )
    assert outer[0][[1, 3, 4]].tolist() == inner[0].tolist()
    assert outer[0][[0, 2]].tolist() == returns[0][[0, 2]].tolist() == [0.0, 0.0]
    assert outer[1].tolist() == [0.75]


def test_reward_on_a_masked_token_goes_to_the_last_unmasked_token() -> None:
    values, masks = [[7.0, 0.5, 7.0, 0.2, 7.0, 7.0]], [[0, 1, 0, 1, 0, 0]]
    moved = gae([[0.0, 0.4, 0.0, 1.5, 0.0, 0.0]], values, masks=masks, gamma=0.9, lam=0.8)
    actual = gae([[0.0, 0.1, 0.3, 0.0, 0.5, 1.0]], values, masks=masks, gamma=0.9, lam=0.8)
    for plain_row, moved_row in zip(actual, moved, strict=True):
        torch.testing.assert_close(plain_row, moved_row)


def test_whitened_values_have_mean_0_and_deviation_1() -> None:
    values, masks = [[1.0, 2.0, 50.0], [3.0, 7.0]], [[1, 1, 0], [1, 1]]
    first, second = whiten(values, masks)
    masked = torch.cat([first[:2], second])
    assert first[2] == 0
    assert float(masked.mean()) == pytest.approx(0, abs=1e-6)
    assert float(masked.std(correction=0)) == pytest.approx(1, rel=1e-5)
    assert whiten([[1.0]], [[0]])[0].tolist() == [0.0]


def test_whitening_over_ranks_equals_one_rank() -> None:
    """Ranks sum values and token counts first, then squares."""
    values, masks = [[1.0, 2.0, 50.0], [3.0, 7.0], [0.5]], [[1, 1, 0], [1, 1], [1]]
    masked = torch.tensor([1.0, 2.0, 3.0, 7.0, 0.5], dtype=torch.float64)
    replies = iter([torch.tensor([13.5, 5.0], dtype=torch.float64), (masked - 2.7).square().sum()])
    local_sums = []

    def all_sum(local_sum: torch.Tensor) -> torch.Tensor:
        local_sums.append(local_sum)
        return next(replies)

    actual = whiten(values[:2], masks[:2], all_sum=all_sum)
    assert local_sums[0].tolist() == [13.0, 4.0]
    assert float(local_sums[1]) == pytest.approx(float((masked[:4] - 2.7).square().sum()))
    for part, full_part in zip(actual, whiten(values, masks)[:2], strict=True):
        torch.testing.assert_close(part, full_part)


def test_invalid_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="2 groups for 3 sequences"):
        grpo([1.0, 2.0, 3.0], [0, 0])
    with pytest.raises(ValueError, match=r"sequence 0 has 2 rewards, 1 values and 2 masks"):
        gae([[1.0, 2.0]], [[1.0]])
    with pytest.raises(ValueError, match=r"lam is 1\.5"):
        gae([[1.0]], [[1.0]], lam=1.5)
