"""Functions of kernels that write FP8 (e4m3)."""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def to_fp8(values):
    """Returns fp32 values of at most ±448 in FP8, rounded to nearest even.

    They are rounded in fp32 first: Triton's interpreter loses the carry of a mantissa that rounds up.
    """
    bits = values.to(tl.int32, bitcast=True)
    rounded = (bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000  # three bits of the mantissa are left
    tiny = (values + 24576.0) - 24576.0  # 1.5 · 2**14, whose last bit is 2**-9: the step of subnormal numbers
    return tl.where(tl.abs(values) < 2**-6, tiny, rounded.to(tl.float32, bitcast=True)).to(tl.float8e4nv)


@triton.jit
def scale_exponent(largest):
    """Returns the exponent of the scale of numbers up to `largest`, fp32: see `ops.fp8_kv`."""
    bits = largest.to(tl.int32, bitcast=True)
    return tl.minimum(tl.maximum(((bits + 0x1FFFFF) >> 23) - 135, -64), 120)


@triton.jit
def power_of_two(exponent):
    """Returns 2**exponent in fp32, exactly, for exponents of scales."""
    return ((exponent.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)
