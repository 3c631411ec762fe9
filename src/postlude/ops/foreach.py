"""One call for many tensors, as a launch for each takes a host longer than a GPU. Torch has none under a public name.

`torch.nn.utils.get_total_norm` is the nearest, and sums in the tensors' own dtype. Private names of torch stand here
alone, so that a torch which renames them is mended here.
"""

from __future__ import annotations

import torch
from torch import Tensor


def norms(tensors: list[Tensor], dtype: torch.dtype) -> Tensor:
    """The norm of each, summed in `dtype` without a copy of the tensor: [n]."""
    return torch.stack(torch._foreach_norm(tensors, 2.0, dtype))


def foreach_copy(into: list[Tensor], values: list[Tensor]) -> None:
    """Overwrite each with the values of the other at its place, which may be of another dtype."""
    torch._foreach_copy_(into, values)
