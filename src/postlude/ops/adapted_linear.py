"""Linear layers with LoRA adapters as one product each: weight · input + scale · B · A · input.

The product with B adds to the layer's own in place, as the one with A does to the gradient of the input. Selective
recompute keeps one result per layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from postlude.ops.fp8 import FP8Scaling, fp8_products, share_amax
from postlude.ops.linear import (
    DeferredWgrads,
    add_biases,
    adjacent_view,
    current_wgrad_queue,
    linear_products,
    product_gradients,
    wgrad,
)


class AdapterOperand(NamedTuple):
    """The adapter of a layer as a product takes it: `a` [rank, in], `b` [out, rank]."""

    a: Tensor
    b: Tensor
    scale: float


def adapted_linears(
    rows: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    adapters: Sequence[AdapterOperand | None],
    *,
    single_gemm: bool = False,
    fp8: FP8Scaling | None = None,
) -> tuple[Tensor, ...]:
    """Returns `rows` [T, in] times each of `weights` [out, in], with what its adapter adds: [T, out] each.

    `single_gemm` and `fp8` are as in `linear_group`. The products with A are one GEMM. A and B are never in FP8.
    """
    joins = rows.is_cuda  # elsewhere joined products are not equal to the bit
    products: tuple[Tensor, ...] = _AdaptedLinears.apply(
        rows,
        current_wgrad_queue(),
        joins,
        single_gemm and joins,
        tuple(0.0 if adapter is None else adapter.scale for adapter in adapters),
        fp8,
        *weights,
        *biases,
        *(None if adapter is None else adapter.a for adapter in adapters),
        *(None if adapter is None else adapter.b for adapter in adapters),
    )
    return products


def _forward(
    rows: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    a_products: Sequence[Tensor | None],
    b: Sequence[Tensor | None],
    single_gemm: bool,
    fp8: bool,
    shared: list[Tensor] | None,
) -> list[Tensor]:
    if fp8:
        joined = adjacent_view(weights) if single_gemm else None
        products = add_biases(fp8_products(rows, weights, shared, joined=joined), biases)
    else:
        products = linear_products(rows, weights, biases, single_gemm=single_gemm)
    for product, a_product, matrix in zip(products, a_products, b, strict=True):
        if a_product is not None and matrix is not None:
            product.addmm_(a_product, matrix.t())
    return list(products)


# One operator, so that selective recompute keeps its results and not the products inside, which it changes in place.
_LIBRARY = torch.library.Library("postlude", "FRAGMENT")
_LIBRARY.define(
    "adapted_linears(Tensor rows, Tensor[] weights, Tensor?[] biases, Tensor?[] a_products, Tensor?[] b, "
    "bool single_gemm, bool fp8, Tensor[]? shared) -> Tensor[]"
)
_LIBRARY.impl("adapted_linears", _forward, "CompositeExplicitAutograd")


class _AdaptedLinears(Function):
    """The products of several layers with the same input, with deferred or directly added weight gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        queue: DeferredWgrads | None,
        joins: bool,
        single_gemm: bool,
        scales: Sequence[float],
        fp8: FP8Scaling | None,
        *operands: Any,
    ) -> tuple[Tensor, ...]:
        weights, biases, a, b = _quarters(operands)
        a_products = _low_rank_inputs(rows, a, scales)
        ctx.save_for_backward(rows, *weights, *a_products, *a, *b)
        ctx.queue, ctx.joins, ctx.scales, ctx.fp8, ctx.operands = queue, joins, scales, fp8, operands
        shared = None if fp8 is None else share_amax(rows, weights, fp8)
        return tuple(
            torch.ops.postlude.adapted_linears(
                rows, weights, biases, a_products, b, single_gemm, fp8 is not None, shared
            )
        )

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        rows, *saved = ctx.saved_tensors
        weights, a_products, a, b = _quarters(saved)
        weight_parameters, _, a_parameters, b_parameters = _quarters(ctx.operands)
        needs_weights, needs_biases, needs_a, needs_b = _quarters(ctx.needs_input_grad[6:])
        grad_rows, grad_weights = product_gradients(
            rows,
            weights,
            weight_parameters,
            gradients,
            ctx.queue,
            needs_weights,
            joins=ctx.joins,
            needs_rows=ctx.needs_input_grad[0],
            fp8=ctx.fp8,
        )
        grad_biases = [
            gradient.sum(0) if needs else None for gradient, needs in zip(gradients, needs_biases, strict=True)
        ]
        grad_a_products = [
            None if matrix is None else _scaled(gradient.mm(matrix), scale)
            for gradient, matrix, scale in zip(gradients, b, ctx.scales, strict=True)
        ]
        if grad_rows is not None:
            grad_rows.addmm_(_joined(grad_a_products, 1), _joined(a, 0))
        grad_a = _wgrads(a_parameters, grad_a_products, [rows] * len(a), needs_a, ctx.queue)
        grad_b = _wgrads(b_parameters, gradients, a_products, needs_b, ctx.queue)
        return grad_rows, None, None, None, None, None, *grad_weights, *grad_biases, *grad_a, *grad_b


def _quarters(parts: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any], Sequence[Any], Sequence[Any]]:
    count = len(parts) // 4
    return parts[:count], parts[count : 2 * count], parts[2 * count : 3 * count], parts[3 * count :]


def _low_rank_inputs(rows: Tensor, a: Sequence[Tensor | None], scales: Sequence[float]) -> list[Tensor | None]:
    """Returns scale · A · row of each layer with an adapter, [T, rank], in one product."""
    ranks = [0 if matrix is None else len(matrix) for matrix in a]
    parts = F.linear(rows, _joined(a, 0)).split(ranks, -1)
    return [_scaled(part, scale) if rank else None for part, scale, rank in zip(parts, scales, ranks, strict=True)]


def _joined(parts: Sequence[Tensor | None], dim: int) -> Tensor:
    present = [part for part in parts if part is not None]
    return present[0] if len(present) == 1 else torch.cat(present, dim)


def _scaled(tensor: Tensor, scale: float) -> Tensor:
    return tensor if scale == 1.0 else tensor * scale


def _wgrads(
    weights: Sequence[Tensor | None],
    gradients: Sequence[Tensor | None],
    rows: Sequence[Tensor | None],
    needs: Sequence[bool],
    queue: DeferredWgrads | None,
) -> list[Tensor | None]:
    return [
        wgrad(weight, gradient, weight_rows, queue)
        if needed and weight is not None and gradient is not None and weight_rows is not None
        else None
        for weight, gradient, weight_rows, needed in zip(weights, gradients, rows, needs, strict=True)
    ]
