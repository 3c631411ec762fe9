"""The one linear function: every linear layer goes through it, and its weight gradient can be deferred.

Other work waits for a layer's input gradient, none for the weight's. Inside `defer_wgrad(queue)` products append the
computation of the latter to `queue`, a list that the caller owns. After the backward, `flush_wgrad` adds to the
parameters' gradients what the backward would have added, to the bit.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from postlude.ops.batch_invariant import invariant_product, is_batch_invariant
from postlude.ops.fp8 import FP8Scaling, fp8_input_gradient, fp8_products, share_amax
from postlude.ops.kernels.capabilities import Backend, use_kernel

DeferredWgrads = list[tuple[Tensor, Callable[[], Tensor | None]]]
"""Weights, each with a closure that returns its gradient, or None if it has added it to `main_grad`."""
Result = TypeVar("Result")
# Read in the forward of a product. Its backward, perhaps in another thread, uses the queue of its forward.
_queue: ContextVar[DeferredWgrads | None] = ContextVar("wgrad_queue", default=None)


@contextlib.contextmanager
def defer_wgrad(queue: DeferredWgrads | None) -> Iterator[None]:
    """Appends the weight gradients of products inside to `queue`; None defers nothing."""
    token = _queue.set(queue)
    try:
        yield
    finally:
        _queue.reset(token)


def bind_wgrad(function: Callable[..., Result]) -> Callable[..., Result]:
    """Returns the function bound to the current queue: products that it makes later are deferred to the same one."""
    queue = _queue.get()

    def run(*arguments: Any) -> Result:
        with defer_wgrad(queue):
            return function(*arguments)

    return run


def current_wgrad_queue() -> DeferredWgrads | None:
    return _queue.get()


def wgrad_queue(weight: Tensor) -> DeferredWgrads | None:
    return _queue.get() if weight.requires_grad and torch.is_grad_enabled() else None


def flush_wgrad(queue: DeferredWgrads) -> None:
    """Computes deferred weight gradients and backpropagates them to the parameters, all in one backward."""
    with torch.no_grad():  # as in the backward
        computed = [(weight, gradient()) for weight, gradient in queue]
    remaining = [(weight, gradient) for weight, gradient in computed if gradient is not None]
    if remaining:
        torch.autograd.backward([weight for weight, _ in remaining], [gradient for _, gradient in remaining])


def set_main_grad(weight: Tensor, total: Tensor | None, *, is_empty: bool = False) -> None:
    """Makes operations add the gradient of `weight`, a leaf, to `total` themselves, as Megatron's main_grad.

    `total` is the leaf's own gradient; autograd adds to it what other operations give. On CUDA products and norms add
    in the kernel that computes the gradient, without rounding in between. Elsewhere, and with None, autograd adds.
    With `is_empty` the total is uninitialised memory, which the first product writes instead of adding. Autograd must
    then not add before `main_grad` was called: `zero_before_autograd` does that.
    """
    if total is None or total.is_cuda:
        weight.main_grad = total  # type: ignore[attr-defined]
        weight.main_grad_is_empty = is_empty  # type: ignore[attr-defined]


def zero_before_autograd(weight: Tensor) -> None:
    """Registers a hook that zeroes an uninitialised `main_grad` before autograd adds to it."""
    reference = weakref.ref(weight)

    def zero(gradient: Tensor | None) -> None:
        leaf = reference()
        if gradient is not None and leaf is not None:  # None comes from products that add by themselves
            main_grad(leaf)

    weight.register_hook(zero)


def wgrad(weight: Tensor, gradient: Tensor, rows: Tensor, queue: DeferredWgrads | None) -> Tensor | None:
    """Returns `gradient`ᵀ [out, T] · `rows` [T, in] for autograd; None where it is deferred or already added.

    `weight` must be the tensor given to the product: saved tensors come back without their history.
    """
    if queue is not None:
        queue.append((weight, functools.partial(wgrad, weight, gradient, rows, None)))
        return None
    if not has_main_grad(weight):
        return gradient.t().mm(rows)
    _add_product((weight,), gradient, rows)
    return None


def _add_product(weights: Sequence[Tensor], gradient: Tensor, rows: Tensor) -> None:
    """Adds `gradient`ᵀ · `rows` to the main_grad of `weights`, which are adjacent in memory."""
    total, is_empty = take_main_grads(weights)
    if is_empty and total.dtype == rows.dtype:
        torch.mm(gradient.t(), rows, out=total)
    elif is_empty:
        torch.mm(gradient.t(), rows, out_dtype=total.dtype, out=total)
    elif total.dtype == rows.dtype:
        total.addmm_(gradient.t(), rows)
    else:
        torch.addmm(total, gradient.t(), rows, out_dtype=total.dtype, out=total)


def forward_product(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Returns `rows` [T, in] · `weight`ᵀ [out, in] + `bias`, [T, out], for a forward that needs no autograd of its own.

    In the batch-invariant mode a row does not depend on the others.
    """
    return invariant_product(rows, weight, bias) if is_batch_invariant() else F.linear(rows, weight, bias)


def linear(rows: Tensor, weight: Tensor, bias: Tensor | None = None, *, fp8: FP8Scaling | None = None) -> Tensor:
    """`rows` [T, in], `weight` [out, in] -> [T, out]. With `fp8` the product and the rows' gradient are in FP8."""
    if fp8 is not None:
        return _products(rows, (weight,), (bias,), single_gemm=False, fp8=fp8)[0]
    if not torch.is_grad_enabled():
        return forward_product(rows, weight, bias)
    if wgrad_queue(weight) is None and not has_main_grad(weight) and not is_batch_invariant():
        return F.linear(rows, weight, bias)
    return _products(rows, (weight,), (bias,), single_gemm=False)[0]


def embed(tokens: Tensor, table: Tensor, *, backend: Backend = "auto") -> Tensor:
    """Returns the rows of `table` [V, H] of these `tokens` [T], [T, H].

    The table's gradient is added to its `main_grad` where it has one: only the rows of these tokens are read.
    """
    if not torch.is_grad_enabled():
        # In a CUDA graph, 16 rows by index take 1.6 µs on an H200, `F.embedding` 7.3. Only it refuses negative tokens.
        by_index = tokens.is_cuda and torch.cuda.is_current_stream_capturing()
        return table[tokens] if by_index else F.embedding(tokens, table)
    total = main_grad(table)
    if total is None:
        return F.embedding(tokens, table)
    dense = total.is_contiguous() and total.dtype == torch.float32
    unsupported_reason = None if dense else "the sum of its gradients is not dense in fp32"
    if not use_kernel("embed", backend, table.device, table.dtype, unsupported_reason=unsupported_reason):
        return F.embedding(tokens, table)
    embedded: Tensor = _Embedding.apply(tokens, table, total)
    return embedded


class _Embedding(Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, table: Tensor, total: Tensor) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.total = total
        return F.embedding(tokens, table)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, None]:
        from postlude.ops.kernels.experts import add_rows  # needs triton

        add_rows(ctx.total, gradients[0].contiguous(), *ctx.saved_tensors[0].sort(stable=True))
        return None, None, None


def linear_group(
    rows: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    *,
    single_gemm: bool = False,
    fp8: FP8Scaling | None = None,
) -> tuple[Tensor, ...]:
    """Returns `linear` of the same `rows` [T, in] with each of `weights` [out, in]: [T, out] each.

    On CUDA each product's gradient of the rows is added to the sum in the product itself. Weights that are adjacent in
    memory are one GEMM: in the backward where their gradients are columns of one tensor and, with `single_gemm`, in the
    forward too. Products are then columns of one tensor, and while one of them is kept all are. Without gradients,
    adjacent weights are one GEMM. With `fp8` the gradient of the rows is one GEMM, wherever the weights are.
    """
    if fp8 is not None or _adds_in_product(rows):
        return _products(rows, weights, biases, single_gemm=single_gemm, fp8=fp8)
    if not torch.is_grad_enabled() and not any(bias is not None for bias in biases):
        joined = adjacent_view(weights)
        if joined is not None:
            parts: tuple[Tensor, ...] = forward_product(rows, joined).split([weight.shape[0] for weight in weights], -1)
            return parts
    return tuple(linear(rows, weight, bias) for weight, bias in zip(weights, biases, strict=True))


def adjacent_view(parts: Sequence[Tensor], dim: int = 0) -> Tensor | None:
    """Returns matrices that are adjacent in memory along `dim` as one view; None where they are not."""
    for part, next_part in itertools.pairwise(parts):
        if not _follows(part, next_part, dim):
            return None
    return _joined(parts, dim)


def _follows(matrix: Tensor, next_matrix: Tensor, dim: int) -> bool:
    strides = matrix.stride()
    return (
        matrix.data_ptr() + matrix.shape[dim] * strides[dim] * matrix.element_size() == next_matrix.data_ptr()
        and strides == next_matrix.stride()
        and matrix.shape[1 - dim] == next_matrix.shape[1 - dim]
        and matrix.untyped_storage().data_ptr() == next_matrix.untyped_storage().data_ptr()
    )


def _joined(parts: Sequence[Tensor], dim: int) -> Tensor:
    """Returns `adjacent_view` of parts that are known to be adjacent."""
    first = parts[0]
    if len(parts) == 1:
        return first
    size = list(first.shape)
    size[dim] = sum(part.shape[dim] for part in parts)
    return first.as_strided(size, first.stride())


def _runs(gradients: Sequence[Tensor], weights: Sequence[Tensor]) -> Iterator[slice]:
    """Yields runs of adjacent ones: gradients [T, out] as columns, their weights [out, in] as rows."""
    start = 0
    for stop, (pair, next_pair) in enumerate(itertools.pairwise(zip(gradients, weights, strict=True)), 1):
        if not (_follows(pair[0], next_pair[0], 1) and _follows(pair[1], next_pair[1], 0)):
            yield slice(start, stop)
            start = stop
    yield slice(start, len(weights))


def _products(
    rows: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    *,
    single_gemm: bool,
    fp8: FP8Scaling | None = None,
) -> tuple[Tensor, ...]:
    joins = rows.is_cuda  # elsewhere joined products are not equal to the bit
    products: tuple[Tensor, ...] = _Linears.apply(
        rows, _queue.get(), joins, single_gemm and joins, fp8, len(weights), *weights, *biases
    )
    return products


def _adds_in_product(rows: Tensor) -> bool:
    return rows.is_cuda and rows.requires_grad and torch.is_grad_enabled()


def has_main_grad(weight: Tensor) -> bool:
    """Whether operations add the gradient of `weight` themselves."""
    return getattr(weight, "main_grad", None) is not None


def main_grad(weight: Tensor) -> Tensor | None:
    """Returns where operations add the gradient of `weight`, if `set_main_grad` was called, zeroed if it was empty."""
    if not has_main_grad(weight):
        return None
    total, is_empty = take_main_grads((weight,))
    return total.zero_() if is_empty else total


def take_main_grads(weights: Sequence[Tensor]) -> tuple[Tensor, bool]:
    """Returns the main_grads of `weights`, adjacent in memory, as one, and whether the caller must write all of it.

    If not, the caller adds to it.
    """
    totals = [weight.main_grad for weight in weights]  # type: ignore[attr-defined]
    empty = [getattr(weight, "main_grad_is_empty", False) for weight in weights]
    for weight, total, is_empty in zip(weights, totals, empty, strict=True):
        if is_empty:
            weight.main_grad_is_empty = False  # type: ignore[attr-defined]
            if not all(empty):
                total.zero_()
    return _joined(totals, 0), all(empty)


def add_to(
    total: Tensor, gradient: Tensor, scale: Tensor | None = None, *, is_empty: bool = False, backend: Backend = "auto"
) -> None:
    """Adds `gradient`, times a 0-dim `scale` if given, to `total`, of another dtype. Writes it if that `is_empty`.

    Torch's kernel for two dtypes reads number by number.
    """
    dense = total.is_contiguous() and gradient.is_contiguous()
    on_gpu = total.is_cuda or backend == "triton"
    if dense and on_gpu and use_kernel("add_to", backend, total.device, total.dtype):
        from postlude.ops.kernels.experts import add_to as add_dense  # needs triton

        add_dense(total, gradient, scale, is_empty=is_empty)
        return
    added = gradient if scale is None else gradient.to(total.dtype) * scale
    if is_empty:
        total.copy_(added)
    else:
        total += added


class _Linears(Function):
    """`forward_product` of several weights, with deferred or directly added weight gradients.

    With `joins`, adjacent weights are one GEMM in the backward; with `single_gemm`, in the forward too.
    """

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        queue: DeferredWgrads | None,
        joins: bool,
        single_gemm: bool,
        fp8: FP8Scaling | None,
        count: int,
        *operands: Any,
    ) -> tuple[Tensor, ...]:
        weights, biases = operands[:count], operands[count:]
        ctx.save_for_backward(rows, *weights)
        ctx.queue, ctx.joins, ctx.fp8, ctx.weights = queue, joins, fp8, weights
        return linear_products(rows, weights, biases, single_gemm=single_gemm, fp8=fp8)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        rows, *weights = ctx.saved_tensors
        count, needs = len(weights), ctx.needs_input_grad[6:]
        grad_rows, grad_weights = product_gradients(
            rows,
            weights,
            ctx.weights,
            gradients,
            ctx.queue,
            needs[:count],
            joins=ctx.joins,
            needs_rows=ctx.needs_input_grad[0],
            fp8=ctx.fp8,
        )
        grad_biases = [gradient.sum(0) if needs[index] else None for index, gradient in enumerate(gradients, count)]
        return grad_rows, None, None, None, None, None, *grad_weights, *grad_biases


def linear_products(
    rows: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None] = (),
    *,
    single_gemm: bool,
    fp8: FP8Scaling | None = None,
) -> tuple[Tensor, ...]:
    """Returns `rows` [T, in] times each of `weights` [out, in], [T, out] each, plus its bias if there are any.

    With `single_gemm`, adjacent weights without biases are one GEMM.
    """
    biases = tuple(biases) or (None,) * len(weights)
    biased = any(bias is not None for bias in biases)
    joined = adjacent_view(weights) if single_gemm and not biased else None
    if fp8 is not None:
        return add_biases(fp8_products(rows, weights, share_amax(rows, weights, fp8), joined=joined), biases)
    if joined is None:
        return tuple(forward_product(rows, weight, bias) for weight, bias in zip(weights, biases, strict=True))
    parts: tuple[Tensor, ...] = forward_product(rows, joined).split([weight.shape[0] for weight in weights], -1)
    return parts


def add_biases(products: Sequence[Tensor], biases: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    """Returns each of `products` [T, out] plus its bias [out], if it has one."""
    return tuple(product if bias is None else product + bias for product, bias in zip(products, biases, strict=True))


def input_gradient(gradient: Tensor, weight: Tensor, fp8: FP8Scaling | None) -> Tensor:
    """Returns the gradient of the rows of one product, [T, in], from that of the product, [T, out]."""
    return gradient.mm(weight) if fp8 is None else fp8_input_gradient([gradient], [weight], fp8)


def product_gradients(
    rows: Tensor,
    weights: Sequence[Tensor],
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor],
    queue: DeferredWgrads | None,
    needs_weights: Sequence[bool],
    *,
    joins: bool = True,
    needs_rows: bool = True,
    fp8: FP8Scaling | None = None,
) -> tuple[Tensor | None, list[Tensor | None]]:
    """Returns the gradients of the rows and of each weight, where needed, from those of the products.

    `parameters` are the weights as they were passed to the product: see `wgrad`, also for the results. With `joins`,
    adjacent weights are one GEMM. With `fp8` the gradient of the rows always is.
    """
    grad_rows: Tensor | None = None
    if needs_rows and fp8 is not None:
        columns, matrices = adjacent_view(gradients, 1), adjacent_view(weights)
        grad_rows = fp8_input_gradient(
            gradients if columns is None else [columns], weights if matrices is None else [matrices], fp8
        )
        needs_rows = False
    grad_weights: list[Tensor | None] = []
    for run in _runs(gradients, weights) if joins else (slice(index, index + 1) for index in range(len(weights))):
        gradient = _joined(gradients[run], 1)
        if needs_rows:
            weight = _joined(weights[run], 0)
            grad_rows = gradient.mm(weight) if grad_rows is None else grad_rows.addmm_(gradient, weight)
        if all(needs_weights[run]) and _have_adjacent_main_grads(parameters[run]):
            add = functools.partial(_add_product, parameters[run], gradient, rows)
            if queue is None:
                add()
            else:  # also one product then: several would not be equal to the bit
                queue.append((parameters[run][0], add))
            grad_weights += [None] * len(parameters[run])
        else:
            grad_weights += [
                wgrad(weight, weight_gradient, rows, queue) if needs_weight else None
                for weight, weight_gradient, needs_weight in zip(
                    parameters[run], gradients[run], needs_weights[run], strict=True
                )
            ]
    return grad_rows, grad_weights


def _have_adjacent_main_grads(weights: Sequence[Tensor]) -> bool:
    if not all(has_main_grad(weight) for weight in weights):
        return False
    return adjacent_view([weight.main_grad for weight in weights]) is not None  # type: ignore[attr-defined]


@contextlib.contextmanager
def blas_fp32_matmul(dtype: torch.dtype) -> Iterator[None]:
    """Sends fp32 products on an Arm CPU to BLAS instead of oneDNN, which prepares each of them again.

    That takes oneDNN 0.2 ms a product, 0.7 ms on a busy machine: several times a small product, while a large one gains
    little. Other dtypes and CPUs are unchanged. The switch is global to the process and restored on exit.
    """
    library: Any = torch.backends.mkldnn  # its switches are declared as descriptors, not as what they hold
    before = library.enabled
    if dtype == torch.float32 and library.is_acl_available():
        library.enabled = False
    try:
        yield
    finally:
        library.enabled = before
