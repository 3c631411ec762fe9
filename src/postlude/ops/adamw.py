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
    return zlib.crc32(name.encode())


def bias_corrections(steps: Tensor, hyperparameters: AdamWHyperparameters) -> Tensor:
    """Step numbers from 1, [n] -> for each, itself and the bias corrections of both moments: [n, 3] fp32."""
    logs = [math.log(beta) if beta else -math.inf for beta in hyperparameters.betas]
    return torch.stack([steps.double(), *(-torch.expm1(steps.double() * log) for log in logs)], 1).float()


@torch.no_grad()
def adamw_step(
    weight: Tensor,
    gradient: Tensor,
    first: Moment,
    second: Moment,
    correction: Tensor,
    hyperparameters: AdamWHyperparameters,
    *,
    low: Tensor | None = None,
    scale: Tensor | None = None,
    seed: int = 0,
    bounds: TensorSlice | None = None,
    backend: Backend = "auto",
) -> None:
    """Updates `weight` and both moments by the `gradient`, in place.

    `weight` is fp32, or bf16 with `low` (int16, same shape) as its lower half, or bf16 alone, rounded at random.
    `correction` is an entry of `bias_corrections`. `scale` [2] fp32 multiplies the gradient by its first entry; where
    its second is zero, nothing changes. The host reads neither. `bounds` is the tensor's position in a larger one.
    """
    if scale is None:
        scale = torch.ones(2, device=weight.device)
    if bounds is None:
        bounds = TensorSlice.of(tuple(slice(0, size) for size in weight.shape), tuple(weight.shape))
    if use_kernel("adamw_step", backend, weight.device, torch.float32):
        from postlude.ops.kernels.adamw import step  # needs triton

        step(weight, gradient, first, second, correction, hyperparameters, low, scale, seed, bounds)
        return
    columns, rows = weight.shape[-1], weight.numel() // max(weight.shape[-1], 1)
    stride = max(1, ROWS_AT_ONCE // max(columns, 1))
    inner = weight.shape[-2] if weight.ndim > 1 else 1
    for start in range(0, rows, stride):
        piece = slice(start, min(start + stride, rows))
        index = _index(torch.arange(piece.start, piece.stop, device=weight.device), columns, inner, bounds)
        _reference(
            weight.view(-1, columns)[piece],
            gradient.view(-1, columns)[piece],
            None if low is None else low.view(-1, columns)[piece],
            [tensor[piece] for tensor in _tensors(first, columns)],
            [tensor[piece] for tensor in _tensors(second, columns)],
            correction,
            hyperparameters,
            scale,
            random_bits(index, seed, correction),
        )


def _tensors(moment: Moment, columns: int) -> list[Tensor]:
    if isinstance(moment, Tensor):
        return [moment.view(-1, columns)]
    return [moment.codes.view(-1, columns), moment.scales.view(-1, scales_shape((columns,))[0])]


def _index(rows: Tensor, columns: int, inner: int, bounds: TensorSlice) -> Tensor:
    """Returns each number's index in the whole tensor, row by row: [rows, columns] int64."""
    (matrix, row, column), (_, all_rows, all_columns) = bounds.starts, bounds.full_shape
    whole_rows = (matrix + rows // inner) * all_rows + row + rows % inner
    return whole_rows[:, None] * all_columns + column + torch.arange(columns, device=rows.device)


MASK = 0xFFFFFFFF


def _hash(bits: Tensor) -> Tensor:
    bits = (bits ^ (bits >> 16)) * 0x7FEB352D & MASK
    bits = (bits ^ (bits >> 15)) * 0x846CA68B & MASK
    return bits ^ (bits >> 16)


def random_bits(index: Tensor, seed: int, correction: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns 16 random bits for the weight at each index, and for each moment: int64 from 0 to 65535."""
    step_seed = _hash((correction[0].to(torch.int64) * 0x9E3779B1 + seed) & MASK)
    first = _hash((index & MASK) ^ step_seed)
    second = _hash((first + 0x85EBCA6B) & MASK)
    return first & 0xFFFF, first >> 16, second >> 16


def _reference(
    weight: Tensor,
    gradient: Tensor,
    low: Tensor | None,
    first: list[Tensor],
    second: list[Tensor],
    correction: Tensor,
    hyperparameters: AdamWHyperparameters,
    scale: Tensor,
    random_numbers: tuple[Tensor, Tensor, Tensor],
) -> None:
    is_finite = scale[1] != 0
    g = gradient.float() * scale[0]
    m = first[0] if len(first) == 1 else dequantize_first(*first)
    v = second[0] if len(second) == 1 else dequantize_second(*second)
    m = m + (1 - hyperparameters.betas[0]) * (g - m)
    v = hyperparameters.betas[1] * v + (1 - hyperparameters.betas[1]) * g * g
    corrected = (v / correction[2]).sqrt() + hyperparameters.eps
    w = weight if weight.dtype == torch.float32 else weight.float() if low is None else join_halves(weight, low)
    w = w * (1 - hyperparameters.lr * hyperparameters.decay) - hyperparameters.lr * (m / correction[1]) / corrected
    written: list[tuple[Tensor, Tensor]] = []
    if weight.dtype == torch.float32:
        written.append((weight, w))
    elif low is not None:
        written += zip((weight, low), split_halves(w), strict=True)
    else:
        written.append((weight, round_randomly(w, random_numbers[0])))
    written += zip(first, [m] if len(first) == 1 else quantize_first(m, random_numbers[1]), strict=True)
    written += zip(second, [v] if len(second) == 1 else quantize_second(v, random_numbers[2]), strict=True)
    for output, values in written:
        output.copy_(torch.where(is_finite, values, output))
