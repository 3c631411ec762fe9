"""How much each token counts: columns of weights for a batch, and what an objective reads of them.

A loss is sum(weight · value) / sum(weight) over the whole batch, so a way of averaging is a column:

    tokens      mask                          every token alike (DAPO, and the usual mean of fine-tuning)
    sequences   mask / tokens of its sequence every sequence alike (GRPO as published, GSPO)
    groups      mask / tokens of its group    every prompt alike, whatever the number and length of its answers

What is divided by a constant length instead (Dr. GRPO) is a setting of `PolicyGradient`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

from postlude.checks import check_choice

if TYPE_CHECKING:
    from torch import Tensor

    from postlude.data import Microbatch

Mean = Literal["tokens", "sequences", "groups"]


def weights(
    masks: Sequence[Sequence[Any] | Tensor], mean: Mean = "tokens", *, groups: Sequence[Hashable] | None = None
) -> list[Tensor]:
    """Make a column of weights, [length] fp32 per sequence, out of masks of the tokens to learn, [length] each.

    The first token of a sequence is predicted by nothing, so its mask is taken as 0. A sequence, or a group, with
    nothing to learn weighs nothing and is not counted. `groups` names the prompt of each sequence, for "groups".
    """
    import torch

    check_choice("mean", mean, get_args(Mean))
    read = [torch.as_tensor(mask).to(torch.float32, copy=True) for mask in masks]
    for mask in read:
        mask[:1] = 0.0
    if mean == "tokens":
        return read
    names: Sequence[Hashable] = range(len(read))
    if mean == "groups":
        if groups is None or len(groups) != len(read):
            raise ValueError(
                f'mean="groups" needs the group of each of {len(read)} sequences, but '
                f"{'none were' if groups is None else f'{len(groups)} were'} given. Name each one's prompt in groups."
            )
        names = groups
    counts: defaultdict[Hashable, float] = defaultdict(float)
    for name, mask in zip(names, read, strict=True):
        counts[name] += float(mask.sum())
    return [mask / (counts[name] or 1.0) for name, mask in zip(names, read, strict=True)]


class Learned(NamedTuple):
    """What a mean is over, in one microbatch."""

    targets: Tensor
    """[T], `IGNORE` where the weight is zero, so that nothing is projected that nothing is learned from."""
    weights: Tensor
    """[T] fp32."""
    target_count: int | None
    """How many targets are left, where the host knows."""


def learned(microbatch: Microbatch, over: str) -> Learned:
    """Targets and weights of a mean over `over`: "tokens" or a column."""
    from postlude.data import IGNORE

    if over == "tokens":
        return Learned(microbatch.targets, (microbatch.targets != IGNORE).float(), microbatch.target_count)
    values = microbatch.column(over).float()
    if values.ndim != 1:
        raise ValueError(
            f'column "{over}" has shape {tuple(values.shape)}, but weights are one number a token, [{len(microbatch)}].'
        )
    facts = microbatch.column_stats.get(over)
    targets = microbatch.targets.masked_fill(values == 0, IGNORE)
    return Learned(targets, values, None if facts is None else facts.weighed)


def sequence_mean(microbatch: Microbatch, values: Tensor, kept: Tensor) -> Tensor:
    """Mean of `values` [T] over those tokens of each sequence that are `kept` [T]: [n], 0 where none is."""
    counts = microbatch.sequence_sum(kept.float())
    return microbatch.sequence_sum(values.where(kept, 0.0)) / counts.clamp_min(1.0)


def spread(microbatch: Microbatch, values: Tensor) -> Tensor:
    """A value for each sequence, [n] -> the same for each of its tokens, [T]."""
    return values[microbatch.packing.sequence_index()]
