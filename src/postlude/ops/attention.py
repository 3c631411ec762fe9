"""Causal attention over packed sequences: one protocol, a per-sequence reference and a fused CUDA implementation."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from postlude.ops.packing import Packing, to_device


@dataclass(frozen=True, kw_only=True)
class Scores:
    """How a query rates the keys it sees: scale · query·key, bounded to softcap · tanh(score / softcap) if asked.

    It sees those before it and its own, `window` of them in all; None means every one.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None


class PackedAttention(Protocol):
    """Causal softmax attention that never looks across a sequence border."""

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, queries: Packing, keys: Packing, scores: Scores
    ) -> Tensor:
        """Query [Tq, heads, width], key and value [Tk, kv_heads, width] -> [Tq, heads, width].

        Query heads share key heads in equal groups. The queries of a sequence stand at the last positions of its keys:
        on whole sequences `queries` and `keys` are one packing, on a part of each the keys are all those up to its end.
        """
        ...


def attend(query: Tensor, key: Tensor, value: Tensor, queries: Packing, keys: Packing, scores: Scores) -> Tensor:
    """The fastest implementation that computes exactly this on the tensors' device and dtype."""
    flash = query.is_cuda and query.dtype in (torch.bfloat16, torch.float16) and scores.softcap is None
    implementation: PackedAttention = varlen_attention if flash else per_sequence_attention
    return implementation(query, key, value, queries, keys, scores)


def per_sequence_attention(
    query: Tensor, key: Tensor, value: Tensor, queries: Packing, keys: Packing, scores: Scores
) -> Tensor:
    """The reference: each sequence by itself, those alike in length side by side, on any device and dtype."""
    _check_lengths(queries, keys)
    if queries.count == 0:
        return _nothing(query, key, value)
    outputs, rows = [], []
    for (asking, asked), starts in _by_lengths(queries, keys).items():
        own_rows, key_rows = (
            to_device(torch.tensor(first), query.device)[:, None] + torch.arange(length, device=query.device)
            for first, length in zip(zip(*starts, strict=True), (asking, asked), strict=True)
        )
        # [sequences, heads, length, width]
        q, k, v = (
            tensor[chosen].transpose(1, 2) for tensor, chosen in ((query, own_rows), (key, key_rows), (value, key_rows))
        )
        if scores.softcap is None:
            plain = asking == asked and (scores.window is None or scores.window >= asked)
            heads = F.scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=None if plain else _visible(asking, asked, scores.window, query.device),
                is_causal=plain,
                scale=scores.scale,
                enable_gqa=True,
            )
        else:
            group = q.shape[1] // k.shape[1]
            rated = q @ k.repeat_interleave(group, dim=1).transpose(-1, -2) * scores.scale
            rated = scores.softcap * torch.tanh(rated / scores.softcap)
            rated = rated.masked_fill(~_visible(asking, asked, scores.window, query.device), float("-inf"))
            dtype = torch.promote_types(v.dtype, torch.float32)
            heads = rated.softmax(dim=-1, dtype=dtype).to(v.dtype) @ v.repeat_interleave(group, dim=1)
        outputs.append(heads.transpose(1, 2).flatten(0, 1))
        rows.append(own_rows.flatten())
    return torch.cat(outputs)[torch.cat(rows).argsort()]


def varlen_attention(
    query: Tensor, key: Tensor, value: Tensor, queries: Packing, keys: Packing, scores: Scores
) -> Tensor:
    """Flash attention over all sequences at once. CUDA, bf16 or fp16."""
    from torch.nn.attention.varlen import varlen_attn  # noqa: PLC0415 - initialises CUDA kernels, so only where used

    if scores.softcap is not None:
        raise ValueError(f"varlen_attention has no softcap (got {scores.softcap}); use per_sequence_attention.")
    _check_lengths(queries, keys)
    if queries.count == 0:
        return _nothing(query, key, value)
    grouped: dict[str, Any] = {}
    if query.shape[1] != key.shape[1]:
        if "enable_gqa" in inspect.signature(varlen_attn).parameters:
            grouped["enable_gqa"] = True
        else:  # torch 2.11 wants one key head a query head
            group = query.shape[1] // key.shape[1]
            key, value = (tensor.repeat_interleave(group, dim=1) for tensor in (key, value))
    left = -1 if scores.window is None else scores.window - 1  # flash counts the keys before the query's own
    output = varlen_attn(
        query,
        key,
        value,
        queries.cu_seqlens,
        keys.cu_seqlens,
        queries.max_length,
        keys.max_length,
        scale=scores.scale,
        window_size=(left, 0),  # counted from the ends, so that the last query stands at the last key
        **grouped,
    )
    assert isinstance(output, Tensor)  # not the pair it returns when asked for more
    return output


def _check_lengths(queries: Packing, keys: Packing) -> None:
    """Refuse queries that do not stand at the last positions of their keys."""
    if queries is keys:
        return
    if queries.count != keys.count:
        raise ValueError(
            f"there are queries of {queries.count} sequences, but keys of {keys.count}. "
            "Pack the queries and the keys of the same sequences."
        )
    for index, (asking, asked) in enumerate(zip(queries.lengths, keys.lengths, strict=True)):
        if asking > asked:
            raise ValueError(
                f"sequence {index} has {asking} queries, but only {asked} keys. A query stands at a key of its own: "
                f"give at least {asking} keys, or at most {asked} queries."
            )


def _nothing(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """[0, heads, width] that hangs on all three, so that what made them gets a gradient of zero rather than none."""
    return query + key.sum() + value.sum()


def _by_lengths(queries: Packing, keys: Packing) -> dict[tuple[int, int], list[tuple[int, int]]]:
    """By number of queries and of keys: where the queries and the keys of those sequences start."""
    starts: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for (query, query_stop), (key, key_stop) in zip(queries.slices(), keys.slices(), strict=True):
        starts.setdefault((query_stop - query, key_stop - key), []).append((query, key))
    return starts


def _visible(asking: int, asked: int, window: int | None, device: torch.device) -> Tensor:
    """[asking, asked], True where the query (row) may see the key (column); the last of each stand together."""
    own = torch.arange(asked - asking, asked, device=device)
    distance = own[:, None] - torch.arange(asked, device=device)[None, :]
    return (distance >= 0) if window is None else (distance >= 0) & (distance < window)
