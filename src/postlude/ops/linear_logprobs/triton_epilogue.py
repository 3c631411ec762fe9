"""The epilogues as two Triton kernels, one program a row. GEMMs stay with cuBLAS, which nobody outruns by hand.

Both read a slab of products once at full bandwidth; the softcap, bias, scale and temperature ride along for free.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from postlude.ops.linear_logprobs import statistics
from postlude.ops.linear_logprobs.statistics import Slab

LOGIT_COPIES = 1

# Columns a program holds at a time, its warps, and how many loads it keeps ahead: by measurement on an H200.
STATISTICS_BLOCK, STATISTICS_WARPS, STATISTICS_STAGES = 1024, 4, 3
GRADIENT_BLOCK, GRADIENT_WARPS = 4096, 8

_LOWEST = tl.constexpr(statistics.LOWEST)


def accumulate(slab: Slab, state: Tensor, *, entropy: bool) -> None:
    """See `Epilogue.accumulate`."""
    count, columns = slab.products.shape
    _accumulate_kernel[(count,)](
        slab.products,
        slab.products.stride(0),
        columns,
        slab.column_range.start,
        slab.rows.targets,
        slab.rows.factor,
        1.0 if slab.rows.inner is None else slab.rows.inner,
        slab.bias,
        state,
        state.stride(0),
        SOFTCAP=slab.rows.inner is not None,
        ENTROPY=entropy,
        BLOCK=_block(columns, STATISTICS_BLOCK),
        STAGES=STATISTICS_STAGES,
        num_warps=STATISTICS_WARPS,
    )


def differentiate(slab: Slab, coefficients: Tensor, dtype: torch.dtype) -> Tensor:
    """See `Epilogue.differentiate`. In place: a half-precision gradient takes the front half of its row's bytes."""
    count, columns = slab.products.shape
    stride = slab.products.stride(0)
    whole = slab.products.as_strided((count, stride), (stride, 1)).view(dtype)
    _differentiate_kernel[(count,)](
        slab.products,
        stride,
        whole,
        whole.stride(0),
        columns,
        slab.column_range.start,
        slab.rows.targets,
        slab.rows.factor,
        1.0 if slab.rows.inner is None else slab.rows.inner,
        slab.bias,
        coefficients,
        coefficients.stride(0),
        SOFTCAP=slab.rows.inner is not None,
        BLOCK=_block(columns, GRADIENT_BLOCK),
        num_warps=GRADIENT_WARPS,
    )
    return whole[:, :columns]


def _block(columns: int, most: int) -> int:
    return min(most, max(256, 1 << (columns - 1).bit_length()))


@triton.jit
def _tanh(x):
    # The exponential form loses its digits near 0, where the series has all of them.
    square = x * x
    series = x * (1.0 + square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * (62 / 2835)))))
    decay = tl.exp(-2.0 * tl.abs(x))
    ratio = (1.0 - decay) / (1.0 + decay)
    slope = 4.0 * decay / ((1.0 + decay) * (1.0 + decay))
    return tl.where(tl.abs(x) < 0.25, series, tl.where(x < 0, -ratio, ratio)), slope


@triton.jit
def logit_of(product, factor, inner, SOFTCAP: tl.constexpr):
    """The logit of a product, and the softcap's slope."""
    slope = 1.0
    if SOFTCAP:
        product, slope = _tanh(product * inner)
    logit = product * factor
    # Not tl.maximum, which would turn a NaN into a number and hide it.
    return tl.where(logit < _LOWEST, _LOWEST, logit), slope


@triton.jit
def _accumulate_kernel(
    products,
    stride,
    columns,
    first,
    targets,
    factors,
    inner,
    bias,
    state,
    state_stride,
    SOFTCAP: tl.constexpr,
    ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    products += row * stride
    state += row
    factor = tl.load(factors + row)
    # Every lane keeps a maximum and sums of its own: no lane waits for another before the row is read.
    maximum = tl.full([BLOCK], _LOWEST, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    moment = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, columns, BLOCK, num_stages=STAGES):
        column = start + tl.arange(0, BLOCK)
        inside = column < columns
        product = tl.load(products + column, mask=inside, other=0.0)
        if bias is not None:
            product += tl.load(bias + column, mask=inside, other=0.0)
        logit, _ = logit_of(product, factor, inner, SOFTCAP)
        rise = tl.where(inside, logit, _LOWEST) - maximum
        share = tl.exp(-tl.abs(rise))
        higher = rise > 0
        if ENTROPY:
            moment = tl.where(higher, (moment - rise * total) * share, moment + share * rise)
        total = tl.where(higher, total * share + 1.0, total + share)
        maximum = tl.where(higher, logit, maximum)
    before = tl.load(state)
    highest = tl.maximum(before, tl.max(maximum, 0))
    gap = maximum - highest
    decay = tl.exp(gap)
    gap_before = before - highest
    decay_before = tl.exp(gap_before)
    total_before = tl.load(state + state_stride)
    tl.store(state, highest)
    tl.store(state + state_stride, total_before * decay_before + tl.sum(total * decay, 0))
    if ENTROPY:
        moment_before = tl.load(state + 2 * state_stride)
        moment = (moment + gap * total) * decay
        tl.store(
            state + 2 * state_stride, (moment_before + gap_before * total_before) * decay_before + tl.sum(moment, 0)
        )
    target = (tl.load(targets + row) - first).to(tl.int32)
    if (target >= 0) & (target < columns):
        product = tl.load(products + target)
        if bias is not None:
            product += tl.load(bias + target)
        logit, _ = logit_of(product, factor, inner, SOFTCAP)
        tl.store(state + 3 * state_stride, logit)


@triton.jit
def _differentiate_kernel(
    products,
    stride,
    gradients,
    gradient_stride,
    columns,
    first,
    targets,
    factors,
    inner,
    bias,
    coefficients,
    coefficient_stride,
    SOFTCAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    products += row * stride
    gradients += row * gradient_stride
    coefficients += row
    factor = tl.load(factors + row)
    target = (tl.load(targets + row) - first).to(tl.int32)
    maximum = tl.load(coefficients)
    log_total = tl.load(coefficients + coefficient_stride)
    at_target = tl.load(coefficients + 2 * coefficient_stride)
    constant = tl.load(coefficients + 3 * coefficient_stride)
    linear = tl.load(coefficients + 4 * coefficient_stride)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < columns
        product = tl.load(products + column, mask=inside, other=0.0)
        if bias is not None:
            product += tl.load(bias + column, mask=inside, other=0.0)
        logit, slope = logit_of(product, factor, inner, SOFTCAP)
        log_p = (logit - maximum) - log_total
        gradient = tl.exp(log_p) * (constant + linear * log_p)
        gradient = tl.where(column == target, gradient + at_target, gradient)
        if SOFTCAP:
            gradient *= slope
        # A narrower gradient lands on products of earlier columns: every thread must have read before any writes.
        tl.debug_barrier()
        tl.store(gradients + column, gradient.to(gradients.dtype.element_ty), mask=inside)
