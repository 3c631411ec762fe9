"""The head's projection and statistics, or projection and gradient, in one kernel each, for half precision on Hopper.

`linear_logprobs` with entropy takes 0.99 to 1.08 times the four plain GEMMs it cannot avoid, forward and backward, over
six shapes in bf16 on an H200 (benchmarks/results/linear_logprobs_h200.json). In the same terms verl's Triton kernel
takes 1.5 to 2.0 and SkyRL's 1.6 to 2.3 (the same file, "earlier").

cuBLAS multiplies faster than these kernels, but its logits have to be written and read again. In registers the
statistics cost a tenth of a GEMM and no memory, and the gradient leaves the kernel in the dtype of the next GEMM. Top-k
needs the logits themselves, so it stays with `Projection` and the row kernels.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from postlude.ops.kernels.launch import Launcher
from postlude.ops.kernels.linear_logprobs_rows import floored, store_results, tanh
from postlude.ops.linear_logprobs import statistics
from postlude.ops.linear_logprobs.statistics import Results, TokenRows

# rows × columns × features of a tile, measured on an H200. 8 warps and 3 stages fill its shared memory.
STATISTICS_TILE = (256, 128, 64)
GRADIENT_TILE = (128, 256, 64)
ROW_TILE_GROUP, WARPS, STAGES = 8, 8, 3

# A tile leaves this many bytes for each of its rows until they are joined: maximum, sum and moment in fp32.
PARTIAL_BYTES = 12

_LOWEST = tl.constexpr(statistics.LOWEST)
# e^x is 2^(x · log2 e): one instruction, where tl.exp takes care of denormals.
LOG2_E = tl.constexpr(1.4426950408889634)


def accumulate(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    rows: TokenRows,
    columns: slice,
    state: Tensor,
) -> None:
    """Joins the logits of hidden [n, H] and `columns` of weight [V, H], entropy included, to `state` [4, n].

    Column 0 starts the state without reading its memory.
    """
    count, features = hidden.shape
    block_rows, block_columns, block_features = STATISTICS_TILE
    tiles = -(-(columns.stop - columns.start) // block_columns)
    partial = torch.empty(3, tiles, count, dtype=torch.float32, device=hidden.device)
    programs = multiprocessors(hidden.device)
    tensors = (
        TensorDescriptor.from_tensor(hidden, [block_rows, block_features]),
        TensorDescriptor.from_tensor(weight, [block_columns, block_features]),
        *(rows.targets, rows.factor, bias, partial, state),
    )
    numbers = (count, columns.start, columns.stop, features, 1.0 if rows.inner is None else rows.inner)
    constants = (rows.inner is not None, *STATISTICS_TILE, ROW_TILE_GROUP, programs)
    _accumulate((programs, 1, 1), tensors, (*numbers, state.stride(0)), constants, WARPS, num_stages=STAGES)
    join_tiles(partial, columns, rows.targets, state)


def join_tiles(partial: Tensor, columns: slice, targets: Tensor, state: Tensor, results: Results | None = None) -> None:
    """Joins the tiles' partial statistics [3, tiles, n] of `columns` to the rows' `state` [4, n]; column 0 starts it.

    Writes `results`, if given, from the state.
    """
    _, tiles, count = partial.shape
    outputs = (None, None, None) if results is None else (results.logprob, results.entropy, results.normalizer)
    numbers = (tiles, count, columns.stop, state.stride(0))
    _join((triton.cdiv(count, 32), 1, 1), (partial, targets, state, *outputs), numbers, (columns.start == 0, 32, 32), 4)


def differentiate(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    rows: TokenRows,
    columns: slice,
    coefficients: Tensor,
    out: Tensor,
) -> Tensor:
    """Writes the gradient of the products of hidden [n, H] and `columns` of weight [V, H] to `out` [n, columns]."""
    count, features = hidden.shape
    block_rows, block_columns, block_features = GRADIENT_TILE
    programs = multiprocessors(hidden.device)
    tensors = (
        TensorDescriptor.from_tensor(hidden, [block_rows, block_features]),
        TensorDescriptor.from_tensor(weight, [block_columns, block_features]),
        TensorDescriptor.from_tensor(out, [block_rows, block_columns // 2]), rows.targets, rows.factor, bias,
        coefficients,
    )  # fmt: skip
    inner = 1.0 if rows.inner is None else rows.inner
    numbers = (count, columns.start, columns.stop, features, inner, coefficients.stride(0))
    constants = (rows.inner is not None, *GRADIENT_TILE, ROW_TILE_GROUP, programs)
    _differentiate((programs, 1, 1), tensors, numbers, constants, WARPS, num_stages=STAGES)
    return out


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Returns the number of programs, one a multiprocessor: each takes tiles until none is left."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


@triton.jit
def tile_of(tile, row_tiles, column_tiles, ROW_TILE_GROUP: tl.constexpr):
    # Neighbouring programs share rows and columns, so that both operands are read from the cache.
    group_tiles = ROW_TILE_GROUP * column_tiles
    first_row_tile = tile // group_tiles * ROW_TILE_GROUP
    group_rows = min(row_tiles - first_row_tile, ROW_TILE_GROUP)
    return first_row_tile + tile % group_tiles % group_rows, tile % group_tiles // group_rows


@triton.jit
def products_of(
    hidden, weight, row, column, features, ROWS: tl.constexpr, COLUMNS: tl.constexpr, FEATURES: tl.constexpr
):
    """Returns products [ROWS, COLUMNS] of the rows from `row` on and the columns from `column` on."""
    products = tl.zeros((ROWS, COLUMNS), tl.float32)
    for step in range(tl.cdiv(features, FEATURES)):
        hidden_tile = hidden.load([row, step * FEATURES])
        weight_tile = weight.load([column, step * FEATURES])
        products = tl.dot(hidden_tile, weight_tile.T, products, input_precision="ieee")
    return products


@triton.jit
def logits_of_products(products, factor, inner, bias, SOFTCAP: tl.constexpr):
    """Returns the logits of products with their bias, and the softcap's slope. Only a bias can be minus infinity."""
    slope = 1.0
    if SOFTCAP:
        products, slope = tanh(products * inner)
    logit = products * factor
    if bias is not None:
        logit = floored(logit)
    return logit, slope


@triton.jit(do_not_specialize=["count", "start", "stop", "features", "inner", "state_stride"])
def _accumulate_kernel(
    hidden, weight, targets, factors, bias, partial, state, count, start, stop, features, inner, state_stride,
    SOFTCAP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, FEATURES: tl.constexpr,
    ROW_TILE_GROUP: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    row_tiles = tl.cdiv(count, ROWS)
    column_tiles = tl.cdiv(stop - start, COLUMNS)
    plane = column_tiles.to(tl.int64) * count
    for tile in tl.range(tl.program_id(0), row_tiles * column_tiles, PROGRAMS, flatten=True):
        row_tile, column_tile = tile_of(tile, row_tiles, column_tiles, ROW_TILE_GROUP)
        first = start + column_tile * COLUMNS
        products = products_of(hidden, weight, row_tile * ROWS, first, features, ROWS, COLUMNS, FEATURES)
        row = row_tile * ROWS + tl.arange(0, ROWS)
        row_mask = row < count
        column = (first + tl.arange(0, COLUMNS))[None, :]
        if bias is not None:
            products += tl.load(bias + column, mask=column < stop, other=0.0)
        logit, _ = logits_of_products(
            products, tl.load(factors + row, mask=row_mask, other=0.0)[:, None], inner, bias, SOFTCAP
        )
        # Only tiles that hold a target do this: with few features every instruction shows.
        target = tl.load(targets + row, mask=row_mask, other=-1)
        has_target = row_mask & (target >= first) & (target < tl.minimum(first + COLUMNS, stop))
        if tl.max(has_target.to(tl.int32), 0) > 0:
            at_target = tl.sum(tl.where(column == target[:, None], logit, 0.0), 1)
            tl.store(state + 3 * state_stride + row, at_target, mask=has_target)
        if first + COLUMNS > stop:
            logit = tl.where(column < stop, logit, _LOWEST)
        maximum = tl.max(logit, 1)
        gap = logit - maximum[:, None]
        share = tl.exp2(gap * LOG2_E)
        partial_at = partial + column_tile.to(tl.int64) * count + row
        tl.store(partial_at, maximum, mask=row_mask)
        tl.store(partial_at + plane, tl.sum(share, 1), mask=row_mask)
        tl.store(partial_at + 2 * plane, tl.sum(share * gap, 1), mask=row_mask)


@triton.jit(do_not_specialize=["tiles", "count", "stop", "state_stride"])
def _join_kernel(
    partial, targets, state, logprobs, entropies, normalizer, tiles, count, stop, state_stride,
    STARTS: tl.constexpr, TILES: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row_mask = row < count
    plane = tiles.to(tl.int64) * count
    maximum = tl.full((TILES, ROWS), _LOWEST, tl.float32)
    total = tl.zeros((TILES, ROWS), tl.float32)
    moment = tl.zeros((TILES, ROWS), tl.float32)
    for first in range(0, tiles, TILES):
        tile = first + tl.arange(0, TILES)
        mask = (tile < tiles)[:, None] & row_mask[None, :]
        partial_at = partial + tile.to(tl.int64)[:, None] * count + row[None, :]
        maximum, total, moment = _merge(
            maximum, total, moment, tl.load(partial_at, mask=mask, other=_LOWEST),
            tl.load(partial_at + plane, mask=mask, other=0.0), tl.load(partial_at + 2 * plane, mask=mask, other=0.0),
        )  # fmt: skip
    # Until here each lane has its own; now they are joined, then with what the state held before.
    highest = tl.max(maximum, 0)
    gap = maximum - highest[None, :]
    decay = tl.exp(gap)
    moment = tl.sum((moment + gap * total) * decay, 0)
    total = tl.sum(total * decay, 0)
    state_at = state + row
    if STARTS:
        target = tl.load(targets + row, mask=row_mask, other=0)
        tl.store(state_at + 3 * state_stride, _LOWEST, mask=row_mask & ((target < 0) | (target >= stop)))
    else:
        highest, total, moment = _merge(
            highest, total, moment, tl.load(state_at, mask=row_mask, other=_LOWEST),
            tl.load(state_at + state_stride, mask=row_mask, other=0.0),
            tl.load(state_at + 2 * state_stride, mask=row_mask, other=0.0),
        )  # fmt: skip
    tl.store(state_at, highest, mask=row_mask)
    tl.store(state_at + state_stride, total, mask=row_mask)
    tl.store(state_at + 2 * state_stride, moment, mask=row_mask)
    if logprobs is not None:
        if STARTS:
            tl.debug_barrier()  # another thread may have stored the target's logit
        at_target = tl.load(state_at + 3 * state_stride, mask=row_mask, other=0.0)
        store_results(highest, total, moment, at_target, logprobs, entropies, normalizer, row, count, row_mask)


@triton.jit
def _merge(maximum, total, moment, other_maximum, other_total, other_moment):
    # As `statistics.join`, of two. A NaN maximum wins no comparison; the sums it is in carry it on.
    highest = tl.maximum(maximum, other_maximum)
    gap = maximum - highest
    other_gap = other_maximum - highest
    decay = tl.exp(gap)
    other_decay = tl.exp(other_gap)
    moment = (moment + gap * total) * decay + (other_moment + other_gap * other_total) * other_decay
    return highest, total * decay + other_total * other_decay, moment


@triton.jit(do_not_specialize=["count", "start", "stop", "features", "inner", "coefficient_stride"])
def _differentiate_kernel(
    hidden, weight, gradients, targets, factors, bias, coefficients, count, start, stop, features, inner,
    coefficient_stride,
    SOFTCAP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, FEATURES: tl.constexpr,
    ROW_TILE_GROUP: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    row_tiles = tl.cdiv(count, ROWS)
    column_tiles = tl.cdiv(stop - start, COLUMNS)
    for tile in tl.range(tl.program_id(0), row_tiles * column_tiles, PROGRAMS, flatten=True):
        row_tile, column_tile = tile_of(tile, row_tiles, column_tiles, ROW_TILE_GROUP)
        offset = column_tile * COLUMNS
        products = products_of(hidden, weight, row_tile * ROWS, start + offset, features, ROWS, COLUMNS, FEATURES)
        row = row_tile * ROWS + tl.arange(0, ROWS)
        # Halves one after the other: the second's registers are free while the first is stored.
        halves = tl.permute(tl.reshape(products, (ROWS, 2, COLUMNS // 2)), (0, 2, 1))
        left, right = tl.split(halves)
        first = start + offset
        left = _gradient(
            left, row, first, count, stop, targets, factors, inner, bias, coefficients, coefficient_stride, SOFTCAP
        )
        gradients.store([row_tile * ROWS, offset], left.to(gradients.dtype))
        first += COLUMNS // 2
        right = _gradient(
            right, row, first, count, stop, targets, factors, inner, bias, coefficients, coefficient_stride, SOFTCAP
        )
        gradients.store([row_tile * ROWS, offset + COLUMNS // 2], right.to(gradients.dtype))


@triton.jit
def _gradient(
    products, row, first, count, stop, targets, factors, inner, bias, coefficients, coefficient_stride,
    SOFTCAP: tl.constexpr,
):  # fmt: skip
    columns: tl.constexpr = products.shape[1]
    column = first + tl.arange(0, columns)
    row_mask = row < count
    if bias is not None:
        products += tl.load(bias + column, mask=column < stop, other=0.0)[None, :]
    logit, slope = logits_of_products(
        products, tl.load(factors + row, mask=row_mask, other=0.0)[:, None], inner, bias, SOFTCAP
    )
    coefficients_at = coefficients + row
    maximum = tl.load(coefficients_at, mask=row_mask, other=0.0)
    log_total = tl.load(coefficients_at + coefficient_stride, mask=row_mask, other=0.0)
    constant = tl.load(coefficients_at + 3 * coefficient_stride, mask=row_mask, other=0.0)
    linear = tl.load(coefficients_at + 4 * coefficient_stride, mask=row_mask, other=0.0)
    gap = logit - maximum[:, None]
    probability = tl.exp2(gap * LOG2_E - (log_total * LOG2_E)[:, None])
    gradient = -probability * ((constant - linear * log_total)[:, None] + linear[:, None] * gap)
    target = tl.load(targets + row, mask=row_mask, other=-1)
    has_target = (target >= first) & (target < first + columns)
    if tl.max(has_target.to(tl.int32), 0) > 0:
        at_target = tl.load(coefficients_at + 2 * coefficient_stride, mask=row_mask, other=0.0)
        gradient += tl.where(column[None, :] == target[:, None], at_target[:, None], 0.0)
    if SOFTCAP:
        gradient *= slope
    return gradient


_accumulate, _join, _differentiate = (
    Launcher(_accumulate_kernel),
    Launcher(_join_kernel),
    Launcher(_differentiate_kernel),
)
