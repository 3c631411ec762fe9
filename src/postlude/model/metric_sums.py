"""MetricSums: what a block adds up in training for the metrics of its layer (`BlockConfig.metrics`)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


class MetricSums:
    """Sums over this rank's tokens, by name, in one float64 tensor on their device. Nothing here synchronises."""

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self.sizes = sizes
        self.total: Tensor | None = None  # None until something is added

    @torch.no_grad()
    def add(self, sums: Mapping[str, Tensor]) -> None:
        """Adds the sums of one microbatch. Those left out are zero.

        Call it in training, and once per microbatch: see `ForwardContext.is_first_call`.
        """
        device = next(iter(sums.values())).device
        zeros = torch.zeros(max(self.sizes.values()), dtype=torch.float32, device=device)  # one kernel for all
        added = torch.cat([sums.get(name, zeros[:size]).reshape(size).float() for name, size in self.sizes.items()])
        self.total = added.double() if self.total is None else self.total.add_(added)

    def take(self) -> Tensor | None:
        """Returns the sums since the last call, in the order of `sizes`; None if nothing was added."""
        total, self.total = self.total, None
        return total
