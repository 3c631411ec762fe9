"""Storage of AdamW's weights and moments in few bits.

Arithmetic is fp32: values are widened when they are read and rounded when they are written.

- **Split weights.** bf16 weights, and separately the lower 16 bits of the fp32 number. Together they are the fp32
  number to the bit. The bf16 part is its nearest, away from zero on a tie.
- **Randomly rounded weights.** bf16 only, rounded up or down with the probability that makes it right on average. A
  step smaller than half of the last bit of a bf16 still moves weights as far as it should, over many steps.
- **8-bit moments.** A row is cut into blocks of `BLOCK`, each with its largest number in fp32. Every number is one of
  255 levels below that, spaced by 2^(1/8), so that small numbers are as precise as large ones. They are rounded at
  random as well: rounded to the nearest, an average that moves by a thousandth a step would never move.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 64
OCTAVE = 8
"""Levels in a factor of two."""
FIRST_TOP, SECOND_TOP = 127, 255
"""The codes of a block's largest number: of signed numbers, whose sign is the eighth bit, and of unsigned ones."""


@dataclass(frozen=True)
class AdamWHyperparameters:
    lr: float
    betas: tuple[float, float]
    eps: float
    decay: float


@dataclass(frozen=True)
class TensorSlice:
    """The position of a slice in the full tensor, viewed as [matrices, rows, columns]."""

    starts: tuple[int, int, int]
    full_shape: tuple[int, int, int]

    @classmethod
    def of(cls, region: tuple[slice, ...], shape: tuple[int, ...]) -> TensorSlice:
        """Returns the slice of a `region` of a tensor of this shape.

        With four or more dimensions only the first is cut.
        """
        starts = [0, 0, *(dimension.start for dimension in region)]
        lead = math.prod(shape[1:-2]) if len(shape) > 3 else 1
        full_shape = (1, 1, *shape)
        if len(shape) > 3:
            starts, full_shape = [0, 0, starts[2] * lead, 0, 0], (1, 1, shape[0] * lead, *shape[-2:])
        return cls(tuple(starts[-3:]), tuple(full_shape[-3:]))  # type: ignore[arg-type]


@dataclass(frozen=True)
class QuantizedMoment:
    """A moment in 8 bits: `codes` uint8 of its shape, and `scales` [..., blocks of the last dimension]."""

    codes: Tensor
    scales: Tensor

    @classmethod
    def zeros_like(cls, tensor: Tensor) -> QuantizedMoment:
        codes = torch.zeros(tensor.shape, dtype=torch.uint8, device=tensor.device)
        scales = torch.zeros(scales_shape(tuple(tensor.shape)), dtype=torch.float32, device=tensor.device)
        return cls(codes, scales)


Moment = Tensor | QuantizedMoment


def scales_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (*shape[:-1], -(-shape[-1] // BLOCK))


def join_halves(high: Tensor, low: Tensor) -> Tensor:
    """bf16 and the lower bits of `split_halves` -> fp32."""
    beyond = low.to(torch.int32) & 0xFFFF
    bits = (high.view(torch.int16).to(torch.int32) << 16) - ((beyond >> 15) << 16)
    return (bits | beyond).view(torch.float32)


def split_halves(values: Tensor) -> tuple[Tensor, Tensor]:
    """fp32 -> the nearest bf16, and the lower sixteen bits as int16."""
    bits = values.view(torch.int32)
    high = ((bits + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16)
    return high, bits.to(torch.int16)


def round_randomly(values: Tensor, random_bits: Tensor) -> Tensor:
    """fp32 -> bf16, up or down by 16 random bits each, right on average."""
    return ((values.view(torch.int32) + random_bits.to(torch.int32)) >> 16).to(torch.int16).view(torch.bfloat16)


def dequantize_first(codes: Tensor, scales: Tensor) -> Tensor:
    """Returns signed numbers, fp32 [rows, columns], from codes and scales [rows, blocks]."""
    code = codes.to(torch.int32)
    size = _dequantize(code & 0x7F, scales, FIRST_TOP)
    return torch.where(code > 0x7F, -size, size)


def dequantize_second(codes: Tensor, scales: Tensor) -> Tensor:
    """Returns nonnegative numbers from codes and scales."""
    return _dequantize(codes.to(torch.int32), scales, SECOND_TOP)


def _dequantize(code: Tensor, scales: Tensor, top: int) -> Tensor:
    size = torch.exp2((code - top).float() / OCTAVE) * scales.repeat_interleave(BLOCK, -1)[:, : code.shape[-1]]
    return torch.where(code == 0, 0.0, size)


def quantize_first(values: Tensor, random_bits: Tensor) -> tuple[Tensor, Tensor]:
    """Returns codes and scales of signed numbers. Those below the lowest level become it or zero at random."""
    code, scales = _quantize(values.abs(), random_bits, FIRST_TOP, from_zero=True)
    return torch.where(values < 0, code | 0x80, code).to(torch.uint8), scales


def quantize_second(values: Tensor, random_bits: Tensor) -> tuple[Tensor, Tensor]:
    """Returns codes and scales of nonnegative numbers.

    The smallest become the lowest level, since steps divide by them.
    """
    code, scales = _quantize(values, random_bits, SECOND_TOP, from_zero=False)
    return code.to(torch.uint8), scales


def _quantize(size: Tensor, random_bits: Tensor, top: int, *, from_zero: bool) -> tuple[Tensor, Tensor]:
    rows, columns = size.shape
    blocks = scales_shape((columns,))[0]
    padded = torch.nn.functional.pad(size, (0, blocks * BLOCK - columns)).view(rows, blocks, BLOCK)
    scales = padded.amax(-1)
    share = size / scales.clamp_min(torch.finfo(torch.float32).tiny).repeat_interleave(BLOCK, -1)[:, :columns]
    below = (torch.log2(share) * OCTAVE).floor().clamp(1 - top, 0)  # also of zero, whose logarithm has no bound
    level = torch.exp2(below / OCTAVE)
    chance = (share - level) / (torch.exp2((below + 1) / OCTAVE) - level)
    up = (random_bits.float() + 0.5) / 65536 < chance
    code = (below.to(torch.int32) + top + up).clamp_max(top)
    smallest = torch.exp2(torch.tensor((1 - top) / OCTAVE))
    lowest = (random_bits.float() + 0.5) / 65536 < share / smallest if from_zero else share > 0
    return torch.where(share < smallest, lowest.to(torch.int32), code), scales
