"""`linear_logprobs_at`: a linear head's log-probs of k given ids per token.

The normaliser comes from the sweep of `linear_logprobs`. The logits of the ids are k dot products per token with weight
rows that are looked up, a few tokens at a time.
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
    first = 0 if logit_config.group is not None else logit_config.vocab_start
    last = logit_config.vocab_start + weight.shape[0] if logit_config.vocab_size is None else logit_config.vocab_size
    outside = has_target & ((ids < first) | (ids >= last))
    if logit_config.target_count is None and bool(outside.any()):
        raise ValueError(
            f"id {int(ids[outside][0])} is outside the vocabulary, {first} to {last - 1} "
            f"({int(outside.sum())} such of {ids.numel()}). Give ids of this model's vocabulary."
        )
    local = ids.long() - logit_config.vocab_start
    in_shard = has_target & (local >= 0) & (local < weight.shape[0])
    logits: Tensor = _SelectedLogits.apply(
        hidden, weight, logit_config.bias, local.where(in_shard, 0), in_shard, logit_config.group
    )
    if logit_config.target_count is not None:
        logits = logits * torch.zeros_like(logits).masked_fill_(outside, torch.nan).add_(1.0)
    temperature = logit_config.temperature
    if isinstance(temperature, Tensor) and temperature.ndim:
        temperature = temperature.detach()[:, None]
    return stats, (logit_config.transform(logits) / temperature - stats.lse[:, None]).where(has_target, 0.0)


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
