"""`linear_objective` in one sweep, in half precision on Hopper: logits wait in 16 bits for the objective's gradients.

`linear_objective` takes 0.80 to 0.89 times the four plain GEMMs of a head that projects twice, forward and backward,
over six shapes in bf16 on an H200 (benchmarks/results/linear_logprobs_h200.json).

The kernel that multiplies takes the statistics from its fp32 products, as `linear_logprobs_fused` does, and stores each
logit as its distance from the largest of its row in its tile, in steps of 1/2048 nat. The error of a probability is at
most 2⁻¹², an eighth of the rounding of a bf16 gradient, in half the memory of an fp32 logit. A second kernel overwrites
the codes with the gradients, which have the same size.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from postlude.ops.kernels.launch import Launcher
from postlude.ops.kernels.linear_logprobs_fused import (
    GRADIENT_TILE,
    LOG2_E,
    PARTIAL_BYTES,
    ROW_TILE_GROUP,
    STAGES,
    WARPS,
    join_tiles,
    logits_of_products,
    multiprocessors,
    products_of,
    tile_of,
)
from postlude.ops.kernels.linear_logprobs_rows import empty_results
from postlude.ops.linear_logprobs import statistics
from postlude.ops.linear_logprobs.statistics import Results, TokenRows, Upstream

TILE_COLUMNS = GRADIENT_TILE[1]
QUANTIZED_BYTES = 2 + PARTIAL_BYTES / TILE_COLUMNS

# Tiles a program decodes at a time, and its warps.
DECODED_TILES, DECODING_WARPS = 16, 8

_LOWEST = tl.constexpr(statistics.LOWEST)
_STEPS_PER_NAT = tl.constexpr(2048.0)
# The last bits of the float 2²³ + n are the whole number n. So an addition converts between float and integer, at a
# fraction of the cost of the conversion instructions.
_INTEGER = tl.constexpr(8388608.0)
_INTEGER_BITS = tl.constexpr(0x4B000000)
_FARTHEST = tl.constexpr(8388608.0 + 65535.0)  # 32 nats or more below the tile's largest


def encode(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    rows: TokenRows,
    columns: int,
    codes: Tensor,
    state: Tensor,
) -> tuple[Tensor, Results]:
    """Encodes the logits of hidden [n, H] and the first `columns` of weight [V, H] into `codes` [n, columns].

    Writes their `state` [4, n]. Returns the tiles' statistics [3, tiles, n], to which codes are relative, and the
    results.
    """
    count, features = hidden.shape
    block_rows, block_columns, block_features = GRADIENT_TILE
    tiles = -(-columns // TILE_COLUMNS)
    partial = torch.empty(3, tiles, count, dtype=torch.float32, device=hidden.device)
    programs = multiprocessors(hidden.device)
    tensors = (
        TensorDescriptor.from_tensor(hidden, [block_rows, block_features]),
        TensorDescriptor.from_tensor(weight, [block_columns, block_features]),
        TensorDescriptor.from_tensor(codes, [block_rows, block_columns // 2]),
        *(rows.targets, rows.factor, bias, partial, state),
    )
    numbers = (count, columns, features, 1.0 if rows.inner is None else rows.inner)
    constants = (rows.inner is not None, *GRADIENT_TILE, ROW_TILE_GROUP, programs)
    _encode((programs, 1, 1), tensors, (*numbers, state.stride(0)), constants, WARPS, num_stages=STAGES)
    results = empty_results(state)
    join_tiles(partial, slice(0, columns), rows.targets, state, results)
    return partial, results


def decode(
    codes: Tensor, partial: Tensor, rows: TokenRows, results: Results, upstream: Upstream, *, masked: bool
) -> Tensor:
    """Overwrites `codes` [n, columns] with the gradient of the products that they stand for.

    With `masked`, minus infinity was among the logits and gets no gradient.
    """
    gradients = upstream.logprob, upstream.entropy, upstream.lse
    result_tensors = results.state, results.normalizer, results.entropy
    tensors = (*gradients, codes, partial, rows.targets, rows.factor, *result_tensors)
    strides = (0 if row is None else row.stride(0) for row in gradients)
    inner = 1.0 if rows.inner is None else rows.inner
    numbers = (codes.shape[0], results.state.stride(0), *strides, inner)
    tiles = min(DECODED_TILES, triton.next_power_of_2(partial.shape[1]))
    constants = (codes.stride(0), rows.inner is not None, masked, tiles, TILE_COLUMNS)
    _decode((codes.shape[0], 1, 1), tensors, numbers, constants, DECODING_WARPS)
    return codes


@triton.jit(do_not_specialize=["count", "stop", "features", "inner", "state_stride"])
def _encode_kernel(
    hidden, weight, codes, targets, factors, bias, partial, state, count, stop, features, inner, state_stride,
    SOFTCAP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, FEATURES: tl.constexpr,
    ROW_TILE_GROUP: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    row_tiles = tl.cdiv(count, ROWS)
    column_tiles = tl.cdiv(stop, COLUMNS)
    plane = column_tiles.to(tl.int64) * count
    for tile in tl.range(tl.program_id(0), row_tiles * column_tiles, PROGRAMS, flatten=True):
        row_tile, column_tile = tile_of(tile, row_tiles, column_tiles, ROW_TILE_GROUP)
        first = column_tile * COLUMNS
        products = products_of(hidden, weight, row_tile * ROWS, first, features, ROWS, COLUMNS, FEATURES)
        row = row_tile * ROWS + tl.arange(0, ROWS)
        # In halves, so that the second's registers are free while the first is stored.
        left, right = tl.split(tl.permute(tl.reshape(products, (ROWS, 2, COLUMNS // 2)), (0, 2, 1)))
        scale = tl.load(factors + row, mask=row < count, other=0.0)
        left = _logits(left, row, first, count, stop, targets, scale, inner, bias, state, state_stride, SOFTCAP)
        second = first + COLUMNS // 2
        right = _logits(right, row, second, count, stop, targets, scale, inner, bias, state, state_stride, SOFTCAP)
        maximum = tl.maximum(tl.max(left, 1), tl.max(right, 1))
        total, moment, code = _encode_gaps(left - maximum[:, None])
        codes.store([row_tile * ROWS, first], code.to(codes.dtype, bitcast=True))
        right_total, right_moment, code = _encode_gaps(right - maximum[:, None])
        codes.store([row_tile * ROWS, second], code.to(codes.dtype, bitcast=True))
        row_mask = row < count
        partial_at = partial + column_tile.to(tl.int64) * count + row
        tl.store(partial_at, maximum, mask=row_mask)
        tl.store(partial_at + plane, total + right_total, mask=row_mask)
        tl.store(partial_at + 2 * plane, moment + right_moment, mask=row_mask)


@triton.jit
def _logits(products, row, first, count, stop, targets, scale, inner, bias, state, state_stride, SOFTCAP: tl.constexpr):
    columns: tl.constexpr = products.shape[1]
    column = (first + tl.arange(0, columns))[None, :]
    row_mask = row < count
    if bias is not None:
        products += tl.load(bias + column, mask=column < stop, other=0.0)
    logit, _ = logits_of_products(products, scale[:, None], inner, bias, SOFTCAP)
    target = tl.load(targets + row, mask=row_mask, other=-1)
    has_target = row_mask & (target >= first) & (target < tl.minimum(first + columns, stop))
    if tl.max(has_target.to(tl.int32), 0) > 0:
        at_target = tl.sum(tl.where(column == target[:, None], logit, 0.0), 1)
        tl.store(state + 3 * state_stride + row, at_target, mask=has_target)
    if first + columns > stop:
        logit = tl.where(column < stop, logit, _LOWEST)
    return logit


@triton.jit
def _encode_gaps(gap):
    weight = tl.exp2(gap * LOG2_E)
    code = tl.minimum(gap * -_STEPS_PER_NAT + _INTEGER, _FARTHEST).to(tl.int32, bitcast=True).to(tl.int16)
    return tl.sum(weight, 1), tl.sum(weight * gap, 1), code


@triton.jit(do_not_specialize=["count", "state_stride", "logprob_stride", "entropy_stride", "lse_stride", "inner"])
def _decode_kernel(
    logprobs, entropies, lses, codes, tile_maxima, targets, factors, state, normalizer, row_entropies, count,
    state_stride, logprob_stride, entropy_stride, lse_stride, inner,
    STRIDE: tl.constexpr, SOFTCAP: tl.constexpr, MASKED: tl.constexpr, TILES: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    codes += row * STRIDE
    tile_maxima += row
    maximum = tl.load(normalizer + row)
    log_total = tl.load(normalizer + count + row)
    slope = tl.load(factors + row) * inner
    at_target = slope * 0.0 if logprobs is None else tl.load(logprobs + row * logprob_stride) * slope
    linear = slope * 0.0 if entropies is None else tl.load(entropies + row * entropy_stride) * slope
    constant = at_target + linear * tl.load(row_entropies + row)
    if lses is not None:
        constant -= tl.load(lses + row * lse_stride) * slope
    # Whole steps to the end of the stride, past the last column: nothing reads what lies there.
    for start in range(0, STRIDE, TILES * COLUMNS):
        tile = tl.arange(0, TILES)[:, None]
        column = start + tile * COLUMNS + tl.arange(0, COLUMNS)[None, :]
        mask = column < STRIDE
        tile += start // COLUMNS
        tile_maximum = tl.load(tile_maxima + tile.to(tl.int64) * count, mask=tile * COLUMNS < STRIDE, other=0.0)
        bits = tl.load(codes + column, mask=mask, other=0.0).to(tl.int16, bitcast=True)
        code = ((bits.to(tl.int32) & 0xFFFF) | _INTEGER_BITS).to(tl.float32, bitcast=True)
        log_p = ((tile_maximum - maximum) - log_total) - (code - _INTEGER) * (1.0 / _STEPS_PER_NAT)
        probability = tl.exp2(log_p * LOG2_E)
        if MASKED:
            probability = tl.where(code == _FARTHEST, 0.0, probability)
        gradient = -probability * (constant + linear * log_p)
        if SOFTCAP:
            capped = (log_p + log_total + maximum) / tl.load(factors + row)
            gradient *= 1.0 - capped * capped
        tl.store(codes + column, gradient.to(codes.dtype.element_ty), mask=mask)
    # The target's logit is known exactly; its gradient overwrites the decoded one.
    logit = tl.load(state + 3 * state_stride + row)
    log_p = (logit - maximum) - log_total
    gradient = at_target - tl.exp(log_p) * (constant + linear * log_p)
    if SOFTCAP:
        capped = logit / tl.load(factors + row)
        gradient *= 1.0 - capped * capped
    tl.debug_barrier()
    target = tl.load(targets + row)
    tl.store(codes + target, gradient.to(codes.dtype.element_ty), mask=(target >= 0) & (target < STRIDE))


_encode, _decode = Launcher(_encode_kernel), Launcher(_decode_kernel)
