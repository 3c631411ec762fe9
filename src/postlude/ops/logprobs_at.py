"""`linear_logprobs_at` and `masked_logprobs`: a linear head's log-probs of k given ids per token, and among k.

The normaliser comes from the sweep of `linear_logprobs`. The logits of the ids are k dot products per token with weight
rows that are looked up, a few tokens at a time.

A sampling mask has the tokens that top-k, top-p and min-p left to sample from. A token that was sampled from it has the
log-prob log softmax(logits of the mask), which needs those k dot products alone.
"""

from __future__ import annotations

from typing import Any, Unpack

import torch
import torch.distributed as dist
from torch import Tensor

from postlude.ops.linear_logprobs import TokenStats, linear_logprobs
from postlude.ops.linear_logprobs.api import refuse_second_derivative
from postlude.ops.linear_logprobs.gemm import without_autocast
from postlude.ops.linear_logprobs.logits import DEFAULT_LOGITS, LogitConfig, LogitOptions

LOOKUP_ELEMENTS = 1 << 24
"""Most numbers held of the rows that are looked up at a time: 64 MB in fp32."""


def linear_logprobs_at(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    ids: Tensor,
    *,
    entropy: bool = False,
    logit_config: LogitConfig = DEFAULT_LOGITS,
    **changes: Unpack[LogitOptions],
) -> tuple[TokenStats, Tensor]:
    """Returns `linear_logprobs` for `targets` [N], and the log-probs of `ids` [N, k], fp32, with gradient.

    `hidden` is [N, H]. Positions whose target is ignored hold 0 and have no gradient, whatever their ids. With `group`
    there is one more collective, and the gradient of `hidden` is this rank's part, as in `linear_logprobs`. With a
    `target_count`, ids are not checked either: one outside of the vocabulary gives NaN. `logit_config` and `changes`
    are those of `linear_logprobs`.
    """
    if ids.ndim != 2 or ids.shape[0] != targets.shape[0] or ids.is_floating_point() or ids.dtype == torch.bool:
        raise ValueError(
            f"ids are {ids.dtype} of shape {tuple(ids.shape)}, but k vocabulary ids for each of {len(targets)} tokens "
            f"are integers of shape ({len(targets)}, k)."
        )
    logit_config = logit_config.replace(**changes)
    hidden = logit_config.operand(hidden, weight)
    stats = linear_logprobs(hidden, weight, targets, entropy=entropy, lse=True, logit_config=logit_config)
    assert stats.lse is not None  # asked for
    has_target = (targets != logit_config.ignore_index)[:, None]
    first, last = vocabulary_bounds(weight, logit_config)
    outside = has_target & ((ids < first) | (ids >= last))
    if logit_config.target_count is None and bool(outside.any()):
        raise ValueError(
            f"id {int(ids[outside][0])} is outside the vocabulary, {first} to {last - 1} "
            f"({int(outside.sum())} such of {ids.numel()}). Give ids of this model's vocabulary."
        )
    logits = selected_logits(hidden, weight, ids.where(has_target, -1), logit_config)
    if logit_config.target_count is not None:
        logits = logits * torch.zeros_like(logits).masked_fill_(outside, torch.nan).add_(1.0)
    temperature = logit_config.temperature
    if isinstance(temperature, Tensor) and temperature.ndim:
        temperature = temperature.detach()[:, None]
    return stats, (logit_config.transform(logits) / temperature - stats.lse[:, None]).where(has_target, 0.0)


def vocabulary_bounds(weight: Tensor, logit_config: LogitConfig) -> tuple[int, int]:
    """Returns the first id of the vocabulary, or of this weight without a group, and the one after the last."""
    first = 0 if logit_config.group is not None else logit_config.vocab_start
    last = logit_config.vocab_start + weight.shape[0] if logit_config.vocab_size is None else logit_config.vocab_size
    return first, last


def selected_logits(hidden: Tensor, weight: Tensor, ids: Tensor, logit_config: LogitConfig) -> Tensor:
    """Returns the head's logits of `ids` [N, k], before `LogitConfig.transform`, with gradient; 0 for an id of -1."""
    local = ids.long() - logit_config.vocab_start
    in_shard = (ids >= 0) & (local >= 0) & (local < weight.shape[0])
    logits: Tensor = _SelectedLogits.apply(
        hidden, weight, logit_config.bias, local.where(in_shard, 0), in_shard, logit_config.group
    )
    return logits


class _SelectedLogits(torch.autograd.Function):
    """hidden [N, H] · weight[ids] [N, k, H] + bias[ids] where an id is `mine`, summed over the group: [N, k].

    The sum is used alike by every rank, so each rank's gradient of it is already the whole one.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        ids: Tensor,
        in_shard: Tensor,
        group: dist.ProcessGroup | None,
    ) -> Tensor:
        ctx.save_for_backward(hidden, weight, ids, in_shard)
        ctx.bias = bias is not None and (bias.shape, bias.dtype)
        dtype = torch.promote_types(torch.promote_types(hidden.dtype, weight.dtype), torch.float32)
        logits = torch.zeros(ids.shape, dtype=dtype, device=hidden.device)
        with without_autocast(hidden.device):
            if weight.shape[0]:
                for part in _parts(ids, weight):
                    rows = weight[ids[part]].to(dtype)
                    logits[part] = (rows @ hidden[part].to(dtype)[:, :, None]).squeeze(-1)
                if bias is not None:
                    logits += bias[ids].to(dtype)
            logits.masked_fill_(~in_shard, 0.0)
        if group is not None:
            dist.all_reduce(logits, group=group)
        return logits

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("linear_logprobs_at")
        hidden, weight, ids, in_shard = ctx.saved_tensors
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        upstream = gradients[0].masked_fill(~in_shard, 0.0)
        dtype, device = upstream.dtype, upstream.device
        to_hidden = torch.zeros(hidden.shape, dtype=dtype, device=device) if wants_hidden else None
        to_weight = torch.zeros(weight.shape, dtype=dtype, device=device) if wants_weight else None
        with without_autocast(device):
            for part in _parts(ids, weight) if weight.shape[0] else ():
                if to_hidden is not None:
                    rows = weight[ids[part]].to(dtype)
                    to_hidden[part] = (upstream[part][:, None] @ rows).squeeze(1)
                if to_weight is not None:
                    outer = upstream[part][:, :, None] * hidden[part].to(dtype)[:, None]
                    to_weight.index_add_(0, ids[part].flatten(), outer.flatten(0, 1))
        to_bias = None
        if wants_bias:
            shape, kind = ctx.bias
            to_bias = torch.zeros(shape, dtype=dtype, device=device)
            if weight.shape[0]:
                to_bias = to_bias.index_add_(0, ids.flatten(), upstream.flatten()).to(kind)
        return (
            None if to_hidden is None else to_hidden.to(hidden.dtype),
            None if to_weight is None else to_weight.to(weight.dtype),
            to_bias,
            None,
            None,
            None,
        )


def _parts(ids: Tensor, weight: Tensor) -> list[slice]:
    """Returns slices of tokens whose looked-up rows fit in the memory limit."""
    step = max(1, LOOKUP_ELEMENTS // max(1, ids.shape[1] * weight.shape[1]))
    return [slice(start, start + step) for start in range(0, ids.shape[0], step)]


def masked_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    masks: Tensor,
    *,
    entropy: bool = False,
    lse: bool = False,
    logit_config: LogitConfig,
) -> TokenStats:
    """Returns log-prob, entropy and lse of `targets` [N] in the distribution over the tokens of their masks.

    `masks` [N, k] integers hold token ids plus 1, and 0 for none. Where a mask is empty the distribution is over the
    vocabulary. It is `linear_logprobs` with logits of -inf outside of the mask, whose arguments and gradients it has,
    and it holds k fp32 logits of each token a few times. The host waits for the device once, to count.
    """
    if masks.ndim != 2 or len(masks) != len(targets) or masks.is_floating_point():
        raise ValueError(
            f"sampling masks are {masks.dtype} of shape {tuple(masks.shape)}. Give integers [{len(targets)}, k]."
        )
    hidden = logit_config.operand(hidden, weight)
    in_mask = masks > 0
    has_target, has_mask = targets != logit_config.ignore_index, in_mask.any(1)
    is_target = in_mask & (masks == targets[:, None] + 1)
    missing = has_target & has_mask & ~is_target.any(1)
    first_id, last_id = vocabulary_bounds(weight, logit_config)
    outside = has_target[:, None] & in_mask & ((masks <= first_id) | (masks > last_id))  # of the vocabulary
    sums = (has_target & ~has_mask).sum(), missing.sum(), outside.sum()
    unmasked_count, missing_count, outside_count = torch.stack(sums).tolist()
    if outside_count:
        raise ValueError(
            f"token {int(masks[outside][0]) - 1} of a sampling mask is outside the vocabulary, {first_id} to "
            f"{last_id - 1} ({outside_count} such). Give masks of this model's vocabulary."
        )
    if missing_count:
        first = int(missing.nonzero()[0])
        raise ValueError(
            f"target {int(targets[first])} at position {first} is not in its sampling mask ({missing_count} such), so "
            "it cannot have been sampled from it. Give the masks of these completions."
        )
    rows = (has_target & has_mask).nonzero()[:, 0]
    results = _among_masks(hidden[rows], weight, masks[rows].long() - 1, is_target[rows], rows, logit_config)
    full: list[Tensor | None] = [None, None, None]
    if unmasked_count:
        stats = linear_logprobs(
            hidden,
            weight,
            targets.masked_fill(has_mask, logit_config.ignore_index),
            entropy=entropy,
            lse=lse,
            logit_config=logit_config.replace(target_count=unmasked_count),
        )
        full = [stats.logprob, stats.entropy, stats.lse]
    combined = []
    for values, others, is_wanted in zip(results, full, (True, entropy, lse), strict=True):
        scattered = torch.zeros(len(targets), dtype=values.dtype, device=values.device).index_copy(0, rows, values)
        combined.append((scattered if others is None else scattered + others) if is_wanted else None)
    logprob, entropies, lses = combined
    assert logprob is not None  # wanted
    return TokenStats(logprob, entropies, lses)


def _among_masks(
    hidden: Tensor, weight: Tensor, ids: Tensor, is_target: Tensor, rows: Tensor, logit_config: LogitConfig
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns log-prob, entropy and logsumexp, [n] each, of tokens whose masks are `ids` [n, k], -1 for none."""
    logits = selected_logits(hidden, weight, ids, logit_config)
    temperature = logit_config.temperature
    if isinstance(temperature, Tensor) and temperature.ndim:
        temperature = temperature.detach()[rows, None]
    logits = logit_config.transform(logits) / temperature
    outside = ids < 0
    lse = logits.masked_fill(outside, float("-inf")).logsumexp(1)
    logprobs = (logits - lse[:, None]).masked_fill(outside, 0.0)
    entropy = -(logprobs.exp().masked_fill(outside, 0.0) * logprobs).sum(1)
    return (logprobs * is_target).sum(1), entropy, lse
