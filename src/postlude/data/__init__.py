"""From sequences to packed microbatches and back."""

from postlude.data.batch import Batch
from postlude.data.context_parallel import cut
from postlude.data.microbatch import IGNORE, ContextCut, Microbatch
from postlude.data.packing import pack, plan_bins, scatter, unpack

__all__ = ["IGNORE", "Batch", "ContextCut", "Microbatch", "cut", "pack", "plan_bins", "scatter", "unpack"]
