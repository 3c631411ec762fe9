"""EagerScheduler: steps that the host launches one by one, on a CPU and where CUDA graphs are not possible.

One forward holds the newest token of each running completion, the draft after it if there is one, and the sequences
of completions that join, without the beginnings that are cached. The host reads all tokens before the next step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from postlude.generate.completion_state import CompletionState, max_stops
from postlude.generate.decode_rows import DecodeRows
from postlude.generate.draft import TOKENS_PER_STEP
from postlude.generate.model_step import ModelStep
from postlude.generate.pages import RowAllocator, RunningCompletion, SavedPage
from postlude.generate.prefix_cache import PrefixCache
from postlude.generate.row_cache import RowCache
from postlude.generate.sampler import SamplerSettings
from postlude.generate.scheduler import JoiningCompletions, Scheduler
from postlude.model import LanguageModel


class EagerScheduler(Scheduler):
    """Runs steps on a `RowCache`, optionally with speculative decoding (`draft`) and a `RoutingRecord`."""

    max_unread_steps = 0

    def __init__(
        self,
        model: LanguageModel,
        completions: Sequence[CompletionState],
        *,
        max_batch_tokens: int,
        max_sequences: int,
        max_prefill_tokens: int,
        draft: bool = False,
        record_routing: bool = False,
        fp8_kv: bool = False,
        prefixes: PrefixCache[SavedPage] | None = None,
    ) -> None:
        self.row_cache = RowCache(next(model.parameters()).device, fp8=fp8_kv)
        self.row_allocator = RowAllocator(
            self.row_cache, max_batch_tokens, max_sequences, drafts_per_row=int(draft), prefixes=prefixes
        )
        tokens_per_step = TOKENS_PER_STEP if draft else 1
        rows = DecodeRows(max_sequences, max_stops(completions), self.row_cache.device, tokens_per_step)
        super().__init__(
            ModelStep(model, rows, self.row_cache, draft=draft, record_routing=record_routing),
            self.row_allocator,
            max_sequences=max_sequences,
            max_prefill_tokens=max_prefill_tokens,
        )
        self._settings: SamplerSettings | None = None  # of the running completions by row; None after a change
        self.add(completions)

    def _advance(self) -> None:
        """See `Scheduler`."""
        joining = self._join()
        joined = {id(running) for running in joining.completions}
        decoding = sorted(
            (running for running in self.running if id(running) not in joined), key=lambda running: running.row
        )
        if not (decoding or joining.sequences):
            return
        if self._settings is None:
            self._settings = self._sampler_settings(decoding)
        self._constrain(decoding)
        self.rows.use_rules, self.rows.use_masks = self._has_rules(decoding), self._has_masks(decoding)
        self.row_cache.longest = max((running.state.length for running in decoding), default=0)
        for sequence, prefix in zip(joining.sequences, joining.prefixes, strict=True):
            if prefix.pages:
                self.row_cache.restore(sequence.pages, [page.stores for page in prefix.pages])
        prefill_logits = self.model_step(
            len(decoding), joining.sequences, filtered=self.filtered, settings=self._settings
        )
        if decoding:
            self._send_decoded(decoding)
        if joining.completions:
            self._start_and_sample(joining, prefill_logits)

    def _join(self) -> JoiningCompletions:
        """Returns the completions that join in this step's forward. While none needs a prefill, they start here."""
        while True:
            self._idle_ended_rows()
            self._make_room()
            self._compact(len(self.running))
            joining = self._admit()
            if self.running:
                self.row_allocator.resize_cache(self.running)
            if joining.sequences or not joining.completions:
                return joining
            self._start_and_sample(joining, torch.empty(0, device=self.device))
            while self.unread_results:
                self._read_results()

    def _sampler_settings(self, completions: Sequence[RunningCompletion]) -> SamplerSettings:
        """See `Scheduler`. No row is idle, so the host knows those of all rows."""
        sampling, keys = (
            [running.state.prompt.sampling for running in completions],
            [running.state.key for running in completions],
        )
        return SamplerSettings.of(sampling, keys, self.model.config.vocab_size, self.device)

    def _on_change(self, running: RunningCompletion, *, grew: bool = False) -> None:
        """See `Scheduler`. The page of a completion is that of its row."""
        running.pages = [running.row]
        self._settings = None
