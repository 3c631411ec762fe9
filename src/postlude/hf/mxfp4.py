"""MXFP4, 4-bit numbers of which 32 share an exponent, dequantised to bf16 tensor by tensor."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from postlude.hf.family import TensorSource

BLOCKS, SCALES = "_blocks", "_scales"
BIAS = 127  # of the shared exponent
# By its four bits: a sign, two bits of exponent, one of mantissa.
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


class Mxfp4Source:
    """The tensors of another source, with `…_blocks` and `…_scales` dequantised to one bf16 tensor.

    Blocks are [experts, out, groups, 16] bytes, each of two numbers, the lower bits first, and scales [experts, out,
    groups]. The result is [experts, 32 · groups, out].
    """

    def __init__(self, quantised: TensorSource) -> None:
        self._quantised = quantised

    def names(self) -> Iterable[str]:
        """Returns the names of all tensors, with the names of dequantised ones."""
        names = set(self._quantised.names())
        for name in names:
            full = name.removesuffix(BLOCKS)
            if full != name and full + SCALES in names:
                yield full
            elif not (name.endswith(SCALES) and name.removesuffix(SCALES) + BLOCKS in names):
                yield name

    def take(self, name: str) -> Tensor:
        """Returns one tensor, on the CPU."""
        if name in self._quantised.names():
            return self._quantised.take(name)
        return dequantise(self._quantised.take(name + BLOCKS), self._quantised.take(name + SCALES))

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape of one tensor."""
        if name in self._quantised.names():
            return self._quantised.shape(name)
        experts, out, groups, bytes_of_one = self._quantised.shape(name + BLOCKS)
        return experts, 2 * groups * bytes_of_one, out


def dequantise(blocks: Tensor, scales: Tensor) -> Tensor:
    """Dequantises [experts, out, groups, bytes], scales [experts, out, groups]: bf16 [experts, 2·groups·bytes, out]."""
    values = torch.tensor((*VALUES, *(-value for value in VALUES)), dtype=torch.bfloat16)
    experts, out, groups, bytes_per_group = blocks.shape
    full = torch.empty(experts, 2 * groups * bytes_per_group, out, dtype=torch.bfloat16)
    for expert_weight, block, scale in zip(full, blocks, scales, strict=True):  # one by one, to save memory
        pairs = torch.stack((values[(block & 15).int()], values[(block >> 4).int()]), dim=-1)  # [out, groups, bytes, 2]
        expert_weight.copy_(torch.ldexp(pairs, (scale.int() - BIAS)[..., None, None]).flatten(1).T)
    return full
