"""A faulty objective: the policy loss is scaled by another factor on every rank but the first."""

from __future__ import annotations

import torch.distributed as dist

from postlude import Loss, OutputInputs
from postlude.objectives import PolicyGradient


def scaled_on_other_ranks(inputs: OutputInputs, *, factor: float) -> Loss:
    """Returns the policy loss, multiplied by `factor` on ranks other than 0."""
    return (1.0 if dist.get_rank() == 0 else factor) * PolicyGradient(clip_high=0.28)(inputs)
