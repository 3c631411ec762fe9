"""Attention of the newest token of each sequence to its keys in pages, wherever those lie. All on the device.

A store is cut into pages of `PAGE_SIZE` tokens; row i of a `table` names those of sequence i in order, and
`lengths[i]` says how many tokens it has, the newest included; 0 means that the row is idle. Nothing here asks the
host for a length, so a step that was recorded once serves sequences of every length.
"""

from __future__ import annotations

import torch
from torch import Tensor

from postlude.ops.attention import ScoreConfig
from postlude.ops.decode_attention import DecodeAttention
from postlude.ops.kernels.capabilities import Backend, use_kernel

PAGE_SIZE = 64  # tokens
MAX_HEAD_DIM = 256  # of a head, for which the kernel's tiles have room
COUNTERS = 256


def new_page_store(pages: int, heads: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[pages, PAGE_SIZE, heads, width]. In memory the tokens of one head lie together, since they are read together."""
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
    backend: Backend = "auto",
) -> Tensor:
    """Write the newest token's key and value of each row to their places, and attend to all of them.

    Query [n, heads, width], key [n, kv_heads, width], value [n, kv_heads, v], stores [pages, PAGE_SIZE, kv_heads,
    width] and [..., v], `table` [n, most] int32, `lengths` [n] int64 -> [n, heads, v]. Heads share key heads in
    equal groups. An idle row writes nothing, and what it gets means nothing. `counters` [COUNTERS] int32 are
    zero, and are so afterwards: see `few_rows.linear_add`.
    """
    widest = max(query.shape[-1], value.shape[-1])
    refused = (
        f"its tiles have room for heads of {MAX_HEAD_DIM}, and these have {widest}" if widest > MAX_HEAD_DIM else None
    )
    if use_kernel("attend_pages", backend, query.device, query.dtype, refused=refused):
        from postlude.ops.kernels.paged_attention import attend  # needs triton

        return attend(query, key, value, keys, values, table, lengths, score_config, counters)
    running = lengths.nonzero()[:, 0]
    last = lengths[running] - 1
    pages = table[running, last // PAGE_SIZE].long()
    keys[pages, last % PAGE_SIZE], values[pages, last % PAGE_SIZE] = key[running], value[running]
    unused = torch.arange(table.shape[1] * PAGE_SIZE, device=lengths.device) >= lengths[:, None]  # what was left there
    gathered = [
        store[table.long()].flatten(1, 2).masked_fill_(unused[..., None, None], 0.0) for store in (keys, values)
    ]
    return DecodeAttention(lengths.clamp_min(1), table.shape[1] * PAGE_SIZE)(
        query, gathered[0], gathered[1], score_config
    )
