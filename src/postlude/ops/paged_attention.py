"""Attention of the newest tokens of each sequence to its keys in pages.

A store consists of pages of `PAGE_SIZE` tokens. Row i of a `table` has the pages of sequence i in order, and
`lengths[i]` is its number of tokens, the newest included; 0 means that the row is idle. No length is read on the host,
so one CUDA graph serves sequences of every length.
"""

from __future__ import annotations

import torch
from torch import Tensor

from postlude.ops.attention import ScoreConfig
from postlude.ops.batch_invariant import is_batch_invariant
from postlude.ops.decode_attention import DecodeAttention, consecutive_positions
from postlude.ops.fp8_kv import FP8, dequantize_heads, quantize_heads
from postlude.ops.kernels.capabilities import Backend, use_kernel
from postlude.ops.shared_pages import SharedPages

PAGE_SIZE = 64  # tokens
MAX_HEAD_DIM = 256  # the largest head size of the kernel
COUNTERS = 256


def new_page_store(pages: int, heads: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns [pages, PAGE_SIZE, heads, width]. In memory the tokens of one head are adjacent, as they are read."""
    return torch.zeros(pages, heads, PAGE_SIZE, width, dtype=dtype, device=device).transpose(1, 2)


def attend_pages(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    lengths: Tensor,
    score_config: ScoreConfig,
    counters: Tensor | None = None,
    *,
    exponents: tuple[Tensor, Tensor] | None = None,
    shared: SharedPages | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Writes the keys and values of each row's newest tokens to its pages. Each attends to all keys up to its own.

    Query [T, heads, width], key [T, kv_heads, width], value [T, kv_heads, v], stores [pages, PAGE_SIZE, kv_heads,
    width] and [..., v], `table` [n, pages] int32, `lengths` [n] int64 -> [T, heads, v]. T is a multiple of n: the same
    number of tokens of every row, adjacent, the newest last. Heads share key heads in equal groups. An idle row writes
    nothing, and its output is undefined. `counters` [COUNTERS] int32 are zero before
    and after the call: see `decode_linear.linear_add`. Rows that share their first pages read these once; without
    `shared` every row reads its own.

    With `exponents`, stores of int8 [pages, PAGE_SIZE, kv_heads, 1], the keys and values are stored in FP8: see
    `fp8_kv`. The newest token too attends to its rounded key.
    """
    tokens_per_row = len(query) // max(len(lengths), 1)
    if is_batch_invariant() and use_kernel("invariant_attention", backend, query.device, query.dtype):
        from postlude.ops.kernels import invariant_attention  # needs triton

        if tokens_per_row > 1:  # each is a row for itself, since all keys are written before one is read
            lengths = lengths_of_tokens(lengths, tokens_per_row)
            table = table.repeat_interleave(tokens_per_row, 0)
        return invariant_attention.attend_pages(query, key, value, keys, values, table, lengths, score_config)
    widest = max(query.shape[-1], value.shape[-1])
    unsupported_reason = (
        f"its tiles have room for heads of {MAX_HEAD_DIM}, and these have {widest}" if widest > MAX_HEAD_DIM else None
    )
    kernel_args = (backend, query.device, query.dtype)
    if use_kernel(
        "attend_pages" if exponents is None else "attend_pages_fp8", *kernel_args, unsupported_reason=unsupported_reason
    ):
        from postlude.ops.kernels.paged_attention import attend  # needs triton

        return attend(query, key, value, keys, values, table, lengths, score_config, counters, exponents, shared)
    table = table if shared is None else shared.read_through(table)
    token_lengths = lengths_of_tokens(lengths, tokens_per_row)
    running = token_lengths.nonzero()[:, 0]
    last = token_lengths[running] - 1
    pages = table[running // tokens_per_row, last // PAGE_SIZE].long()
    stores = (keys, values) if exponents is None else (keys, values, *exponents)
    write_pages(stores, (pages, last % PAGE_SIZE), (key[running], value[running]))
    unused = torch.arange(table.shape[1] * PAGE_SIZE, device=lengths.device) >= lengths[:, None]  # of earlier sequences
    read = [store[table.long()].flatten(1, 2) for store in stores]
    if exponents is not None:
        read = [dequantize_heads(*pair, query.dtype) for pair in zip(read[:2], read[2:], strict=True)]
    gathered = [part.masked_fill_(unused[..., None, None], 0.0) for part in read]
    attention = DecodeAttention(lengths.clamp_min(tokens_per_row), table.shape[1] * PAGE_SIZE, tokens_per_row)
    return attention(query, gathered[0], gathered[1], score_config)


def lengths_of_tokens(lengths: Tensor, tokens_per_row: int) -> Tensor:
    """Returns the number of tokens of each row up to each of its newest, [n · tokens_per_row]; 0 in an idle row.

    `lengths` [n] int64 count all of the newest, and are 0 in idle rows.
    """
    if tokens_per_row == 1:
        return lengths
    counts = consecutive_positions(lengths - tokens_per_row + 1, tokens_per_row).view(-1, tokens_per_row)
    return torch.where(lengths[:, None] > 0, counts, 0).flatten()


def write_pages(
    stores: tuple[Tensor, ...], slots: tuple[Tensor, Tensor], new: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """Writes `new` keys and values [T, kv_heads, width] to the page and the offset of each token. Returns what is read.

    `stores` are those of keys and values, then in FP8 those of their exponents.
    """
    if len(stores) == 2:
        for store, part in zip(stores, new, strict=True):
            store[slots] = part
        return new
    quantized = [quantize_heads(part) for part in new]
    for store, part in zip(stores, (*(pair[0] for pair in quantized), *(pair[1] for pair in quantized)), strict=True):
        store[slots] = part
    key, value = (dequantize_heads(*pair, part.dtype) for pair, part in zip(quantized, new, strict=True))
    return key, value


def read_pages(stores: tuple[Tensor, ...], slots: tuple[Tensor, Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns the keys and values [T, kv_heads, width] that `write_pages` wrote to the slots of these tokens."""
    keys, values, *exponents = (
        store.view(torch.uint8)[slots].view(store.dtype) if store.dtype == FP8 else store[slots] for store in stores
    )
    if not exponents:
        return keys, values
    return dequantize_heads(keys, exponents[0], dtype), dequantize_heads(values, exponents[1], dtype)
