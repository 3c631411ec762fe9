"""LogitRules: penalties, biases, grammars and likeliest tokens of running completions, where a step has any of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from postlude.generate.completion_state import CompletionState
from postlude.generate.sampling_params import MAX_BIASES, MAX_SAMPLING_MASK, MAX_TOP_LOGPROBS

WORD = 32  # tokens in an integer of `LogitRules.allowed`


class LogitRules:
    """The state of `size` rows on the device. A row without rules keeps its logits to the bit.

    `seen` [size, vocab] int32: twice how often the completion has a token, and 1 more if the prompt has it.
    `penalties` [size, 3] fp32: presence, frequency and repetition.
    `biased` [size, m] int64 and `biases` [size, m] fp32: tokens, and what is added to their logits; 0 to token 0 else.
    `allowed` [size, words] int32: a bit for each token, which is 0 if the grammar does not allow it next.
    `constrained` [size] bool: whether the row has a grammar.
    `top` [tokens_per_step, size, k, 2] fp64, of the last step: the likeliest tokens, and their log-probs.
    `masks` [tokens_per_step, size, 1 + m] int32, of the last step: how many tokens could be sampled, and the likeliest
    m of them; -1 for none.
    """

    def __init__(self, size: int, vocab_size: int, tokens_per_step: int, device: torch.device) -> None:
        words, k = -(-vocab_size // WORD), min(MAX_TOP_LOGPROBS, vocab_size)
        self.seen = torch.zeros(size, vocab_size, dtype=torch.int32, device=device)
        self.penalties = torch.tensor([0.0, 0.0, 1.0], device=device).repeat(size, 1)
        self.biased = torch.zeros(size, MAX_BIASES, dtype=torch.int64, device=device)
        self.biases = torch.zeros(size, MAX_BIASES, device=device)
        self.allowed = torch.full((size, words), -1, dtype=torch.int32, device=device)
        self.constrained = torch.zeros(size, dtype=torch.bool, device=device)
        self.top = torch.zeros(tokens_per_step, size, k, 2, dtype=torch.float64, device=device)
        width = 1 + min(MAX_SAMPLING_MASK, vocab_size)
        self.masks = torch.zeros(tokens_per_step, size, width, dtype=torch.int32, device=device)
        self._bits = torch.arange(WORD, dtype=torch.int32, device=device)

    def move(self, sources: Tensor, targets: Tensor) -> None:
        """Copies rows `sources` to rows `targets`, both [m] int64."""
        for columns in (self.seen, self.penalties, self.biased, self.biases, self.allowed, self.constrained):
            columns.index_copy_(0, targets, columns.index_select(0, sources))

    def write(self, indices: Tensor, states: Sequence[CompletionState]) -> None:
        """Writes the completions that start in rows."""
        samplings = [state.prompt.sampling for state in states]
        penalties = [[s.presence_penalty, s.frequency_penalty, s.repetition_penalty] for s in samplings]
        self.penalties.index_copy_(0, indices, torch.tensor(penalties).to(self.penalties))
        pairs = torch.zeros(len(states), MAX_BIASES, 2, dtype=torch.float64)
        for row, sampling in enumerate(samplings):
            if sampling.logit_bias:
                pairs[row, : len(sampling.logit_bias)] = torch.tensor(sampling.logit_bias, dtype=torch.float64)
        self.biased.index_copy_(0, indices, pairs[..., 0].to(self.biased))
        self.biases.index_copy_(0, indices, pairs[..., 1].to(self.biases))
        self.constrained.index_copy_(0, indices, self._like(indices, [state.grammar is not None for state in states]))
        self.allowed.index_fill_(0, indices, -1)
        counted = [place for place, sampling in enumerate(samplings) if sampling.penalized]
        if counted:
            seen = torch.zeros(len(counted), self.seen.shape[1], dtype=torch.int32)
            for row, place in enumerate(counted):
                seen[row, torch.tensor(states[place].prompt.tokens)] = 1
                tokens = torch.tensor(states[place].tokens, dtype=torch.int64)
                seen[row] += 2 * torch.bincount(tokens, minlength=seen.shape[1]).int()
            self.seen.index_copy_(0, indices[self._like(indices, counted)], seen.to(self.seen.device))

    def allow(self, indices: Tensor, masks: Sequence[bytes]) -> None:
        """Writes which tokens the grammars of rows allow next."""
        words = torch.stack([torch.frombuffer(bytearray(mask), dtype=torch.int32) for mask in masks])
        self.allowed.index_copy_(0, indices, words.to(self.allowed.device))

    def adjust(self, logits: Tensor, indices: Tensor) -> Tensor:
        """Returns fp32 logits [n, vocab] of rows with penalties and biases; -inf for a token that is not allowed."""
        logits, seen = logits.float(), self.seen[indices]
        presence, frequency, repetition = self.penalties[indices, :, None].unbind(1)
        repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
        count = seen >> 1
        logits = torch.where(seen > 0, repeated, logits) - frequency * count - presence * (count > 0)
        logits = logits.scatter_add(1, self.biased[indices], self.biases[indices])
        bits = (self.allowed[indices, :, None] >> self._bits) & 1
        return logits.masked_fill(bits.flatten(1)[:, : logits.shape[1]] == 0, float("-inf"))

    def record(self, logits: Tensor, indices: Tensor, tokens: Tensor, running: Tensor, token_index: int) -> Tensor:
        """Counts sampled tokens [n] of the `running` rows [n] bool, and stores the likeliest ones.

        `logits` [n, vocab] are divided by the temperature, before penalties, biases and grammars. Returns the
        log-probs of the tokens under them, [n].
        """
        self.seen[indices, tokens] += 2 * running.int()
        logprobs = logits.log_softmax(-1)
        values, ids = logprobs.topk(self.top.shape[2], dim=-1)
        self.top[token_index, indices] = torch.stack((ids.double(), values.double()), -1)
        return logprobs.gather(-1, tokens[:, None])[:, 0]

    def record_mask(self, logits: Tensor, indices: Tensor, threshold: Tensor, token_index: int) -> None:
        """Stores the tokens whose logits, of [n, vocab], are at least the `threshold` [n] and can be sampled."""
        lowest = threshold[:, None]
        can_be_sampled = (logits >= lowest) & (logits > float("-inf"))
        values, ids = logits.topk(self.masks.shape[2] - 1, dim=-1)
        kept_ids = ids.masked_fill((values < lowest) | (values == float("-inf")), -1)
        self.masks[token_index, indices] = torch.cat((can_be_sampled.sum(-1, keepdim=True), kept_ids), 1).int()

    @staticmethod
    def _like(indices: Tensor, values: Sequence[int] | Sequence[bool]) -> Tensor:
        return torch.tensor(values).to(indices.device)
