"""ScoreConfig: how attention scores keys. The protocol of its implementations, and attention written out in torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from postlude.ops.packing import Packing


@dataclass(frozen=True, kw_only=True, eq=False)
class ScoreConfig:
    """The scoring of keys: scale · query·key, bounded to softcap · tanh(score / softcap) with a softcap.

    A query sees the keys up to its own, the last `window` of them; None means all. `sinks` [heads] are scores of an
    extra key with value zero, which joins only the softmax's denominator.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None


class PackedAttention(Protocol):
    """Causal softmax attention within each packed sequence."""

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, queries: Packing, keys: Packing, score_config: ScoreConfig
    ) -> Tensor:
        """Query [Tq, heads, width], key [Tk, kv_heads, width], value [Tk, kv_heads, v] -> [Tq, heads, v].

        Query heads share key heads in equal groups. The queries of a sequence are at the last positions of its keys:
        for whole sequences `queries` and `keys` are one packing; for a part of each, keys are all those up to its end.
        """
        ...


def softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Softmax over the last dimension, in fp32 or wider, with a sink [..., 1] in the denominator if given."""
    dtype = torch.promote_types(scores.dtype, torch.float32)
    if sinks is None:
        return scores.softmax(dim=-1, dtype=dtype)
    joined = torch.cat((scores.to(dtype), sinks.to(dtype).expand(*scores.shape[:-1], 1)), dim=-1)
    return joined.softmax(dim=-1)[..., :-1]


def explicit_attention(query: Tensor, key: Tensor, value: Tensor, visible: Tensor, score_config: ScoreConfig) -> Tensor:
    """Attention written out for any config: query [n, heads, tq, width], keys and values [n, kv_heads, tk, ...]."""
    grouped = query.unflatten(1, (key.shape[1], -1))  # [n, kv_heads, group, tq, width]
    scores = grouped @ key[:, :, None].transpose(-1, -2) * score_config.scale
    if score_config.softcap is not None:
        scores = score_config.softcap * torch.tanh(scores / score_config.softcap)
    sinks = None if score_config.sinks is None else score_config.sinks.view(*grouped.shape[1:3], 1, 1)
    weights = softmax(scores.masked_fill(~visible, float("-inf")), sinks)
    return (weights.to(value.dtype) @ value[:, :, None]).flatten(1, 2)
