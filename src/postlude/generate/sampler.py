"""Samples one token for each row of logits. Every row has its own settings and random numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from postlude.generate.counter_rng import GOLDEN, gumbel, mix
from postlude.generate.sampling_params import SamplingParams

BLOCK = 256  # tokens; a row samples a block first, then a token in it
TOKEN_NOISE = 1 << 40  # index of the first token's random number; those of blocks start at 0
_SHORTLIST = 512  # likeliest tokens in which the threshold of top-p is searched first


@dataclass(frozen=True)
class SamplerSettings:
    """The settings of n rows, on the device. A setting that no row uses is None."""

    keys: Tensor
    """[n] int64, the key of each row's random numbers."""
    temperature: Tensor | None
    """[n, 1] fp32, 1 where the row is greedy."""
    greedy: Tensor | None
    """[n] bool."""
    top_k: Tensor | None
    """[n] int64, the vocabulary's size where it is not used."""
    top_p: Tensor | None
    """[n] fp32."""
    log_min_p: Tensor | None
    """[n] fp32, -inf where it is not used."""
    all_greedy: bool
    max_top_k: int
    """The largest top_k of a row that has one, on the host."""

    @staticmethod
    def of(
        samplings: Sequence[SamplingParams], keys: Sequence[int], vocab_size: int, device: torch.device
    ) -> SamplerSettings:
        """Returns the settings of every row."""

        def column(values: Sequence[float], dtype: torch.dtype, unused: float) -> Tensor | None:
            return (
                None if all(value == unused for value in values) else torch.tensor(values, dtype=dtype, device=device)
            )

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
            max_top_k=max((count for count in counts if count < vocab_size), default=0),
        )


def sample(logits: Tensor, settings: SamplerSettings, counts: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Samples tokens [n] from logits [n, vocab]. Returns them and their log-probs before and after filtering, [n].

    The last result is the lowest scaled logit that could be sampled, [n]; None if all could. `counts` [n] int64 are the
    numbers of tokens that rows have sampled. Key and count alone determine the noise.
    """
    scaled = logits.float()
    if settings.temperature is not None:
        scaled = scaled / settings.temperature
    if settings.all_greedy:
        tokens = scaled.argmax(-1)
        logprobs = scaled.log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
        return tokens, logprobs, torch.zeros_like(logprobs), None
    blocks = _blocks(scaled)
    weights = blocks.logsumexp(-1)  # [n, blocks], each block's log-probability up to a constant
    total = weights.logsumexp(-1)
    threshold = _threshold(scaled, total, settings)
    sampled_total = total
    if threshold is not None:
        blocks = blocks.masked_fill(blocks < threshold[:, None, None], float("-inf"))
        weights = blocks.logsumexp(-1)
        sampled_total = weights.logsumexp(-1)
    tokens = _gumbel_max(blocks, weights, mix(settings.keys + counts * GOLDEN))
    if settings.greedy is not None:
        tokens = torch.where(settings.greedy, scaled.argmax(-1), tokens)
    chosen = scaled.gather(-1, tokens[:, None])[:, 0]
    sampled = chosen - sampled_total
    if settings.greedy is not None:
        sampled = sampled.masked_fill(settings.greedy, 0.0)
    return tokens, chosen - total, sampled, threshold


def _blocks(scaled: Tensor) -> Tensor:
    """Returns [n, vocab] as [n, blocks, BLOCK], padded with -inf."""
    missing = -scaled.shape[1] % BLOCK
    if missing:
        scaled = F.pad(scaled, (0, missing), value=float("-inf"))
    blocks: Tensor = scaled.unflatten(1, (-1, BLOCK))
    return blocks


def _gumbel_max(blocks: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    """Samples a block by its weight, then a token in it. This is exact, and needs only about 2 · √vocab noise values.

    A small change of the logits changes the token with small probability, as with noise for every token. Sampling by
    inversion of the cumulative sum does not have this property.
    """
    indices = torch.arange(max(BLOCK, weights.shape[1]), device=weights.device)
    block = (weights + gumbel(keys[:, None], indices[: weights.shape[1]])).argmax(-1)  # [n]
    tokens = blocks[torch.arange(len(block), device=block.device), block]  # [n, BLOCK]
    first = (block * BLOCK)[:, None]
    return (tokens + gumbel(keys[:, None], TOKEN_NOISE + first + indices[:BLOCK])).argmax(-1) + first[:, 0]


def _threshold(scaled: Tensor, total: Tensor, settings: SamplerSettings) -> Tensor | None:
    """Returns the lowest logit that can be sampled, [n], by top-k, top-p and min-p; None if none of them is used."""
    thresholds = []
    if settings.log_min_p is not None:
        thresholds.append(scaled.amax(-1) + settings.log_min_p)
    if settings.top_p is not None:
        thresholds.append(_top_p_threshold(scaled, total, settings))
    elif settings.top_k is not None:
        thresholds.append(_kth(scaled.topk(settings.max_top_k, dim=-1).values, settings.top_k))
    return torch.stack(thresholds).amax(0) if thresholds else None


def _kth(ranked: Tensor, top_k: Tensor) -> Tensor:
    """Returns the k-th of each row's values in descending order [n, m], as [n]; -inf where k is larger than m."""
    kth = ranked.gather(-1, (top_k - 1).clamp(max=ranked.shape[1] - 1)[:, None])[:, 0]
    return kth.masked_fill(top_k > ranked.shape[1], float("-inf"))


def _top_p_threshold(scaled: Tensor, total: Tensor, settings: SamplerSettings) -> Tensor:
    """Returns the logit, [n], of the last token of the smallest set that has probability top-p after top-k.

    It is nearly always among the likeliest few hundred tokens. More are sorted only where it is not.
    """
    assert settings.top_p is not None
    vocab = scaled.shape[1]
    size = min(max(_SHORTLIST, settings.max_top_k), vocab)
    while True:
        ranked = scaled.topk(size, dim=-1).values
        log_sum = total
        if settings.top_k is not None:
            outside = torch.arange(size, device=ranked.device) >= settings.top_k[:, None]
            ranked = ranked.masked_fill(outside, float("-inf"))
            log_sum = torch.where(settings.top_k < vocab, ranked.logsumexp(-1), total)
        probabilities = (ranked - log_sum[:, None]).exp().double()
        before = probabilities.cumsum(-1) - probabilities
        unused = settings.top_p == 1.0
        within = (before < settings.top_p[:, None]) | unused[:, None]
        kept_count = (within & (ranked > float("-inf"))).sum(-1)  # at least 1, unless logits are NaN
        cut_short = (kept_count == size) & ~unused
        if size == vocab or not bool(cut_short.any()):
            threshold = ranked.gather(-1, (kept_count - 1).clamp_min(0)[:, None])[:, 0]
            if settings.top_k is not None:
                unused &= settings.top_k == vocab
            return threshold.masked_fill(unused, float("-inf"))
        size = min(8 * size, vocab)
