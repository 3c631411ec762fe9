"""`linear_objective`: a token-separable loss and all its gradients in one sweep over the logits.

A head that recomputes projects twice (8·N·H·V operations with both gradients). If a token's loss depends only on its
log-prob, entropy and columns, a slab of tokens can be projected, scored and differentiated while its logits exist:
6·N·H·V, 25 % less.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Unpack

import torch
from torch import Tensor

from postlude.ops.linear_logprobs.api import (
    TokenStats,
    flat_hidden,
    refuse_second_derivative,
    scatter_results,
    token_results,
)
from postlude.ops.linear_logprobs.gemm import without_autocast
from postlude.ops.linear_logprobs.logits import DEFAULT_LOGITS, LogitConfig, LogitOptions
from postlude.ops.linear_logprobs.plan import plan_rows, plan_sweep
from postlude.ops.linear_logprobs.resolved_call import ResolvedCall, resolve
from postlude.ops.linear_logprobs.statistics import RequestedStats, Results, Upstream, empty_state
from postlude.ops.linear_logprobs.sweep import Gradients, GradientsNeeded, Head, Projection, TokenSweep

TokenObjective = Callable[[Tensor, Tensor | None, Any], Tensor]


@dataclass(frozen=True)
class LinearObjective:
    """The result of `linear_objective`. Only `loss` has a gradient."""

    loss: Tensor  # 0-dim: the sum of the token losses
    token_loss: Tensor  # in the shape of targets, 0 where ignored
    stats: TokenStats


def linear_objective(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    token_objective: TokenObjective,
    columns: Any = None,
    *,
    entropy: bool = False,
    lse: bool = False,
    top1: bool = False,
    logit_config: LogitConfig = DEFAULT_LOGITS,
    **changes: Unpack[LogitOptions],
) -> LinearObjective:
    """Returns the sum over tokens of `token_objective(logprob, entropy, columns)`, with gradient.

    `token_objective` is ordinary torch code: it receives fp32 log-probs [n], entropies [n] (None unless `entropy`) and
    `columns` for some of the tokens, and returns their losses [n]. It is called once per slab, never with an ignored
    token, and must treat each token by itself: no mean, no reference to other tokens. A normalisation belongs in
    `columns`, or multiplies the result.

    `columns` is what the objective needs besides log-probs: a tensor, or a mapping, sequence or dataclass of tensors,
    each in the shape of `targets` (more dimensions may follow). Other values, 0-dim tensors among them, are passed
    unchanged. Gradients reach hidden, weight and bias only, not `columns` nor what the objective closes over. They are
    computed in the forward; backward only scales them and cannot be differentiated. In
    half precision on Hopper the weight's is summed over slabs in place, in its own dtype, where its fp32 form would be
    larger than 256 MiB, or than half of a `memory_budget`.

    With `group` (and where no gradient is needed) the statistics come first and backward projects again: the same
    results at `linear_logprobs`'s cost, still with one collective per call. All other arguments are those of
    `linear_logprobs`.
    """
    logit_config = logit_config.replace(**changes)
    hidden = logit_config.operand(hidden, weight)
    tensors = hidden, weight, logit_config.bias
    needed = GradientsNeeded(*(tensor is not None and tensor.requires_grad for tensor in tensors))
    needs_gradient = torch.is_grad_enabled() and (needed.hidden or needed.weight or needed.bias)
    call = resolve(hidden, weight, targets, logit_config)
    selected_columns = _map_tensors(columns, lambda tensor: call.select(_flat(tensor.detach(), targets)))
    requested = RequestedStats(entropy=entropy, lse=lse, top1=top1)
    if call.group is None and needs_gradient and not call.plain:
        loss, token_losses, *results = _OneSweep.apply(
            flat_hidden(hidden), weight, logit_config.bias, call, token_objective, selected_columns, requested
        )
    else:
        logprobs, entropies, *others = token_results(hidden, weight, logit_config.bias, call, requested)
        assert logprobs is not None
        stats = call.select(logprobs), None if entropies is None else call.select(entropies)
        with without_autocast(hidden.device):
            losses = _call(token_objective, *stats, selected_columns)
        loss, token_losses = losses.sum(), call.scatter(losses.detach())
        results = [None if values is None else values.detach() for values in (logprobs, entropies, *others)]
    return LinearObjective(loss, token_losses.view(targets.shape), TokenStats.of(results, targets.shape))


def objective_of_stats(
    stats: TokenStats, targets: Tensor, token_objective: TokenObjective, columns: Any, ignore_index: int
) -> LinearObjective:
    """Returns what `linear_objective` does for log-probs and entropies, [N] each, that are computed already."""
    rows = (targets != ignore_index).nonzero()[:, 0]
    selected_columns = _map_tensors(columns, lambda tensor: _flat(tensor.detach(), targets)[rows])
    entropy = None if stats.entropy is None else stats.entropy[rows]
    with without_autocast(targets.device):
        losses = _call(token_objective, stats.logprob[rows], entropy, selected_columns)
    token_loss = torch.zeros(len(targets), dtype=losses.dtype, device=losses.device)
    results = [None if values is None else values.detach() for values in (stats.logprob, stats.entropy, stats.lse)]
    token_loss = token_loss.index_copy(0, rows, losses.detach())
    return LinearObjective(losses.sum(), token_loss, TokenStats.of(results, targets.shape))


class _OneSweep(torch.autograd.Function):
    """Computes gradients in the forward, for an upstream gradient of 1, and scales them in the backward."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        call: ResolvedCall,
        objective: TokenObjective,
        columns: Any,
        requested: RequestedStats,
    ) -> tuple[Tensor | None, ...]:
        needed = GradientsNeeded(*ctx.needs_input_grad[:3])
        head = Head(call.select(hidden), weight, bias)
        with without_autocast(hidden.device):
            sweep = _plan(head, call, needed)
            gradients = Gradients(head, call, needed, sweep.plan, sweep.shape, exact=sweep.exact)
            losses = _run_sweep(sweep, call, gradients, objective=objective, columns=columns, entropy=requested.entropy)
            results = call.epilogue.results(sweep.state)
        ctx.gradients, ctx.weight = gradients, weight
        ctx.call = call
        outputs = call.scatter(losses), *scatter_results(results, call, requested)
        ctx.mark_non_differentiable(*(values for values in outputs if values is not None))
        return losses.sum(), *outputs

    @staticmethod
    def backward(ctx: Any, scale: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("linear_objective")
        gradients, ctx.gradients = ctx.gradients, None  # frees them: they are as large as the weight
        if gradients is None:
            raise RuntimeError("linear_objective's gradients were used up by an earlier backward; run it again first.")
        hidden, weight, bias = gradients.finish(scale, ctx.weight)
        return None if hidden is None else ctx.call.scatter(hidden), weight, bias, None, None, None, None


def _plan(head: Head, call: ResolvedCall, needed: GradientsNeeded) -> TokenSweep:
    shape, budget = call.shape(head.hidden.shape[1], quantized=call.can_quantize), call.memory_budget
    if call.can_quantize:
        return TokenSweep.quantized(head, call.rows, shape, call.operand, needed, budget)
    cast = head.weight.dtype != call.operand
    plan = plan_sweep(shape, weight_gradient=needed.weight, weight_cast=cast, memory_budget=budget)
    if call.batch_invariant:
        plan = plan_rows(shape, budget)
    state = empty_state(shape.rows, call.compute, head.hidden.device)
    return TokenSweep(shape, plan, True, state, Projection(head, call, plan, shape))


def _run_sweep(
    sweep: TokenSweep,
    call: ResolvedCall,
    gradients: Gradients,
    *,
    objective: TokenObjective,
    columns: Any,
    entropy: bool,
) -> Tensor:
    """Returns the losses [n] of the projected tokens. Fills the sweep's state and `gradients`."""
    # A slab's kernels take about a millisecond, in which the host must launch the next slab's.
    projection, losses = sweep.projection, []
    for rows, vocabulary in sweep.plan.slabs(sweep.shape):
        results = projection.score(rows, vocabulary, sweep.state[:, rows], entropy=entropy)
        loss, upstream = _differentiate(objective, results, _map_tensors(columns, itemgetter(rows)), entropy=entropy)
        gradients.add(*projection.differentiate(results, upstream))
        losses.append(loss)
    if not losses:
        return torch.zeros(0, dtype=call.compute, device=sweep.state.device)
    return torch.cat(losses).to(call.compute)


def _differentiate(
    objective: TokenObjective, results: Results, columns: Any, *, entropy: bool
) -> tuple[Tensor, Upstream]:
    """Returns the losses [n] of a slab, and the gradients of their sum by log-prob and entropy."""
    with torch.enable_grad():
        logprob = results.logprob.detach().requires_grad_()
        entropies = results.entropy.detach().requires_grad_() if entropy else None
        losses = _call(objective, logprob, entropies, columns)
    if not losses.requires_grad:
        return losses, Upstream(None, None)
    leaves = [logprob] if entropies is None else [logprob, entropies]
    with torch.autograd.set_multithreading_enabled(False):  # another thread would take longer
        upstream = _scalar_one(losses.dtype, losses.device).expand(losses.shape)
        gradients = torch.autograd.grad(losses, leaves, upstream, allow_unused=True)
    return losses.detach(), Upstream(*gradients) if entropy else Upstream(gradients[0], None)


@functools.cache
def _scalar_one(dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.ones((), dtype=dtype, device=device)


def _call(objective: TokenObjective, logprob: Tensor, entropy: Tensor | None, columns: Any) -> Tensor:
    losses = objective(logprob, entropy, columns)
    if not isinstance(losses, Tensor):
        raise TypeError(f"token_objective must return a tensor of losses, but returned a {type(losses).__name__}.")
    if losses.shape != logprob.shape:
        raise ValueError(
            f"token_objective must return one loss a token, {list(logprob.shape)}, but returned {list(losses.shape)}. "
            "Leave the sum to linear_objective."
        )
    return losses


def _flat(tensor: Tensor, targets: Tensor) -> Tensor:
    """[*targets.shape, ...] -> [positions, ...]."""
    if tensor.shape[: targets.dim()] != targets.shape:
        raise ValueError(
            f"columns hold a tensor {list(tensor.shape)}, which does not begin with targets' {list(targets.shape)}. "
            "Every column has one entry a token."
        )
    return tensor.reshape(-1, *tensor.shape[targets.dim() :])


def _map_tensors(columns: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Applies `function` to every tensor with dimensions in a mapping, sequence or dataclass."""
    if isinstance(columns, Tensor):
        return function(columns) if columns.dim() else columns.detach()
    if dataclasses.is_dataclass(columns) and not isinstance(columns, type):
        named = {field.name: getattr(columns, field.name) for field in dataclasses.fields(columns)}
        return dataclasses.replace(columns, **_map_tensors(named, function))
    if isinstance(columns, Mapping):
        return {name: _map_tensors(column, function) for name, column in columns.items()}
    if isinstance(columns, (tuple, list)):
        parts = [_map_tensors(column, function) for column in columns]
        return type(columns)(*parts) if hasattr(columns, "_fields") else type(columns)(parts)
    return columns
