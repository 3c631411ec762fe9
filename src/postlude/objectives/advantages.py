"""Advantages from rewards: functions on plain numbers, called before a batch is made.

`groups` names the prompt of each completion; equal names are one group. Results have one number per completion, [N], or
are lists of one number per token, [length] each. Both are columns of a batch as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from postlude.checks import Bounds

Numbers = Sequence[Any] | Tensor
AllSum = Callable[[Tensor], Tensor]
"""Returns the sum over all data-parallel ranks of a tensor of this rank."""


def _on_one_rank(sums: Tensor) -> Tensor:
    return sums


def grpo(
    rewards: Numbers,
    groups: Sequence[Hashable],
    *,
    leave_one_out: bool = False,
    scale_by_std: bool = True,
    eps: float = 1e-6,
) -> Tensor:
    """Returns (reward - mean of its group) / (standard deviation of its group + eps), [N] fp32.

    With `leave_one_out` the mean is of the others in the group. Without `scale_by_std` it is not divided (Dr. GRPO).
    Where all rewards of a group are equal, or there is only one, advantages are exactly 0.
    """
    Bounds(least=0).check("eps", eps)
    values, index, count = _grouped(rewards, groups)
    size = torch.zeros(count, dtype=torch.float64).index_add_(0, index, torch.ones_like(values))
    average = torch.zeros_like(size).index_add_(0, index, values) / size
    centred = values - average[index]
    squares = torch.zeros_like(size).index_add_(0, index, centred.square())
    highest = torch.full_like(size, -torch.inf).scatter_reduce_(0, index, values, "amax")
    lowest = torch.full_like(size, torch.inf).scatter_reduce_(0, index, values, "amin")
    if leave_one_out:
        centred = centred * (size / (size - 1).clamp_min(1.0))[index]  # r - mean of others = n / (n - 1) · (r - mean)
    if scale_by_std:
        centred = centred / ((squares / (size - 1).clamp_min(1.0)).sqrt() + eps)[index]
    return centred.masked_fill((highest == lowest)[index], 0.0).float()


def rloo(rewards: Numbers, groups: Sequence[Hashable]) -> Tensor:
    """Returns reward - mean reward of the others in its group, [N] fp32."""
    return grpo(rewards, groups, leave_one_out=True, scale_by_std=False)


def reinforce_plus_plus(
    rewards: Numbers,
    masks: Sequence[Numbers],
    *,
    groups: Sequence[Hashable] | None = None,
    penalties: Sequence[Numbers] | None = None,
    gamma: float = 1.0,
    eps: float = 1e-8,
    all_sum: AllSum = _on_one_rank,
) -> list[Tensor]:
    """Returns (G - mean G) / (std G + eps) over every token of the batch, [length] fp32 each.

    Gₜ sums γ^(s - t) · rₛ over the completion's tokens from t on, where r is the reward at the last token, minus
    `penalties` at each token (such as a KL to the reference). With `groups` the mean of the group is first subtracted
    from the reward (REINFORCE++-baseline). `masks` are 1 for the completion's tokens; advantages are 0 elsewhere. Where
    each rank has some sequences of the batch, `all_sum` adds up their sums; groups must then be whole.
    """
    values = _read(rewards)
    if groups is not None:
        values = grpo(rewards, groups, scale_by_std=False)
    _same_count("masks", masks, len(values))
    if penalties is not None:
        _same_count("penalties", penalties, len(values))
    returns, completion_masks = [], []
    for row, mask in enumerate(masks):
        is_completion = _read(mask) != 0
        token_rewards = torch.zeros(len(is_completion), dtype=torch.float64)
        if bool(is_completion.any()):
            token_rewards[int(is_completion.nonzero()[-1])] = values[row].double()
        if penalties is not None:
            token_rewards -= _read(penalties[row]) * is_completion
        completion_masks.append(is_completion)
        returns.append(_discounted(token_rewards, is_completion, gamma))
    return whiten(returns, completion_masks, eps=eps, all_sum=all_sum)


def whiten(
    values: Sequence[Numbers], masks: Sequence[Numbers], *, eps: float = 1e-8, all_sum: AllSum = _on_one_rank
) -> list[Tensor]:
    """Returns (value - mean) / (standard deviation + eps) over tokens of the batch with mask 1; 0 elsewhere.

    Where each rank has some sequences of the batch, `all_sum` adds up their sums.
    """
    _same_count("masks", masks, len(values))
    rows = [(_read(row), _read(mask) != 0) for row, mask in zip(values, masks, strict=True)]
    masked_values = torch.cat([row[mask] for row, mask in rows]) if rows else torch.zeros(0, dtype=torch.float64)
    total, count = all_sum(
        torch.tensor([float(masked_values.sum()), float(len(masked_values))], dtype=torch.float64)
    ).tolist()
    average = total / max(count, 1.0)
    squares = all_sum((masked_values - average).square().sum())
    deviation = (squares / max(count, 1.0)).sqrt()
    return [((row - average) / (deviation + eps)).where(mask, 0.0).float() for row, mask in rows]


def gae(
    rewards: Sequence[Numbers],
    values: Sequence[Numbers],
    *,
    masks: Sequence[Numbers] | None = None,
    gamma: float = 1.0,
    lam: float = 0.95,
) -> tuple[list[Tensor], list[Tensor]]:
    """Aₜ = δₜ + γ · λ · A(t + 1),   δₜ = rₜ + γ · V(t + 1) - V(t),   returnₜ = Aₜ + V(t)

    Returns the advantages A and the returns, which a critic is trained on, [length] fp32 each. `rewards` and `values`
    are [length] per sequence: the reward of token t, and the value before it was sampled, from `engine.values`. V is 0
    after the end. Tokens with mask 0 (prompts, tool output) are skipped: t + 1 is the next token with mask 1, and
    advantages and returns are 0 there. A reward on such a token, such as an environment's, is added to the last token
    before it with mask 1; before the first such token it is ignored. (verl's gae ignores all of them.)
    """
    for name, factor in (("gamma", gamma), ("lam", lam)):
        if not 0.0 <= factor <= 1.0:
            raise ValueError(f"{name} is {factor:g}, but a discount lies between 0 and 1.")
    _same_count("values", values, len(rewards))
    if masks is not None:
        _same_count("masks", masks, len(rewards))
    advantages, returns = [], []
    for row, row_rewards in enumerate(rewards):
        token_rewards, token_values = _read(row_rewards), _read(values[row])
        mask = torch.ones(len(token_rewards), dtype=torch.bool) if masks is None else _read(masks[row]) != 0
        if not len(token_rewards) == len(token_values) == len(mask):
            raise ValueError(
                f"sequence {row} has {len(token_rewards)} rewards, {len(token_values)} values and {len(mask)} masks. "
                "Give one of each for every token."
            )
        estimates = torch.zeros(len(token_rewards), dtype=torch.float64)
        next_value, advantage = 0.0, 0.0
        steps, segments = mask.nonzero()[:, 0], mask.cumsum(0) - 1  # -1 before the first token in the mask
        gains = token_rewards.new_zeros(len(steps)).index_add_(0, segments[segments >= 0], token_rewards[segments >= 0])
        reversed_advantages: list[float] = []  # a loop over numbers: one over tensors takes ten times as long
        for gain, value in zip(reversed(gains.tolist()), reversed(token_values[steps].tolist()), strict=True):
            advantage = gain + gamma * next_value - value + gamma * lam * advantage
            reversed_advantages.append(advantage)
            next_value = value
        estimates[steps] = torch.tensor(reversed_advantages[::-1], dtype=torch.float64)
        advantages.append(estimates.float())
        returns.append((estimates + token_values).where(mask, 0.0).float())
    return advantages, returns


def _discounted(rewards: Tensor, mask: Tensor, gamma: float) -> Tensor:
    steps = mask.nonzero()[:, 0]
    later, reversed_returns = 0.0, list[float]()
    for reward in reversed(rewards[steps].tolist()):
        later = reward + gamma * later
        reversed_returns.append(later)
    returns = torch.zeros_like(rewards)
    returns[steps] = torch.tensor(reversed_returns[::-1], dtype=rewards.dtype)
    return returns


def _read(numbers: Numbers) -> Tensor:
    tensor = torch.as_tensor(numbers).detach().to("cpu", torch.float64)
    if tensor.ndim != 1:
        raise ValueError(f"numbers have shape {tuple(tensor.shape)}, but they must have one dimension, [length].")
    return tensor


def _grouped(rewards: Numbers, groups: Sequence[Hashable]) -> tuple[Tensor, Tensor, int]:
    """Returns rewards [N] fp64, the index of each one's group [N] int64, and the number of groups."""
    values = _read(rewards)
    _same_count("groups", groups, len(values))
    numbers: dict[Hashable, int] = {}
    index = [numbers.setdefault(name.item() if isinstance(name, Tensor) else name, len(numbers)) for name in groups]
    return values, torch.tensor(index, dtype=torch.int64), len(numbers)


def _same_count(name: str, values: Sequence[Any], count: int) -> None:
    if len(values) != count:
        raise ValueError(f"there are {len(values)} {name} for {count} sequences. Give one for each.")
