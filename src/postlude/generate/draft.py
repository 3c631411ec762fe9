"""Drafter: speculative decoding. It proposes the next token of every running completion, so that a step can give two.

A draft comes from the model's first multi-token-prediction depth. It is sampled with the same random numbers as the
token itself, so the closer the depth's distribution is to the model's, the likelier they are equal. The model then
samples its token as without a draft. If the draft was the same, the logits after it are valid too, and give a second
token. So drafts change the speed of a completion, and never its tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from postlude.data import Microbatch
from postlude.generate.completion_state import CompletionState
from postlude.generate.forward import MixedMicrobatches, logits_at
from postlude.generate.row_cache import RowCache
from postlude.generate.sampler import SamplerSettings, sample
from postlude.model import LanguageModel, OutputInputs

HIDDEN = "drafter"  # name in the cache of the hidden states that the depth has not read yet, [rows, 2, H]


class Drafter:
    """The first multi-token-prediction depth of a model, on the rows of its cache.

    At each position the depth reads the model's hidden state and the token after it. So the newest hidden states of a
    row are kept until the next token is sampled. At the next `propose`, `CompletionState.undrafted` of them are read,
    one or two.

    With `collective`, other ranks take part in every forward, so it also runs without rows.
    """

    def __init__(self, model: LanguageModel, cache: RowCache, *, collective: bool = False) -> None:
        self.model = model
        self.cache = cache
        self.collective = collective
        self.device = cache.device
        self._microbatches = MixedMicrobatches(cache, model.mesh.tp.size)

    def propose(self, completions: Sequence[CompletionState], settings: SamplerSettings) -> Tensor:
        """Returns a draft of the next token of each completion, [n] int64. The completions are in the first n rows."""
        count, undrafted = len(completions), self._integers([completion.undrafted for completion in completions])
        # If there is one token, the second is a placeholder, which is rejected below.
        newest = [[*completion.tokens[-completion.undrafted :], 0][:2] for completion in completions]
        lengths = [completion.length - completion.undrafted + 1 for completion in completions]
        microbatch = self._microbatches(self._integers(newest).view(count, 2), lengths)
        hidden = self.cache.states(HIDDEN)[0][:count].flatten(0, 1) if count else self._no_hidden()
        depth = self._run_depth(hidden, microbatch)
        logits, _ = logits_at(depth, 2 * torch.arange(count, device=self.device) + undrafted - 1)
        self.cache.accept(undrafted)
        return sample(logits, settings, self._integers([len(completion.tokens) for completion in completions]))[0]

    def update(self, hidden: Tensor, count: int, sequences: Sequence[Sequence[int]], rows: Sequence[int]) -> None:
        """Takes the model's hidden states [T, H] of a forward: two of each of `count` rows, then those of sequences.

        Those of a row are kept for the next `propose`. Those of the sequences prefill the depth.
        """
        start = 2 * count
        if count:
            self.cache.set_states(HIDDEN, slice(0, count), (hidden[:start].unflatten(0, (count, 2)),))
        if not sequences and not self.collective:
            return
        read: list[int] = []  # indices of hidden states that have a token after them
        last: list[int] = []
        following: list[Sequence[int]] = []
        for tokens in sequences:
            # After a single token the depth reads a placeholder, whose states are reset below.
            following.append(tokens[1:] or [0])
            read += range(start, start + len(following[-1]))
            start += len(tokens)
            last.append(start - 1)
        microbatch = self._microbatches(self._integers([]).view(0, 2), [], following, rows)
        self._run_depth(hidden[self._integers(read)], microbatch)
        single = [index for index, tokens in enumerate(sequences) if len(tokens) == 1]
        self.cache.reset_last_states(single, [block.name for layer in self.model.mtp.layers for block in layer.blocks])
        self.cache.set_last_states(HIDDEN, (hidden[self._integers(last), None].expand(-1, 2, -1),))

    def _run_depth(self, hidden: Tensor, microbatch: Microbatch) -> OutputInputs:
        """Runs the depth on the model's hidden states [m, H]. The microbatch has the token after each."""
        hidden = F.pad(hidden, (0, 0, 0, len(microbatch) - len(hidden)))
        return self.model.draft(hidden[slice(*self.model.mesh.tp.block(len(hidden)))], microbatch, self.cache)

    def _no_hidden(self) -> Tensor:
        weight = self.model.embedding.weight
        return torch.empty(0, weight.shape[1], dtype=weight.dtype, device=self.device)

    def _integers(self, values: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)
