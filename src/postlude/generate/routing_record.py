"""RoutingRecord: the experts that every token of a running completion was routed to, for replay in training."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from postlude.data.microbatch import ROUTING
from postlude.generate.completion_state import CompletionState
from postlude.generate.decode_cache import DecodeCache
from postlude.model import LanguageModel, ModelConfig
from postlude.ops.collectives import gather_replicated


class RoutingRecord:
    """Expert ids in the cache, moved and shared like the keys: [pages, tokens of a page, routers, top_k]."""

    def __init__(self, model: LanguageModel, cache: DecodeCache) -> None:
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

    def copy_to(self, completion: CompletionState, pages: Sequence[int]) -> None:
        """Starts to copy the expert ids of a completion in these pages to the host: [length, routers, top_k].

        The last token was not an input yet, and has -1.
        """
        (stored,) = self.cache.stores(ROUTING)
        expert_ids = stored[list(pages)].flatten(0, 1)[: completion.length - 1]
        on_host = torch.full(
            (completion.length, *expert_ids.shape[1:]), -1, dtype=torch.int16, pin_memory=stored.is_cuda
        )
        on_host[:-1].copy_(expert_ids, non_blocking=True)
        completion.routing = on_host
        if stored.is_cuda:
            completion.routing_copied = torch.cuda.Event()
            completion.routing_copied.record()


def check_routing_record(config: ModelConfig) -> None:
    """Raises ValueError for a model without routers."""
    if not config.routers:
        raise ValueError(
            f"record_routing=True records which experts tokens are sent to, but pattern {config.pattern} has none. "
            "Leave it out."
        )
