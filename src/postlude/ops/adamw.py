"""One AdamW step on weights and moments that are stored in few bits: see `adamw_storage`.

Random bits are a hash of the number's index in the whole tensor, the tensor's name and the step. They are the same in
every layout, and again after a resume.
"""

from __future__ import annotations

import math
import zlib

import torch
from torch import Tensor

from postlude.ops.adamw_storage import (
    AdamWHyperparameters,
    Moment,
    TensorSlice,
    dequantize_first,
    dequantize_second,
    join_halves,
    quantize_first,
    quantize_second,
    round_randomly,
    scales_shape,
    split_halves,
)
from postlude.ops.kernels.capabilities import Backend, use_kernel

ROWS_AT_ONCE = 1 << 22  # numbers that torch processes at a time, in several fp32 copies


def name_seed(name: str) -> int:
    """Returns a seed that distinguishes this tensor's random numbers from others'."""
    return zlib.crc32(name.encode())


def bias_corrections(steps: Tensor, rates: AdamWHyperparameters) -> Tensor:
    """Step numbers from 1, [n] -> for each, itself and the bias corrections of both moments: [n, 3] fp32."""
    there = [-torch.expm1(steps.double() * (math.log(beta) if beta else -math.inf)) for beta in rates.betas]
    return torch.stack([steps.double(), *there], 1).float()


@torch.no_grad()
def adamw_step(
    weight: Tensor,
    gradient: Tensor,
    first: Moment,
    second: Moment,
    now: Tensor,
    rates: AdamWHyperparameters,
    *,
    low: Tensor | None = None,
    scale: Tensor | None = None,
    key: int = 0,
    place: TensorSlice | None = None,
    backend: Backend = "auto",
) -> None:
    """Updates `weight` and both moments by the `gradient`, in place.

    `weight` is fp32, or bf16 with `low` (int16, same shape) as its lower half, or bf16 alone, rounded at random. `now`
    is an entry of `bias_corrections`. `scale` [2] fp32 multiplies the gradient by its first entry; where its second is
    zero, nothing changes. The host reads neither. `place` is the tensor's position in a larger one.
    """
    if scale is None:
        scale = torch.ones(2, device=weight.device)
    if place is None:
        place = TensorSlice.of(tuple(slice(0, size) for size in weight.shape), tuple(weight.shape))
    if use_kernel("adamw_step", backend, weight.device, torch.float32):
        from postlude.ops.kernels.adamw import launch  # needs triton

        launch(weight, gradient, first, second, now, rates, low, scale, key, place)
        return
    columns, rows = weight.shape[-1], weight.numel() // max(weight.shape[-1], 1)
    stride = max(1, ROWS_AT_ONCE // max(columns, 1))
    inner = weight.shape[-2] if weight.ndim > 1 else 1
    for start in range(0, rows, stride):
        cut = slice(start, min(start + stride, rows))
        index = _index(torch.arange(cut.start, cut.stop, device=weight.device), columns, inner, place)
        _reference(
            weight.view(-1, columns)[cut],
            gradient.view(-1, columns)[cut],
            None if low is None else low.view(-1, columns)[cut],
            [each[cut] for each in _parts(first, columns)],
            [each[cut] for each in _parts(second, columns)],
            now,
            rates,
            scale,
            random_bits(index, key, now),
        )


def _parts(moment: Moment, columns: int) -> list[Tensor]:
    if isinstance(moment, Tensor):
        return [moment.view(-1, columns)]
    return [moment.codes.view(-1, columns), moment.scales.view(-1, scales_shape((columns,))[0])]


def _index(rows: Tensor, columns: int, inner: int, place: TensorSlice) -> Tensor:
    """Returns each number's index in the whole tensor, row by row: [rows, columns] int64."""
    (matrix, row, column), (_, all_rows, all_columns) = place.starts, place.whole
    whole_rows = (matrix + rows // inner) * all_rows + row + rows % inner
    return whole_rows[:, None] * all_columns + column + torch.arange(columns, device=rows.device)


MASK = 0xFFFFFFFF


def _mixed(bits: Tensor) -> Tensor:
    """Hashes 32 bits, in int64."""
    bits = (bits ^ (bits >> 16)) * 0x7FEB352D & MASK
    bits = (bits ^ (bits >> 15)) * 0x846CA68B & MASK
    return bits ^ (bits >> 16)


def random_bits(index: Tensor, key: int, now: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns 16 random bits for the weight at each index, and for each moment: int64 from 0 to 65535."""
    seed = _mixed((now[0].to(torch.int64) * 0x9E3779B1 + key) & MASK)
    one = _mixed((index & MASK) ^ seed)
    other = _mixed((one + 0x85EBCA6B) & MASK)
    return one & 0xFFFF, one >> 16, other >> 16


def _reference(
    weight: Tensor,
    gradient: Tensor,
    low: Tensor | None,
    first: list[Tensor],
    second: list[Tensor],
    now: Tensor,
    rates: AdamWHyperparameters,
    scale: Tensor,
    drawn: tuple[Tensor, Tensor, Tensor],
) -> None:
    goes = scale[1] != 0
    g = gradient.float() * scale[0]
    m = first[0] if len(first) == 1 else dequantize_first(*first)
    v = second[0] if len(second) == 1 else dequantize_second(*second)
    m = m + (1 - rates.betas[0]) * (g - m)
    v = rates.betas[1] * v + (1 - rates.betas[1]) * g * g
    corrected = (v / now[2]).sqrt() + rates.eps
    w = weight if weight.dtype == torch.float32 else weight.float() if low is None else join_halves(weight, low)
    w = w * (1 - rates.lr * rates.decay) - rates.lr * (m / now[1]) / corrected
    written: list[tuple[Tensor, Tensor]] = []
    if weight.dtype == torch.float32:
        written.append((weight, w))
    elif low is not None:
        written += zip((weight, low), split_halves(w), strict=True)
    else:
        written.append((weight, round_randomly(w, drawn[0])))
    written += zip(first, [m] if len(first) == 1 else quantize_first(m, drawn[1]), strict=True)
    written += zip(second, [v] if len(second) == 1 else quantize_second(v, drawn[2]), strict=True)
    for into, values in written:
        into.copy_(torch.where(goes, values, into))
