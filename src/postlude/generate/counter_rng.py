"""Counter-based random numbers: each is a hash of a key and an index, so no sample depends on another.

Integers are 64 bits wide and wrap around. The mixing is the finaliser of splitmix64, whose stream steps by GOLDEN.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)  # as a signed integer
_FIRST, _SECOND = 0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64)
_MASK = (1 << 64) - 1


def mix(values: Tensor) -> Tensor:
    """Returns a hash of each int64 value, of any shape. The hash is a bijection."""
    values = (values ^ _shifted(values, 30)) * _FIRST
    values = (values ^ _shifted(values, 27)) * _SECOND
    return values ^ _shifted(values, 31)


def rng_key(*parts: int) -> int:
    """Returns one signed 64-bit integer from integers in order: the key of a stream of random numbers."""
    key = 0
    for part in parts:
        key = (key + (part + 1) * 0x9E3779B97F4A7C15) & _MASK
        key = ((key ^ (key >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        key = ((key ^ (key >> 27)) * 0x94D049BB133111EB) & _MASK
        key ^= key >> 31
    return key - (1 << 64) if key >> 63 else key


def gumbel(keys: Tensor, indices: Tensor) -> Tensor:
    """Returns standard Gumbel noise, fp64, from int64 `keys` and `indices`, which are broadcast.

    The argmax of logits + noise is a sample of their softmax.
    """
    bits = mix(keys + (indices + 1) * GOLDEN)
    uniform = (_shifted(bits, 11).double() + 0.5) * 2.0**-53  # strictly between 0 and 1
    return -uniform.log_().neg_().log_()


def _shifted(values: Tensor, by: int) -> Tensor:
    """Returns a logical right shift."""
    return (values >> by) & ((1 << (64 - by)) - 1)
