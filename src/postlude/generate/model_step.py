"""ModelStep: one step of a model on the device, which CUDA graphs capture, or which the host launches each time.

`RoutingRecord` keeps the experts that every token of a running completion was routed to, for replay in training.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from postlude.data.microbatch import ROUTING
from postlude.generate.completion_state import CompletionState
from postlude.generate.decode_cache import DecodeCache, PrefillSequence
from postlude.generate.decode_rows import LENGTH, TOKEN, DecodeRows, sample_after_drafts, sample_next
from postlude.generate.draft import Drafter
from postlude.generate.forward import Microbatches, all_logits_and_hidden, logits_at
from postlude.generate.sampler import SamplerSettings
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


class ModelStep:
    """Samples the next tokens of rows and prefills sequences, in one forward of the model.

    With `draft`, the first multi-token-prediction depth proposes the next token of each row. With `record_routing`,
    the experts of every token are recorded.
    """

    def __init__(
        self,
        model: LanguageModel,
        rows: DecodeRows,
        cache: DecodeCache,
        *,
        draft: bool = False,
        record_routing: bool = False,
    ) -> None:
        self.model = model
        self.rows = rows
        self.cache = cache
        self.drafter = Drafter(model, rows, cache) if draft else None
        self.routing_record = RoutingRecord(model, cache) if record_routing else None
        self._microbatches = Microbatches(cache, model.mesh.tp.size)

    def __call__(
        self,
        count: int,
        sequences: Sequence[PrefillSequence] = (),
        *,
        filtered: bool = True,
        settings: SamplerSettings | None = None,
    ) -> Tensor:
        """Samples a token of each of the first `count` rows, and a second where the draft is accepted.

        Runs the new tokens of the `sequences` too, and returns the logits after each of them, [m, vocab]. `filtered`
        and `settings` of the rows are those of `sample_next`.
        """
        tokens, lengths = self.rows.numbers[TOKEN, :count, None], self.rows.numbers[LENGTH, :count]
        drafter, drafts = self.drafter, None
        if drafter is not None and count:
            unread = self._microbatches(*drafter.unread_tokens(count))
            drafts = drafter.propose(unread, count, filtered=filtered, settings=settings)
            tokens, lengths = torch.cat((tokens, drafts[:, None]), 1), torch.where(lengths > 0, lengths + 1, 0)
        logits, hidden = self._forward(tokens, lengths, sequences)
        if self.routing_record is not None:
            self.routing_record.store()
        decoded = tokens.numel()
        if drafter is not None:
            if count:
                drafter.keep(hidden[:decoded])
            if sequences:
                drafter.prefill(hidden[decoded:], sequences, partial(self._microbatches, tokens[:0], lengths[:0]))
        if count and drafts is not None:
            by_row = logits[:decoded].unflatten(0, (count, -1))
            self.cache.accept(sample_after_drafts(by_row, drafts, self.rows, filtered=filtered, settings=settings))
        elif count:
            sample_next(logits[:count], self.rows.all[:count], self.rows, filtered=filtered, settings=settings)
        return logits[decoded : decoded + len(sequences)]

    def _forward(self, tokens: Tensor, lengths: Tensor, sequences: Sequence[PrefillSequence]) -> tuple[Tensor, Tensor]:
        """Returns the logits of all `tokens` and after each sequence, [tokens + m, vocab], and all hidden states."""
        microbatch, count = self._microbatches(tokens, lengths, sequences), len(tokens)
        if count and not sequences:
            logits, hidden = self.model(microbatch, output_processor=all_logits_and_hidden, decode_state=self.cache)
            return logits, hidden
        last = microbatch.packing.cu_seqlens[count + 1 : count + len(sequences) + 1].long() - 1
        indices = torch.cat((torch.arange(tokens.numel(), device=last.device), last))
        logits, hidden = self.model(
            microbatch, output_processor=logits_at, output_processor_context=indices, decode_state=self.cache
        )
        return logits, hidden
