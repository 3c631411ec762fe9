"""One call for many tensors, since a launch for each takes the host longer than the GPU. Torch's are private.

`torch.nn.utils.get_total_norm` is the nearest public one, and sums in the tensors' own dtype.
"""

from __future__ import annotations

import torch
from torch import Tensor


def norms(tensors: list[Tensor], dtype: torch.dtype) -> Tensor:
    """Returns the norm of each tensor, summed in `dtype` without a copy of it: [n]."""
    return torch.stack(torch._foreach_norm(tensors, 2.0, dtype))


def foreach_copy(outputs: list[Tensor], values: list[Tensor]) -> None:
    """Copies each of `values` into its counterpart, which may have another dtype."""
    torch._foreach_copy_(outputs, values)
