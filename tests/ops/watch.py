"""A look at what torch really does: the largest tensor, and the matrix products."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

GEMMS = {torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_}


class Watch(TorchDispatchMode):
    """Records, while active, the storage of every tensor made and the shape of every matrix product."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0  # elements
        self.products: list[tuple[int, int, int]] = []  # rows, inner dimension, columns

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.largest = max(self.largest, leaf.untyped_storage().nbytes() // leaf.element_size())
        if func.overloadpacket in GEMMS:
            left, right = args[-2:]
            self.products.append((*left.shape, right.shape[1]))
        return result

    def projections(self, features: int) -> int:
        """Products over the features: slabs of logits."""
        return sum(inner == features for _, inner, _ in self.products)

    @property
    def operations(self) -> int:
        """Multiplications of all matrix products."""
        return sum(rows * inner * columns for rows, inner, columns in self.products)
