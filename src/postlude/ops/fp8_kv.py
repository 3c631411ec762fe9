"""Keys and values in FP8 (e4m3) with a scale for each token and key head.

A scale is a power of two, stored as its exponent in one byte. e4m3 is a floating-point format, so a power of two rounds
as well as any other scale, and a rounded value is exact in bf16 and fp32. A generator that stores FP8 and one that
rounds keys and values but stores them in the model's dtype therefore compute the same function.
"""

from __future__ import annotations

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
MIN_EXPONENT, MAX_EXPONENT = -64, 120  # of a scale
CARRY, BIAS = 0x1FFFFF, 135
"""The exponent of the least power of two s with amax ≤ 448 · s, from its bits in fp32: (bits + CARRY) // 2**23 -
BIAS. 448 is 1.75 · 2**8, and CARRY overflows the mantissas above 1.75."""


def quantize_heads(heads: Tensor) -> tuple[Tensor, Tensor]:
    """Returns `heads` [..., width] divided by their scales, in FP8, and the exponents of the scales, [..., 1] int8."""
    heads_fp32 = heads.float()
    exponents = scale_exponents(heads_fp32.abs().amax(-1, keepdim=True))
    return (heads_fp32 * power_of_two(-exponents)).to(FP8), exponents.to(torch.int8)


def dequantize_heads(quantized: Tensor, exponents: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns what `quantize_heads` rounded to, [..., width]."""
    return (quantized.float() * power_of_two(exponents.int())).to(dtype)


def round_heads(heads: Tensor) -> Tensor:
    """Returns `heads` [..., width] rounded to FP8, in their own dtype."""
    return dequantize_heads(*quantize_heads(heads), heads.dtype)


def scale_exponents(largest: Tensor) -> Tensor:
    """Returns the exponents of the scales of numbers up to `largest`, fp32 of any shape; int32."""
    return (((largest.view(torch.int32) + CARRY) >> 23) - BIAS).clamp(MIN_EXPONENT, MAX_EXPONENT)


def power_of_two(exponents: Tensor) -> Tensor:
    """Returns 2**exponents in fp32, exactly; int32 of any shape."""
    return ((exponents + 127) << 23).view(torch.float32)
