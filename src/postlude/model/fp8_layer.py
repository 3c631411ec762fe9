"""FP8Layer: the base class of layers whose products can be in FP8. `fp8.py` says which of a model's are."""

from __future__ import annotations

from typing import ClassVar

from torch import nn

from postlude.ops.fp8 import FP8Scaling
from postlude.world.mesh import SINGLE_RANK, Axis


class FP8Layer(nn.Module):
    """A linear layer whose products are in FP8 after `use_fp8`."""

    weight: nn.Parameter  # [out, in]
    weight_dim: ClassVar[int | None] = None
    """The dimension of the weight that tensor parallelism shards."""
    tp: Axis = SINGLE_RANK
    fp8: FP8Scaling | None = None

    def use_fp8(self) -> None:
        """Multiplies in FP8 from now on. Ranks that hold parts of the rows of an operand share their scales."""
        groups = {None: (None, None), 0: (None, self.tp.group), 1: (self.tp.group, None)}
        self.fp8 = FP8Scaling(*groups[self.weight_dim])
