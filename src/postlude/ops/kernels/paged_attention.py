"""Flash decoding over pages: a program reads the keys of one sequence and key head once, for all heads of its group
and all new tokens of the sequence.

It takes 133 µs for 128 rows of 1024 keys, 32 and 8 heads of 128, on an H200: 4.05 TB/s of 4.8. PyTorch's attention
takes 124 µs where the keys of a row are adjacent (benchmarks/results/small_kernels_h200.json). It needs no lengths on
the host, so that a CUDA graph can hold it. With 192 keys it takes 8.3, 31.2 and 103 µs for 16, 128 and 512 rows of a
0.6B (benchmarks/results/decode_tries_h200.json).

Where few sequences run, the keys of each are split among several programs, and the last of them to finish merges what
they left: states (weighted sums of values), and the maxima and sums of the weights. The number of splits follows from
the number of rows, so lengths stay on the device.

Rows with the same first pages (completions of one prompt) read these together: another kernel before it loads each key
of the pages once, multiplies it with the queries of up to 64 heads of all those rows, and leaves a state for each row.
With prompts of 512 and 16 completions of each, 512 rows then take 115 µs in place of 200
(benchmarks/results/decode_step_h200.json).

In the kernels' parameters `x_token`, `x_head`, `x_page`, `x_slot` and `x_row` are strides of `x`.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, assignment, misc"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from postlude.ops.attention import ScoreConfig
from postlude.ops.kernels.fp8 import power_of_two, scale_exponent, to_fp8
from postlude.ops.kernels.launch import Kernel
from postlude.ops.shared_pages import SharedPages

PROGRAMS = 512  # that a kernel should have at least: about four for each of a GPU's multiprocessors
MAX_SPLITS = 16
MAX_SHARED_SPLITS = 8
STAGES = 3
MIN_TILE = 16  # rows of a product at least
MAX_QUERIES = 64  # rows of a product with shared keys


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    lengths: Tensor,
    score_config: ScoreConfig,
    counters: Tensor | None = None,
    exponents: tuple[Tensor, Tensor] | None = None,
    shared: SharedPages | None = None,
) -> Tensor:
    count, (tokens, heads, width) = len(lengths), query.shape
    tokens_per_row = tokens // max(count, 1)
    page_size, kv_heads, value_width = keys.shape[1], keys.shape[2], values.shape[-1]
    group, device = heads // kv_heads, query.device
    splits = max(1, min(MAX_SPLITS, PROGRAMS // max(1, count * kv_heads)))
    output = torch.empty(tokens, heads, value_width, dtype=query.dtype, device=device)
    partial, statistics = (output, output) if splits == 1 else _new_partial(tokens, heads, splits, value_width, device)
    if splits > 1 and counters is None:
        counters = torch.zeros(PROGRAMS // 2, dtype=torch.int32, device=device)
    fp8_arguments = (None, None, 0, 0, 0) if exponents is None else (*exponents, *exponents[0].stride()[:3])
    strides = keys.stride()[:3], values.stride()[:3]
    cache = (keys, *strides[0], values, *strides[1], *fp8_arguments, table, table.stride(0), lengths)
    score_numbers = (score_config.scale, score_config.softcap or 0.0, score_config.window or 0)
    constants = {
        "TOKENS": tokens_per_row,
        "GROUP": group,
        "WIDTH": width,
        "WIDE": max(MIN_TILE, triton.next_power_of_2(width)),
        "VALUE": value_width,
        "VALUE_WIDE": max(MIN_TILE, triton.next_power_of_2(value_width)),
        "PAGE": page_size,
        "KEYS": min(page_size, 64 if max(width, value_width) * query.element_size() <= 256 else 32),
        "SOFTCAP": score_config.softcap is not None,
        "WINDOW": score_config.window is not None,
        "num_warps": 4,
        "num_stages": STAGES if query.element_size() == 2 else 2,
    }
    shared_splits, shared_partial, shared_statistics = 0, None, None
    if shared is not None:
        tiles, members = shared.shape
        queries = MAX_QUERIES if query.element_size() == 2 else MIN_TILE
        padded_group = triton.next_power_of_2(tokens_per_row * group)
        rows_at_a_time = max(1, min(members, queries // padded_group))
        programs = tiles * (members // rows_at_a_time)
        shared_splits = max(1, min(MAX_SHARED_SPLITS, PROGRAMS // (programs * kv_heads)))
        shared_partial, shared_statistics = _new_partial(tokens, heads, shared_splits, value_width, device)
        _shared_pages_kernel[(programs, kv_heads, shared_splits)](
            *(query, *query.stride()[:2], *cache, shared.tiles, shared.pages, shared_partial, shared_statistics),
            *score_numbers, ROWS_AT_A_TIME=rows_at_a_time, PADDED_GROUP=padded_group,
            QUERIES=max(MIN_TILE, rows_at_a_time * padded_group), SPLITS=shared_splits, **constants,
        )  # fmt: skip
    _attend_kernel[(count, kv_heads, splits)](
        *(query, *query.stride()[:2], key, *key.stride()[:2], value, *value.stride()[:2], *cache),
        *(score_config.sinks, output, partial, statistics, counters if splits > 1 else None),
        *(None if shared is None else shared.pages, shared_partial, shared_statistics, *score_numbers),
        QUERIES=max(MIN_TILE, triton.next_power_of_2(tokens_per_row * group)), SPLITS=splits,
        SHARED_SPLITS=shared_splits, SINKS=score_config.sinks is not None, **constants,
    )  # fmt: skip
    return output


def _new_partial(tokens: int, heads: int, splits: int, value_width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns memory for what each split leaves: its weighted sum of values; the maximum and the sum of its weights."""
    states = torch.empty(tokens, heads, splits, value_width, dtype=torch.float32, device=device)
    return states, torch.empty(tokens, heads, splits, 2, dtype=torch.float32, device=device)


@Kernel
@triton.jit
def _attend_kernel(  # noqa: PLR0912, PLR0915
    query, query_token, query_head, key, key_token, key_head_stride, value, value_token, value_head_stride,
    keys, keys_page, keys_slot, keys_head, values, values_page, values_slot, values_head, key_exponents,
    value_exponents, exponents_page, exponents_slot, exponents_head, table, table_row, lengths, sinks,
    output, partial, statistics, counters, shared_pages, shared_partial, shared_statistics, scale, softcap, window,
    TOKENS: tl.constexpr, GROUP: tl.constexpr, QUERIES: tl.constexpr, WIDTH: tl.constexpr, WIDE: tl.constexpr,
    VALUE: tl.constexpr, VALUE_WIDE: tl.constexpr, PAGE: tl.constexpr, KEYS: tl.constexpr, SPLITS: tl.constexpr,
    SHARED_SPLITS: tl.constexpr, SOFTCAP: tl.constexpr, WINDOW: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    row, key_head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths + row).to(tl.int32)
    stored = length - TOKENS  # the first new key goes there; those before it are read
    first_visible = tl.maximum(stored + 1 - window, 0) if WINDOW else 0  # that the first new token sees
    first_read, shared_length = first_visible, 0
    if shared_pages is not None:
        shared_length = tl.load(shared_pages + row) * PAGE
        first_read = tl.maximum(first_visible, shared_length)
    start = first_read // KEYS
    stop = tl.where(stored > first_read, tl.cdiv(stored, KEYS), start)
    split_blocks = tl.cdiv(stop - start, SPLITS)
    start += split * split_blocks
    split_stop = tl.minimum(start + split_blocks, stop)

    lane, feature, value_feature = tl.arange(0, QUERIES), tl.arange(0, WIDE), tl.arange(0, VALUE_WIDE)
    token = lane // GROUP  # of the row's new ones
    head = key_head * GROUP + lane % GROUP
    valid = lane < TOKENS * GROUP
    index = row * TOKENS + token
    at = query + index[:, None] * query_token + head[:, None] * query_head + feature[None, :]
    query_tile = tl.load(at, mask=valid[:, None] & (feature < WIDTH)[None, :], other=0.0)
    operand, query_scale = _scaled_queries(query_tile, key_exponents)
    maximum = tl.full((QUERIES,), -1e30, tl.float32)
    total = tl.zeros((QUERIES,), tl.float32)
    state = tl.zeros((QUERIES, VALUE_WIDE), tl.float32)
    has_new_tokens = (split == 0) & (length > 0)  # one program handles the new tokens
    key_mask = feature < tl.where(has_new_tokens, WIDTH, 0)
    value_mask = value_feature < tl.where(has_new_tokens, VALUE, 0)
    new_key_at = key + row * TOKENS * key_token + key_head * key_head_stride + feature
    new_value_at = value + row * TOKENS * value_token + key_head * value_head_stride + value_feature
    new_key = tl.load(new_key_at, mask=key_mask, other=0.0)
    new_value = tl.load(new_value_at, mask=value_mask, other=0.0)
    new_page = tl.load(table + row * table_row + tl.maximum(stored, 0) // PAGE).to(tl.int64)
    for block in range(start, split_stop):  # each holds at least one visible key
        position = block * KEYS + tl.arange(0, KEYS)
        page = tl.load(table + row * table_row + block * KEYS // PAGE).to(tl.int64)
        loaded = (position >= first_visible) & (position < stored)
        visible = loaded[None, :]
        if WINDOW and TOKENS > 1:
            visible = visible & (position[None, :] >= (stored + 1 + token - window)[:, None])
        keys_at = keys + page * keys_page + key_head * keys_head + (position % PAGE)[None, :] * keys_slot
        values_at = values + page * values_page + key_head * values_head + (position % PAGE)[:, None] * values_slot
        exponents_at = page * exponents_page + key_head * exponents_head + (position % PAGE) * exponents_slot
        maximum, total, state = _attend_block(
            operand, query_scale, maximum, total, state, keys_at, values_at, key_exponents, value_exponents,
            exponents_at, loaded, visible, scale, softcap, feature, value_feature, WIDTH, VALUE, SOFTCAP,
        )  # fmt: skip

    if has_new_tokens:
        for new_index in tl.static_range(TOKENS):
            position = stored + new_index
            if new_index > 0:
                new_key = tl.load(new_key_at + new_index * key_token, mask=feature < WIDTH, other=0.0)
                new_value = tl.load(new_value_at + new_index * value_token, mask=value_feature < VALUE, other=0.0)
                new_page = tl.load(table + row * table_row + position // PAGE).to(tl.int64)
            stored_key, stored_value = new_key, new_value
            if key_exponents is not None:
                stored_key, key_exponent = _quantize_head(new_key)
                stored_value, value_exponent = _quantize_head(new_value)
                slot_at = new_page * exponents_page + key_head * exponents_head + (position % PAGE) * exponents_slot
                tl.store(key_exponents + slot_at, key_exponent)
                tl.store(value_exponents + slot_at, value_exponent)
            slot_at = keys + new_page * keys_page + key_head * keys_head + (position % PAGE) * keys_slot + feature
            tl.store(slot_at, stored_key, mask=feature < WIDTH)
            slot_at = values + new_page * values_page + key_head * values_head + (position % PAGE) * values_slot
            tl.store(slot_at + value_feature, stored_value, mask=value_feature < VALUE)
            key_fp32, value_fp32 = stored_key.to(tl.float32), stored_value.to(tl.float32)
            if key_exponents is not None:
                key_fp32 *= power_of_two(key_exponent)
                value_fp32 *= power_of_two(value_exponent)
            score = tl.sum(query_tile.to(tl.float32) * key_fp32[None, :], 1) * scale
            if SOFTCAP:
                score = softcap * (2.0 * tl.sigmoid(2.0 * score / softcap) - 1.0)
            if new_index > 0:
                score = tl.where(token >= new_index, score, float("-inf"))
            if WINDOW and new_index < TOKENS - 1:
                score = tl.where(token - new_index < window, score, float("-inf"))
            new_maximum = tl.maximum(maximum, score)
            decay, weight = tl.exp(maximum - new_maximum), tl.exp(score - new_maximum)
            added = weight[:, None] * value_fp32[None, :]
            if new_index > 0:  # a rejected draft may be NaN
                added = tl.where((token >= new_index)[:, None], added, 0.0)
            state = state * decay[:, None] + added
            total = total * decay + weight
            maximum = new_maximum

    heads = tl.num_programs(1) * GROUP
    at = output + (index * heads + head)[:, None] * VALUE + value_feature[None, :]
    mask = valid[:, None] & (value_feature < VALUE)[None, :]
    first_shared_split = (index * heads + head) * SHARED_SPLITS
    has_shared = lane < tl.where(tl.minimum(shared_length, length) > 0, TOKENS * GROUP, 0)
    if SPLITS == 1:
        if SHARED_SPLITS > 0:
            maximum, total, state = _merge_splits(
                maximum, total, state, shared_partial, shared_statistics, first_shared_split, has_shared,
                value_feature, VALUE, SHARED_SPLITS,
            )  # fmt: skip
        _store_output(maximum, total, state, sinks, head, valid, at, mask, SINKS)
    else:
        first_split = (index * heads + head) * SPLITS
        split_index = first_split + split
        tl.store(partial + split_index[:, None] * VALUE + value_feature[None, :], state, mask=mask)
        tl.store(statistics + split_index * 2, maximum, mask=valid)
        tl.store(statistics + split_index * 2 + 1, total, mask=valid)
        tl.debug_barrier()  # all threads have stored before one counts
        counter = counters + row * tl.num_programs(1) + key_head
        if tl.atomic_add(counter, 1, sem="acq_rel") == SPLITS - 1:
            tl.debug_barrier()
            maximum = tl.full((QUERIES,), -1e30, tl.float32)  # an idle row has none
            total = tl.zeros((QUERIES,), tl.float32)
            state = tl.zeros((QUERIES, VALUE_WIDE), tl.float32)
            maximum, total, state = _merge_splits(
                maximum, total, state, partial, statistics, first_split, valid, value_feature, VALUE, SPLITS
            )
            if SHARED_SPLITS > 0:
                maximum, total, state = _merge_splits(
                    maximum, total, state, shared_partial, shared_statistics, first_shared_split, has_shared,
                    value_feature, VALUE, SHARED_SPLITS,
                )  # fmt: skip
            _store_output(maximum, total, state, sinks, head, valid, at, mask, SINKS)
            tl.store(counter, 0)


@Kernel
@triton.jit
def _shared_pages_kernel(
    query, query_token, query_head, keys, keys_page, keys_slot, keys_head, values, values_page, values_slot,
    values_head, key_exponents, value_exponents, exponents_page, exponents_slot, exponents_head, table, table_row,
    lengths, tiles, shared_pages, partial, statistics, scale, softcap, window,
    ROWS_AT_A_TIME: tl.constexpr, PADDED_GROUP: tl.constexpr, TOKENS: tl.constexpr, GROUP: tl.constexpr,
    QUERIES: tl.constexpr, WIDTH: tl.constexpr, WIDE: tl.constexpr, VALUE: tl.constexpr, VALUE_WIDE: tl.constexpr,
    PAGE: tl.constexpr, KEYS: tl.constexpr, SPLITS: tl.constexpr, SOFTCAP: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    # A program takes ROWS_AT_A_TIME rows of a tile, and for each the TOKENS * GROUP queries of a key head, padded to a
    # power of two.
    key_head, split = tl.program_id(1), tl.program_id(2)
    members = tiles + tl.program_id(0) * ROWS_AT_A_TIME
    leader = tl.load(members).to(tl.int64)
    if leader >= 0:
        lane, feature, value_feature = tl.arange(0, QUERIES), tl.arange(0, WIDE), tl.arange(0, VALUE_WIDE)
        in_program = lane < ROWS_AT_A_TIME * PADDED_GROUP
        row = tl.load(members + lane // PADDED_GROUP, mask=in_program, other=-1).to(tl.int64)
        token = lane % PADDED_GROUP // GROUP  # of the row's new ones
        head = key_head * GROUP + lane % PADDED_GROUP % GROUP
        valid = (row >= 0) & (lane % PADDED_GROUP < TOKENS * GROUP)
        row_length = tl.load(lengths + row, mask=valid, other=0).to(tl.int32)
        valid = valid & (row_length > 0)
        index = row * TOKENS + token
        at = query + index[:, None] * query_token + head[:, None] * query_head + feature[None, :]
        operand = tl.load(at, mask=valid[:, None] & (feature < WIDTH)[None, :], other=0.0)
        operand, query_scale = _scaled_queries(operand, key_exponents)
        shared_length = tl.load(shared_pages + leader) * PAGE
        first_visible = tl.zeros((QUERIES,), tl.int32)
        start = 0
        if WINDOW:
            first_visible = tl.maximum(row_length - TOKENS + 1 + token - window, 0)
            start = tl.min(tl.where(valid, first_visible, shared_length)) // KEYS
        stop = tl.maximum(shared_length // KEYS, start)
        split_blocks = tl.cdiv(stop - start, SPLITS)
        start += split * split_blocks
        maximum = tl.full((QUERIES,), -1e30, tl.float32)
        total = tl.zeros((QUERIES,), tl.float32)
        state = tl.zeros((QUERIES, VALUE_WIDE), tl.float32)
        for block in range(start, tl.minimum(start + split_blocks, stop)):
            position = block * KEYS + tl.arange(0, KEYS)
            page = tl.load(table + leader * table_row + block * KEYS // PAGE).to(tl.int64)
            keys_at = keys + page * keys_page + key_head * keys_head + (position % PAGE)[None, :] * keys_slot
            values_at = values + page * values_page + key_head * values_head + (position % PAGE)[:, None] * values_slot
            exponents_at = page * exponents_page + key_head * exponents_head + (position % PAGE) * exponents_slot
            maximum, total, state = _attend_block(
                operand, query_scale, maximum, total, state, keys_at, values_at, key_exponents, value_exponents,
                exponents_at, position >= 0, position[None, :] >= first_visible[:, None], scale, softcap, feature,
                value_feature, WIDTH, VALUE, SOFTCAP,
            )  # fmt: skip
        split_index = (index * (tl.num_programs(1) * GROUP) + head) * SPLITS + split
        tl.store(
            partial + split_index[:, None] * VALUE + value_feature[None, :],
            state,
            mask=valid[:, None] & (value_feature < VALUE)[None, :],
        )
        tl.store(statistics + split_index * 2, maximum, mask=valid)
        tl.store(statistics + split_index * 2 + 1, total, mask=valid)


@triton.jit
def _scaled_queries(queries, exponents):
    """Returns queries as products take them, and for FP8 keys the scale of each."""
    scale = tl.zeros((queries.shape[0],), tl.float32)
    if exponents is not None:
        # FP8 becomes fp16 in one instruction, bf16 in three. A power of two brings a query into the range of fp16.
        queries_fp32 = queries.to(tl.float32)
        scale = power_of_two(scale_exponent(tl.max(tl.abs(queries_fp32), 1)))
        queries = (queries_fp32 / scale[:, None]).to(tl.float32 if queries.dtype == tl.float32 else tl.float16)
    return queries, scale


@triton.jit
def _quantize_head(head):
    """Returns a head [width] in FP8, and the exponent of its scale: see `ops.fp8_kv`."""
    head_fp32 = head.to(tl.float32)
    exponent = scale_exponent(tl.max(tl.abs(head_fp32), 0))
    return to_fp8(head_fp32 * power_of_two(-exponent)), exponent.to(tl.int8)


@triton.jit
def _attend_block(
    operand, query_scale, maximum, total, state, keys_at, values_at, key_exponents, value_exponents, exponents_at,
    loaded, visible, scale, softcap, feature, value_feature,
    WIDTH: tl.constexpr, VALUE: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    # `loaded` [KEYS] are the keys to read, `visible` [QUERIES or 1, KEYS] those that a query sees.
    key_tile = tl.load(keys_at + feature[:, None], mask=loaded[None, :] & (feature < WIDTH)[:, None], other=0.0)
    scores = tl.dot(operand, key_tile.to(operand.dtype), input_precision="ieee") * scale
    if key_exponents is not None:
        key_exponent = tl.load(key_exponents + exponents_at, mask=loaded, other=0)
        scores *= query_scale[:, None] * power_of_two(key_exponent)[None, :]
    if SOFTCAP:
        scores = softcap * (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0)
    scores = tl.where(visible, scores, float("-inf"))
    new_maximum = tl.maximum(maximum, tl.max(scores, 1))
    weights = tl.exp(scores - new_maximum[:, None])
    decay = tl.exp(maximum - new_maximum)
    value_tile = tl.load(
        values_at + value_feature[None, :], mask=loaded[:, None] & (value_feature < VALUE)[None, :], other=0.0
    )
    total = total * decay + tl.sum(weights, 1)
    if key_exponents is None:
        state = state * decay[:, None] + tl.dot(weights.to(value_tile.dtype), value_tile, input_precision="ieee")
    else:
        value_exponent = tl.load(value_exponents + exponents_at, mask=loaded, other=0)
        weights *= power_of_two(value_exponent)[None, :]
        largest_weight = tl.maximum(tl.max(weights, 1), 1e-30)[:, None]
        block_state = tl.dot(
            (weights / largest_weight).to(operand.dtype), value_tile.to(operand.dtype), input_precision="ieee"
        )
        state = state * decay[:, None] + block_state * largest_weight
    return new_maximum, total, state


@triton.jit
def _merge_splits(
    maximum, total, state, partial, statistics, first_split, valid, value_feature,
    VALUE: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    # Adds SPLITS parts of the keys, in their order.
    for number in tl.static_range(SPLITS):  # loads do not wait for each other
        split = first_split + number
        split_maximum = tl.load(statistics + split * 2, mask=valid, other=-1e30, cache_modifier=".cg")
        split_total = tl.load(statistics + split * 2 + 1, mask=valid, other=0.0, cache_modifier=".cg")
        split_at = partial + split[:, None] * VALUE + value_feature[None, :]
        split_state = tl.load(
            split_at, mask=valid[:, None] & (value_feature < VALUE)[None, :], other=0.0, cache_modifier=".cg"
        )
        new_maximum = tl.maximum(maximum, split_maximum)
        decay, weight = tl.exp(maximum - new_maximum), tl.exp(split_maximum - new_maximum)
        state = state * decay[:, None] + split_state * weight[:, None]
        total = total * decay + split_total * weight
        maximum = new_maximum
    return maximum, total, state


@triton.jit
def _store_output(maximum, total, state, sinks, head, valid, at, mask, SINKS: tl.constexpr):
    if SINKS:
        sink = tl.load(sinks + head, mask=valid, other=0.0).to(tl.float32)
        new_maximum = tl.maximum(maximum, sink)
        decay = tl.exp(maximum - new_maximum)
        state, total = state * decay[:, None], total * decay + tl.exp(sink - new_maximum)
    result = state / tl.maximum(total, 1e-30)[:, None]
    tl.store(at, result.to(at.dtype.element_ty), mask=mask)
