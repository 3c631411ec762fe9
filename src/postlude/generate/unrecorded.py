"""UnrecordedScheduler: steps that the host launches one by one, on a CPU and wherever steps cannot be recorded.

One forward holds the next tokens of the running completions, with a drafted one if tokens are drafted, and the whole
sequences that join. The host knows every token before the next step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from postlude.generate.completion_state import CompletionState
from postlude.generate.decode_rows import LENGTH, TOKEN, DecodeRows, sample_next
from postlude.generate.draft import Drafter
from postlude.generate.forward import MixedMicrobatches, all_logits_and_hidden, logits_at
from postlude.generate.pages import RowPages, RunningCompletion
from postlude.generate.routing_record import RoutingRecord
from postlude.generate.row_cache import RowCache
from postlude.generate.sampler import SamplerSettings
from postlude.generate.scheduler import Joining, Scheduler, max_stops
from postlude.model import LanguageModel

RIGHT = -2.0  # in place of a second token: the draft was right, but its completion had ended


class UnrecordedScheduler(Scheduler):
    """Steps on a page a row, optionally with drafts (`draft`) and a record of routing (`routing`)."""

    ahead = 0

    def __init__(
        self,
        model: LanguageModel,
        completions: Sequence[CompletionState],
        *,
        max_batch_tokens: int,
        max_sequences: int,
        max_prefill_tokens: int,
        draft: bool = False,
        routing: bool = False,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.row_cache = cache = RowCache(next(model.parameters()).device)
        self.row_pages = RowPages(cache, max_batch_tokens, max_sequences, drafted=int(draft))
        super().__init__(
            model,
            DecodeRows(max_sequences, 0, max_stops(completions), cache.device),
            cache,
            self.row_pages,
            max_sequences=max_sequences,
            max_prefill_tokens=max_prefill_tokens,
            group=group,
        )
        self.drafter = Drafter(model, cache, together=group is not None) if draft else None
        self.routing = RoutingRecord(model, cache) if routing else None
        self._microbatches = MixedMicrobatches(cache, model.mesh.tp.size)
        self._settings: SamplerSettings | None = None  # of the running ones by row; None once they have changed
        self.add(completions)

    def _advance(self) -> None:
        """See `Scheduler`. A rank without completions takes part in the forwards of its group with padding."""
        joining = self._join()
        joined = {id(each) for each in joining.completions}
        decoding = sorted((each for each in self.running if id(each) not in joined), key=lambda each: each.row)
        if not (decoding or joining.sequences or self.group is not None):
            return
        completions, settings = [each.state for each in decoding], self._settings_of(decoding)
        drafts = None if self.drafter is None else self.drafter.guess(completions, settings)
        logits, after_sequences = self._forward(completions, drafts, joining)
        if decoding:
            self._sample(decoding, logits, drafts, settings)
        if joining.completions:
            self._begin(joining, after_sequences)

    def _join(self) -> Joining:
        """Returns the completions that join with a prefill. Those whose prompt was prefilled before start at once."""
        while True:
            self._stop_ended()
            self._make_room()
            self._move_into(len(self.running))
            joining = self._admit()
            if self.running:
                self.row_pages.commit(self.running)
            if joining.sequences or not joining.completions:
                return joining
            self._begin(joining, torch.empty(0, device=self.device))
            while self.sampled:
                self._read()

    def _begin(self, joining: Joining, after_sequences: Tensor) -> None:
        """Start the completions that join, and sample their first token."""
        rows = self._integers([each.row for each in joining.completions])
        logits = self._start(joining, rows, after_sequences)
        self._enter_rows(joining.completions, rows)
        sample_next(logits, rows, self.rows, settings=self._new_settings(joining.completions))
        self._send(joining.completions)

    def _forward(
        self, completions: Sequence[CompletionState], drafts: Tensor | None, joining: Joining
    ) -> tuple[Tensor, Tensor]:
        """Run the newest token and the draft of each completion, by row, and the whole sequences that join.

        Returns the logits after the tokens of each completion [n, each, vocab], and after each sequence [m, vocab].
        """
        count, sequences = len(completions), joining.sequences
        newest, rows = self.rows.numbers[TOKEN, :count], [row for (row,) in joining.pages]
        tokens = newest[:, None] if drafts is None else torch.stack((newest, drafts), 1)
        each = tokens.shape[1]
        lengths = [completion.length + each - 1 for completion in completions]
        microbatch = self._microbatches(tokens, lengths, sequences, rows)
        if sequences or not count:
            last = microbatch.packing.cu_seqlens[count + 1 : count + len(sequences) + 1].long() - 1
            indices = torch.cat((torch.arange(count * each, device=self.device), last))
            logits, hidden = self.model(
                microbatch, output_processor=logits_at, output_processor_context=indices, decode_state=self.cache
            )
        else:
            logits, hidden = self.model(microbatch, output_processor=all_logits_and_hidden, decode_state=self.cache)
        if self.routing is not None:
            self.routing.keep()
        if self.drafter is not None:
            self.drafter.follow(hidden, count, sequences, rows)
        decoded = count * each
        return logits[:decoded].unflatten(0, (count, each)), logits[decoded : decoded + len(sequences)]

    def _sample(
        self, decoding: Sequence[RunningCompletion], logits: Tensor, drafts: Tensor | None, settings: SamplerSettings
    ) -> None:
        """Sample a token of each from logits [n, each, vocab], and a second one where the first is the draft."""
        rows, count = self.rows, len(decoding)
        sample_next(logits[:, 0], rows.all[:count], rows, settings=settings)
        self._send(decoding)
        if drafts is not None:
            right = rows.numbers[TOKEN, :count] == drafts
            self.row_cache.settle(1 + right.long())
            rows.results[:count, 0] = torch.where(right, RIGHT, -1.0)
            second = (right & (rows.numbers[LENGTH, :count] > 0)).nonzero()[:, 0]
            sample_next(logits[second, 1], second, rows, settings=settings.at(second))
            self._send(decoding, drafted=True)

    def _settings_of(self, decoding: Sequence[RunningCompletion]) -> SamplerSettings:
        """Returns the settings of these completions, which are those of the last step unless something changed."""
        if self._settings is None:
            self._settings = self._new_settings(decoding)
        return self._settings

    def _new_settings(self, completions: Sequence[RunningCompletion]) -> SamplerSettings:
        sampling, keys = [each.state.prompt.sampling for each in completions], [each.state.key for each in completions]
        return SamplerSettings.of(sampling, keys, self.model.config.vocab_size, self.device)

    def _changed(self, each: RunningCompletion) -> None:
        """See `Scheduler`."""
        self._settings = None

    def _done(self, each: RunningCompletion) -> None:
        """See `Scheduler`."""
        if each.state.error is not None:
            self.cache.clear(each.row)
        elif self.routing is not None:
            each.state.routing = self.routing.of(each.row, each.state.length)
        super()._done(each)
