"""RoutingRecord: the experts that every token of a running completion was routed to, for replay in training."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from postlude.data.microbatch import ROUTING
from postlude.generate.row_cache import RowCache
from postlude.model import LanguageModel, ModelConfig
from postlude.ops.collectives import gather_replicated


class RoutingRecord:
    """Expert ids in the cache, moved and shared like the keys: [rows, capacity, routers, top_k]."""

    def __init__(self, model: LanguageModel, cache: RowCache) -> None:
        self.routers = model.routers
        self.tp = model.mesh.tp
        self.cache = cache
        cache.choices = {}

    def store(self) -> None:
        """Stores the expert ids of the last forward, as int16."""
        choices = self.cache.choices
        assert choices is not None
        max_top_k = max(top_k for top_k, _ in self.routers.values())
        padded = [F.pad(choices[name], (0, max_top_k - top_k), value=-1) for name, (top_k, _) in self.routers.items()]
        gathered = gather_replicated(torch.stack(padded, 1), self.tp.group)
        self.cache.append(ROUTING, (gathered.short(),))
        self.cache.choices = {}

    def of(self, row: int, length: int) -> Tensor:
        """Returns the expert ids of a row's first `length` tokens, [length, routers, top_k] on the CPU.

        The last token was not an input yet, and has -1.
        """
        (expert_ids,) = self.cache.stores(ROUTING)
        return F.pad(expert_ids[row, : length - 1].cpu(), (0, 0, 0, 0, 0, 1), value=-1)


def check_routing_record(config: ModelConfig) -> None:
    """Raises ValueError for a model without routers."""
    if not config.routers:
        raise ValueError(
            f"routing=True records which experts tokens are sent to, but pattern {config.pattern} has none. Leave it "
            "out."
        )
