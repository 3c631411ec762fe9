"""`linear_logprobs`: log-probs, entropy and top-k of a linear head without materialising its logits.

`plain_results` has all of the logits and is differentiated by autograd: what the fused head is compared with.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Unpack

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from postlude.ops.linear_logprobs.gemm import without_autocast
from postlude.ops.linear_logprobs.logits import DEFAULT_LOGITS, LogitConfig, LogitOptions
from postlude.ops.linear_logprobs.resolved_call import ResolvedCall, resolve
from postlude.ops.linear_logprobs.statistics import LOWEST, RequestedStats, Results, TopKLogits, Upstream, merge_ranks
from postlude.ops.linear_logprobs.sweep import GradientsNeeded, Head, sweep_gradients, sweep_statistics


@dataclass(frozen=True)
class TokenStats:
    """Results per token in the shape of `targets`; fp32, or float64 if the inputs are. Ignored positions hold 0.

    What was not requested is None. Gradients flow through `logprob`, `entropy` and `lse`.
    """

    logprob: Tensor
    entropy: Tensor | None = None
    lse: Tensor | None = None
    topk_logprobs: Tensor | None = None  # [..., k], best first
    topk_ids: Tensor | None = None  # [..., k] int64, ids of the whole vocabulary
    top1: Tensor | None = None  # bool: the target is a likeliest token, no logit is larger than its own

    @staticmethod
    def of(results: Iterable[Tensor | None], shape: torch.Size) -> TokenStats:
        """Builds it from results [positions, ...] in the order above, in the `shape` of the targets."""
        if len(shape) != 1:  # a view would be one more autograd node
            results = [None if values is None else values.view(*shape, *values.shape[1:]) for values in results]
        return TokenStats(*results)  # type: ignore[arg-type]


def linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    entropy: bool = False,
    topk: int = 0,
    lse: bool = False,
    top1: bool = False,
    logit_config: LogitConfig = DEFAULT_LOGITS,
    **changes: Unpack[LogitOptions],
) -> TokenStats:
    """Returns the log-prob of each target under softmax(logits), and on request entropy, lse, top-k and `top1`.

    Args:
        hidden: [..., H].
        weight: [V, H], this rank's rows of the output embedding.
        targets: [...] integer ids of the whole vocabulary, or `ignore_index` where there is none.
        entropy: also -Σ p·log p, with its gradient.
        topk: also the k likeliest ids and their log-probs, without gradient.
        lse: also log Σ e^logit, with its gradient (z-loss).
        top1: also whether the target is a likeliest token: no logit is larger than its own.
        logit_config: how logits are computed. Its fields are also keywords of the call, which take precedence: bias,
            temperature, logit_scale, softcap, ignore_index, target_count, vocab_start, vocab_size, group, backend,
            memory_budget and cast_hidden, as `LogitConfig` explains them.

    It is differentiable once; create_graph=True raises. The backward needs the inputs and a few numbers per token.
    """
    logit_config = logit_config.replace(**changes)
    hidden = logit_config.operand(hidden, weight)
    call = resolve(hidden, weight, targets, logit_config)
    if not 0 <= topk <= call.vocab_size:
        raise ValueError(f"topk must be between 0 and the vocabulary's {call.vocab_size} entries, but is {topk}.")
    requested = RequestedStats(entropy=entropy, lse=lse, top1=top1, topk=topk)
    results = token_results(hidden, weight, logit_config.bias, call, requested)
    return TokenStats.of(results, targets.shape)


def token_results(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, call: ResolvedCall, requested: RequestedStats
) -> tuple[Tensor | None, ...]:
    """Returns the fields of `TokenStats`, [positions, ...] each, of a resolved call."""
    if call.plain:
        return plain_results(flat_hidden(hidden), weight, bias, call, requested)
    return _LinearLogprobs.apply(flat_hidden(hidden), weight, bias, call, requested)  # type: ignore[no-any-return]


def flat_hidden(hidden: Tensor) -> Tensor:
    """[..., H] -> [positions, H]."""
    return hidden if hidden.dim() == 2 else hidden.reshape(-1, hidden.shape[-1])


def scatter_results(
    results: Results, call: ResolvedCall, requested: RequestedStats, top: TopKLogits | None = None
) -> tuple[Tensor | None, ...]:
    """Returns the fields of `TokenStats`, [positions, ...] each, from the results of the projected tokens."""
    token_values = (
        results.logprob,
        results.entropy if requested.entropy else None,
        results.lse if requested.lse else None,
        None if top is None else top.logits - results.lse[:, None],
        None if top is None else top.ids,
        results.top1 if requested.top1 else None,
    )
    return tuple(None if values is None else call.scatter(values) for values in token_values)


def refuse_second_derivative(name: str) -> None:
    """Raises in a backward with create_graph=True, whose result would silently be a constant."""
    if torch.is_grad_enabled():
        raise RuntimeError(f"{name} has no second derivative; differentiate it without create_graph=True.")


class _LinearLogprobs(torch.autograd.Function):
    """Forward keeps references to its inputs and [n] statistics. Backward recomputes the logits."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        call: ResolvedCall,
        requested: RequestedStats,
    ) -> tuple[Tensor | None, ...]:
        with without_autocast(hidden.device):
            head = Head(call.select(hidden), weight, bias)
            state, top = sweep_statistics(head, call, entropy=requested.entropy, topk=requested.topk)
            if call.group is not None and state.shape[1]:
                state, top = merge_ranks(state, top, call.group)
        results = call.epilogue.results(state)
        ctx.save_for_backward(hidden, weight, bias, results.normalizer, results.entropy)
        ctx.call, ctx.weight = call, weight  # a saved one comes back without its main_grad
        ctx.set_materialize_grads(False)
        outputs = scatter_results(results, call, requested, top)
        ctx.mark_non_differentiable(*(values for values in outputs[3:] if values is not None))
        return outputs

    @staticmethod
    def backward(
        ctx: Any, grad_logprob: Tensor | None, grad_entropy: Tensor | None, grad_lse: Tensor | None, *_: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("linear_logprobs")
        if grad_logprob is None and grad_entropy is None and grad_lse is None:
            return (None,) * 5
        hidden, weight, bias, normalizer, row_entropy = ctx.saved_tensors
        call: ResolvedCall = ctx.call
        upstream = Upstream(grad_logprob, grad_entropy, grad_lse)
        coefficients = call.epilogue.coefficients(call.rows, normalizer, row_entropy, upstream, call.target_positions)
        with without_autocast(hidden.device):
            head = Head(call.select(hidden), weight, bias)
            gradients = sweep_gradients(head, call, coefficients, GradientsNeeded(*ctx.needs_input_grad[:3]))
        hidden_gradient, weight_gradient, bias_gradient = gradients.finish(weight=ctx.weight)
        if hidden_gradient is not None:
            hidden_gradient = call.scatter(hidden_gradient)
        return hidden_gradient, weight_gradient, bias_gradient, None, None


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
