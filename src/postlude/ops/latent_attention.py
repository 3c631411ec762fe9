"""Attention of the newest tokens of each sequence to its latents in pages: see `paged_attention` for tables and stores.

A latent is the key of all query heads, and its first features are their values: latent attention in its absorbed form.
"""

from __future__ import annotations

import torch
from torch import Tensor

from postlude.ops.attention import ScoreConfig
from postlude.ops.decode_attention import DecodeAttention
from postlude.ops.kernels.capabilities import EMPTY, Backend, use_kernel
from postlude.ops.norm import Norm, rms_norm
from postlude.ops.paged_attention import PAGE_SIZE, lengths_of_tokens
from postlude.ops.rotary import RotaryTable, deinterleave_pairs, rotate_heads

MAX_LATENT_SIZE = 512  # features of a value that the kernels take in bf16
MAX_LATENT_SIZE_FP32 = 128
MAX_ROPE_DIM = 128  # features of a key after those, that the kernels take


def rotate_latents(
    query: Tensor, latent: Tensor, norm: Norm, table: RotaryTable, *, interleaved: bool, backend: Backend = "auto"
) -> tuple[Tensor, Tensor]:
    """Returns rotated queries [T, heads, rope], and latents [T, width], of which the last `rope` features are rotated.

    The others are normalised. `interleaved` features have the two of a pair next to each other; the results have not.
    The kernel rounds once, as in `rotate_heads`. There are no gradients.
    """
    size, rope = latent.shape[-1] - query.shape[-1], query.shape[-1]
    unsupported_reason = why_no_latent_kernel(size, rope, query.dtype) if len(query) else EMPTY
    if use_kernel("rotate_latents", backend, query.device, query.dtype, unsupported_reason=unsupported_reason):
        from postlude.ops.kernels.latent_attention import rotate  # needs triton

        return rotate(query, latent, norm, table, interleaved)
    latent, key = latent.split((size, rope), dim=-1)
    if interleaved:
        query, key = deinterleave_pairs(query), deinterleave_pairs(key)
    query, rotated_key = rotate_heads(query, key[:, None], table)
    return query, torch.cat((rms_norm(latent, norm.weight, norm.eps, norm.offset), rotated_key[:, 0]), dim=-1)


def attend_latent_pages(
    query: Tensor,
    query_rotated: Tensor,
    new: Tensor,
    store: Tensor,
    table: Tensor,
    lengths: Tensor,
    scale: float,
    counters: Tensor | None = None,
    *,
    backend: Backend = "auto",
) -> Tensor:
    """Writes the latents of each row's newest tokens to its pages. Each attends to all latents up to its own.

    Query [T, heads, size] and its other features [T, heads, rope], new latents [T, size + rope], store [pages,
    PAGE_SIZE, 1, size + rope], `table` [n, pages] int32, `lengths` [n] int64 -> [T, heads, size]: the first features
    of latents are values. T is a multiple of n: the same number of tokens of every row, adjacent, the newest last. An
    idle row writes nothing, and its output is undefined. `counters` are those of `attend_pages`. Every row reads its
    own pages, shared or not.
    """
    tokens_per_row = len(query) // max(len(lengths), 1)
    size = query.shape[-1]
    unsupported_reason = why_no_latent_kernel(size, query_rotated.shape[-1], query.dtype) if len(query) else EMPTY
    if use_kernel("attend_latent_pages", backend, query.device, query.dtype, unsupported_reason=unsupported_reason):
        from postlude.ops.kernels.latent_attention import attend  # needs triton

        return attend(query, query_rotated, new, store, table, lengths, scale, counters)
    token_lengths = lengths_of_tokens(lengths, tokens_per_row)
    running = token_lengths.nonzero()[:, 0]
    last = token_lengths[running] - 1
    store[table[running // tokens_per_row, last // PAGE_SIZE].long(), last % PAGE_SIZE, 0] = new[running]
    unused = torch.arange(table.shape[1] * PAGE_SIZE, device=lengths.device) >= lengths[:, None]  # of earlier sequences
    latents = store[table.long()].flatten(1, 2).masked_fill_(unused[..., None, None], 0.0)
    attention = DecodeAttention(lengths.clamp_min(tokens_per_row), latents.shape[1], tokens_per_row)
    return attention(torch.cat((query, query_rotated), dim=-1), latents, latents[..., :size], ScoreConfig(scale=scale))


def why_no_latent_kernel(latent_size: int, rope_dim: int, dtype: torch.dtype) -> str | None:
    """Returns why the kernels do not take latents of these sizes; None if they do."""
    largest = MAX_LATENT_SIZE if dtype.itemsize == 2 else MAX_LATENT_SIZE_FP32
    if latent_size > largest or rope_dim > MAX_ROPE_DIM:
        return (
            f"its tiles have room for values of {largest} features in {dtype} and {MAX_ROPE_DIM} more of a key, and "
            f"these have {latent_size} and {rope_dim}"
        )
    return None
