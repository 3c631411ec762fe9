"""Drafter: speculative decoding. It proposes the next token of every running completion, so that a step can give two.

A draft comes from the model's first multi-token-prediction depth. It is sampled with the same random numbers as the
token itself, so the closer the depth's distribution is to the model's, the likelier they are equal. The model then
samples its token as without a draft. If the draft was the same, the logits after it are valid too, and give a second
token. So drafts change the speed of a completion, and never its tokens.

All that a step reads and writes is on the device, so a CUDA graph can replay it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from postlude.data import Microbatch
from postlude.generate.decode_cache import DecodeCache, PrefillSequence
from postlude.generate.decode_rows import LENGTH, PREVIOUS, TOKEN, UNREAD, DecodeRows, sample_next
from postlude.generate.forward import logits_at
from postlude.generate.sampler import SamplerSettings
from postlude.model import LanguageModel, OutputInputs

HIDDEN = "drafter"  # name in the cache of the hidden states that the depth has not read yet, [rows, 2, H]
TOKENS_PER_STEP = 2  # of a row: its newest token and the draft, and at most as many are sampled
BeginPrefill = Callable[[Sequence[PrefillSequence]], Microbatch]


class Drafter:
    """The first multi-token-prediction depth of a model, on its rows and their cache.

    At each position the depth reads the model's hidden state and the token after it. So the newest hidden states of a
    row are kept until the next token is sampled. At the next `propose`, one or two of them are read: as many as tokens
    were sampled.
    """

    def __init__(self, model: LanguageModel, rows: DecodeRows, cache: DecodeCache) -> None:
        self.model = model
        self.rows = rows
        self.cache = cache
        self.device = cache.device

    def unread_tokens(self, count: int) -> tuple[Tensor, Tensor]:
        """Returns the tokens that the depth has not read, [n, 2] int64 of the first n rows, and its lengths with them.

        If there is one token, the second is a placeholder, which `propose` rejects. Lengths [n] are 0 in idle rows.
        """
        numbers = self.rows.numbers[:, :count]
        token, length, unread = numbers[TOKEN], numbers[LENGTH], numbers[UNREAD]
        has_two = unread == 2
        tokens = torch.stack((torch.where(has_two, numbers[PREVIOUS], token), torch.where(has_two, token, 0)), 1)
        return tokens, torch.where(length > 0, length - unread + 1, 0)

    def propose(
        self, microbatch: Microbatch, count: int, *, filtered: bool = True, settings: SamplerSettings | None = None
    ) -> Tensor:
        """Returns a draft of the next token of each of the first n rows, [n] int64.

        The microbatch has their `unread_tokens`. `filtered` and `settings` are those of `sample_next`.
        """
        hidden = self.cache.states(HIDDEN)[0][:count].flatten(0, 1)
        depth, indices = self._run_depth(hidden, microbatch), self.rows.all[:count]
        unread = self.rows.numbers[UNREAD, :count]
        logits, _ = logits_at(depth, 2 * indices + (unread - 1).clamp_min(0))
        self.cache.accept(torch.where(self.rows.numbers[LENGTH, :count] > 0, unread, 0))
        sampled = self.rows.scratch()
        sample_next(logits, indices, sampled, filtered=filtered, settings=settings)
        return sampled.numbers[TOKEN, :count]

    def keep(self, hidden: Tensor) -> None:
        """Keeps the model's hidden states of a step, two of each of the first n rows [2n, H], for `propose`."""
        by_row = hidden.unflatten(0, (-1, TOKENS_PER_STEP))
        self.cache.set_states(HIDDEN, (by_row,), self.rows.numbers[LENGTH, : len(by_row)] > 0)

    def prefill(self, hidden: Tensor, sequences: Sequence[PrefillSequence], begin: BeginPrefill) -> None:
        """Prefills the depth with the model's hidden states of the new tokens of sequences, [T, H].

        `begin` sets up the cache for a forward of sequences that start where these do, and returns its microbatch.
        """
        read: list[int] = []  # indices of hidden states that have a token after them
        last: list[int] = []
        following: list[PrefillSequence] = []
        start = 0
        for sequence in sequences:
            new = len(sequence.new_tokens)
            # After a single token the depth reads a placeholder, whose states are reset below.
            following.append(replace(sequence, tokens=[*sequence.tokens[1:], *([0] if new == 1 else [])]))
            read += range(start, start + max(new - 1, 1))
            start += new
            last.append(start - 1)
        self._run_depth(hidden[self._integers(read)], begin(following))
        single = [index for index, sequence in enumerate(sequences) if len(sequence.new_tokens) == 1]
        self.cache.reset_prefill_states(
            single, [block.name for layer in self.model.mtp.layers for block in layer.blocks]
        )
        kept = hidden[self._integers(last), None].expand(-1, TOKENS_PER_STEP, -1)
        self.cache.set_prefill_states(HIDDEN, (kept,))

    def _run_depth(self, hidden: Tensor, microbatch: Microbatch) -> OutputInputs:
        """Runs the depth on the model's hidden states [m, H]. The microbatch has the token after each."""
        hidden = F.pad(hidden, (0, 0, 0, len(microbatch) - len(hidden)))
        return self.model.draft(hidden[slice(*self.model.mesh.tp.block(len(hidden)))], microbatch, self.cache)

    def _integers(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)
