"""`linear_objective`: a token-separable loss and all its gradients in one sweep over the logits.

A recomputing head projects twice (8·N·H·V operations with both gradients). If the loss of a token depends on nothing
but that token's log-prob, entropy and columns, a slab of tokens can be projected, scored and differentiated before its
logits are gone: 6·N·H·V, a floor 25 % lower.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Unpack

import torch
from torch import Tensor

from postlude.ops.linear_logprobs.api import (
    Asked,
    TokenStats,
    at_positions,
    flat_hidden,
    refuse_second_derivative,
    token_results,
)
from postlude.ops.linear_logprobs.gemm import without_autocast
from postlude.ops.linear_logprobs.logits import PLAIN, LogitKeywords, Logits
from postlude.ops.linear_logprobs.plan import plan_coded_sweep, plan_sweep
from postlude.ops.linear_logprobs.problem import Problem, resolve
from postlude.ops.linear_logprobs.statistics import Results, Upstream, empty_state
from postlude.ops.linear_logprobs.sweep import CodedProjection, Gradients, Head, Projection, Wanted

TokenObjective = Callable[[Tensor, Tensor | None, Any], Tensor]


@dataclass(frozen=True)
class LinearObjective:
    """What `linear_objective` returns. Only `loss` carries a gradient."""

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
    hit: bool = False,
    how: Logits = PLAIN,
    **changes: Unpack[LogitKeywords],
) -> LinearObjective:
    """The sum over tokens of `token_objective(logprob, entropy, columns)`, with gradients to hidden, weight and bias.

    `token_objective` is ordinary torch code: it receives fp32 log-probs [n], entropies [n] (None unless `entropy`) and
    `columns` for some of the tokens, and returns their losses [n]. It is called once a slab, never with an ignored
    token, and must treat each token by itself: no mean, no reference to other tokens. Whatever normalises the loss
    belongs in `columns`, or multiplies the result.

    `columns` is what the objective needs beside the log-probs: a tensor, or a mapping, sequence or dataclass of them,
    each in the shape of `targets` (more dimensions may follow). Other values, 0-dim tensors among them, are handed on
    as they are. Gradients reach hidden, weight and bias alone, nothing in `columns` and nothing the objective closes
    over. They are made forward and wait for backward, which only scales them and cannot itself be differentiated. In
    half precision on Hopper the weight's is summed over slabs in place, in its own dtype, where its fp32 form would be
    larger than 256 MiB, or than half of a `memory_budget`.

    With `group` (and where no gradient is wanted) the statistics come first and backward projects again: the same
    results at `linear_logprobs`'s cost, still with one collective a call. All other arguments, `how`
    logits are made among them, are those of `linear_logprobs`.
    """
    how = how.but(**changes)
    problem = resolve(hidden, weight, targets, how)
    mine = _map_tensors(columns, lambda tensor: problem.take(_flat(tensor.detach(), targets)))
    asked = Asked(entropy=entropy, lse=lse, hit=hit)
    wants_gradient = any(tensor is not None and tensor.requires_grad for tensor in (hidden, weight, how.bias))
    if problem.group is None and wants_gradient and torch.is_grad_enabled():
        loss, token_losses, *results = _OneSweep.apply(
            flat_hidden(hidden), weight, how.bias, problem, token_objective, mine, asked
        )
    else:
        logprobs, entropies, *others = token_results(hidden, weight, how.bias, problem, asked)
        assert logprobs is not None
        kept = problem.take(logprobs), None if entropies is None else problem.take(entropies)
        with without_autocast(hidden.device):
            losses = _call(token_objective, *kept, mine)
        loss, token_losses = losses.sum(), problem.put(losses.detach())
        results = [None if row is None else row.detach() for row in (logprobs, entropies, *others)]
    return LinearObjective(loss, token_losses.view(targets.shape), TokenStats.of(results, targets.shape))


class _OneSweep(torch.autograd.Function):
    """Gradients are made forward, for an upstream gradient of 1, and scaled backward."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        problem: Problem,
        objective: TokenObjective,
        columns: Any,
        asked: Asked,
    ) -> tuple[Tensor | None, ...]:
        wanted = Wanted(*ctx.needs_input_grad[:3])
        head = Head(problem.take(hidden), weight, bias)
        with without_autocast(hidden.device):
            results, losses, ctx.gradients = _sweep(
                head, problem, wanted, objective=objective, columns=columns, entropy=asked.entropy
            )
        ctx.problem = problem
        outputs = problem.put(losses), *at_positions(results, problem, asked)
        ctx.mark_non_differentiable(*(row for row in outputs if row is not None))
        return losses.sum(), *outputs

    @staticmethod
    def backward(ctx: Any, scale: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("linear_objective")
        gradients, ctx.gradients = ctx.gradients, None  # as large as the weight, and the graph may outlive this
        if gradients is None:
            raise RuntimeError("linear_objective's gradients were used up by an earlier backward; run it again first.")
        hidden, weight, bias = gradients.finish(scale)
        return None if hidden is None else ctx.problem.put(hidden), weight, bias, None, None, None, None


def _sweep(
    head: Head, problem: Problem, wanted: Wanted, *, objective: TokenObjective, columns: Any, entropy: bool
) -> tuple[Results, Tensor, Gradients]:
    """Statistics and losses [n] of the projected tokens, and the gradients of the losses' sum."""
    coded = problem.coded
    shape, budget, exact = problem.shape(head.hidden.shape[1], coded=coded), problem.memory_budget, True
    if coded:
        plan, exact = plan_coded_sweep(shape, weight_gradient=wanted.weight, memory_budget=budget)
    else:
        cast = head.weight.dtype != problem.operand
        plan = plan_sweep(shape, weight_gradient=wanted.weight, weight_cast=cast, memory_budget=budget)
    state = empty_state(shape.rows, problem.compute, head.hidden.device)
    losses = torch.zeros(shape.rows, dtype=problem.compute, device=head.hidden.device)
    gradients = Gradients(head, problem, wanted, plan, shape, exact=exact)
    projection = (CodedProjection if coded else Projection)(head, problem, plan, shape)
    for rows, vocabulary in plan.slabs(shape):
        part = state[:, rows]
        projection.score(rows, vocabulary, part, entropy=entropy)
        results = problem.epilogue.results(part)
        losses[rows], upstream = _differentiate(objective, results, _map_tensors(columns, itemgetter(rows)), entropy)
        picked = problem.rows[rows]
        coefficients = problem.epilogue.coefficients(picked, results.normalizer, results.entropy, upstream, None)
        gradients.add(*projection.differentiate(part, coefficients))
    return problem.epilogue.results(state), losses, gradients


def _differentiate(objective: TokenObjective, results: Results, columns: Any, entropy: bool) -> tuple[Tensor, Upstream]:
    """The losses [n] of a slab, and their sum's gradients with respect to log-prob and entropy."""
    with torch.enable_grad():
        logprob = results.logprob.detach().requires_grad_()
        entropies = results.entropy.detach().requires_grad_() if entropy else None
        losses = _call(objective, logprob, entropies, columns)
    if not losses.requires_grad:
        return losses, Upstream(None, None)
    leaves = [logprob] if entropies is None else [logprob, entropies]
    gradients = torch.autograd.grad(losses, leaves, torch.ones_like(losses), allow_unused=True)
    return losses.detach(), Upstream(*gradients) if entropy else Upstream(gradients[0], None)


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
    """Apply `function` to every tensor with dimensions in a mapping, sequence or dataclass of them."""
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
