"""The AdamW step as one kernel, which reads and writes every number once.

Not measured alone: part of every update in benchmarks/results/train_step_h200.json, 8b-whole with 8-bit moments.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, assignment, misc"
# ruff: noqa: PLR0915 (a kernel is one function)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from postlude.ops.adamw_storage import (
    BLOCK,
    FIRST_TOP,
    OCTAVE,
    SECOND_TOP,
    AdamWHyperparameters,
    Moment,
    QuantizedMoment,
    TensorSlice,
    scales_shape,
)
from postlude.ops.kernels.launch import Kernel

BLOCKS = 16  # blocks of numbers a program takes


def launch(
    weight: Tensor,
    gradient: Tensor,
    first: Moment,
    second: Moment,
    now: Tensor,
    rates: AdamWHyperparameters,
    low: Tensor | None,
    scale: Tensor,
    key: int,
    place: TensorSlice,
) -> None:
    """See `adamw_step`."""
    columns = weight.shape[-1]
    count = weight.numel() // max(columns, 1) * scales_shape((columns,))[0]
    if not count:
        return
    eight = isinstance(first, QuantizedMoment)
    first_codes, first_scales = (first.codes, first.scales) if isinstance(first, QuantizedMoment) else (first, now)
    second_codes, second_scales = (
        (second.codes, second.scales) if isinstance(second, QuantizedMoment) else (second, now)
    )
    (matrix, row, column), (_, all_rows, all_columns) = place.starts, place.full_shape
    _step[(triton.cdiv(count, BLOCKS),)](
        weight, weight if low is None else low, gradient, first_codes, first_scales, second_codes, second_scales,
        now, scale, rates.lr, 1 - rates.betas[0], rates.betas[1], 1 - rates.betas[1], rates.eps, rates.decay,
        columns, count, weight.shape[-2] if weight.ndim > 1 else 1, matrix, row, column, all_rows, all_columns,
        key - (1 << 32) if key >> 31 else key, EIGHT=eight, WIDE=weight.dtype == torch.float32,
        SPLIT=low is not None, BLOCK=BLOCK, BLOCKS=BLOCKS, OCTAVE=OCTAVE, FIRST_TOP=FIRST_TOP, SECOND_TOP=SECOND_TOP,
    )  # fmt: skip


@triton.jit
def _mixed(bits):
    bits = (bits ^ (bits >> 16)) * 0x7FEB352D
    bits = (bits ^ (bits >> 15)) * 0x846CA68B
    return bits ^ (bits >> 16)


@triton.jit
def _levels(code, scale, top, OCTAVE: tl.constexpr):
    size = tl.exp2((code - top).to(tl.float32) / OCTAVE) * scale
    return tl.where(code == 0, 0.0, size)


@triton.jit
def _narrowed(size, scale, chance_of, top, OCTAVE: tl.constexpr, FROM_ZERO: tl.constexpr):
    share = size / tl.maximum(scale, 1.1754943508222875e-38)
    below = tl.maximum(tl.minimum(tl.floor(tl.log2(share) * OCTAVE), 0.0), 1.0 - top)
    level = tl.exp2(below / OCTAVE)
    chance = (share - level) / (tl.exp2((below + 1.0) / OCTAVE) - level)
    code = tl.minimum(below.to(tl.int32) + top + (chance_of < chance).to(tl.int32), top)
    least = tl.exp2((1.0 - top) / OCTAVE)
    lowest = chance_of < share / least if FROM_ZERO else share > 0.0
    return tl.where(share < least, lowest.to(tl.int32), code)


@Kernel
@triton.jit(do_not_specialize=["matrix", "row", "column", "key"])
def _step(
    weight, low, gradient, first, first_scales, second, second_scales, now, scale, lr, new1, beta2, new2, eps, decay,
    columns, count, inner, matrix, row, column, all_rows, all_columns, key,
    EIGHT: tl.constexpr, WIDE: tl.constexpr, SPLIT: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
    OCTAVE: tl.constexpr, FIRST_TOP: tl.constexpr, SECOND_TOP: tl.constexpr,
):  # fmt: skip
    """Moves [BLOCKS, BLOCK] numbers: `BLOCKS` blocks of the rows, counted one row after another."""
    if tl.load(scale + 1) == 0.0:
        return
    in_row = tl.cdiv(columns, BLOCK)
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    line = block // in_row
    here = (block % in_row)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = (block < count)[:, None] & (here < columns)
    at = line[:, None] * columns + here

    place = ((matrix + line // inner) * all_rows + row + line % inner)[:, None] * all_columns + column + here
    step = tl.load(now).to(tl.int64)
    seed = _mixed((step * 0x9E3779B1 + key).to(tl.uint32))
    one = _mixed(place.to(tl.uint32) ^ seed)
    other = _mixed(one + 0x85EBCA6B)

    g = tl.load(gradient + at, mask=inside, other=0.0).to(tl.float32) * tl.load(scale)
    if EIGHT:
        of_first = tl.load(first_scales + block, mask=block < count, other=0.0)[:, None]
        of_second = tl.load(second_scales + block, mask=block < count, other=0.0)[:, None]
        code = tl.load(first + at, mask=inside, other=0).to(tl.int32)
        m = _levels(code & 0x7F, of_first, FIRST_TOP, OCTAVE)
        m = tl.where(code > 0x7F, -m, m)
        v = _levels(tl.load(second + at, mask=inside, other=0).to(tl.int32), of_second, SECOND_TOP, OCTAVE)
    else:
        m = tl.load(first + at, mask=inside, other=0.0)
        v = tl.load(second + at, mask=inside, other=0.0)
    m = m + new1 * (g - m)
    v = beta2 * v + new2 * g * g

    raw = tl.load(weight + at, mask=inside, other=0.0)
    if SPLIT:
        beyond = tl.load(low + at, mask=inside, other=0).to(tl.int32) & 0xFFFF
        bits = (raw.to(tl.int16, bitcast=True).to(tl.int32) << 16) - ((beyond >> 15) << 16)
        w = (bits | beyond).to(tl.float32, bitcast=True)
    else:
        w = raw.to(tl.float32)
    w = w * (1 - lr * decay) - lr * (m / tl.load(now + 1)) / (tl.sqrt(v / tl.load(now + 2)) + eps)
    if WIDE:
        tl.store(weight + at, w, mask=inside)
    else:
        bits = w.to(tl.int32, bitcast=True)
        if SPLIT:
            tl.store(low + at, bits.to(tl.int16), mask=inside)
            high = (bits + 0x8000) >> 16
        else:
            high = (bits + (one & 0xFFFF).to(tl.int32)) >> 16
        tl.store(weight + at, high.to(tl.int16).to(tl.bfloat16, bitcast=True), mask=inside)

    if EIGHT:
        size = tl.abs(m)
        of_first = tl.max(tl.where(inside, size, 0.0), 1)
        of_second = tl.max(tl.where(inside, v, 0.0), 1)
        tl.store(first_scales + block, of_first, mask=block < count)
        tl.store(second_scales + block, of_second, mask=block < count)
        code = _narrowed(size, of_first[:, None], _chance(one >> 16), FIRST_TOP, OCTAVE, True)
        code = tl.where(m < 0, code | 0x80, code)
        tl.store(first + at, code.to(tl.uint8), mask=inside)
        code = _narrowed(v, of_second[:, None], _chance(other >> 16), SECOND_TOP, OCTAVE, False)
        tl.store(second + at, code.to(tl.uint8), mask=inside)
    else:
        tl.store(first + at, m, mask=inside)
        tl.store(second + at, v, mask=inside)


@triton.jit
def _chance(bits):
    return (bits.to(tl.float32) + 0.5) / 65536
