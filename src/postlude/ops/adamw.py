"""One AdamW step on numbers that are stored narrow: weights in bf16, moments in eight bits.

Arithmetic is in fp32; what is narrow is widened where it is read and rounded where it is written:

- **Weights in two halves.** bf16 weights and, apart from them, the sixteen bits that fp32 has beyond: together they are
  the fp32 number, to the bit. bf16 alone is its nearest, away from zero where two are as near.
- **Weights rounded at random.** bf16 alone, up or down with the chance that makes it right on average: a step that is
  smaller than half of a bf16's last bit still moves weights as far as it should, over many.
- **Moments in eight bits.** A row is cut into blocks of `BLOCK`, each with its largest number in fp32; every number is
  one of 255 levels below that, each a power of 2^(1/8), so that small ones are as precise as large ones. They are
  rounded at random as well: rounded to the nearest, an average that moves by a thousandth a step would never move.

What is random comes of a hash of the number's place in the whole tensor, the tensor's name and the step: the same in
every layout, and again after a resume.
"""

from __future__ import annotations

import importlib
import math
import zlib
from dataclasses import dataclass

import torch
from torch import Tensor

from postlude.ops.kernels.capabilities import Backend, use_kernel

BLOCK = 64
OCTAVE = 8
"""Levels in a factor of two."""
FIRST_TOP, SECOND_TOP = 127, 255
"""The codes of a block's largest number: of signed ones, whose sign is the eighth bit, and of those that have none."""
ROWS_AT_ONCE = 1 << 22  # numbers that torch looks at, in several fp32 copies


@dataclass(frozen=True)
class AdamWHyperparameters:
    """What a step is made with, beside the numbers themselves."""

    lr: float
    betas: tuple[float, float]
    eps: float
    decay: float


@dataclass(frozen=True)
class TensorSlice:
    """Where a part of a tensor stands in the whole, seen as [matrices, rows, columns]."""

    starts: tuple[int, int, int]
    whole: tuple[int, int, int]

    @classmethod
    def of(cls, region: tuple[slice, ...], shape: tuple[int, ...]) -> TensorSlice:
        """The place of a `region` of a tensor of this shape. Of four dimensions or more the first alone may be cut."""
        starts = [0, 0, *(each.start for each in region)]
        lead = math.prod(shape[1:-2]) if len(shape) > 3 else 1
        whole = (1, 1, *shape)
        if len(shape) > 3:
            starts, whole = [0, 0, starts[2] * lead, 0, 0], (1, 1, shape[0] * lead, *shape[-2:])
        return cls(tuple(starts[-3:]), tuple(whole[-3:]))  # type: ignore[arg-type]


@dataclass(frozen=True)
class QuantizedMoment:
    """Numbers in eight bits: `codes` of their own shape, uint8, and `scales` [..., blocks of the last dimension]."""

    codes: Tensor
    scales: Tensor

    @classmethod
    def zeros_like(cls, tensor: Tensor) -> QuantizedMoment:
        """Zeros of this shape."""
        codes = torch.zeros(tensor.shape, dtype=torch.uint8, device=tensor.device)
        scales = torch.zeros(scales_shape(tuple(tensor.shape)), dtype=torch.float32, device=tensor.device)
        return cls(codes, scales)


Moment = Tensor | QuantizedMoment


def scales_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the scales of numbers of this shape."""
    return (*shape[:-1], -(-shape[-1] // BLOCK))


def name_seed(name: str) -> int:
    """What sets the random numbers of this tensor apart from those of others."""
    return zlib.crc32(name.encode())


def bias_corrections(steps: Tensor, rates: AdamWHyperparameters) -> Tensor:
    """The numbers of steps, from 1, [n] -> for each, itself and how much of either average is there: [n, 3] fp32."""
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
    """Move `weight` by its `gradient`, and both moments, all in place.

    `weight` is fp32, or bf16; with `low` (int16, its shape) as its other half, without, rounded at random. `now` is
    an entry of what `bias_corrections` says of the step. `scale` [2] fp32 multiplies the gradient by its first
    entry; where its second is zero, nothing is changed. Neither is looked at on the host. `place` is where in a
    larger tensor it stands.
    """
    if scale is None:
        scale = torch.ones(2, device=weight.device)
    if place is None:
        place = TensorSlice.of(tuple(slice(0, size) for size in weight.shape), tuple(weight.shape))
    if use_kernel("adamw_step", backend, weight.device, torch.float32):
        kernel = importlib.import_module("postlude.ops.kernels.adamw")  # triton is not everywhere
        kernel.launch(weight, gradient, first, second, now, rates, low, scale, key, place)
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
            draws(index, key, now),
        )


def _parts(moment: Moment, columns: int) -> list[Tensor]:
    if isinstance(moment, Tensor):
        return [moment.view(-1, columns)]
    return [moment.codes.view(-1, columns), moment.scales.view(-1, scales_shape((columns,))[0])]


def _index(rows: Tensor, columns: int, inner: int, place: TensorSlice) -> Tensor:
    """Each number's place in the whole tensor, counted row by row: [rows, columns] int64."""
    (matrix, row, column), (_, all_rows, all_columns) = place.starts, place.whole
    whole_rows = (matrix + rows // inner) * all_rows + row + rows % inner
    return whole_rows[:, None] * all_columns + column + torch.arange(columns, device=rows.device)


MASK = 0xFFFFFFFF


def _mixed(bits: Tensor) -> Tensor:
    """Thirty-two bits, each of which depends on each that was there, in int64."""
    bits = (bits ^ (bits >> 16)) * 0x7FEB352D & MASK
    bits = (bits ^ (bits >> 15)) * 0x846CA68B & MASK
    return bits ^ (bits >> 16)


def draws(index: Tensor, key: int, now: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Sixteen random bits for the weight at each index, and as many for either moment: int64 from 0 to 65535."""
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
    m = first[0] if len(first) == 1 else widened_first(*first)
    v = second[0] if len(second) == 1 else widened_second(*second)
    m = m + (1 - rates.betas[0]) * (g - m)
    v = rates.betas[1] * v + (1 - rates.betas[1]) * g * g
    corrected = (v / now[2]).sqrt() + rates.eps
    w = weight if weight.dtype == torch.float32 else weight.float() if low is None else joined(weight, low)
    w = w * (1 - rates.lr * rates.decay) - rates.lr * (m / now[1]) / corrected
    written: list[tuple[Tensor, Tensor]] = []
    if weight.dtype == torch.float32:
        written.append((weight, w))
    elif low is not None:
        written += zip((weight, low), halves(w), strict=True)
    else:
        written.append((weight, rounded(w, drawn[0])))
    written += zip(first, [m] if len(first) == 1 else narrowed_first(m, drawn[1]), strict=True)
    written += zip(second, [v] if len(second) == 1 else narrowed_second(v, drawn[2]), strict=True)
    for into, values in written:
        into.copy_(torch.where(goes, values, into))


def joined(high: Tensor, low: Tensor) -> Tensor:
    """bf16 and the bits beyond it -> fp32, as `halves` has cut it."""
    beyond = low.to(torch.int32) & 0xFFFF
    bits = (high.view(torch.int16).to(torch.int32) << 16) - ((beyond >> 15) << 16)
    return (bits | beyond).view(torch.float32)


def halves(values: Tensor) -> tuple[Tensor, Tensor]:
    """fp32 -> the nearest bf16, and the lower sixteen bits as int16."""
    bits = values.view(torch.int32)
    high = ((bits + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16)
    return high, bits.to(torch.int16)


def rounded(values: Tensor, drawn: Tensor) -> Tensor:
    """fp32 -> bf16, up or down by sixteen random bits each, right on average."""
    return ((values.view(torch.int32) + drawn.to(torch.int32)) >> 16).to(torch.int16).view(torch.bfloat16)


def widened_first(codes: Tensor, scales: Tensor) -> Tensor:
    """Signed numbers, fp32: [rows, columns], of codes and of scales [rows, blocks]."""
    code = codes.to(torch.int32)
    size = _levels(code & 0x7F, scales, FIRST_TOP)
    return torch.where(code > 0x7F, -size, size)


def widened_second(codes: Tensor, scales: Tensor) -> Tensor:
    """Numbers that are never below zero."""
    return _levels(codes.to(torch.int32), scales, SECOND_TOP)


def _levels(code: Tensor, scales: Tensor, top: int) -> Tensor:
    size = torch.exp2((code - top).float() / OCTAVE) * scales.repeat_interleave(BLOCK, -1)[:, : code.shape[-1]]
    return torch.where(code == 0, 0.0, size)


def narrowed_first(values: Tensor, drawn: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and scales of signed numbers. Those below the lowest level become it, or zero, by chance."""
    code, scales = _narrowed(values.abs(), drawn, FIRST_TOP, from_zero=True)
    return torch.where(values < 0, code | 0x80, code).to(torch.uint8), scales


def narrowed_second(values: Tensor, drawn: Tensor) -> tuple[Tensor, Tensor]:
    """The same of numbers that are never below zero. The smallest become the lowest level: steps divide by them."""
    code, scales = _narrowed(values, drawn, SECOND_TOP, from_zero=False)
    return code.to(torch.uint8), scales


def _narrowed(size: Tensor, drawn: Tensor, top: int, *, from_zero: bool) -> tuple[Tensor, Tensor]:
    rows, columns = size.shape
    blocks = scales_shape((columns,))[0]
    padded = torch.nn.functional.pad(size, (0, blocks * BLOCK - columns)).view(rows, blocks, BLOCK)
    scales = padded.amax(-1)
    share = size / scales.clamp_min(torch.finfo(torch.float32).tiny).repeat_interleave(BLOCK, -1)[:, :columns]
    below = (torch.log2(share) * OCTAVE).floor().clamp(1 - top, 0)  # also of zero, whose logarithm has no bound
    level = torch.exp2(below / OCTAVE)
    chance = (share - level) / (torch.exp2((below + 1) / OCTAVE) - level)
    up = (drawn.float() + 0.5) / 65536 < chance
    code = (below.to(torch.int32) + top + up).clamp_max(top)
    least = torch.exp2(torch.tensor((1 - top) / OCTAVE))
    lowest = (drawn.float() + 0.5) / 65536 < share / least if from_zero else share > 0
    return torch.where(share < least, lowest.to(torch.int32), code), scales
