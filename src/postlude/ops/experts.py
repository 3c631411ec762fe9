"""Tokens grouped by expert: sorting, sending them to the experts' ranks, and one product per expert."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from postlude.ops.all_to_all import AllToAllPlan, Permutation, exchange_sizes
from postlude.ops.batch_invariant import is_batch_invariant
from postlude.ops.fp8 import fp8_grouped_product
from postlude.ops.invariant_linear import invariant_grouped_product
from postlude.ops.kernels.capabilities import Backend, use_kernel
from postlude.ops.linear import DeferredWgrads, linear, main_grad, wgrad_queue
from postlude.world.mesh import Axis

WIDEST = 16384  # features of a row that the kernels take: one program has all of them


def expert_order(choice: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sorts the slots of `choice` [T, k] by expert. The host does not wait.

    Returns `order` [T·k] (slot at each sorted row), its inverse, and `counts` [experts], rows per expert.
    """
    narrow = torch.int16 if experts <= 2**15 else torch.int32  # sorts in a fraction of int64's time
    chosen, order = choice.flatten().to(narrow).sort(stable=True)
    inverse = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=order.device))
    ends = torch.searchsorted(chosen, torch.arange(experts, device=chosen.device, dtype=chosen.dtype), right=True)
    return order, inverse, ends.diff(prepend=ends.new_zeros(1))


def replicate_rows(tokens: Tensor, order: Tensor, inverse: Tensor, copies: int, *, backend: Backend = "auto") -> Tensor:
    """Returns row order[i] // copies of `tokens` [T, H] at row i, [T·copies, H]. Gradients sum over the copies."""
    if _use_kernel("replicate_rows", tokens, backend):
        return _as_tensor(_Spread.apply(tokens, inverse, copies))
    return _as_tensor(_Rows.apply(tokens, order, inverse, copies))


def merge_rows(rows: Tensor, weights: Tensor, order: Tensor, inverse: Tensor, *, backend: Backend = "auto") -> Tensor:
    """Undoes the sort and sums each token's `rows` [T·k, H] with its `weights` [T, k]: [T, H]."""
    if _use_kernel("merge_rows", rows, backend):
        return _as_tensor(_Collect.apply(rows, weights, inverse))
    slots: Tensor = restore_rows(rows, order, inverse).unflatten(0, tuple(weights.shape))  # [T, k, H]
    return (slots * weights[..., None]).sum(1)


def restore_rows(rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    """Undoes the sort: [T·k, H] in slot order."""
    return _as_tensor(_Rows.apply(rows, inverse, order, 1))


@dataclass(frozen=True)
class ExpertRoute:
    """How one rank's rows, sorted by expert, reach the ranks that hold the experts.

    `counts` [E / ep] are the rows that each of this rank's experts gets from all ranks, sorted by expert. `to_experts`
    sends them; None where this rank has all experts.
    """

    counts: Tensor
    to_experts: AllToAllPlan | None = None


def start_expert_route(counts: Tensor, ep: Axis) -> Callable[[], ExpertRoute]:
    """Starts telling the ranks how many rows they get, from this rank's `counts` [E] per expert. Call it to wait."""
    if ep.group is None:
        return lambda: ExpertRoute(counts)
    group = ep.group
    wait_for_sizes = exchange_sizes(counts.view(ep.size, -1), group)  # [rank, its experts]

    def wait() -> ExpertRoute:
        incoming, sent, received = wait_for_sizes()
        # Rows come rank by rank, each rank's sorted by expert; each expert needs all its rows together.
        experts = torch.arange(incoming.shape[1], device=counts.device).repeat(ep.size)
        arrived = experts.repeat_interleave(incoming.flatten(), output_size=sum(received))
        order, inverse, local_counts = expert_order(arrived, incoming.shape[1])
        return ExpertRoute(local_counts, AllToAllPlan(sent, received, group, after=Permutation(order, inverse)))

    return wait


def grouped_linear(rows: Tensor, weight: Tensor, counts: Tensor, *, fp8: bool = False) -> Tensor:
    """Multiplies each of `rows` [R, in] by its expert's matrix of `weight` [E, out, in]: [R, out].

    Rows are sorted by expert and `counts` [E] has the rows of each. Where the grouped kernel does not fit, the host
    waits for the counts. With `fp8` the product and the gradient of the rows are in FP8.
    """
    if len(rows) and fp8:
        in_fp8: Tensor = _FP8GroupedProduct.apply(rows, weight, counts, wgrad_queue(weight))
        return in_fp8
    if len(rows) and rows.dtype == weight.dtype and grouped_kernel_fits(weight):
        product: Tensor = _GroupedProduct.apply(rows, weight, counts.cumsum(0).to(torch.int32), wgrad_queue(weight))
        return product
    if not len(rows):
        return rows @ weight[0].T  # as empty, with a gradient of zero
    pieces = rows.split(counts.tolist())
    if is_batch_invariant():
        return torch.cat([linear(piece, matrix) for piece, matrix in zip(pieces, weight, strict=True)])
    return torch.cat([piece @ matrix.T for piece, matrix in zip(pieces, weight, strict=True)])


def add_bias(rows: Tensor, bias: Tensor, counts: Tensor) -> Tensor:
    """Adds to each of `rows` [R, out] its expert's vector of `bias` [E, out]. See `grouped_linear`."""
    experts = torch.arange(len(bias), device=bias.device)
    added: Tensor = _Bias.apply(rows, bias, experts.repeat_interleave(counts, output_size=len(rows)))
    return added


def grouped_kernel_fits(weight: Tensor) -> bool:
    """Whether one kernel multiplies by all matrices: it needs rows of whole 16 bytes, bf16 on CUDA, and no float64."""
    aligned = all(size * weight.element_size() % 16 == 0 for size in weight.shape[1:])
    return aligned and weight.dtype != torch.float64 and (not weight.is_cuda or weight.dtype == torch.bfloat16)


class _Rows(Function):
    """Gathers by a permutation. The backward gathers by the inverse, so it is deterministic."""

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
    """Types the result of a Function."""
    tensor: Tensor = applied
    return tensor


class _Spread(Function):
    """Copies each token to its rows. Its gradient is their sum, in fp32 and rounded once."""

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
    """Sums each token's rows with weights, in fp32 and rounded once."""

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
    """The grouped kernel and its gradients, written out since the kernel needs contiguous operands."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, offsets: Tensor, deferred: DeferredWgrads | None) -> Tensor:
        ctx.save_for_backward(rows, weight, offsets)
        ctx.weight, ctx.deferred = weight, deferred  # with its history
        if is_batch_invariant():
            return invariant_grouped_product(rows, weight, offsets.diff(prepend=offsets.new_zeros(1)))
        return F.grouped_mm(rows, weight.transpose(-2, -1), offs=offsets)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        rows, weight, offsets = ctx.saved_tensors
        gradient = gradients[0].contiguous()
        for_rows = F.grouped_mm(gradient, weight, offs=offsets) if ctx.needs_input_grad[0] else None
        return for_rows, _grouped_wgrad(ctx, gradient, rows, offsets), None, None


class _FP8GroupedProduct(Function):
    """The same with the product and the gradient of the rows in FP8."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, counts: Tensor, deferred: DeferredWgrads | None) -> Tensor:
        ctx.save_for_backward(rows, weight, counts)
        ctx.weight, ctx.deferred = weight, deferred
        return fp8_grouped_product(rows, weight, counts)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        rows, weight, counts = ctx.saved_tensors
        gradient = gradients[0].contiguous()
        for_rows = fp8_grouped_product(gradient, weight, counts, transposed=True) if ctx.needs_input_grad[0] else None
        return for_rows, _grouped_wgrad(ctx, gradient, rows, counts.cumsum(0).to(torch.int32)), None, None


def _grouped_wgrad(ctx: Any, gradient: Tensor, rows: Tensor, offsets: Tensor) -> Tensor | None:
    """Returns the gradient of a grouped product's weight for autograd; None where it is deferred or already added."""
    total = main_grad(ctx.weight)

    def for_weight() -> Tensor | None:
        product = _products_of_groups(gradient, rows, offsets)
        if total is None:
            return product
        add_to(total, product)
        return None

    if ctx.deferred is not None:
        ctx.deferred.append((ctx.weight, for_weight))
        return None
    return for_weight() if ctx.needs_input_grad[1] else None


def _products_of_groups(gradient: Tensor, rows: Tensor, offsets: Tensor) -> Tensor:
    """Returns `gradient`ᵀ [out, R] · `rows` [R, in] of each expert's rows, [E, out, in]."""
    if rows.dtype != torch.float64:
        return F.grouped_mm(gradient.T, rows, offs=offsets)
    groups = zip(
        gradient.tensor_split(offsets[:-1].cpu().long()), rows.tensor_split(offsets[:-1].cpu().long()), strict=True
    )
    return torch.stack([left.T @ right for left, right in groups])


def add_to(total: Tensor, gradient: Tensor, *, backend: Backend = "auto") -> None:
    """Adds `gradient` to `total`, of another dtype. Torch's kernel for two dtypes reads number by number."""
    dense = total.is_contiguous() and gradient.is_contiguous()
    on_gpu = total.is_cuda or backend == "triton"
    if dense and on_gpu and use_kernel("add_to", backend, total.device, total.dtype):
        from postlude.ops.kernels.experts import add_to as add_dense

        add_dense(total, gradient)
    else:
        total += gradient


class _Bias(Function):
    """Adds a row of `bias` by expert. Its gradient sums each expert's rows in a product, so it is deterministic."""

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
