"""Logits and log-probs of a generator in the batch-invariant mode, with the bits of `linear_logprobs` in that mode."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from postlude.ops.batch_invariant import invariant_product, is_batch_invariant
from postlude.ops.linear import linear
from postlude.ops.linear_logprobs.gemm import aligned, operand_dtype
from postlude.ops.linear_logprobs.plan import Shape, plan_rows
from postlude.ops.linear_logprobs.resolved_call import select_epilogue
from postlude.ops.linear_logprobs.statistics import SelectionRule, Slab, TokenRows, empty_state


def invariant_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Returns hidden [n, H] @ weightᵀ + bias, fp32 [n, V], with the bits that they have in any batch. No gradient."""
    operand = operand_dtype(hidden.dtype, hidden.device)
    out = _aligned_rows(hidden, len(hidden), len(weight), torch.promote_types(operand, torch.float32))
    return invariant_product(hidden.to(operand), weight.to(operand), bias, out=out)


def logit_products(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Returns hidden [n, H] @ weightᵀ + bias, [n, V], in hidden's dtype, or `invariant_logits` in that mode.

    Where a gradient is needed they are in hidden's dtype in the mode too.
    """
    if is_batch_invariant():
        return linear(hidden, weight, bias) if torch.is_grad_enabled() else invariant_logits(hidden, weight, bias)
    return F.linear(hidden, weight, bias)


def logprobs_of_logits(logits: Tensor, targets: Tensor, temperature: Tensor) -> Tensor:
    """Returns the log-probs of `targets` [n], fp32, from `invariant_logits` [n, V] and a `temperature` [n].

    They equal those of `linear_logprobs` in the mode, if it has no logit scale and no softcap.
    """
    (count, columns), dtype = logits.shape, logits.dtype
    logits = _with_aligned_rows(logits)
    epilogue = select_epilogue("auto", logits.device, dtype)
    selection = epilogue.select(targets, temperature, 1.0, SelectionRule(-1, (0, columns), 0, dtype, None))
    token_rows, state = TokenRows(selection.targets, selection.factor, None), empty_state(count, dtype, logits.device)
    shape = Shape(count, columns, 0, device=logits.device.type)
    for rows, column_range in plan_rows(shape, logits.numel() * dtype.itemsize).slabs(shape):
        slab = Slab(
            hidden=logits[:0],  # not needed, nor is the weight
            weight=logits[:0],
            row_range=rows,
            column_range=column_range,
            products=logits[rows],
            rows=token_rows[rows],
            bias=None,
        )
        epilogue.accumulate(slab, state[:, rows], entropy=False)
    return epilogue.results(state).logprob


def _aligned_rows(like: Tensor, count: int, columns: int, dtype: torch.dtype) -> Tensor:
    """Returns uninitialised rows [count, columns] with the stride of a slab of `linear_logprobs`."""
    return like.new_empty(count, aligned(columns), dtype=dtype)[:, :columns]


def _with_aligned_rows(logits: Tensor) -> Tensor:
    # The order of a kernel's sum depends on the width of its loads, and that on the stride of the rows.
    count, columns = logits.shape
    if logits.stride() == (aligned(columns), 1):
        return logits
    return _aligned_rows(logits, count, columns, logits.dtype).copy_(logits)
