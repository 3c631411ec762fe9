"""The head's `Epilogue` as kernels of one program a row; cuBLAS multiplies.

They serve top-k, fp32, and GPUs other than Hopper. In fp32 a head with entropy is 1.3 times as fast as with PyTorch's
operations: 26 ms against 34, forward and backward, for 2048 tokens, 2048 features and 37,984 entries on an H200
(benchmarks/results/small_kernels_h200.json). A third kernel selects the tokens to project in every case, where a dozen
small launches would keep the device idle.

Both epilogues read a slab of products once at full bandwidth; softcap, bias, scale and temperature cost nothing extra.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from postlude.ops.kernels.launch import Kernel, Launcher
from postlude.ops.linear_logprobs import statistics
from postlude.ops.linear_logprobs.statistics import Results, Selection, SelectionRule, Slab, TokenRows, Upstream

LOGIT_COPIES = 1

# Columns a program holds at a time, its warps, and loads ahead, measured on an H200.
STATISTICS_BLOCK, STATISTICS_WARPS, STATISTICS_STAGES = 1024, 4, 3
GRADIENT_BLOCK, GRADIENT_WARPS = 4096, 8
SELECTION_BLOCK, SELECTION_WARPS = 8192, 32
ROW_BLOCK = 256
SCALE_BLOCK, SCALE_BLOCKS = 4096, 16

_LOWEST = tl.constexpr(statistics.LOWEST)


def select(targets: Tensor, temperature: float | Tensor, scale: float, rule: SelectionRule) -> Selection:
    tensors = temperature if isinstance(temperature, Tensor) else None
    selection = Selection(
        counts=targets.new_empty(3),
        positions=torch.empty_like(targets),
        targets=torch.empty_like(targets),
        factor=torch.empty_like(targets, dtype=rule.dtype),
        wrong_count=None if rule.target_count is None else targets.new_empty((), dtype=torch.bool),
    )
    written = selection.counts, selection.positions, selection.targets, selection.factor, selection.wrong_count
    stride = 0 if tensors is None else tensors.stride(0)
    factor = scale if isinstance(temperature, Tensor) else scale / temperature
    numbers = (targets.numel(), stride, factor, *rule.allowed, rule.vocab_start, rule.target_count or 0)
    _select((1, 1, 1), (targets, tensors, *written), numbers, (rule.ignore_index, SELECTION_BLOCK), SELECTION_WARPS)
    return selection


def accumulate(slab: Slab, state: Tensor, *, entropy: bool) -> None:
    count, columns = slab.products.shape
    _accumulate_kernel[(count,)](
        slab.products, slab.products.stride(0), columns, slab.column_range.start, slab.rows.targets,
        slab.rows.factor, 1.0 if slab.rows.inner is None else slab.rows.inner, slab.bias, state, state.stride(0),
        SOFTCAP=slab.rows.inner is not None, ENTROPY=entropy, BLOCK=_block(columns, STATISTICS_BLOCK),
        STAGES=STATISTICS_STAGES, num_warps=STATISTICS_WARPS,
    )  # fmt: skip


def empty_results(state: Tensor) -> Results:
    """Returns uninitialised results for a state [4, n]."""
    count = state.shape[1]
    return Results(state, state.new_empty(count), state.new_empty(count), state.new_empty(2, count))


def results(state: Tensor) -> Results:
    count, row_results = state.shape[1], empty_results(state)
    tensors = (state, row_results.logprob, row_results.entropy, row_results.normalizer)
    _results((triton.cdiv(count, ROW_BLOCK), 1, 1), tensors, (state.stride(0), count), (ROW_BLOCK,), 4)
    return row_results


def coefficients(
    rows: TokenRows, normalizer: Tensor, entropy: Tensor, upstream: Upstream, target_positions: Tensor | None
) -> Tensor:
    count = entropy.shape[0]
    output = entropy.new_empty(5, count)
    gradients = upstream.logprob, upstream.entropy, upstream.lse
    strides = (0 if row is None else row.stride(0) for row in gradients)
    inner = 1.0 if rows.inner is None else rows.inner
    tensors = (*gradients, target_positions, rows.factor, normalizer, entropy, output)
    _coefficients((triton.cdiv(count, ROW_BLOCK), 1, 1), tensors, (*strides, inner, count), (ROW_BLOCK,), 4)
    return output


def differentiate(slab: Slab, coefficients: Tensor, dtype: torch.dtype) -> Tensor:
    """See `Epilogue.differentiate`. In place: a half-precision gradient takes the first half of its row's bytes."""
    count, columns = slab.products.shape
    stride = slab.products.stride(0)
    gradients = slab.products.as_strided((count, stride), (stride, 1)).view(dtype)
    _differentiate_kernel[(count,)](
        slab.products, stride, gradients, gradients.stride(0), columns, slab.column_range.start, slab.rows.targets,
        slab.rows.factor, 1.0 if slab.rows.inner is None else slab.rows.inner, slab.bias, coefficients,
        coefficients.stride(0), SOFTCAP=slab.rows.inner is not None, BLOCK=_block(columns, GRADIENT_BLOCK),
        num_warps=GRADIENT_WARPS,
    )  # fmt: skip
    return gradients[:, :columns]


def scale(tensor: Tensor, factor: Tensor) -> Tensor:
    """See `Epilogue.scale`. Where the factor is 1 nothing is read or written."""
    programs = triton.cdiv(tensor.numel(), SCALE_BLOCK * SCALE_BLOCKS)
    if programs:
        _scale_kernel[(programs,)](tensor, tensor.numel(), factor, BLOCK=SCALE_BLOCK, BLOCKS=SCALE_BLOCKS)
    return tensor


def _block(columns: int, limit: int) -> int:
    return min(limit, max(256, 1 << (columns - 1).bit_length()))


@triton.jit(do_not_specialize=["count", "temperature_stride", "scale", "low", "high", "vocab_start", "target_count"])
def _select_kernel(
    targets, temperatures, counts, positions, selected_targets, factors, wrong_count, count, temperature_stride, scale,
    low, high, vocab_start, target_count,
    IGNORE_INDEX: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # One program: a token's row depends on all before it, and all together take a few microseconds.
    selected_before = 0
    ignored_before = 0
    invalid_temperatures = 0
    for first in range(0, count, BLOCK):
        position = first + tl.arange(0, BLOCK)
        inside = position < count
        target = tl.load(targets + position, mask=inside, other=0)
        ignored = inside & (target == IGNORE_INDEX)
        selected = inside & (target != IGNORE_INDEX) & (target >= low) & (target < high)
        selected_index = selected_before + tl.cumsum(selected.to(tl.int32), 0) - 1
        factor = tl.full((BLOCK,), scale, tl.float32)
        if temperatures is not None:
            temperature = tl.load(temperatures + position * temperature_stride, mask=inside, other=1.0)
            factor = tl.div_rn(factor, temperature.to(tl.float32))
            invalid_temperatures += tl.sum((selected & ~(temperature > 0)).to(tl.int32), 0)
        tl.store(positions + selected_index, position, mask=selected)
        tl.store(selected_targets + selected_index, target - vocab_start, mask=selected)
        tl.store(factors + selected_index, factor, mask=selected)
        selected_before += tl.sum(selected.to(tl.int32), 0)
        ignored_before += tl.sum(ignored.to(tl.int32), 0)
    tl.store(counts, selected_before)
    tl.store(counts + 1, ignored_before)
    tl.store(counts + 2, invalid_temperatures)
    if wrong_count is not None:
        is_wrong = (
            (selected_before != target_count) | (ignored_before != count - target_count) | (invalid_temperatures != 0)
        )
        tl.store(wrong_count, is_wrong)
        if is_wrong:
            tl.debug_barrier()  # other threads overwrite what was stored above
            for first in range(0, count, BLOCK):
                position = first + tl.arange(0, BLOCK)
                inside = position < count
                tl.store(factors + position, float("nan"), mask=inside)
                # Memory after the last token is uninitialised, and as many rows as expected are read.
                is_unwritten = inside & (position >= selected_before)
                tl.store(positions + position, 0, mask=is_unwritten)
                tl.store(selected_targets + position, 0, mask=is_unwritten)


@triton.jit
def tanh(x):
    # The exponential form loses digits near 0; the series does not.
    square = x * x
    series = x * (1.0 + square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * (62 / 2835)))))
    decay = tl.exp(-2.0 * tl.abs(x))
    ratio = (1.0 - decay) / (1.0 + decay)
    slope = 4.0 * decay / ((1.0 + decay) * (1.0 + decay))
    return tl.where(tl.abs(x) < 0.25, series, tl.where(x < 0, -ratio, ratio)), slope


@triton.jit
def logit_of(product, factor, inner, SOFTCAP: tl.constexpr):
    slope = 1.0
    if SOFTCAP:
        product, slope = tanh(product * inner)
    return floored(product * factor), slope


@triton.jit
def floored(logit):
    """Replaces minus infinity by the lowest number. `tl.maximum` would turn a NaN into a number and hide it."""
    return tl.where(logit < _LOWEST, _LOWEST, logit)


@Kernel
@triton.jit
def _accumulate_kernel(
    products, stride, columns, first, targets, factors, inner, bias, state, state_stride,
    SOFTCAP: tl.constexpr, ENTROPY: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    products += row * stride
    state += row
    factor = tl.load(factors + row)
    # Every lane keeps its own maximum and sums, so no lane waits for another before the row is read.
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


@triton.jit(do_not_specialize=["state_stride", "count"])
def _results_kernel(state, logprobs, entropies, normalizer, state_stride, count, BLOCK: tl.constexpr):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = row < count
    state_at = state + row
    maximum = tl.load(state_at, mask=mask, other=0.0)
    total = tl.load(state_at + state_stride, mask=mask, other=1.0)
    moment = tl.load(state_at + 2 * state_stride, mask=mask, other=0.0)
    target = tl.load(state_at + 3 * state_stride, mask=mask, other=0.0)
    store_results(maximum, total, moment, target, logprobs, entropies, normalizer, row, count, mask)


@triton.jit
def store_results(maximum, total, moment, target, logprobs, entropies, normalizer, row, count, mask):
    log_total = tl.log(total)
    entropy = log_total - moment / total
    tl.store(logprobs + row, (target - maximum) - log_total, mask=mask)
    # Not tl.maximum, which would turn a NaN into a number and hide it.
    tl.store(entropies + row, tl.where(entropy < 0, 0.0, entropy), mask=mask)
    tl.store(normalizer + row, maximum, mask=mask)
    tl.store(normalizer + count + row, log_total, mask=mask)


@triton.jit(do_not_specialize=["logprob_stride", "entropy_stride", "lse_stride", "inner", "count"])
def _coefficients_kernel(
    logprobs, entropies, lses, target_positions, factors, normalizer, row_entropies, output, logprob_stride,
    entropy_stride, lse_stride, inner, count,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = row < count
    gradient_index = row
    if target_positions is not None:
        gradient_index = tl.load(target_positions + row, mask=mask, other=0)
    slope = tl.load(factors + row, mask=mask, other=0.0) * inner
    at_target = _scaled_gradient(logprobs, logprob_stride, gradient_index, mask, slope)
    linear = _scaled_gradient(entropies, entropy_stride, gradient_index, mask, slope)
    at_all = _scaled_gradient(lses, lse_stride, gradient_index, mask, slope)
    constant = at_target + linear * tl.load(row_entropies + row, mask=mask, other=0.0) - at_all
    tl.store(output + row, tl.load(normalizer + row, mask=mask, other=0.0), mask=mask)
    tl.store(output + count + row, tl.load(normalizer + count + row, mask=mask, other=0.0), mask=mask)
    tl.store(output + 2 * count + row, at_target, mask=mask)
    tl.store(output + 3 * count + row, constant, mask=mask)
    tl.store(output + 4 * count + row, linear, mask=mask)


@triton.jit
def _scaled_gradient(gradients, stride, index, mask, slope):
    scaled = tl.zeros_like(slope)
    if gradients is not None:
        scaled = tl.load(gradients + index * stride, mask=mask, other=0.0) * slope
    return scaled


@Kernel
@triton.jit
def _differentiate_kernel(
    products, stride, gradients, gradient_stride, columns, first, targets, factors, inner, bias, coefficients,
    coefficient_stride,
    SOFTCAP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
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
        gradient = tl.where(column == target, at_target, 0.0) - tl.exp(log_p) * (constant + linear * log_p)
        if SOFTCAP:
            gradient *= slope
        # A narrower gradient overwrites products of earlier columns: every thread reads before any writes.
        tl.debug_barrier()
        tl.store(gradients + column, gradient.to(gradients.dtype.element_ty), mask=inside)


@Kernel
@triton.jit
def _scale_kernel(tensor, size, factor, BLOCK: tl.constexpr, BLOCKS: tl.constexpr):
    scale = tl.load(factor).to(tl.float32)
    if scale != 1.0:
        first = tl.program_id(0).to(tl.int64) * BLOCK * BLOCKS
        for step in range(BLOCKS):
            index = first + step * BLOCK + tl.arange(0, BLOCK)
            mask = index < size
            value = tl.load(tensor + index, mask=mask, other=0.0).to(tl.float32) * scale
            tl.store(tensor + index, value.to(tensor.dtype.element_ty), mask=mask)


_select, _results, _coefficients = Launcher(_select_kernel), Launcher(_results_kernel), Launcher(_coefficients_kernel)
