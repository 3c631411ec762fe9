"""Weights of tokens: columns for a batch, and how objectives read them.

A loss is sum(weight · value) / sum(weight) over the whole batch, so the kind of mean is a column:

    tokens      mask                          equal weight for every token (DAPO, and the usual mean of fine-tuning)
    sequences   mask / tokens of its sequence equal weight for every sequence (GRPO as published, GSPO)
    groups      mask / tokens of its group    equal weight for every prompt

Division by a constant length (Dr. GRPO) is a setting of `PolicyGradient`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, get_args

from postlude.checks import check_choice

if TYPE_CHECKING:
    from torch import Tensor

    from postlude.data import Microbatch
    from postlude.model import OutputInputs

Mean = Literal["tokens", "sequences", "groups"]
Denominators: TypeAlias = tuple[tuple[str, int], ...]
"""(column name, MTP depth) of the weights of each mean of a loss, which the engine checks before a pass."""


class MeanOverSequences:
    def denominators(self, depths: int) -> Denominators:
        return (("sequences", 0),)


class MeanOverTokens:
    over: str

    def denominators(self, depths: int) -> Denominators:
        return ((self.over, 0),)


def check_per_token(over: str) -> None:
    if over == "sequences":
        raise ValueError(
            'over is "sequences", but this loss has a value for each token. Name a column of weights; '
            'weights(masks, mean="sequences") makes one that counts every sequence equally.'
        )


def weights(
    masks: Sequence[Sequence[Any] | Tensor], mean: Mean = "tokens", *, groups: Sequence[Hashable] | None = None
) -> list[Tensor]:
    """Returns a column of weights, [length] fp32 per sequence, from masks of the tokens to train on, [length] each.

    The first token of a sequence is never predicted, so its weight is 0. A sequence, or a group, without tokens to
    train on has weight 0. `groups` names the prompt of each sequence, for "groups".
    """
    import torch

    check_choice("mean", mean, get_args(Mean))
    columns = [torch.as_tensor(mask).to(torch.float32, copy=True) for mask in masks]
    for mask in columns:
        mask[:1] = 0.0
    if mean == "tokens":
        return columns
    names: Sequence[Hashable] = range(len(columns))
    if mean == "groups":
        if groups is None or len(groups) != len(columns):
            raise ValueError(
                f'mean="groups" needs the group of each of {len(columns)} sequences, but '
                f"{'none were' if groups is None else f'{len(groups)} were'} given. Name each one's prompt in groups."
            )
        names = groups
    counts: defaultdict[Hashable, float] = defaultdict(float)
    for name, mask in zip(names, columns, strict=True):
        counts[name] += float(mask.sum())
    return [mask / (counts[name] or 1.0) for name, mask in zip(names, columns, strict=True)]


class WeightedTargets(NamedTuple):
    targets: Tensor
    """[T], `IGNORE` where the weight is zero, so that such positions are not projected."""
    weights: Tensor
    """[T] fp32."""
    target_count: int | None
    """The number of targets that are not `IGNORE`, if it is known on the host."""


def weighted_targets(microbatch: Microbatch, over: str) -> WeightedTargets:
    """Returns the targets and weights of a mean over `over`: "tokens" or a column."""
    from postlude.data import IGNORE

    if over == "tokens":
        return WeightedTargets(microbatch.targets, (microbatch.targets != IGNORE).float(), microbatch.target_count)
    values = microbatch.column(over).float()
    if values.ndim != 1:
        raise ValueError(
            f'column "{over}" has shape {tuple(values.shape)}, but weights are [{len(microbatch)}], one per token.'
        )
    stats = microbatch.column_stats.get(over)
    targets = microbatch.targets.masked_fill(values == 0, IGNORE)
    return WeightedTargets(targets, values, None if stats is None else stats.nonzero)


def masked_logprobs(inputs: OutputInputs, mask: str) -> tuple[Tensor, Tensor]:
    """Returns the log-prob of each token [T] fp32, and whether it has a weight in the column `mask` [T]."""
    from postlude.data import IGNORE

    targets, _, count = weighted_targets(inputs.microbatch, mask)
    return inputs.head.logprobs(inputs.hidden, targets, target_count=count).logprob, targets != IGNORE


def sequence_mean(microbatch: Microbatch, values: Tensor, mask: Tensor) -> Tensor:
    """Returns the mean of `values` [T] over each sequence's tokens in `mask` [T]: [n], 0 if it has none."""
    counts = microbatch.sequence_sum(mask.float())
    return microbatch.sequence_sum(values.where(mask, 0.0)) / counts.clamp_min(1.0)


def sequence_value(microbatch: Microbatch, name: str, mask: Tensor) -> Tensor:
    """Returns the value of each sequence in the column `name`, which is the same for all of its tokens: [n] fp32.

    It is read at the tokens in `mask` [T], or at the last token if a sequence has none there.
    """
    is_empty = microbatch.sequence_sum(mask.float()) == 0
    values = sequence_mean(microbatch, microbatch.column(name).float(), mask)
    return microbatch.last_value(name).float().where(is_empty, values)


def broadcast_to_tokens(microbatch: Microbatch, values: Tensor) -> Tensor:
    """Returns the value of each token's sequence: [n] -> [T]."""
    return values[microbatch.packing.sequence_index()]


def weighted_nll(logprob: Tensor, entropy: Tensor | None, weights: Tensor) -> Tensor:
    """Returns -weight · log p of each token, in the form that `head.objective` takes."""
    return -logprob * weights
