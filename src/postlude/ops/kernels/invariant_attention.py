"""Causal attention whose rows have the same bits in training, prefill and decoding.

Not measured alone: `invariant_linear` says what the batch-invariant mode costs.

A query sees its keys in blocks of `KEYS`, counted from the start of its sequence, and no program shares the keys of a
query with another. A block that a query does not see changes none of its sums, so it does not matter which queries a
tile holds. Tiles have 64 rows in decoding too, where most are empty, so that all are computed by the same instruction.

The backward is that of `kernels/attention.py`, from this lse.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, assignment, misc"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from postlude.ops.attention_scores import ScoreConfig
from postlude.ops.kernels.attention_device import LOG2E, UNSEEN
from postlude.ops.kernels.capabilities import gpu_of
from postlude.ops.kernels.launch import Kernel

ROWS, WARPS = 64, 4
MIN_FEATURES = 16  # features of a product at least
LARGE_SHARED_MEMORY = 147_456  # bytes of shared memory for wide heads with 64 keys at a time


def packed_heads(group: int) -> int:
    """Returns the room for heads that share a key head in a tile: a power of two."""
    return min(1 << (group - 1).bit_length(), ROWS)


def attend_rows(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    tiles: Tensor,
    score_config: ScoreConfig,
    *,
    lse: Tensor | None = None,
) -> Tensor:
    """Attends to keys [rows, kv_heads, width] and values [..., v] of sequences that are dense in memory.

    `tiles` [n, 4] int32: the first of a tile's queries [Tq, heads, width], queries to the sequence's end, the first
    row of its keys, and the position of the first query. A tile holds ROWS // `packed_heads` queries. Writes the `lse`
    fp32 [Tq, heads] if it is given.
    """
    output = torch.empty(*query.shape[:2], values.shape[-1], dtype=query.dtype, device=query.device)
    strides = (*keys.stride()[:2], *values.stride()[:2])
    _launch(query, keys, values, (0, *strides[:2]), (0, *strides[2:]), output, lse, tiles, None, None, score_config)
    return output


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    tiles: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    """Returns `attend_rows` of packed sequences [T, heads, v] and the lse, fp32 [T, heads]."""
    query, key, value = (tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in (query, key, value))
    lse = torch.empty(query.shape[:2], dtype=torch.float32, device=query.device)
    score_config = ScoreConfig(scale=scale, window=window, softcap=softcap, sinks=sinks)
    return attend_rows(query, key, value, tiles, score_config, lse=lse), lse


# An operator, so that selective recompute keeps its result.
_LIBRARY = torch.library.Library("postlude", "FRAGMENT")
_LIBRARY.define(
    "invariant_attention(Tensor query, Tensor key, Tensor value, Tensor? sinks, Tensor tiles, float scale, "
    "int? window, float? softcap) -> (Tensor, Tensor)"
)
_LIBRARY.impl("invariant_attention", forward, "CompositeExplicitAutograd")


def attend_pages(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    lengths: Tensor,
    score_config: ScoreConfig,
) -> Tensor:
    count, kv_heads, width = key.shape
    output = torch.empty(*query.shape[:2], value.shape[-1], dtype=query.dtype, device=query.device)
    _store_new_keys_kernel[(count, kv_heads)](
        *(key, *key.stride()[:2], keys, *keys.stride()[:3], value, *value.stride()[:2], values, *values.stride()[:3]),
        *(table, table.stride(0), lengths),
        PAGE=keys.shape[1], WIDTH=width, WIDE=triton.next_power_of_2(width), VALUE=value.shape[-1],
        VALUE_WIDE=triton.next_power_of_2(value.shape[-1]), num_warps=1,
    )  # fmt: skip
    strides = keys.stride()[:3], values.stride()[:3]
    _launch(query, keys, values, *strides, output, None, lengths, table, keys.shape[1], score_config)
    return output


def _launch(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    key_strides: tuple[int, ...],
    value_strides: tuple[int, ...],
    output: Tensor,
    lse: Tensor | None,
    tiles: Tensor,
    table: Tensor | None,
    page: int | None,
    score_config: ScoreConfig,
) -> None:
    heads, width, value_width = query.shape[1], query.shape[2], values.shape[-1]
    kv_heads = keys.shape[-2]
    group, pack = heads // kv_heads, packed_heads(heads // kv_heads)
    block, stages = key_block(max(width, value_width), query.element_size(), gpu_of(query.device).shared_memory)
    if not len(tiles):
        return
    _attend_kernel[(len(tiles), kv_heads * triton.cdiv(group, pack))](
        *(query, *query.stride()[:2], keys, *key_strides, values, *value_strides),
        *(score_config.sinks, output, lse, tiles, table, 0 if table is None else table.stride(0)),
        *(score_config.scale, score_config.softcap or 1.0, score_config.window or 0),
        HEADS=heads, GROUP=group, PACK=pack, ROWS=ROWS, KEYS=block, PAGE=page or 0,
        WIDTH=width, WIDE=max(MIN_FEATURES, triton.next_power_of_2(width)),
        VALUE=value_width, VALUE_WIDE=max(MIN_FEATURES, triton.next_power_of_2(value_width)),
        SOFTCAP=score_config.softcap is not None, WINDOW=score_config.window is not None,
        num_warps=WARPS, num_stages=stages,
    )  # fmt: skip


def key_block(width: int, element_size: int, shared_memory: int) -> tuple[int, int]:
    """Returns keys of a block and loads ahead, for the wider heads of keys and values. Both follow from the model."""
    if width * element_size <= 256:
        return 64, 3 if shared_memory >= LARGE_SHARED_MEMORY else 2
    return (64 if shared_memory >= LARGE_SHARED_MEMORY and element_size == 2 else 16 if element_size == 4 else 32), 2


@Kernel
@triton.jit
def _store_new_keys_kernel(
    key, key_token, key_head, keys, keys_page, keys_slot, keys_head,
    value, value_token, value_head, values, values_page, values_slot, values_head, table, table_row, lengths,
    PAGE: tl.constexpr, WIDTH: tl.constexpr, WIDE: tl.constexpr, VALUE: tl.constexpr, VALUE_WIDE: tl.constexpr,
):  # fmt: skip
    # Writes the newest key and value of a row to its page. An idle row writes nothing.
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    position = tl.load(lengths + row).to(tl.int32) - 1
    if position >= 0:
        page = tl.load(table + row * table_row + position // PAGE).to(tl.int64)
        feature = tl.arange(0, WIDE)
        new_head = tl.load(key + row * key_token + head * key_head + feature, mask=feature < WIDTH, other=0.0)
        at = keys + page * keys_page + position % PAGE * keys_slot + head * keys_head + feature
        tl.store(at, new_head, mask=feature < WIDTH)
        feature = tl.arange(0, VALUE_WIDE)
        new_head = tl.load(value + row * value_token + head * value_head + feature, mask=feature < VALUE, other=0.0)
        at = values + page * values_page + position % PAGE * values_slot + head * values_head + feature
        tl.store(at, new_head, mask=feature < VALUE)


@Kernel
@triton.jit
def _attend_kernel(  # noqa: PLR0915 - one pass over the keys
    query, query_token, query_head, keys, key_page, key_slot, key_head, values, value_page, value_slot, value_head,
    sinks, output, lse, tiles, table, table_row, scale, softcap, window,
    HEADS: tl.constexpr, GROUP: tl.constexpr, PACK: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    PAGE: tl.constexpr, WIDTH: tl.constexpr, WIDE: tl.constexpr, VALUE: tl.constexpr, VALUE_WIDE: tl.constexpr,
    SOFTCAP: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    tile, head_tiles = tl.program_id(0).to(tl.int64), tl.cdiv(GROUP, PACK)
    kv_head = tl.program_id(1) // head_tiles
    if table is None:
        first, rows_left = tl.load(tiles + tile * 4).to(tl.int64), tl.load(tiles + tile * 4 + 1).to(tl.int32)
        key_row, position = tl.load(tiles + tile * 4 + 2).to(tl.int64), tl.load(tiles + tile * 4 + 3).to(tl.int32)
    else:  # `tiles` are the rows' lengths, 0 in an idle row
        length = tl.load(tiles + tile).to(tl.int32)
        first, rows_left, position, key_row = tile, tl.minimum(length, 1), length - 1, tile * 0
    lane = tl.arange(0, ROWS)
    row, group_head = lane // PACK, tl.program_id(1) % head_tiles * PACK + lane % PACK
    head = kv_head * GROUP + group_head
    valid = (row < rows_left) & (group_head < GROUP)
    query_position = position + row
    feature, value_feature, slot = tl.arange(0, WIDE), tl.arange(0, VALUE_WIDE), tl.arange(0, KEYS)
    query_at = query + (first + row)[:, None] * query_token + head[:, None] * query_head + feature[None, :]
    query_tile = tl.load(query_at, mask=valid[:, None] & (feature < WIDTH)[None, :], other=0.0)
    keys += kv_head * key_head
    values += kv_head * value_head
    state = tl.zeros((ROWS, VALUE_WIDE), tl.float32)
    if sinks is None:
        maximum = tl.full((ROWS,), UNSEEN, tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
    else:
        maximum = tl.load(sinks + head, mask=valid, other=0.0).to(tl.float32) * LOG2E
        total = tl.full((ROWS,), 1.0, tl.float32)
    stop = position + tl.minimum(rows_left, ROWS // PACK)
    start = tl.maximum(position - window + 1, 0) // KEYS * KEYS if WINDOW else 0
    for begin in range(start, stop, KEYS):
        key_position = begin + slot
        key_mask = key_position < stop
        if table is None:
            key_base, value_base = (key_row + begin) * key_slot, (key_row + begin) * value_slot
        else:
            page = tl.load(table + tile * table_row + begin // PAGE).to(tl.int64)
            key_base, value_base = (
                page * key_page + begin % PAGE * key_slot,
                page * value_page + begin % PAGE * value_slot,
            )
        key_at = keys + key_base + slot[:, None] * key_slot + feature[None, :]
        key = tl.load(key_at, mask=key_mask[:, None] & (feature < WIDTH)[None, :], other=0.0)
        scores = tl.dot(query_tile, tl.trans(key), input_precision="ieee")
        if SOFTCAP:
            scores, factor = softcap * (2.0 * tl.sigmoid(scores * (2.0 * scale / softcap)) - 1.0), LOG2E
        else:
            factor = scale * LOG2E
        visible = key_position[None, :] <= query_position[:, None]
        if WINDOW:
            visible &= key_position[None, :] > query_position[:, None] - window
        scores = tl.where(visible, scores, UNSEEN)
        new_maximum = tl.maximum(maximum, tl.max(scores, 1) * factor)
        weight = tl.where(visible, tl.exp2(scores * factor - new_maximum[:, None]), 0.0)
        decay = tl.exp2(maximum - new_maximum)
        total = total * decay + tl.sum(weight, 1)
        value_at = values + value_base + slot[:, None] * value_slot + value_feature[None, :]
        value = tl.load(value_at, mask=key_mask[:, None] & (value_feature < VALUE)[None, :], other=0.0)
        state = tl.dot(weight.to(value.dtype), value, state * decay[:, None], input_precision="ieee")
        maximum = new_maximum
    output_row = (first + row) * HEADS + head
    if lse is not None:
        tl.store(lse + output_row, (maximum + tl.log2(total)) * (1.0 / LOG2E), mask=valid)
    mask = valid[:, None] & (value_feature < VALUE)[None, :]
    result = (state / total[:, None]).to(output.dtype.element_ty)
    tl.store(output + output_row[:, None] * VALUE + value_feature[None, :], result, mask=mask)
