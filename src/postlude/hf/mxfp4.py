"""MXFP4: numbers of four bits, 32 of which share an exponent. Read as the bf16 they stand for, tensor by tensor."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from postlude.hf.tensor_source import TensorSource

BLOCKS, SCALES = "_blocks", "_scales"
BIAS = 127  # of the shared exponent
# By its four bits: a sign, two bits of exponent, one of mantissa.
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


class Mxfp4Source:
    """The tensors of another source, where `…_blocks` and `…_scales` are one: the bf16 tensor that they stand for.

    Blocks are [experts, out, groups, 16] bytes, each of two numbers, the lower bits first, and scales [experts, out,
    groups]. What they stand for is [experts, 32 · groups, out].
    """

    def __init__(self, packed: TensorSource) -> None:
        self._packed = packed

    def names(self) -> Iterable[str]:
        """Every tensor, a packed one by the name it would have if it were not."""
        names = set(self._packed.names())
        for name in names:
            whole = name.removesuffix(BLOCKS)
            if whole != name and whole + SCALES in names:
                yield whole
            elif not (name.endswith(SCALES) and name.removesuffix(SCALES) + BLOCKS in names):
                yield name

    def take(self, name: str) -> Tensor:
        """One tensor, on the CPU."""
        if name in self._packed.names():
            return self._packed.take(name)
        return unpacked(self._packed.take(name + BLOCKS), self._packed.take(name + SCALES))

    def shape(self, name: str) -> tuple[int, ...]:
        """The sizes of one tensor."""
        if name in self._packed.names():
            return self._packed.shape(name)
        experts, out, groups, bytes_of_one = self._packed.shape(name + BLOCKS)
        return experts, 2 * groups * bytes_of_one, out


def unpacked(blocks: Tensor, scales: Tensor) -> Tensor:
    """Blocks [experts, out, groups, bytes] and scales [experts, out, groups] -> bf16 [experts, 2·groups·bytes, out]."""
    values = torch.tensor((*VALUES, *(-value for value in VALUES)), dtype=torch.bfloat16)
    experts, out, groups, bytes_of_one = blocks.shape
    whole = torch.empty(experts, 2 * groups * bytes_of_one, out, dtype=torch.bfloat16)
    for one, block, scale in zip(whole, blocks, scales, strict=True):  # the rest needs the memory of one expert
        pairs = torch.stack((values[(block & 15).int()], values[(block >> 4).int()]), dim=-1)  # [out, groups, bytes, 2]
        one.copy_(torch.ldexp(pairs, (scale.int() - BIAS)[..., None, None]).flatten(1).T)
    return whole
