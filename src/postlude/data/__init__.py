"""From sequences to packed microbatches and back."""

from postlude.data.microbatch import IGNORE, Microbatch
from postlude.data.packing import pack, plan_bins, unpack

__all__ = ["IGNORE", "Microbatch", "pack", "plan_bins", "unpack"]
