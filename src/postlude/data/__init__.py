"""Data: rows of datasets, chat encoding, and packed microbatches.

`chat` and `datasets` need no torch. So that they can be imported alone, each name here is imported when first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from postlude.data.batch import Batch
    from postlude.data.bins import plan_bins
    from postlude.data.context_parallel import shard_context
    from postlude.data.microbatch import IGNORE, Microbatch
    from postlude.data.packing import pack, scatter_add, unpack

__all__ = ["IGNORE", "Batch", "Microbatch", "pack", "plan_bins", "scatter_add", "shard_context", "unpack"]

_HOMES = {
    "batch": ("Batch",),
    "bins": ("plan_bins",),
    "context_parallel": ("shard_context",),
    "microbatch": ("IGNORE", "Microbatch"),
    "packing": ("pack", "scatter_add", "unpack"),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}.")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
