"""From rewards to advantages: plain functions on plain numbers, before a batch is made.

`groups` names the prompt of each answer: equal names are one group, wherever they stand. A result of one number an
answer is a column as it is; results with one number a token are lists of [length], as columns are.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from postlude.checks import Bounds

Numbers = Sequence[Any] | Tensor


def grpo(
    rewards: Numbers,
    groups: Sequence[Hashable],
    *,
    leave_one_out: bool = False,
    scale_by_std: bool = True,
    eps: float = 1e-6,
) -> Tensor:
    """(reward - mean of its group) / (standard deviation of its group + eps), [N] fp32.

    With `leave_one_out` the mean is of the others in the group. Without `scale_by_std` nothing is divided (Dr. GRPO).
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
    """Reward - mean reward of the others in its group, [N] fp32."""
    return grpo(rewards, groups, leave_one_out=True, scale_by_std=False)


def reinforce_plus_plus(
    rewards: Numbers,
    masks: Sequence[Numbers],
    *,
    groups: Sequence[Hashable] | None = None,
    penalties: Sequence[Numbers] | None = None,
    gamma: float = 1.0,
    eps: float = 1e-8,
) -> list[Tensor]:
    """Returns, normalised over every token of the batch: (G - mean G) / (std G + eps), [length] fp32 each.

    Gₜ sums γ^(s - t) · rₛ over the answer's tokens from t on, where r is the answer's reward at its last token, less
    the token's own `penalties` (such as a KL to the reference). With `groups` the mean of its group is taken from the
    reward first (REINFORCE++-baseline). `masks` are 1 for the answer's tokens, and advantages are 0 elsewhere.
    """
    values = _read(rewards)
    if groups is not None:
        values = grpo(rewards, groups, scale_by_std=False)
    _same_count("masks", masks, len(values))
    if penalties is not None:
        _same_count("penalties", penalties, len(values))
    returns, kept = [], []
    for row, mask in enumerate(masks):
        answer = _read(mask) != 0
        earned = torch.zeros(len(answer), dtype=torch.float64)
        if bool(answer.any()):
            earned[int(answer.nonzero()[-1])] = values[row].double()
        if penalties is not None:
            earned -= _read(penalties[row]) * answer
        kept.append(answer)
        returns.append(_discounted(earned, answer, gamma))
    return whiten(returns, kept, eps=eps)


def whiten(values: Sequence[Numbers], masks: Sequence[Numbers], *, eps: float = 1e-8) -> list[Tensor]:
    """(value - mean) / (standard deviation + eps) over all tokens of the batch that are masked in; 0 elsewhere."""
    _same_count("masks", masks, len(values))
    read = [_read(each) for each in values]
    kept = [_read(mask) != 0 for mask in masks]
    chosen = torch.cat([each[mask] for each, mask in zip(read, kept, strict=True)])
    if not len(chosen):
        return [torch.zeros(len(each)) for each in read]
    average, deviation = chosen.mean(), chosen.std(correction=0)
    return [
        ((each - average) / (deviation + eps)).where(mask, 0.0).float() for each, mask in zip(read, kept, strict=True)
    ]


def gae(
    rewards: Sequence[Numbers],
    values: Sequence[Numbers],
    *,
    masks: Sequence[Numbers] | None = None,
    gamma: float = 1.0,
    lam: float = 0.95,
) -> tuple[list[Tensor], list[Tensor]]:
    """Generalised advantage estimates and the returns a critic learns, [length] fp32 each.

        δₜ = rₜ + γ · V(t + 1) - V(t),   Aₜ = δₜ + γ · λ · A(t + 1),   returnₜ = Aₜ + V(t)

    `rewards` and `values` are [length] per sequence: what token t earned, and what was expected before it was chosen,
    as `engine.values` gives it. V is 0 after the end. Tokens masked out (prompts, tool output) are stepped over: the
    next token that counts is the one t + 1 means. Advantages and returns are 0 there. A reward on one of them, such as
    an environment's beside its answer, is earned by the last token before it that counts; before the first there is
    none, and it is left out. (verl's gae leaves out all of them.)
    """
    for name, factor in (("gamma", gamma), ("lam", lam)):
        if not 0.0 <= factor <= 1.0:
            raise ValueError(f"{name} is {factor:g}, but a discount lies between 0 and 1.")
    _same_count("values", values, len(rewards))
    if masks is not None:
        _same_count("masks", masks, len(rewards))
    advantages, returns = [], []
    for row, each in enumerate(rewards):
        earned, expected = _read(each), _read(values[row])
        counted = torch.ones(len(earned), dtype=torch.bool) if masks is None else _read(masks[row]) != 0
        if not len(earned) == len(expected) == len(counted):
            raise ValueError(
                f"sequence {row} has {len(earned)} rewards, {len(expected)} values and {len(counted)} masks. "
                "Give one of each for every token."
            )
        found = torch.zeros(len(earned), dtype=torch.float64)
        following, later = 0.0, 0.0
        steps = counted.nonzero()[:, 0].tolist()
        ends = [*steps[1:], len(earned)]
        for step, end in zip(reversed(steps), reversed(ends), strict=True):
            value = float(expected[step])
            later = float(earned[step:end].sum()) + gamma * following - value + gamma * lam * later
            found[step], following = later, value
        advantages.append(found.float())
        returns.append((found + expected).where(counted, 0.0).float())
    return advantages, returns


def _discounted(earned: Tensor, counted: Tensor, gamma: float) -> Tensor:
    found = torch.zeros_like(earned)
    later = 0.0
    for step in reversed(counted.nonzero()[:, 0].tolist()):
        later = float(earned[step]) + gamma * later
        found[step] = later
    return found


def _read(numbers: Numbers) -> Tensor:
    read = torch.as_tensor(numbers).detach().to("cpu", torch.float64)
    if read.ndim != 1:
        raise ValueError(f"numbers have shape {tuple(read.shape)}, but these are one after the other, [length].")
    return read


def _grouped(rewards: Numbers, groups: Sequence[Hashable]) -> tuple[Tensor, Tensor, int]:
    """Rewards [N] fp64, which group each is of [N] int64, and the number of groups."""
    values = _read(rewards)
    _same_count("groups", groups, len(values))
    numbers: dict[Hashable, int] = {}
    index = [numbers.setdefault(name.item() if isinstance(name, Tensor) else name, len(numbers)) for name in groups]
    return values, torch.tensor(index, dtype=torch.int64), len(numbers)


def _same_count(name: str, given: Sequence[Any], count: int) -> None:
    if len(given) != count:
        raise ValueError(f"there are {len(given)} {name} for {count} sequences. Give one for each.")
