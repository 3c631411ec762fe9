"""Attention of the batch-invariant mode: a query's result depends on its own sequence alone, to the bit.

The kernel (`kernels/invariant_attention.py`) is the same for training, prefill and decoding. Elsewhere each query is
computed by itself, with tensors whose shapes follow from its position.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from postlude.ops.attention_scores import PackedAttention, ScoreConfig, explicit_attention
from postlude.ops.kernels.capabilities import use_kernel
from postlude.ops.packing import Packing, to_device


def attend_in_rows(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    score_config: ScoreConfig,
    starts: Tensor,
    positions: Tensor,
) -> Tensor:
    """Attends to keys [rows, kv_heads, width] and values [rows, kv_heads, v], where sequences are dense. No gradient.

    Query i of [n, heads, width] is at `positions[i]` of a sequence whose keys begin at row `starts[i]`, both [n].
    """
    if use_kernel("invariant_attention", "auto", query.device, query.dtype):
        from postlude.ops.kernels.invariant_attention import attend_rows  # needs triton

        first = torch.arange(len(query), device=query.device)
        tiles = torch.stack((first, torch.ones_like(first), starts, positions), 1).to(torch.int32)
        return attend_rows(query, keys, values, tiles, score_config)
    output = torch.empty(*query.shape[:2], values.shape[-1], dtype=query.dtype, device=query.device)
    for index, (start, position) in enumerate(zip(starts.tolist(), positions.tolist(), strict=True)):
        oldest = 0 if score_config.window is None else max(0, position + 1 - score_config.window)
        # [1, heads, length, width], copied, since BLAS may depend on alignment and strides
        q, k, v = (
            part.transpose(0, 1)[None].clone(memory_format=torch.contiguous_format)
            for part in (
                query[index : index + 1],
                keys[start + oldest : start + position + 1],
                values[start + oldest : start + position + 1],
            )
        )
        mask = torch.ones(1, position + 1 - oldest, dtype=torch.bool, device=query.device)
        output[index] = explicit_attention(q, k, v, mask, score_config)[0, :, 0]
    return output


def invariant_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    queries: Packing,
    keys: Packing,
    score_config: ScoreConfig,
    ordinary: PackedAttention,
) -> Tensor:
    """See `PackedAttention`. Its gradient is that of the `ordinary` implementation, which runs again for it."""
    if not torch.is_grad_enabled():
        return _forward(query, key, value, queries, keys, score_config)
    output: Tensor = _Attention.apply(query, key, value, score_config.sinks, (queries, keys, score_config), ordinary)
    return output


def _forward(
    query: Tensor, key: Tensor, value: Tensor, queries: Packing, keys: Packing, score_config: ScoreConfig
) -> Tensor:
    """Returns the output [Tq, heads, v]."""
    sequence, device = queries.sequence_index(), query.device
    before = to_device(torch.tensor([k - q for q, k in zip(queries.lengths, keys.lengths, strict=True)]), device)
    starts = keys.cu_seqlens.long()[sequence]
    return attend_in_rows(query, key, value, score_config, starts, before[sequence] + queries.positions())


class _Attention(Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        arguments: tuple[Packing, Packing, ScoreConfig],
        ordinary: PackedAttention,
    ) -> Tensor:
        ctx.save_for_backward(query, key, value, sinks)
        ctx.arguments, ctx.ordinary = arguments, ordinary
        return _forward(query, key, value, *arguments)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        queries, keys, config = ctx.arguments
        inputs = [None if part is None else part.detach().requires_grad_() for part in ctx.saved_tensors]
        query, key, value, sinks = inputs
        scores = ScoreConfig(scale=config.scale, window=config.window, softcap=config.softcap, sinks=sinks)
        with torch.enable_grad():
            output = ctx.ordinary(query, key, value, queries, keys, scores)
        present = [part for part in inputs if part is not None]
        gradients_in_order = iter(torch.autograd.grad(output, present, gradients[0]))
        return *(None if part is None else next(gradients_in_order) for part in inputs), None, None
