"""The two passes over the slabs of a plan: statistics in the forward, gradients in the backward."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from postlude.ops.batch_invariant import invariant_product
from postlude.ops.linear import add_to, has_main_grad, take_main_grads
from postlude.ops.linear_logprobs import gemm
from postlude.ops.linear_logprobs.plan import (
    Plan,
    Shape,
    plan_gradients,
    plan_quantized_sweep,
    plan_rows,
    plan_statistics,
    plan_tiles,
)
from postlude.ops.linear_logprobs.resolved_call import ResolvedCall
from postlude.ops.linear_logprobs.statistics import (
    Epilogue,
    Operands,
    Results,
    Slab,
    TokenRows,
    TopKLogits,
    Upstream,
    empty_state,
    transform,
)


@dataclass(frozen=True)
class Head:
    """The tensors of one call. `hidden` [n, H] holds only the projected tokens; `weight` [V, H], `bias` [V]."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None


@dataclass(frozen=True)
class GradientsNeeded:
    hidden: bool
    weight: bool
    bias: bool


class Projection:
    """hidden @ weightᵀ, one slab at a time in one buffer: each slab overwrites the one before."""

    def __init__(self, head: Head, call: ResolvedCall, plan: Plan, shape: Shape) -> None:
        self.head = head
        self.call = call
        self.hidden = head.hidden.to(call.operand)
        self.cast_weight: tuple[slice, Tensor] | None = None
        self.scored: Slab | None = None
        rows, columns = plan.largest(shape)
        self.buffer = torch.empty(rows * gemm.aligned(columns), dtype=call.compute, device=self.hidden.device)

    def slab(self, rows: slice, columns: slice) -> Slab:
        hidden, weight = self.hidden[rows], self._weight(columns)
        bias = None if self.head.bias is None else self.head.bias[columns].to(self.call.compute).contiguous()
        stride = gemm.aligned(weight.shape[0])
        out = self.buffer[: hidden.shape[0] * stride].view(-1, stride)[:, : weight.shape[0]]
        if self.call.batch_invariant:
            products = invariant_product(hidden, weight, out=out)
        else:
            products = gemm.product(hidden, weight.t(), out)
        return Slab(
            hidden=hidden,
            weight=weight,
            row_range=rows,
            column_range=columns,
            products=products,
            rows=self.call.rows[rows],
            bias=bias,
        )

    def score(self, rows: slice, columns: slice, state: Tensor, *, entropy: bool) -> Results:
        """Projects `rows` on all `columns` and keeps the slab. Returns the results; updates `state` [4, rows]."""
        self.scored = self.slab(rows, columns)
        self.call.epilogue.accumulate(self.scored, state, entropy=entropy)
        return self.call.epilogue.results(state)

    def differentiate(self, results: Results, upstream: Upstream) -> tuple[Operands, Tensor]:
        """Returns the gradient [rows, columns] of the products kept by `score`, from that of its results."""
        slab, self.scored = self.scored, None
        assert slab is not None, "nothing was scored"
        epilogue = self.call.epilogue
        coefficients = epilogue.coefficients(slab.rows, results.normalizer, results.entropy, upstream, None)
        return slab, epilogue.differentiate(slab, coefficients, self.call.operand)

    def gradient(self, rows: slice, columns: slice, coefficients: Tensor) -> tuple[Operands, Tensor]:
        """Projects again and returns the products' gradient [rows, columns] from `Epilogue.coefficients` [5, n]."""
        slab = self.slab(rows, columns)
        return slab, self.call.epilogue.differentiate(slab, coefficients[:, rows], self.call.operand)

    def _weight(self, columns: slice) -> Tensor:
        """Returns rows of the weight in the GEMMs' dtype. A cast is kept while the columns stay the same."""
        if self.cast_weight is None or self.cast_weight[0] != columns:
            self.cast_weight = columns, self.head.weight[columns].to(self.call.operand)
        return self.cast_weight[1]


class FusedProjection:
    """Like `Projection`, for gradients only: the products never leave the kernel."""

    def __init__(self, head: Head, call: ResolvedCall, plan: Plan, shape: Shape) -> None:
        self.head = head
        self.call = call
        rows, columns = plan.largest(shape)
        self.buffer = torch.empty(rows, gemm.whole_steps(columns), dtype=call.operand, device=head.hidden.device)
        self.bias = _fused_bias(head)

    def gradient(self, rows: slice, columns: slice, coefficients: Tensor) -> tuple[Operands, Tensor]:
        """Returns the gradient [rows, columns] of the products from `Epilogue.coefficients` [5, n]."""
        from postlude.ops.kernels.linear_logprobs_fused import differentiate  # needs triton

        hidden, weight = self.head.hidden[rows], self.head.weight
        out = self.buffer[: hidden.shape[0], : columns.stop - columns.start]
        differentiate(hidden, weight, self.bias, self.call.rows[rows], columns, coefficients[:, rows], out)
        operands = Operands(hidden=hidden, weight=weight[columns], row_range=rows, column_range=columns)
        return operands, out


class QuantizedProjection:
    """`Projection`'s `score` and `differentiate`, with the logits held in 16 bits between the two."""

    def __init__(self, head: Head, rows: TokenRows, operand: torch.dtype, plan: Plan, shape: Shape) -> None:
        self.head = head
        self.rows = rows
        largest_rows, columns = plan.largest(shape)
        self.codes = torch.empty(largest_rows, gemm.whole_steps(columns), dtype=operand, device=head.hidden.device)
        self.bias = _fused_bias(head)
        self.scored: tuple[Operands, Tensor, Tensor] | None = None

    def score(self, rows: slice, columns: slice, state: Tensor, *, entropy: bool) -> Results:
        from postlude.ops.kernels.linear_logprobs_quantized import encode

        hidden, weight = self.head.hidden[rows], self.head.weight
        codes = self.codes[: hidden.shape[0], : columns.stop]
        partial, results = encode(hidden, weight, self.bias, self.rows[rows], columns.stop, codes, state)
        operands = Operands(hidden=hidden, weight=weight[columns], row_range=rows, column_range=columns)
        self.scored = operands, codes, partial
        return results

    def differentiate(self, results: Results, upstream: Upstream) -> tuple[Operands, Tensor]:
        from postlude.ops.kernels.linear_logprobs_quantized import decode

        assert self.scored is not None, "nothing was scored"
        (operands, codes, partial), self.scored = self.scored, None
        rows, masked = self.rows[operands.row_range], self.bias is not None
        return operands, decode(codes, partial, rows, results, upstream, masked=masked)


@dataclass(frozen=True)
class TokenSweep:
    """One sweep over tokens: its plan, its state [4, n], the projection that holds a slab's logits, and whether the
    weight's gradient is summed in the compute dtype (`exact`).
    """

    shape: Shape
    plan: Plan
    exact: bool
    state: Tensor
    projection: Projection | QuantizedProjection

    @staticmethod
    def quantized(
        head: Head,
        rows: TokenRows,
        shape: Shape,
        operand: torch.dtype,
        needed: GradientsNeeded,
        budget: int | None,
    ) -> TokenSweep:
        in_training = has_main_grad(head.weight)
        plan, exact = plan_quantized_sweep(
            shape, weight_gradient=needed.weight, in_training=in_training, memory_budget=budget
        )
        state = torch.empty(4, shape.rows, dtype=torch.float32, device=head.hidden.device)  # filled slab by slab
        return TokenSweep(shape, plan, exact, state, QuantizedProjection(head, rows, operand, plan, shape))


class GradientSum:
    """The gradient of `parameter`, filled region by region with matrix products.

    If each region is written `once` it is in the gradient's dtype, else it is summed in `dtype`.
    """

    def __init__(self, parameter: Tensor, dtype: torch.dtype, epilogue: Epilogue, *, once: bool) -> None:
        self.dtype = parameter.dtype
        self.epilogue = epilogue
        self.written = 0  # rows of `total` that are filled, from the first on
        self.total = torch.empty(parameter.shape, dtype=self.dtype if once else dtype, device=parameter.device)

    def add(self, region: slice, left: Tensor, right: Tensor) -> None:
        """Adds left @ right to the rows of `region`: the next region if each is written once, else always the same."""
        if region.stop > self.written:
            gemm.product(left, right, self.total[region])
            self.written = region.stop
        else:
            gemm.add_product(left, right, self.total[region])

    def finish(self, scale: Tensor | None = None, parameter: Tensor | None = None) -> Tensor | None:
        """Returns the gradient times a 0-dim `scale`; call it once. Rows without any product are zero.

        If the `parameter` has a `main_grad`, it is added to that, and None is returned.
        """
        if parameter is not None and has_main_grad(parameter):
            main_grad, is_empty = take_main_grads((parameter,))
            add_to(main_grad[: self.written], self.total[: self.written], scale, is_empty=is_empty)
            if is_empty:
                main_grad[self.written :].zero_()
            return None
        if self.written < self.total.shape[0]:
            self.total[self.written :].zero_()
        if scale is None:
            return self.total.to(self.dtype)
        if self.total.dtype == self.dtype:
            return self.epilogue.scale(self.total, scale)
        return torch.mul(self.total, scale, out=torch.empty_like(self.total, dtype=self.dtype))


class Gradients:
    """The gradients of a head's tensors, filled slab by slab."""

    def __init__(
        self, head: Head, call: ResolvedCall, needed: GradientsNeeded, plan: Plan, shape: Shape, *, exact: bool = True
    ) -> None:
        """Unless `exact`, the weight's gradient is summed in the weight's dtype."""
        single = plan.count(shape) <= 1
        over_tokens = plan.axis == "token"
        compute, epilogue = call.compute, call.epilogue
        weight_sum = compute if exact else head.weight.dtype
        self.hidden = self.weight = self.bias = None
        if needed.hidden:
            self.hidden = GradientSum(head.hidden, compute, epilogue, once=single or over_tokens)
        if needed.weight:
            self.weight = GradientSum(head.weight, weight_sum, epilogue, once=single or not over_tokens)
        if head.bias is not None and needed.bias:
            self.bias = torch.zeros_like(head.bias, dtype=compute)
            self.bias_dtype = head.bias.dtype

    def add(self, operands: Operands, gradient: Tensor) -> None:
        """Adds the contribution of a product's gradient [rows, columns]."""
        if self.hidden is not None:
            self.hidden.add(operands.row_range, gradient, operands.weight)
        if self.weight is not None:
            self.weight.add(operands.column_range, gradient.t(), operands.hidden)
        if self.bias is not None:
            self.bias[operands.column_range] += gradient.sum(0, dtype=self.bias.dtype)

    def finish(
        self, scale: Tensor | None = None, weight: Tensor | None = None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Returns the gradients of hidden [n, H], weight and bias in their dtypes; None where not needed.

        The weight's is added to the `main_grad` of `weight` instead, if it has one.
        """
        return (
            None if self.hidden is None else self.hidden.finish(scale),
            None if self.weight is None else self.weight.finish(scale, weight),
            None if self.bias is None else (self.bias if scale is None else self.bias * scale).to(self.bias_dtype),
        )


def _fused_statistics(head: Head, rows: TokenRows, shape: Shape, memory_budget: int | None) -> Tensor:
    from postlude.ops.kernels import linear_logprobs_fused as fused

    tiles = plan_tiles(shape, fused.STATISTICS_TILE[1], fused.PARTIAL_BYTES, memory_budget)
    bias = _fused_bias(head)
    state = torch.empty(4, shape.rows, dtype=torch.float32, device=head.hidden.device)
    for _, columns in tiles.slabs(shape):
        fused.accumulate(head.hidden, head.weight, bias, rows, columns, state)
    return state


def sweep_statistics(head: Head, call: ResolvedCall, *, entropy: bool, topk: int) -> tuple[Tensor, TopKLogits | None]:
    """Returns the state [4, n] of this shard's logits, and their top k if requested."""
    shape, device = call.shape(head.hidden.shape[1]), head.hidden.device
    if call.fused and not (topk or call.batch_invariant) and shape.rows and shape.columns:
        return _fused_statistics(head, call.rows, shape, call.memory_budget), None
    state = empty_state(shape.rows, call.compute, device)
    top = TopKLogits.empty(shape.rows, topk, call.compute, device) if topk else None
    if not (shape.rows and shape.columns):
        return state, top
    # A batch-invariant row is one slab: the order of its sum does not depend on the memory that other rows take.
    plan = (plan_rows if call.batch_invariant else plan_statistics)(shape, call.memory_budget)
    projection = Projection(head, call, plan, shape)
    top_by_slab = []
    for rows, columns in plan.slabs(shape):
        slab = projection.slab(rows, columns)
        call.epilogue.accumulate(slab, state[:, rows], entropy=entropy)
        if top is not None:
            logits, _ = transform(slab)
            top_by_slab.append(top[rows].merged_slab(logits, call.vocab_start + columns.start))
            if plan.axis == "vocabulary":
                top = top_by_slab.pop()
    return state, TopKLogits.stacked(top_by_slab) if top_by_slab else top


def sweep_gradients(head: Head, call: ResolvedCall, coefficients: Tensor, needed: GradientsNeeded) -> Gradients:
    """Projects again and returns gradients from `Epilogue.coefficients` [5, n]; hidden's is this shard's part."""
    shape = call.shape(head.hidden.shape[1], fused=call.fused)
    plan = plan_gradients(
        shape,
        hidden_gradient=needed.hidden,
        weight_gradient=needed.weight,
        weight_cast=head.weight.dtype != call.operand,
        memory_budget=call.memory_budget,
    )
    gradients = Gradients(head, call, needed, plan, shape)
    if not (shape.rows and shape.columns):
        return gradients
    projection = (FusedProjection if call.fused else Projection)(head, call, plan, shape)
    for rows, columns in plan.slabs(shape):
        gradients.add(*projection.gradient(rows, columns, coefficients))
    return gradients


def _fused_bias(head: Head) -> Tensor | None:
    return None if head.bias is None else head.bias.detach().float().contiguous()
