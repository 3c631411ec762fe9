"""EagerScheduler: steps that the host launches one by one, on a CPU and where CUDA graphs are not possible.

One forward holds the next token of each running completion, the draft after it if there is one, and the whole
sequences of completions that join. The host reads all tokens before the next step.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from postlude.data import Microbatch
from postlude.generate.completion_state import CompletionState
from postlude.generate.decode_rows import LENGTH, TOKEN, DecodeRows, sample_after_drafts, sample_next
from postlude.generate.draft import TOKENS_PER_STEP, Drafter
from postlude.generate.forward import MixedMicrobatches, all_logits_and_hidden, logits_at
from postlude.generate.pages import RowAllocator, RunningCompletion
from postlude.generate.routing_record import RoutingRecord
from postlude.generate.row_cache import RowCache
from postlude.generate.sampler import SamplerSettings
from postlude.generate.scheduler import JoiningCompletions, Scheduler, max_stops
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
        group: dist.ProcessGroup | None = None,
    ) -> None:
        cache = RowCache(next(model.parameters()).device, fp8=fp8_kv)
        self.row_allocator = RowAllocator(cache, max_batch_tokens, max_sequences, drafts_per_row=int(draft))
        super().__init__(
            model,
            DecodeRows(max_sequences, 0, max_stops(completions), cache.device, TOKENS_PER_STEP if draft else 1),
            cache,
            self.row_allocator,
            max_sequences=max_sequences,
            max_prefill_tokens=max_prefill_tokens,
            group=group,
        )
        self.drafter = Drafter(model, self.rows, cache) if draft else None
        self.routing_record = RoutingRecord(model, cache) if record_routing else None
        self._microbatches = MixedMicrobatches(cache, model.mesh.tp.size)
        self._settings: SamplerSettings | None = None  # of the running completions by row; None after a change
        self.add(completions)

    def _advance(self) -> None:
        """See `Scheduler`. A rank without completions runs the forwards of its group with padding."""
        joining = self._join()
        joined = {id(running) for running in joining.completions}
        decoding = sorted(
            (running for running in self.running if id(running) not in joined), key=lambda running: running.row
        )
        if not (decoding or joining.sequences or self.group is not None):
            return
        completions, settings = [running.state for running in decoding], self._settings_of(decoding)
        longest = max((completion.length for completion in completions), default=0)
        drafts = None if self.drafter is None else self._propose(self.drafter, len(completions), longest, settings)
        logits, prefill_logits = self._forward(len(completions), longest, drafts, joining)
        if decoding:
            self._sample(decoding, logits, drafts, settings)
        if joining.completions:
            self._start_and_sample(joining, prefill_logits)

    def _join(self) -> JoiningCompletions:
        """Returns the completions that join with a prefill. Those with a prefilled prompt start here."""
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

    def _start_and_sample(self, joining: JoiningCompletions, prefill_logits: Tensor) -> None:
        """Starts joining completions, and samples their first token."""
        indices = self._integers([running.row for running in joining.completions])
        logits = self._start(joining, indices, prefill_logits)
        self._write_rows(joining.completions, indices)
        sample_next(logits, indices, self.rows, settings=self._new_settings(joining.completions))
        self._send_results(joining.completions, 1)

    def _propose(self, drafter: Drafter, count: int, longest: int, settings: SamplerSettings) -> Tensor:
        """Returns a draft of the next token of each of the first `count` rows."""
        tokens, lengths = drafter.unread_tokens(count)
        return drafter.propose(self._microbatches(tokens, lengths, longest), count, settings=settings)

    def _forward(
        self, count: int, longest: int, drafts: Tensor | None, joining: JoiningCompletions
    ) -> tuple[Tensor, Tensor]:
        """Runs the newest token and the draft of the first `count` rows, then the whole sequences that join.

        Returns the logits of each row's tokens [n, tokens_per_row, vocab], and after each sequence [m, vocab].
        `longest` is the number of tokens of the longest row, without its draft.
        """
        sequences = joining.sequences
        newest, rows = self.rows.numbers[TOKEN, :count], [row for (row,) in joining.pages]
        tokens = newest[:, None] if drafts is None else torch.stack((newest, drafts), 1)
        tokens_per_row = tokens.shape[1]
        drafts_per_row = tokens_per_row - 1
        lengths = self.rows.numbers[LENGTH, :count] + drafts_per_row
        microbatch = self._microbatches(tokens, lengths, longest + drafts_per_row, sequences, rows)
        if sequences or not count:
            last = microbatch.packing.cu_seqlens[count + 1 : count + len(sequences) + 1].long() - 1
            indices = torch.cat((torch.arange(count * tokens_per_row, device=self.device), last))
            logits, hidden = self.model(
                microbatch, output_processor=logits_at, output_processor_context=indices, decode_state=self.cache
            )
        else:
            logits, hidden = self.model(microbatch, output_processor=all_logits_and_hidden, decode_state=self.cache)
        if self.routing_record is not None:
            self.routing_record.store()
        decoded = count * tokens_per_row
        if self.drafter is not None:
            if count:
                self.drafter.keep(hidden[:decoded])
            if sequences or self.group is not None:  # other ranks take part in every forward
                self.drafter.prefill(hidden[decoded:], sequences, partial(self._begin_prefill, rows))
        return logits[:decoded].unflatten(0, (count, tokens_per_row)), logits[decoded : decoded + len(sequences)]

    def _begin_prefill(self, rows: Sequence[int], sequences: Sequence[Sequence[int]]) -> Microbatch:
        """Returns a microbatch of whole sequences that start in `rows`, and sets up the cache for it."""
        no_rows = self._integers([])
        return self._microbatches(no_rows[:, None], no_rows, 0, sequences, rows)

    def _sample(
        self, decoding: Sequence[RunningCompletion], logits: Tensor, drafts: Tensor | None, settings: SamplerSettings
    ) -> None:
        """Samples a token of each from logits [n, tokens_per_row, vocab], and a second where the draft is accepted."""
        if drafts is None:
            sample_next(logits[:, 0], self.rows.all[: len(decoding)], self.rows, settings=settings)
        else:
            filtered = any(running.state.prompt.sampling.filtered for running in decoding)
            self.cache.accept(sample_after_drafts(logits, drafts, self.rows, filtered=filtered, settings=settings))
        self._send_results(decoding, self.rows.tokens_per_step)
        for running in decoding:
            running.scheduled_length += self.rows.tokens_per_step

    def _settings_of(self, decoding: Sequence[RunningCompletion]) -> SamplerSettings:
        """Returns the sampler settings of these completions, which are cached until something changes."""
        if self._settings is None:
            self._settings = self._new_settings(decoding)
        return self._settings

    def _new_settings(self, completions: Sequence[RunningCompletion]) -> SamplerSettings:
        sampling, keys = (
            [running.state.prompt.sampling for running in completions],
            [running.state.key for running in completions],
        )
        return SamplerSettings.of(sampling, keys, self.model.config.vocab_size, self.device)

    def _on_change(self, running: RunningCompletion, *, grew: bool = False) -> None:
        """See `Scheduler`."""
        self._settings = None

    def _remove_finished(self, running: RunningCompletion) -> None:
        """See `Scheduler`."""
        if running.state.error is not None:
            self.cache.clear(running.row)
        elif self.routing_record is not None:
            self.routing_record.copy_to(running.state, [running.row])
        super()._remove_finished(running)
