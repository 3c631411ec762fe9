"""Drafter: guesses the next token of every running completion, so that one forward can give two tokens.

A draft comes from the model's first multi-token-prediction depth. It is sampled with the random numbers that the token
itself will be sampled with: the nearer the depth's distribution to the model's, the likelier the same token. The model
then samples its token as if there were no draft. Where the draft was right, the token after it is there as well. So
drafts decide how fast a completion comes, and nothing else about it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from postlude.data import Microbatch
from postlude.generate.completion_state import CompletionState
from postlude.generate.forward import DecodeMicrobatches, all_logits_and_hidden, logits_at, prefill_microbatch
from postlude.generate.row_cache import RowCache
from postlude.generate.sampler import SamplerSettings, sample
from postlude.model import LanguageModel, OutputInputs

HIDDEN = "drafter"  # the cache keeps under this name the hidden states that the depth has yet to read, [rows, 2, H]


class Drafter:
    """The first multi-token-prediction depth of a model, on the rows of its cache.

    At each position the depth reads the model's hidden state and the token after it. So the newest hidden states of a
    row wait until a token has come after them: `CompletionState.undrafted` have, one or two, at the next guess.
    """

    def __init__(self, model: LanguageModel, cache: RowCache) -> None:
        self.model = model
        self.cache = cache
        self.device = cache.device
        self.tp = model.mesh.tp
        self._microbatches = DecodeMicrobatches()
        self._no_table = torch.empty(0, device=cache.device)

    def guess(self, completions: Sequence[CompletionState], settings: SamplerSettings) -> Tensor:
        """Returns a draft of the next token of each completion, [n] int64. They run in the first n rows."""
        count, idle = len(completions), -len(completions) % self.tp.size
        undrafted = self._integers([completion.undrafted for completion in completions])
        # If there is one token, the second is a placeholder that is not kept.
        newest = [[*completion.tokens[-completion.undrafted :], 0][:2] for completion in completions]
        lengths = [completion.length - completion.undrafted + 1 for completion in completions] + [2] * idle
        tokens, on_device = self._integers([*newest, *[[0, 0]] * idle]), self._integers(lengths)
        self.cache.decode(self._no_table, on_device, max(lengths), each=2)
        hidden = self.cache.kept(HIDDEN)[0][: len(lengths)].flatten(0, 1)
        depth = self._run_depth(hidden, self._microbatches(tokens, on_device))
        logits, _ = logits_at(depth, 2 * torch.arange(count, device=self.device) + undrafted - 1)
        self.cache.settle(undrafted)
        return sample(logits, settings, self._integers([len(completion.tokens) for completion in completions]))[0]

    def verify(self, newest: Tensor, drafts: Tensor, lengths: Tensor, longest: int) -> Tensor:
        """Run the model on the newest token of each row and its draft. Returns the logits after both, [n, 2, vocab].

        `newest` and `lengths` [n], `drafts` [n] or fewer: the last rows may be idle. `longest` is with the draft.
        """
        size, count = len(newest), len(drafts)
        tokens, lengths = torch.stack((newest, F.pad(drafts, (0, size - count))), 1), lengths + 1
        self.cache.decode(self._no_table, lengths, longest, each=2)
        logits, hidden = self.model(
            self._microbatches(tokens, lengths), output_processor=all_logits_and_hidden, decode_state=self.cache
        )
        self.cache.keep(HIDDEN, slice(0, count), (hidden[: 2 * count].unflatten(0, (count, 2)),))
        of_both: Tensor = logits.unflatten(0, (size, 2))
        return of_both

    def follow_prefill(
        self, hidden: Tensor, sequences: Sequence[Sequence[int]], pages: Sequence[Sequence[int]]
    ) -> None:
        """Prefill the depth with the model's hidden states [T, H] of sequences that were just prefilled."""
        start = 0
        read: list[int] = []  # indices of hidden states that have a token after them
        last: list[int] = []
        following: list[Sequence[int]] = []
        for tokens in sequences:
            # No sequence is empty: after a single token the depth reads a placeholder, and then forgets it.
            following.append(tokens[1:] or [0])
            read += range(start, start + len(following[-1]))
            start += len(tokens)
            last.append(start - 1)
        microbatch = prefill_microbatch(following, self.tp.size, self.device)
        self.cache.prefill(microbatch.packing, pages, microbatch.padding)
        self._run_depth(hidden[self._integers(read)], microbatch)
        single = [index for index, tokens in enumerate(sequences) if len(tokens) == 1]
        self.cache.reset_last_states(single, [block.name for layer in self.model.mtp.layers for block in layer.blocks])
        self.cache.set_last_states(HIDDEN, (hidden[self._integers(last), None].expand(-1, 2, -1),))

    def run_padding(self) -> None:
        """Take part in the guesses of other ranks."""
        weight = self.model.embedding.weight
        microbatch = prefill_microbatch([], self.tp.size, self.device)
        self.cache.prefill(microbatch.packing, [], microbatch.padding)
        self._run_depth(torch.empty(0, weight.shape[1], dtype=weight.dtype, device=self.device), microbatch)

    def _run_depth(self, hidden: Tensor, microbatch: Microbatch) -> OutputInputs:
        """Run the depth on the model's hidden states [m, H], each with the microbatch's token that comes after it."""
        hidden = F.pad(hidden, (0, 0, 0, len(microbatch) - len(hidden)))
        return self.model.draft(hidden[slice(*self.tp.block(len(hidden)))], microbatch, self.cache)

    def _integers(self, values: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)
