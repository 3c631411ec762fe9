"""The head with all of its logits, differentiated by autograd: what the fused head is compared with."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from postlude.ops.linear_logprobs.gemm import without_autocast
from postlude.ops.linear_logprobs.resolved_call import ResolvedCall
from postlude.ops.linear_logprobs.statistics import LOWEST, RequestedStats


def plain_results(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, call: ResolvedCall, requested: RequestedStats
) -> tuple[Tensor | None, ...]:
    """Returns the fields of `TokenStats`, [positions, ...] each, of a resolved call. Holds [n, vocabulary] logits."""
    with without_autocast(hidden.device):
        logits, first = _logits(call.select(hidden), weight, bias, call)
        logprobs, lse = logits.log_softmax(1), logits.logsumexp(1)
        # With a wrong target_count, whose results are NaN, targets may be anything.
        targets = (call.rows.targets + call.vocab_start - first).clamp(0, max(0, logits.shape[1] - 1))[:, None]
        top, ids = logits.detach().topk(requested.topk)
        values = (
            logprobs.gather(1, targets)[:, 0],
            -(logprobs.exp() * logprobs).sum(1) if requested.entropy else None,
            lse if requested.lse else None,
            top - lse.detach()[:, None] if requested.topk else None,
            ids + first if requested.topk else None,
            logits.gather(1, targets)[:, 0] >= logits.amax(1) if requested.top1 else None,
        )
        return tuple(None if value is None else call.scatter(value) for value in values)


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, call: ResolvedCall) -> tuple[Tensor, int]:
    """Returns the logits [n, vocabulary] of the whole group, and the id of the first."""
    real, rows = slice(call.local_vocab_size), call.rows
    features, columns = (tensor.to(call.operand).to(call.compute) for tensor in (hidden, weight[real]))
    products = F.linear(features, columns, None if bias is None else bias[real].to(call.compute))
    capped = products if rows.inner is None else torch.tanh(products * rows.inner)
    logits = (capped * rows.factor[:, None]).clamp(min=LOWEST)  # a bias of -inf leaves entropy and gradients finite
    if call.group is None:
        return logits, call.vocab_start
    before = min(call.vocab_start, call.vocab_size)  # a shard may hold padding alone
    local = F.pad(logits, (before, call.vocab_size - before - call.local_vocab_size))
    total = local.detach().clone()
    dist.all_reduce(total, group=call.group)
    return local + (total - local.detach()), 0  # the values of all ranks, with the gradient of this rank's alone
