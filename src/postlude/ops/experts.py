"""Work on tokens grouped by expert: sorting them, bringing them to their experts' ranks, one product per group."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from postlude.ops.all_to_all import AllToAllPlan, Permutation, exchange_sizes
from postlude.ops.kernels.capabilities import Backend, use_kernel
from postlude.ops.linear import DeferredWgrads, main_grad, wgrad_queue
from postlude.world.mesh import Axis

WIDEST = 16384  # features of a row that the Triton kernels take: one program has all of them


def expert_order(choice: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sort the slots of `choice` [T, k] by expert. The host waits for nothing.

    Returns `order` [T·k] (slot at each sorted row), its inverse, and `counts` [experts], rows per expert.
    """
    narrow = torch.int16 if experts <= 2**15 else torch.int32  # which sorts in a fraction of int64's time
    chosen, order = choice.flatten().to(narrow).sort(stable=True)
    inverse = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=order.device))
    ends = torch.searchsorted(chosen, torch.arange(experts, device=chosen.device, dtype=chosen.dtype), right=True)
    return order, inverse, ends.diff(prepend=ends.new_zeros(1))


def replicate_rows(tokens: Tensor, order: Tensor, inverse: Tensor, copies: int, *, backend: Backend = "auto") -> Tensor:
    """Row order[i] // copies of `tokens` [T, H] at row i, [T·copies, H]. The gradient sums each token's copies."""
    if _use_kernel("replicate_rows", tokens, backend):
        return _as_tensor(_Spread.apply(tokens, inverse, copies))
    return _as_tensor(_Rows.apply(tokens, order, inverse, copies))


def merge_rows(rows: Tensor, weights: Tensor, order: Tensor, inverse: Tensor, *, backend: Backend = "auto") -> Tensor:
    """Undo the sort, and sum each token's `rows` [T·k, H] by its `weights` [T, k]: [T, H]."""
    if _use_kernel("merge_rows", rows, backend):
        return _as_tensor(_Collect.apply(rows, weights, inverse))
    slots: Tensor = restore_rows(rows, order, inverse).unflatten(0, tuple(weights.shape))  # [T, k, H]
    return (slots * weights[..., None]).sum(1)


def restore_rows(rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    """Undo the sort: [T·k, H] in slot order."""
    return _as_tensor(_Rows.apply(rows, inverse, order, 1))


@dataclass(frozen=True)
class ExpertRoute:
    """How one rank's rows, sorted by expert, come to the ranks that hold the experts.

    `counts` [E / ep]: rows that each of this rank's experts gets, from all ranks together, sorted by expert. `there`
    leads to them, and its `back` back again; None where this rank has all experts.
    """

    counts: Tensor
    there: AllToAllPlan | None = None


def start_expert_route(counts: Tensor, ep: Axis) -> Callable[[], ExpertRoute]:
    """From this rank's rows for each of all experts, `counts` [E]. Ranks tell each other; call this to wait for it."""
    if ep.group is None:
        return lambda: ExpertRoute(counts)
    group = ep.group
    hear = exchange_sizes(counts.view(ep.size, -1), group)  # [rank, its experts]

    def heard() -> ExpertRoute:
        incoming, sent, received = hear()
        # Rows come rank by rank, each rank's sorted by expert; the experts want all their rows together.
        experts = torch.arange(incoming.shape[1], device=counts.device).repeat(ep.size)
        arrived = experts.repeat_interleave(incoming.flatten(), output_size=sum(received))
        order, inverse, own = expert_order(arrived, incoming.shape[1])
        return ExpertRoute(own, AllToAllPlan(sent, received, group, after=Permutation(order, inverse)))

    return heard


def grouped_linear(rows: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """Each of `rows` [R, in] by its expert's matrix of `weight` [E, out, in]: [R, out].

    Rows are sorted by expert; `counts` [E] says how many each has. Where the grouped kernel does not fit, the host
    waits for them.
    """
    if len(rows) and rows.dtype == weight.dtype and grouped_kernel_fits(weight):
        product: Tensor = _GroupedProduct.apply(rows, weight, counts.cumsum(0).to(torch.int32), wgrad_queue(weight))
        return product
    if not len(rows):
        return rows @ weight[0].T  # as empty, with a gradient of zero
    pieces = rows.split(counts.tolist())
    return torch.cat([piece @ matrix.T for piece, matrix in zip(pieces, weight, strict=True)])


def add_bias(rows: Tensor, bias: Tensor, counts: Tensor) -> Tensor:
    """Each of `rows` [R, out] plus its expert's vector of `bias` [E, out]. Rows and `counts` as in `grouped_linear`."""
    experts = torch.arange(len(bias), device=bias.device)
    added: Tensor = _Bias.apply(rows, bias, experts.repeat_interleave(counts, output_size=len(rows)))
    return added


def grouped_kernel_fits(weight: Tensor) -> bool:
    """Whether one kernel multiplies by all matrices: it wants rows of whole 16 bytes, and bf16 on CUDA."""
    aligned = all(size * weight.element_size() % 16 == 0 for size in weight.shape[1:])
    return aligned and (not weight.is_cuda or weight.dtype == torch.bfloat16)


class _Rows(Function):
    """Gather by a permutation; the backward gathers by the inverse, so it needs no atomics and is deterministic."""

    @staticmethod
    def forward(ctx: Any, source: Tensor, order: Tensor, inverse: Tensor, copies: int) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.copies = copies
        return source[order // copies if copies > 1 else order]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (inverse,) = ctx.saved_tensors
        rows = gradients[0][inverse]
        if ctx.copies > 1:
            rows = rows.unflatten(0, (-1, ctx.copies)).sum(1)
        return rows, None, None, None


def _use_kernel(name: str, rows: Tensor, backend: Backend) -> bool:
    if not rows.is_cuda and backend == "auto":
        return False
    refused = f"its kernels take rows of {WIDEST} features" if rows.shape[1] > WIDEST else None
    return use_kernel(name, backend, rows.device, rows.dtype, refused=refused)


def _as_tensor(applied: Any) -> Tensor:
    """What a Function returns, which has no type."""
    tensor: Tensor = applied
    return tensor


class _Spread(Function):
    """Each token to its rows; its gradient is their sum, in fp32 and rounded once."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, inverse: Tensor, copies: int) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.copies = copies
        from postlude.ops.kernels.experts import spread  # needs triton

        return spread(tokens, inverse, copies)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        from postlude.ops.kernels.experts import collect

        (inverse,) = ctx.saved_tensors
        return collect(gradients[0], inverse, ctx.copies), None, None


class _Collect(Function):
    """Each token's rows by weight, summed in fp32 and rounded once."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weights, inverse)
        from postlude.ops.kernels.experts import collect

        return collect(rows, inverse, weights.shape[1], weights)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        from postlude.ops.kernels.experts import spread_and_rate

        rows, weights, inverse = ctx.saved_tensors
        return *spread_and_rate(gradients[0], inverse, weights.shape[1], weights, rows), None


class _GroupedProduct(Function):
    """The grouped kernel and its gradients, written out since the kernel wants them laid out in memory."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, offsets: Tensor, later: DeferredWgrads | None) -> Tensor:
        ctx.save_for_backward(rows, weight, offsets)
        ctx.weight, ctx.later = weight, later  # with its history
        return F.grouped_mm(rows, weight.transpose(-2, -1), offs=offsets)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        rows, weight, offsets = ctx.saved_tensors
        gradient, total = gradients[0].contiguous(), main_grad(ctx.weight)

        def for_weight() -> Tensor | None:
            made: Tensor = F.grouped_mm(gradient.T, rows, offs=offsets)
            if total is None:
                return made
            add_to(total, made)
            return None

        for_rows = F.grouped_mm(gradient, weight, offs=offsets) if ctx.needs_input_grad[0] else None
        if ctx.later is not None:
            ctx.later.append((ctx.weight, for_weight))
            return for_rows, None, None, None
        return for_rows, for_weight() if ctx.needs_input_grad[1] else None, None, None


def add_to(total: Tensor, gradient: Tensor, *, backend: Backend = "auto") -> None:
    """total += gradient, of another dtype. For two dtypes torch's own kernel reads number by number."""
    dense = total.is_contiguous() and gradient.is_contiguous()
    on_gpu = total.is_cuda or backend == "triton"
    if dense and on_gpu and use_kernel("add_to", backend, total.device, total.dtype):
        from postlude.ops.kernels.experts import add_to as add_dense

        add_dense(total, gradient)
    else:
        total += gradient


class _Bias(Function):
    """Add a row of `bias` by expert; its gradient sums each expert's rows in a product, so it is deterministic."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, bias: Tensor, expert: Tensor) -> Tensor:
        ctx.save_for_backward(expert)
        ctx.experts = len(bias)
        return rows + bias[expert]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        (expert,) = ctx.saved_tensors
        belongs = torch.arange(ctx.experts, device=expert.device)[:, None] == expert  # [E, R]
        return gradients[0], belongs.to(gradients[0].dtype) @ gradients[0], None
