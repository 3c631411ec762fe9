"""Causal attention over packed sequences: one protocol, a per-sequence reference and a fused CUDA implementation."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from postlude.ops.packing import Packing


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

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, packing: Packing, scores: Scores) -> Tensor:
        """Query [T, heads, width], key and value [T, kv_heads, width] -> [T, heads, width].

        Query heads share key heads in equal groups.
        """
        ...


def attend(query: Tensor, key: Tensor, value: Tensor, packing: Packing, scores: Scores) -> Tensor:
    """The fastest implementation that computes exactly this on the tensors' device and dtype."""
    flash = query.is_cuda and query.dtype in (torch.bfloat16, torch.float16) and scores.softcap is None
    implementation: PackedAttention = varlen_attention if flash else per_sequence_attention
    return implementation(query, key, value, packing, scores)


def per_sequence_attention(query: Tensor, key: Tensor, value: Tensor, packing: Packing, scores: Scores) -> Tensor:
    """The reference: each sequence by itself, those of one length side by side, on any device and dtype."""
    outputs, rows = [], []
    for length, starts in _by_length(packing).items():
        own_rows = torch.tensor(starts, device=query.device)[:, None] + torch.arange(length, device=query.device)
        # [sequences, heads, length, width]
        q, k, v = (tensor[own_rows].transpose(1, 2) for tensor in (query, key, value))
        if scores.softcap is None:
            windowed = scores.window is not None and scores.window < length
            heads = F.scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=_visible(length, scores.window, query.device) if windowed else None,
                is_causal=not windowed,
                scale=scores.scale,
                enable_gqa=True,
            )
        else:
            group = q.shape[1] // k.shape[1]
            rated = q @ k.repeat_interleave(group, dim=1).transpose(-1, -2) * scores.scale
            rated = scores.softcap * torch.tanh(rated / scores.softcap)
            rated = rated.masked_fill(~_visible(length, scores.window, query.device), float("-inf"))
            heads = rated.softmax(dim=-1, dtype=torch.float32).to(v.dtype) @ v.repeat_interleave(group, dim=1)
        outputs.append(heads.transpose(1, 2).flatten(0, 1))
        rows.append(own_rows.flatten())
    return torch.cat(outputs)[torch.cat(rows).argsort()] if outputs else torch.zeros_like(query)


def varlen_attention(query: Tensor, key: Tensor, value: Tensor, packing: Packing, scores: Scores) -> Tensor:
    """Flash attention over all sequences at once. CUDA, bf16 or fp16."""
    from torch.nn.attention.varlen import varlen_attn  # noqa: PLC0415 - initialises CUDA kernels, so only where used

    if scores.softcap is not None:
        raise ValueError(f"varlen_attention has no softcap (got {scores.softcap}); use per_sequence_attention.")
    if len(packing.lengths) == 0:
        return torch.zeros_like(query)
    grouped: dict[str, Any] = {}
    if query.shape[1] != key.shape[1]:
        if "enable_gqa" in inspect.signature(varlen_attn).parameters:
            grouped["enable_gqa"] = True
        else:  # torch 2.11 wants one key head a query head
            group = query.shape[1] // key.shape[1]
            key, value = (tensor.repeat_interleave(group, dim=1) for tensor in (key, value))
    left = -1 if scores.window is None else scores.window - 1  # flash counts the keys before the query's own
    longest = packing.max_length
    output = varlen_attn(
        query,
        key,
        value,
        packing.cu_seqlens,
        packing.cu_seqlens,
        longest,
        longest,
        scale=scores.scale,
        window_size=(left, 0),
        **grouped,
    )
    assert isinstance(output, Tensor)  # not the pair it returns when asked for more
    return output


def _by_length(packing: Packing) -> dict[int, list[int]]:
    """Where the sequences of each length start."""
    starts: dict[int, list[int]] = {}
    for start, stop in packing.slices():
        starts.setdefault(stop - start, []).append(start)
    return starts


def _visible(length: int, window: int | None, device: torch.device) -> Tensor:
    """[length, length], True where the query (row) may see the key (column)."""
    distance = torch.arange(length, device=device)[:, None] - torch.arange(length, device=device)[None, :]
    return (distance >= 0) if window is None else (distance >= 0) & (distance < window)
