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
from postlude.generate.forward import MixedMicrobatches, logits_at
from postlude.generate.row_cache import RowCache
from postlude.generate.sampler import SamplerSettings, sample
from postlude.model import LanguageModel, OutputInputs

HIDDEN = "drafter"  # the cache keeps under this name the hidden states that the depth has yet to read, [rows, 2, H]


class Drafter:
    """The first multi-token-prediction depth of a model, on the rows of its cache.

    At each position the depth reads the model's hidden state and the token after it. So the newest hidden states of a
    row wait until a token has come after them: `CompletionState.undrafted` have, one or two, at the next guess.

    With `together` other ranks need its every forward, with or without rows.
    """

    def __init__(self, model: LanguageModel, cache: RowCache, *, together: bool = False) -> None:
        self.model = model
        self.cache = cache
        self.together = together
        self.device = cache.device
        self._microbatches = MixedMicrobatches(cache, model.mesh.tp.size)

    def guess(self, completions: Sequence[CompletionState], settings: SamplerSettings) -> Tensor:
        """Returns a draft of the next token of each completion, [n] int64. They run in the first n rows."""
        count, undrafted = len(completions), self._integers([completion.undrafted for completion in completions])
        # If there is one token, the second is a placeholder that is not kept.
        newest = [[*completion.tokens[-completion.undrafted :], 0][:2] for completion in completions]
        lengths = [completion.length - completion.undrafted + 1 for completion in completions]
        microbatch = self._microbatches(self._integers(newest).view(count, 2), lengths)
        hidden = self.cache.kept(HIDDEN)[0][:count].flatten(0, 1) if count else self._no_hidden()
        depth = self._run_depth(hidden, microbatch)
        logits, _ = logits_at(depth, 2 * torch.arange(count, device=self.device) + undrafted - 1)
        self.cache.settle(undrafted)
        return sample(logits, settings, self._integers([len(completion.tokens) for completion in completions]))[0]

    def follow(self, hidden: Tensor, count: int, sequences: Sequence[Sequence[int]], rows: Sequence[int]) -> None:
        """Read the model's hidden states [T, H] of a forward: two of each of `count` rows, then those of sequences.

        Those of a row wait for the next guess. The depth is prefilled with those of the sequences.
        """
        start = 2 * count
        if count:
            self.cache.keep(HIDDEN, slice(0, count), (hidden[:start].unflatten(0, (count, 2)),))
        if not sequences and not self.together:
            return
        read: list[int] = []  # indices of hidden states that have a token after them
        last: list[int] = []
        following: list[Sequence[int]] = []
        for tokens in sequences:
            # No sequence is empty: after a single token the depth reads a placeholder, and then forgets it.
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
        """Run the depth on the model's hidden states [m, H], each with the microbatch's token that comes after it."""
        hidden = F.pad(hidden, (0, 0, 0, len(microbatch) - len(hidden)))
        return self.model.draft(hidden[slice(*self.model.mesh.tp.block(len(hidden)))], microbatch, self.cache)

    def _no_hidden(self) -> Tensor:
        weight = self.model.embedding.weight
        return torch.empty(0, weight.shape[1], dtype=weight.dtype, device=self.device)

    def _integers(self, values: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)
