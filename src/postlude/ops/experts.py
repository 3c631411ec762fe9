"""Tokens grouped by expert: sorting, sending them to the experts' ranks, one product per expert, auxiliary losses.

The gradient of an auxiliary loss joins where the loss arises, whatever the caller's objective is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from postlude.ops.all_to_all import AllToAllPlan, Permutation, exchange_sizes
from postlude.ops.batch_invariant import invariant_grouped_product, is_batch_invariant
from postlude.ops.kernels.capabilities import Backend, use_kernel
from postlude.ops.linear import (
    DeferredWgrads,
    add_to,
    adjacent_view,
    current_wgrad_queue,
    has_main_grad,
    linear,
    take_main_grads,
)
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
        return _as_tensor(_ReplicateRows.apply(tokens, inverse, copies))
    return _as_tensor(_Rows.apply(tokens, order, inverse, copies))


def merge_rows(rows: Tensor, weights: Tensor, order: Tensor, inverse: Tensor, *, backend: Backend = "auto") -> Tensor:
    """Undoes the sort and sums each token's `rows` [T·k, H] with its `weights` [T, k]: [T, H]."""
    if _use_kernel("merge_rows", rows, backend):
        return _as_tensor(_MergeRows.apply(rows, weights, inverse))
    slots: Tensor = restore_rows(rows, order, inverse).unflatten(0, tuple(weights.shape))  # [T, k, H]
    return (slots * weights[..., None]).sum(1)


def restore_rows(rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    """Undoes the sort: [T·k, H] in slot order."""
    return _as_tensor(_Rows.apply(rows, inverse, order, 1))


@dataclass(frozen=True)
class ExpertRoute:
    """The route of one rank's rows, sorted by expert, to the ranks that hold the experts.

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
        received_experts = experts.repeat_interleave(incoming.flatten(), output_size=sum(received))
        order, inverse, local_counts = expert_order(received_experts, incoming.shape[1])
        return ExpertRoute(local_counts, AllToAllPlan(sent, received, group, after=Permutation(order, inverse)))

    return wait


def grouped_linear(rows: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """Multiplies each of `rows` [R, in] by its expert's matrix of `weight` [E, out, in]: [R, out].

    Rows are sorted by expert and `counts` [E] has the rows of each. Where the grouped kernel does not fit, the host
    waits for the counts.
    """
    return grouped_linears(rows, (weight,), counts)[0]


def grouped_linears(
    rows: Tensor, weights: Sequence[Tensor], counts: Tensor, *, joins: bool | None = None
) -> tuple[Tensor, ...]:
    """Returns `grouped_linear` of the same `rows` with each of `weights` [E, out, in]: [R, out] each.

    Weights that alternate in memory (`alternating_view`) are one product with `joins`, and so are the gradients of the
    rows where those of the products are columns of one tensor. The default is to join on CUDA: elsewhere results would
    not be equal to the bit.
    """
    if len(rows) and all(rows.dtype == weight.dtype and grouped_kernel_fits(weight) for weight in weights):
        queue = current_wgrad_queue() if torch.is_grad_enabled() else None
        joins = rows.is_cuda if joins is None else joins
        products: tuple[Tensor, ...] = _GroupedProducts.apply(rows, counts, queue, joins, *weights)
        return products
    return tuple(_product_by_expert(rows, weight, counts) for weight in weights)


def _product_by_expert(rows: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    if not len(rows):
        return rows @ weight[0].T  # as empty, with a gradient of zero
    pieces = rows.split(counts.tolist())
    if is_batch_invariant():
        return torch.cat([linear(piece, matrix) for piece, matrix in zip(pieces, weight, strict=True)])
    return torch.cat([piece @ matrix.T for piece, matrix in zip(pieces, weight, strict=True)])


def alternating(shapes: Sequence[Sequence[int]], dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    """Returns uninitialised weights of these shapes [E, out, in] that alternate in memory, expert by expert."""
    experts, _, width = shapes[0]
    sizes = [size for _, size, _ in shapes]
    parts: tuple[Tensor, ...] = torch.empty(experts, sum(sizes), width, dtype=dtype, device=device).split(sizes, 1)
    return parts


def alternating_view(weights: Sequence[Tensor]) -> Tensor | None:
    """Returns weights made by `alternating` as one, [E, sum of out, in]; None for others."""
    first = weights[0]
    experts, _, width = first.shape
    outputs = sum(weight.shape[1] for weight in weights)
    address, storage = first.data_ptr(), first.untyped_storage().data_ptr()
    for weight in weights:
        strides_fit = weight.stride() == (outputs * width, width, 1)
        if not strides_fit or weight.data_ptr() != address or weight.untyped_storage().data_ptr() != storage:
            return None
        address += weight.shape[1] * width * weight.element_size()
    return first.as_strided((experts, outputs, width), first.stride())


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
    unsupported_reason = f"its kernels take rows of {WIDEST} features" if rows.shape[1] > WIDEST else None
    return use_kernel(name, backend, rows.device, rows.dtype, unsupported_reason=unsupported_reason)


def _as_tensor(applied: Any) -> Tensor:
    tensor: Tensor = applied
    return tensor


class _ReplicateRows(Function):
    """Copies each token to its rows. Its gradient is their sum, in fp32 and rounded once."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, inverse: Tensor, copies: int) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.copies = copies
        from postlude.ops.kernels.experts import replicate  # needs triton

        return replicate(tokens, inverse, copies)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        from postlude.ops.kernels.experts import merge

        (inverse,) = ctx.saved_tensors
        return merge(gradients[0], inverse, ctx.copies), None, None


class _MergeRows(Function):
    """Sums each token's rows with weights, in fp32 and rounded once."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weights, inverse)
        from postlude.ops.kernels.experts import merge

        return merge(rows, inverse, weights.shape[1], weights)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        from postlude.ops.kernels.experts import merge_backward

        rows, weights, inverse = ctx.saved_tensors
        return *merge_backward(gradients[0], inverse, weights.shape[1], weights, rows), None


class _GroupedProducts(Function):
    """The grouped kernel and its gradients for weights with the same rows: see `grouped_linears`."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, counts: Tensor, queue: DeferredWgrads | None, joins: bool, *weights: Tensor
    ) -> tuple[Tensor, ...]:
        ends = counts.cumsum(0).to(torch.int32)
        ctx.save_for_backward(rows, ends, *weights)
        ctx.weights, ctx.queue, ctx.joins = weights, queue, joins  # weights with their history
        joined = alternating_view(weights) if joins and not is_batch_invariant() else None
        if joined is None:
            return tuple(_forward_product(rows, weight, counts, ends) for weight in weights)
        product = _forward_product(rows, joined, counts, ends)
        parts: tuple[Tensor, ...] = product.split([weight.shape[1] for weight in weights], 1)
        return parts

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        rows, ends, *weights = ctx.saved_tensors
        gradients = tuple(_with_adjacent_columns(gradient) for gradient in gradients)
        columns = adjacent_view(gradients, 1) if ctx.joins else None
        joined = None if columns is None else alternating_view(weights)
        for_rows = None
        if ctx.needs_input_grad[0]:
            parts, matrices = (gradients, weights) if columns is None or joined is None else ((columns,), (joined,))
            products = [F.grouped_mm(part, matrix, offs=ends) for part, matrix in zip(parts, matrices, strict=True)]
            for_rows = functools.reduce(Tensor.add_, products)
        for_weights = [
            _grouped_wgrad(weight, gradient, rows, ends, ctx.queue) if needed else None
            for weight, gradient, needed in zip(ctx.weights, gradients, ctx.needs_input_grad[4:], strict=True)
        ]
        return for_rows, None, None, None, *for_weights


def _forward_product(rows: Tensor, weight: Tensor, counts: Tensor, ends: Tensor) -> Tensor:
    if is_batch_invariant():
        return invariant_grouped_product(rows, weight, counts)
    return F.grouped_mm(rows, weight.transpose(-2, -1), offs=ends)


def _with_adjacent_columns(gradient: Tensor) -> Tensor:
    """Returns the gradient [R, out] as the kernels take it: no expanded one, and rows at multiples of 16 bytes."""
    stride, size = gradient.stride(0), gradient.element_size()
    fits = gradient.stride(1) == 1 and stride >= gradient.shape[1] and not stride * size % 16
    return gradient if fits and not gradient.data_ptr() % 16 else gradient.contiguous()


def _grouped_wgrad(
    weight: Tensor, gradient: Tensor, rows: Tensor, ends: Tensor, queue: DeferredWgrads | None
) -> Tensor | None:
    """Returns the gradient of a grouped product's weight for autograd; None where it is deferred or already added.

    `weight` is the tensor given to the product: see `linear.wgrad`.
    """
    if queue is not None:
        queue.append((weight, functools.partial(_grouped_wgrad, weight, gradient, rows, ends, None)))
        return None
    if not has_main_grad(weight):
        return _products_of_groups(gradient, rows, ends)
    total, is_empty = take_main_grads((weight,))
    add_grouped_products(total, gradient, rows, ends, is_empty=is_empty)
    return None


def add_grouped_products(
    total: Tensor,
    gradient: Tensor,
    rows: Tensor,
    ends: Tensor,
    *,
    is_empty: bool = False,
    backend: Backend = "auto",
) -> None:
    """Adds `gradient`ᵀ [out, R] · `rows` [R, in] of each expert's rows to `total` [E, out, in].

    The rows of expert e end before row `ends`[e], int32. Writes to a `total` that `is_empty`.
    """
    fits = total.dtype == torch.float32 and total.is_contiguous() and rows.is_contiguous()
    on_gpu = total.is_cuda or backend == "triton"
    unsupported_reason = None if fits else "sums and rows are not dense, or the sums not in fp32"
    if on_gpu and use_kernel("grouped_wgrad", backend, total.device, rows.dtype, unsupported_reason=unsupported_reason):
        from postlude.ops.kernels.experts import add_products  # needs triton

        add_products(total, gradient, rows, ends, is_empty=is_empty)
    else:
        add_to(total, _products_of_groups(gradient, rows, ends), is_empty=is_empty)


def _products_of_groups(gradient: Tensor, rows: Tensor, offsets: Tensor) -> Tensor:
    """Returns `gradient`ᵀ [out, R] · `rows` [R, in] of each expert's rows, [E, out, in]."""
    if rows.dtype != torch.float64:
        return F.grouped_mm(gradient.T, rows, offs=offsets)
    groups = zip(
        gradient.tensor_split(offsets[:-1].cpu().long()), rows.tensor_split(offsets[:-1].cpu().long()), strict=True
    )
    return torch.stack([left.T @ right for left, right in groups])


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


def add_aux_loss(values: Tensor, loss: Tensor) -> Tensor:
    """Returns `values` unchanged. Their backward also minimises `loss`, a scalar."""
    result: Tensor = _AuxLoss.apply(values, loss)
    return result


def weighted_sum(values: Tensor, weights: Tensor, rows: Tensor) -> Tensor:
    """Returns Σ values · weights[rows], a scalar: `values` [T, E], `weights` [n, E] without gradient, `rows` [T].

    The backward keeps `weights` and `rows`, nothing of size [T, E].
    """
    result: Tensor = _WeightedSum.apply(values, weights, rows)
    return result


class _WeightedSum(Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, weights: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(weights, rows)
        return (values * weights[rows]).sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        weights, rows = ctx.saved_tensors
        return (gradients[0] * weights)[rows], None, None


class _AuxLoss(Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, loss: Tensor) -> Tensor:
        ctx.like = loss.dtype, loss.device
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        dtype, device = ctx.like
        return gradients[0], torch.ones((), dtype=dtype, device=device)
