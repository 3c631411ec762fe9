"""What one forward pass hands to every block: where the sequences lie, and what they would otherwise all compute."""

from __future__ import annotations

import torch
from torch import Tensor

from postlude.data import Microbatch
from postlude.ops.packing import Packing
from postlude.ops.rotary import RotaryConfig, rotary_table


class ForwardContext:
    """One microbatch's packing and positions, rotary tables made once, and a place to report side values."""

    def __init__(self, microbatch: Microbatch) -> None:
        self.microbatch = microbatch
        self.reports: dict[str, Tensor] = {}
        self._tables: dict[tuple[RotaryConfig, int], tuple[Tensor, Tensor]] = {}

    @property
    def packing(self) -> Packing:
        """Where each sequence begins and ends among the tokens."""
        return self.microbatch.packing

    def rotary(self, config: RotaryConfig, width: int) -> tuple[Tensor, Tensor]:
        """Cosine and sine of this microbatch's positions, fp32 [T, 1, width]; layers alike share one table."""
        key = (config, width)
        if key not in self._tables:
            with torch.no_grad():
                self._tables[key] = rotary_table(config, self.microbatch.positions, width)
        return self._tables[key]

    def report(self, name: str, value: Tensor) -> None:
        """Leave a value for the log, by a name of its own. It carries no gradient."""
        self.reports[name] = value.detach()
