"""Samples one token for each of many rows of logits, every row with its own settings and random numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from postlude.generate.counter_rng import GOLDEN, gumbel, mix
from postlude.generate.sampling_params import SamplingParams

BLOCK = 256  # tokens; a row draws its block first and its token within it
WITHIN = 1 << 40  # where the places of tokens begin, past those of blocks
_SHORTLIST = 512  # likeliest tokens in which the edge of top-p is first looked for


@dataclass(frozen=True)
class SamplerSettings:
    """The settings of n rows, on the device. What no row asks for is None and costs nothing."""

    keys: Tensor
    """[n] int64, the start of each row's random numbers."""
    temperature: Tensor | None
    """[n, 1] fp32, 1 where the row is greedy."""
    greedy: Tensor | None
    """[n] bool."""
    top_k: Tensor | None
    """[n] int64, the vocabulary's size where all are left."""
    top_p: Tensor | None
    """[n] fp32."""
    log_min_p: Tensor | None
    """[n] fp32, -inf where all are left."""
    all_greedy: bool
    most: int
    """The largest top_k of a row that has one, on the host."""

    @staticmethod
    def of(
        samplings: Sequence[SamplingParams], keys: Sequence[int], vocab_size: int, device: torch.device
    ) -> SamplerSettings:
        """Returns the settings of every row."""

        def column(values: Sequence[float], dtype: torch.dtype, idle: float) -> Tensor | None:
            return None if all(value == idle for value in values) else torch.tensor(values, dtype=dtype, device=device)

        temperatures = [sampling.temperature or 1.0 for sampling in samplings]
        counts = [min(sampling.top_k or vocab_size, vocab_size) for sampling in samplings]
        temperature = column(temperatures, torch.float32, 1.0)
        min_p = column([sampling.min_p for sampling in samplings], torch.float32, 0.0)
        return SamplerSettings(
            keys=torch.tensor(keys, dtype=torch.int64, device=device),
            temperature=None if temperature is None else temperature[:, None],
            greedy=column([sampling.greedy for sampling in samplings], torch.bool, False),
            top_k=column(counts, torch.int64, vocab_size),
            top_p=column([sampling.top_p for sampling in samplings], torch.float32, 1.0),
            log_min_p=None if min_p is None else min_p.log(),
            all_greedy=all(sampling.greedy for sampling in samplings),
            most=max((count for count in counts if count < vocab_size), default=0),
        )

    def at(self, rows: Tensor) -> SamplerSettings:
        """Returns the settings of `rows` [m] int64."""
        columns: dict[str, Any] = {name: each[rows] for name, each in vars(self).items() if isinstance(each, Tensor)}
        return replace(self, **columns)


def sample(logits: Tensor, settings: SamplerSettings, counts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Logits [n, vocab] -> tokens [n] int64, their log-probs and those they were sampled with, fp32 [n].

    `counts` [n] int64 is the number of each row's draw: with its key it decides the noise, and nothing else does.
    """
    scaled = logits.float()
    if settings.temperature is not None:
        scaled = scaled / settings.temperature
    if settings.all_greedy:
        tokens = scaled.argmax(-1)
        logprobs = scaled.log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
        return tokens, logprobs, torch.zeros_like(logprobs)
    blocks = _blocks(scaled)
    weights = blocks.logsumexp(-1)  # [n, blocks], each block's log-probability up to a constant
    total = weights.logsumexp(-1)
    edge = _edge(scaled, total, settings)
    sampled_total = total
    if edge is not None:
        blocks = blocks.masked_fill(blocks < edge[:, None, None], float("-inf"))
        weights = blocks.logsumexp(-1)
        sampled_total = weights.logsumexp(-1)
    tokens = _gumbel_max(blocks, weights, mix(settings.keys + counts * GOLDEN))
    if settings.greedy is not None:
        tokens = torch.where(settings.greedy, scaled.argmax(-1), tokens)
    chosen = scaled.gather(-1, tokens[:, None])[:, 0]
    sampled = chosen - sampled_total
    if settings.greedy is not None:
        sampled = sampled.masked_fill(settings.greedy, 0.0)
    return tokens, chosen - total, sampled


def _blocks(scaled: Tensor) -> Tensor:
    """Returns [n, vocab] as [n, blocks, BLOCK], padded with tokens that are never sampled."""
    missing = -scaled.shape[1] % BLOCK
    if missing:
        scaled = F.pad(scaled, (0, missing), value=float("-inf"))
    blocks: Tensor = scaled.unflatten(1, (-1, BLOCK))
    return blocks


def _gumbel_max(blocks: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    """Samples a block by its weight, then a token within it: exact, and noise for √vocab places instead of all.

    A small change of the logits changes the outcome with a small probability, as when every token had its own noise;
    with a search in their running sum it would not be small.
    """
    places = torch.arange(max(BLOCK, weights.shape[1]), device=weights.device)
    block = (weights + gumbel(keys[:, None], places[: weights.shape[1]])).argmax(-1)  # [n]
    within = blocks[torch.arange(len(block), device=block.device), block]  # [n, BLOCK]
    first = (block * BLOCK)[:, None]
    return (within + gumbel(keys[:, None], WITHIN + first + places[:BLOCK])).argmax(-1) + first[:, 0]


def _edge(scaled: Tensor, total: Tensor, settings: SamplerSettings) -> Tensor | None:
    """[n]: the least logit that a token may have, the strictest of top-k, top-p and min-p; None where all may stay."""
    edges = []
    if settings.log_min_p is not None:
        edges.append(scaled.amax(-1) + settings.log_min_p)
    if settings.top_p is not None:
        edges.append(_top_p_edge(scaled, total, settings))
    elif settings.top_k is not None:
        edges.append(_kth(scaled.topk(settings.most, dim=-1).values, settings.top_k))
    return torch.stack(edges).amax(0) if edges else None


def _kth(ranked: Tensor, top_k: Tensor) -> Tensor:
    """[n]: the k-th of each row's values in falling order [n, m]; -inf where k is more than there are."""
    kth = ranked.gather(-1, (top_k - 1).clamp(max=ranked.shape[1] - 1)[:, None])[:, 0]
    return kth.masked_fill(top_k > ranked.shape[1], float("-inf"))


def _top_p_edge(scaled: Tensor, total: Tensor, settings: SamplerSettings) -> Tensor:
    """[n]: the logit of the token that brings the probability of those left by top-k to top-p.

    It nearly always stands among the likeliest few hundred; only where it does not are more of them sorted.
    """
    assert settings.top_p is not None
    vocab = scaled.shape[1]
    size = min(max(_SHORTLIST, settings.most), vocab)
    while True:
        ranked = scaled.topk(size, dim=-1).values
        whole = total
        if settings.top_k is not None:
            outside = torch.arange(size, device=ranked.device) >= settings.top_k[:, None]
            ranked = ranked.masked_fill(outside, float("-inf"))
            whole = torch.where(settings.top_k < vocab, ranked.logsumexp(-1), total)
        probabilities = (ranked - whole[:, None]).exp().double()
        before = probabilities.cumsum(-1) - probabilities
        everything = settings.top_p == 1.0
        within = (before < settings.top_p[:, None]) | everything[:, None]
        kept = (within & (ranked > float("-inf"))).sum(-1)  # at least 1, unless logits are not numbers
        cut_short = (kept == size) & ~everything
        if size == vocab or not bool(cut_short.any()):
            edge = ranked.gather(-1, (kept - 1).clamp_min(0)[:, None])[:, 0]
            if settings.top_k is not None:
                everything &= settings.top_k == vocab
            return edge.masked_fill(everything, float("-inf"))
        size = min(8 * size, vocab)
