"""Drafter: guesses the token after the next one of every running answer, so that a step can give two tokens.

A guess is what the model's first multi-token-prediction depth says, drawn with the very random numbers that the token
itself will be drawn with: the nearer the depth's distribution to the model's, the likelier the same token. The model
then draws its token as if nobody had guessed, and where the guess was right the token after it is there as well. So
guesses decide how fast an answer comes, and nothing else about it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from postlude.data import Microbatch
from postlude.generate.completion_state import CompletionState
from postlude.generate.forward import logits_at, packed
from postlude.generate.row_cache import RowCache
from postlude.generate.sampler import SamplerSettings, draw
from postlude.model import LanguageModel, OutputInputs

WAITING = "drafter"  # by this name the cache keeps the model's states that the depth has yet to take, [rows, 2, H]


class Drafter:
    """The first multi-token-prediction depth of a model, beside it on the rows of a generator's cache.

    At a position it takes the model's state there and the token after. So the newest states of each row wait until a
    token has come after them: `CompletionState.unseen` have, one or two, when it is next asked for a guess.

    With `together` other ranks need its every forward, with or without rows.
    """

    def __init__(self, model: LanguageModel, cache: RowCache, device: torch.device, *, together: bool) -> None:
        self.model = model
        self.cache = cache
        self.device = device
        self.together = together

    def guess(self, answers: Sequence[CompletionState], settings: SamplerSettings) -> Tensor:
        """The next token of each answer, [n] int64, as the depth would have it. They run in the first n rows."""
        if not answers and not self.together:
            return self._integers([])
        count, unseen = len(answers), self._integers([answer.unseen for answer in answers])
        # Where there is one token, something stands in the second's place that will not stay.
        tokens = self._integers([token for answer in answers for token in [*answer.tokens[-answer.unseen :], 0][:2]])
        ends = [answer.length - answer.unseen + 1 for answer in answers]
        microbatch = packed(self.cache, self.model.mesh.tp, tokens.view(count, 2), ends)
        states = self.cache.kept(WAITING)[0][:count].flatten(0, 1) if count else self._no_states()
        newest = 2 * torch.arange(count, device=self.device) + unseen - 1
        logits, _ = logits_at(self._look_ahead(states, microbatch), newest)
        self.cache.settle(unseen)
        return draw(logits, settings, self._integers([len(answer.tokens) for answer in answers]))[0]

    def follow(self, states: Tensor, going_on: int, begun: Sequence[CompletionState]) -> None:
        """Take the model's states [T, H] of a forward: two of each of the rows that go on, then those of prompts."""
        start = 2 * going_on
        self.cache.keep(WAITING, slice(0, going_on), (states[:start].unflatten(0, (going_on, 2)),))
        taken: list[int] = []  # where states are that have a token after them
        last: list[int] = []
        after: list[list[int]] = []
        for answer in begun:
            tokens = [*answer.prompt.tokens, *answer.tokens]
            # No sequence is empty: after a single token the depth is given any, and then forgets it.
            after.append(tokens[1:] or [0])
            taken += range(start, start + len(after[-1]))
            start += len(tokens)
            last.append(start - 1)
        if not begun and not self.together:
            return
        nothing = self._integers([]).view(0, 2)
        microbatch = packed(self.cache, self.model.mesh.tp, nothing, [], after, first=going_on)
        self._look_ahead(states[self._integers(taken)], microbatch)
        alone = [row for row, answer in enumerate(begun, start=going_on) if answer.length == 1]
        self.cache.forget(alone, [block.name for layer in self.model.mtp.layers for block in layer.blocks])
        rows = slice(going_on, going_on + len(begun))
        self.cache.keep(WAITING, rows, (states[self._integers(last), None].expand(-1, 2, -1),))

    def _look_ahead(self, states: Tensor, microbatch: Microbatch) -> OutputInputs:
        """What the depth makes of the model's states [m, H] and the microbatch's tokens, each that after its state."""
        states = F.pad(states, (0, 0, 0, len(microbatch) - len(states)))
        return self.model.draft(states[slice(*self.model.mesh.tp.block(len(states)))], microbatch, self.cache)

    def _no_states(self) -> Tensor:
        weight = self.model.embedding.weight
        return torch.empty(0, weight.shape[1], dtype=weight.dtype, device=self.device)

    def _integers(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)
