"""DecodeRows: the state of each running completion on the device, and the sampling of its next token.

A decode step reads and writes the same memory every time, so that a CUDA graph can replay it.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from postlude.generate.logit_rules import LogitRules
from postlude.generate.sampler import SamplerSettings, sample
from postlude.ops.batch_invariant import is_batch_invariant
from postlude.ops.kernels.capabilities import Backend, use_kernel
from postlude.ops.linear_logprobs.invariant import logprobs_of_logits

# Indices of the first dimension of `DecodeRows.numbers` and of `DecodeRows.settings`.
TOKEN, LENGTH, COUNT, LIMIT, KEY, TOP_K, PREVIOUS, UNREAD = range(8)
TEMPERATURE, TOP_P, LOG_MIN_P = range(3)
NO_TOKEN = -1.0  # in place of a token: the row is idle, or its draft was rejected
ACCEPTED = -2.0  # in place of a second token: the draft was accepted, but its completion had ended


class DecodeRows:
    """`size` rows. Each is idle or belongs to one completion.

    `numbers` [8, size] int64: the newest token; the number of tokens of prompt and completion, 0 in an idle row; that
    of the completion; its maximum; the key of its random numbers; its top-k, the vocabulary size if it has none; the
    token before the newest, if the last step sampled two; how many of these tokens the drafter has not read, 1 or 2.
    `settings` [3, size] fp32: the temperature, 0 for greedy; top-p; the logarithm of min-p.
    `stops` [stops, size] int64: stop tokens, padded with -1.
    `results` [tokens_per_step, size, 3] fp64, of the last step: the token or `NO_TOKEN`, its log-prob, and its log-prob
    in the distribution it was sampled from. A second token may be `ACCEPTED`.
    """

    def __init__(self, size: int, stops: int, device: torch.device, tokens_per_step: int = 1) -> None:
        self.size = size
        self.tokens_per_step = tokens_per_step
        self.numbers = torch.zeros(8, size, dtype=torch.int64, device=device)
        self.settings = torch.zeros(3, size, dtype=torch.float32, device=device)
        self.stops = torch.full((stops, size), -1, dtype=torch.int64, device=device)
        self.results = torch.zeros(tokens_per_step, size, 3, dtype=torch.float64, device=device)
        self.all = torch.arange(size, device=device)
        self.rules: LogitRules | None = None
        """The rules of all rows; made when a row first has some."""
        self.use_rules = False
        """Whether the next step applies them: it is captured with them or without."""
        self.use_masks = False
        """Whether the next step also records which tokens could be sampled, if it is filtered."""

    def move(self, sources: Tensor, targets: Tensor) -> None:
        """Copies rows `sources` to rows `targets`, both [m] int64. The sources become idle."""
        for columns in (self.numbers, self.settings, self.stops):
            columns.index_copy_(-1, targets, columns.index_select(-1, sources))
        if self.rules is not None:
            self.rules.move(sources, targets)
        self.stop(sources)

    def stop(self, indices: Tensor) -> None:
        """Makes the rows at these indices idle."""
        self.numbers[LENGTH].index_fill_(0, indices, 0)

    def scratch(self) -> DecodeRows:
        """Returns the same rows with copies of `numbers` and `results`, to sample drafts: without rules."""
        rows = copy.copy(self)
        rows.use_rules = rows.use_masks = False
        rows.numbers, rows.results = self.numbers.clone(), self.results.clone()
        return rows

    def sampler_settings(self, indices: Tensor, vocab_size: int, *, filtered: bool) -> SamplerSettings:
        """Returns the settings of the rows at `indices` [n] for the sampler."""
        key, top_k = self.numbers[KEY, indices], self.numbers[TOP_K, indices]
        temperature, top_p, log_min_p = self.settings[:, indices]
        greedy = temperature == 0
        return SamplerSettings(
            keys=key,
            temperature=torch.where(greedy, 1.0, temperature)[:, None],
            greedy=greedy,
            top_k=top_k if filtered else None,
            top_p=top_p if filtered else None,
            log_min_p=log_min_p if filtered else None,
            all_greedy=False,
            max_top_k=max(top_k[top_k < vocab_size].tolist(), default=0) if filtered else 0,
        )


def sample_next(
    logits: Tensor,
    indices: Tensor,
    rows: DecodeRows,
    *,
    token_index: int = 0,
    filtered: bool = True,
    settings: SamplerSettings | None = None,
    backend: Backend = "auto",
) -> None:
    """Samples a token for each row at `indices` [n] int64 from its logits [n, vocab], and writes it to the row.

    Its result is `results[token_index]`. A row becomes idle at a stop token or its maximum length. Idle rows do not
    change. Without `filtered`, top-k, top-p and min-p are ignored. A caller that has the `settings` of the rows passes
    them, if none is idle.
    """
    if not rows.use_rules or rows.rules is None:
        _sample_next(logits, indices, rows, token_index, filtered, settings, backend)
        return
    running = rows.numbers[LENGTH, indices] > 0
    adjusted = rows.rules.adjust(logits, indices)
    _sample_next(adjusted, indices, rows, token_index, filtered, settings, backend)
    temperature = rows.settings[TEMPERATURE, indices, None]
    scaled = logits.float() / torch.where(temperature > 0, temperature, 1.0)
    logprobs = rows.rules.record(scaled, indices, rows.numbers[TOKEN, indices], running, token_index)
    rows.results[token_index, indices, 1] = logprobs.double()
    _score_invariantly(logits, indices, rows, rows.results[token_index])


def _sample_next(
    logits: Tensor,
    indices: Tensor,
    rows: DecodeRows,
    token_index: int,
    filtered: bool,
    settings: SamplerSettings | None,
    backend: Backend,
) -> None:
    if is_batch_invariant() and logits.is_cuda:
        settings = None  # torch's sums on a GPU depend on the number of rows
    results = rows.results[token_index]
    if settings is None and use_kernel("sample_next", backend, logits.device, logits.dtype):
        from postlude.ops.kernels import sample as kernels  # needs triton

        logits = logits if logits.stride(-1) == 1 else logits.contiguous()  # tensor-parallel ranks gather columns
        threshold = kernels.sample_next(logits, indices, rows.numbers, rows.settings, rows.stops, results, filtered)
        _record_mask(logits, indices, rows, token_index, threshold)
        _score_invariantly(logits, indices, rows, results)
        return
    if settings is None:
        results[indices, 0] = NO_TOKEN
        running = rows.numbers[LENGTH, indices] > 0
        indices, logits = indices[running], logits[running]
        settings = rows.sampler_settings(indices, logits.shape[1], filtered=filtered)
    _, length, count, limit, *_ = rows.numbers[:, indices]
    tokens, *logprobs, threshold = sample(logits, settings, count)
    results[indices] = torch.stack([column.double() for column in (tokens, *logprobs)], 1)
    ended = (count + 1 >= limit) | (rows.stops[:, indices] == tokens).any(0)
    rows.numbers[:3, indices] = torch.stack((tokens, torch.where(ended, 0, length + 1), count + 1))
    _record_mask(logits, indices, rows, token_index, threshold)
    _score_invariantly(logits, indices, rows, results)


def sample_after_drafts(
    logits: Tensor,
    drafts: Tensor,
    rows: DecodeRows,
    *,
    filtered: bool = True,
    settings: SamplerSettings | None = None,
) -> Tensor:
    """Samples a token for each of the first n rows, and a second one where the first equals its draft [n] int64.

    `logits` [n, 2, vocab] are those after the newest token and after the draft. `filtered` and `settings` are those of
    `sample_next`. Returns how many of these two tokens each row has accepted, [n] int64; 0 in an idle row.
    """
    count = len(drafts)
    indices, lengths, tokens = rows.all[:count], rows.numbers[LENGTH, :count], rows.numbers[TOKEN, :count]
    running = lengths > 0
    sample_next(logits[:, 0], indices, rows, filtered=filtered, settings=settings)
    accepted = running & (tokens == drafts)
    if rows.use_rules and rows.rules is not None:
        accepted &= ~rows.rules.constrained[:count]  # the host finds out what a grammar allows after a token
    first, first_lengths = tokens.clone(), lengths.clone()
    lengths.masked_fill_(~accepted, 0)  # for the second token all other rows are idle
    has_second = lengths > 0
    sample_next(logits[:, 1], indices, rows, token_index=1, filtered=filtered)
    lengths.copy_(torch.where(accepted, lengths, first_lengths))
    rows.results[1, :count, 0].masked_fill_(accepted & ~has_second, ACCEPTED)
    previous, unread = rows.numbers[PREVIOUS, :count], rows.numbers[UNREAD, :count]
    previous.copy_(torch.where(has_second, first, previous))
    unread.copy_(torch.where(running, 1 + has_second.long(), unread))
    return running.long() + accepted.long()


def _record_mask(logits: Tensor, indices: Tensor, rows: DecodeRows, token_index: int, threshold: Tensor | None) -> None:
    """Records which tokens of `logits` [n, vocab] could be sampled: those of at least the `threshold` [n]."""
    if rows.use_masks and rows.rules is not None and threshold is not None:
        temperature = rows.settings[TEMPERATURE, indices, None]
        scaled = logits.float() / torch.where(temperature > 0, temperature, 1.0)
        rows.rules.record_mask(scaled, indices, threshold, token_index)


def _score_invariantly(logits: Tensor, indices: Tensor, rows: DecodeRows, results: Tensor) -> None:
    """Replaces log-probs by those that the trainer's head computes, in the batch-invariant mode."""
    if is_batch_invariant() and len(indices):
        temperature = rows.settings[TEMPERATURE, indices]
        temperature = torch.where(temperature > 0, temperature, 1.0)
        logprobs = logprobs_of_logits(logits, rows.numbers[TOKEN, indices], temperature)
        results[:, 1].index_copy_(0, indices, logprobs.double())
