"""RoutingRecord: which experts every token of a running answer was sent to, for a trainer to send them there again."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from postlude.data.microbatch import ROUTING
from postlude.generate.row_cache import RowCache
from postlude.model import LanguageModel, ModelConfig
from postlude.ops.collectives import gather_alike


class RoutingRecord:
    """Choices beside the keys of a cache, moved and shared as they are: [rows, capacity, routers, top_k] int16."""

    def __init__(self, model: LanguageModel, cache: RowCache) -> None:
        self.routers = model.routers
        self.tp = model.mesh.tp
        self.cache = cache
        cache.choices = {}

    def keep(self) -> None:
        """Keep what the blocks chose in the forward that was just made."""
        chosen = self.cache.choices
        assert chosen is not None
        most = max(top_k for top_k, _ in self.routers.values())
        alike = [F.pad(chosen[name], (0, most - top_k), value=-1) for name, (top_k, _) in self.routers.items()]
        together = gather_alike(torch.stack(alike, 1), self.tp.group)
        self.cache.put(ROUTING, (together.short(),))
        self.cache.choices = {}

    def of(self, row: int, length: int) -> Tensor:
        """Those of a row's first `length` tokens, [length, routers, top_k] on the CPU; -1 of the last, no input yet."""
        (store,) = self.cache.stored(ROUTING)
        return F.pad(store[row, : length - 1].cpu(), (0, 0, 0, 0, 0, 1), value=-1)


def check_routing_record(config: ModelConfig) -> None:
    """Refuse to record the choices of a model that makes none."""
    if not config.routers:
        raise ValueError(
            f"routing=True records which experts tokens are sent to, but pattern {config.pattern} has none. Leave it "
            "out."
        )
