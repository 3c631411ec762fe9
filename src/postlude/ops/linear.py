"""The product of tokens and a weight, which every linear layer goes through; its weight's gradient can be put off.

A layer's input gradient is what others wait for; nobody waits for the weight's. Inside `defer_wgrad(later)` products
leave the latter undone and append it to `later`, a list that the caller owns. After the backward that appended them,
`flush_wgrad` adds to the parameters' gradients what the backward would have, to the bit.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

DeferredWgrads = list[tuple[Tensor, Callable[[], Tensor | None]]]
"""Weights, and how the gradient of each is made; what adds it where it is summed returns none."""
Result = TypeVar("Result")
# Read where a product is made; its backward, perhaps in another thread, keeps the list that it was made under.
_later: ContextVar[DeferredWgrads | None] = ContextVar("later", default=None)


@contextlib.contextmanager
def defer_wgrad(later: DeferredWgrads | None) -> Iterator[None]:
    """The weight gradients of products made inside are appended to `later`; None leaves all as it is."""
    token = _later.set(later)
    try:
        yield
    finally:
        _later.reset(token)


def bind_wgrad(function: Callable[..., Result]) -> Callable[..., Result]:
    """The same function for a later time: its products put off what they would put off now."""
    later = _later.get()

    def run(*arguments: Any) -> Result:
        with defer_wgrad(later):
            return function(*arguments)

    return run


def wgrad_queue(weight: Tensor) -> DeferredWgrads | None:
    """Where the gradient of this weight is to be put off to, if it has one."""
    return _later.get() if weight.requires_grad and torch.is_grad_enabled() else None


def flush_wgrad(put_off: DeferredWgrads) -> None:
    """Add each weight's gradient to that of what the weight was made from, all in one backward: each one costs."""
    with torch.no_grad():  # as in the backward
        made = [(weight, gradient()) for weight, gradient in put_off]
    left = [(weight, gradient) for weight, gradient in made if gradient is not None]
    if left:
        torch.autograd.backward([weight for weight, _ in left], [gradient for _, gradient in left])


def set_main_grad(weight: Tensor, total: Tensor | None) -> None:
    """Have operations add the gradient of `weight`, a leaf, to `total` as they make it, and leave none to the leaf.

    `total` is the leaf's own gradient, to which autograd adds what others make. On CUDA products and norms do it, in
    the kernel that makes the gradient, which rounds nothing in between; elsewhere, and with None from now on, it is
    left to autograd.
    """
    if total is None or total.is_cuda:
        weight.main_grad = total  # type: ignore[attr-defined]


def wgrad(weight: Tensor, gradient: Tensor, rows: Tensor, later: DeferredWgrads | None) -> Tensor | None:
    """`gradient`ᵀ [out, T] · `rows` [T, in], for autograd to add; None where it is put off, or added already.

    `weight` is to be what was given to the product: saved tensors come back without their history.
    """
    if later is not None:
        later.append((weight, functools.partial(wgrad, weight, gradient, rows, None)))
        return None
    total = main_grad(weight)
    if total is None:
        return gradient.t().mm(rows)
    _add_product(total, gradient, rows)
    return None


def _add_product(total: Tensor, gradient: Tensor, rows: Tensor) -> None:
    if total.dtype == rows.dtype:
        total.addmm_(gradient.t(), rows)
    else:
        torch.addmm(total, gradient.t(), rows, out_dtype=total.dtype, out=total)


def linear(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`rows` [T, in], `weight` [out, in] -> [T, out]."""
    if not torch.is_grad_enabled() or (wgrad_queue(weight) is None and main_grad(weight) is None):
        return F.linear(rows, weight, bias)
    return _products(rows, (weight,), (bias,), one=False)[0]


def linear_group(
    rows: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], *, one: bool = False
) -> tuple[Tensor, ...]:
    """`linear` of the same `rows` [T, in] by each of `weights` [out, in]: [T, out] each.

    On CUDA each product's gradient of the rows is added to the sum as it is made, rather than in a kernel of its own,
    and what lies together in memory is multiplied as one: weights whose gradients are columns of one tensor and, with
    `one`, forward too. Products are columns of one tensor then, and while one of them is kept all are.
    Where there are no gradients, and weights lie one after the other in memory, all are one product.
    """
    if _sums_as_made(rows):
        return _products(rows, weights, biases, one=one)
    if not torch.is_grad_enabled() and not any(bias is not None for bias in biases):
        joined = adjacent_view(weights)
        if joined is not None:
            parts: tuple[Tensor, ...] = F.linear(rows, joined).split([weight.shape[0] for weight in weights], -1)
            return parts
    return tuple(linear(rows, weight, bias) for weight, bias in zip(weights, biases, strict=True))


def adjacent_view(parts: Sequence[Tensor], dim: int = 0) -> Tensor | None:
    """Matrices as one, in which they follow one another along `dim`, where they lie so in memory; else None."""
    for one, other in itertools.pairwise(parts):
        if not _follows(one, other, dim):
            return None
    return _joined(parts, dim)


def _follows(one: Tensor, other: Tensor, dim: int) -> bool:
    strides = one.stride()
    return (
        one.data_ptr() + one.shape[dim] * strides[dim] * one.element_size() == other.data_ptr()
        and strides == other.stride()
        and one.shape[1 - dim] == other.shape[1 - dim]
        and one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
    )


def _joined(parts: Sequence[Tensor], dim: int) -> Tensor:
    """What `adjacent_view` gives, of parts that do follow one another."""
    first = parts[0]
    if len(parts) == 1:
        return first
    size = list(first.shape)
    size[dim] = sum(part.shape[dim] for part in parts)
    return first.as_strided(size, first.stride())


def _runs(gradients: Sequence[Tensor], weights: Sequence[Tensor]) -> Iterator[slice]:
    """Which of them follow one another: gradients [T, out] as columns, their weights [out, in] as rows."""
    start = 0
    for stop, (one, other) in enumerate(itertools.pairwise(zip(gradients, weights, strict=True)), 1):
        if not (_follows(one[0], other[0], 1) and _follows(one[1], other[1], 0)):
            yield slice(start, stop)
            start = stop
    yield slice(start, len(weights))


def _products(
    rows: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], *, one: bool
) -> tuple[Tensor, ...]:
    joins = rows.is_cuda  # elsewhere a sum of several products is not the same to the bit
    products: tuple[Tensor, ...] = _Linears.apply(
        rows, _later.get(), joins, one and joins, len(weights), *weights, *biases
    )
    return products


def _sums_as_made(rows: Tensor) -> bool:
    return rows.is_cuda and rows.requires_grad and torch.is_grad_enabled()


def main_grad(weight: Tensor) -> Tensor | None:
    """Where the gradients of `weight` are to be added up, if `set_main_grad` has said so."""
    return getattr(weight, "main_grad", None)


class _Linears(Function):
    """As torch differentiates `F.linear`, but for when, for where gradients are added up, and for what is one product.

    With `joins`, in the backward what lies together is; with `one`, in the forward too.
    """

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, later: DeferredWgrads | None, joins: bool, one: bool, count: int, *given: Any
    ) -> tuple[Tensor, ...]:
        weights, biases = given[:count], given[count:]
        ctx.save_for_backward(rows, *weights)
        ctx.later, ctx.joins, ctx.weights = later, joins, weights
        if all(bias is None for bias in biases):
            return linear_products(rows, weights, one=one)
        return tuple(F.linear(rows, weight, bias) for weight, bias in zip(weights, biases, strict=True))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        rows, *weights = ctx.saved_tensors
        count, asked = len(weights), ctx.needs_input_grad[5:]
        for_rows, for_weights = product_gradients(
            rows,
            weights,
            ctx.weights,
            gradients,
            ctx.later,
            asked[:count],
            joins=ctx.joins,
            needs=ctx.needs_input_grad[0],
        )
        for_biases = [gradient.sum(0) if asked[index] else None for index, gradient in enumerate(gradients, count)]
        return for_rows, None, None, None, None, *for_weights, *for_biases


def linear_products(rows: Tensor, weights: Sequence[Tensor], *, one: bool) -> tuple[Tensor, ...]:
    """The products of `rows` [T, in] by `weights` [out, in], [T, out] each: with `one`, in one where they lie so."""
    joined = adjacent_view(weights) if one else None
    if joined is None:
        return tuple(F.linear(rows, weight) for weight in weights)
    parts: tuple[Tensor, ...] = F.linear(rows, joined).split([weight.shape[0] for weight in weights], -1)
    return parts


def product_gradients(
    rows: Tensor,
    weights: Sequence[Tensor],
    given: Sequence[Tensor],
    gradients: Sequence[Tensor],
    later: DeferredWgrads | None,
    asked: Sequence[bool],
    *,
    joins: bool = True,
    needs: bool = True,
) -> tuple[Tensor | None, list[Tensor | None]]:
    """Of `gradients` [T, out] of products, those of the rows, if it `needs` one, and of each weight that is `asked`.

    `given` are the weights as they were given to the product: see `wgrad`, also for what comes back. With
    `joins`, what lies together is one product.
    """
    for_rows: Tensor | None = None
    for_weights: list[Tensor | None] = []
    for run in _runs(gradients, weights) if joins else (slice(index, index + 1) for index in range(len(weights))):
        gradient = _joined(gradients[run], 1)
        if needs:
            weight = _joined(weights[run], 0)
            for_rows = gradient.mm(weight) if for_rows is None else for_rows.addmm_(gradient, weight)
        totals = _totals(given[run]) if all(asked[run]) else []
        total = adjacent_view(totals) if totals else None
        if total is not None:
            add = functools.partial(_add_product, total, gradient, rows)
            if later is None:
                add()
            else:  # one product then, too: several would not be the same to the bit
                later.append((given[run][0], add))
            for_weights += [None] * len(totals)
        else:
            for_weights += [
                wgrad(weight, each, rows, later) if wanted else None
                for weight, each, wanted in zip(given[run], gradients[run], asked[run], strict=True)
            ]
    return for_rows, for_weights


def _totals(weights: Sequence[Tensor]) -> list[Tensor]:
    """Where the gradients of all of them are added up; nothing where that is not known of one."""
    found = list[Tensor]()
    for weight in weights:
        total = main_grad(weight)
        if total is None:
            return []
        found.append(total)
    return found
