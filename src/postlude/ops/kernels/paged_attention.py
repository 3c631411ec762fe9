"""Flash decoding over pages: a program reads the keys of one sequence and key head once, for all heads of its group
and all new tokens of the sequence.

Not measured alone. It lets a decode step be captured as a CUDA graph: 12,124, 56,474 and 92,657 tokens/s at 16, 128 and
512 completions of a 0.6B on an H200, against 352, 2,541 and 5,035 with steps from the host (docs/benchmarks.md, "The
generator").

Where few sequences run, several programs share the keys of each, and the last of them to finish joins their parts. How
many depends on the number of rows only, so lengths stay on the device.

Rows with the same first pages (completions of one prompt) read these together: another kernel before it loads each key
of the pages once, multiplies it with the queries of up to 64 heads of all those rows, and leaves a part for each row.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, assignment, misc"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from postlude.ops.attention import ScoreConfig
from postlude.ops.kernels.fp8_device import power_of_two, scale_exponent, to_fp8
from postlude.ops.kernels.launch import Kernel
from postlude.ops.shared_pages import SharedPages

PROGRAMS = 512  # that a kernel should have at least: about four for each of a GPU's multiprocessors
MOST_SPLITS = 16
MOST_SHARED_SPLITS = 8
STAGES = 3
LEAST = 16  # rows of a product at least
MOST_QUERIES = 64  # rows of a product with shared keys


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
    """See `paged_attention.attend_pages`."""
    count, (tokens, heads, width) = len(lengths), query.shape
    tokens_per_row = tokens // max(count, 1)
    page, kv_heads, made = keys.shape[1], keys.shape[2], values.shape[-1]
    group, device = heads // kv_heads, query.device
    splits = max(1, min(MOST_SPLITS, PROGRAMS // max(1, count * kv_heads)))
    output = torch.empty(tokens, heads, made, dtype=query.dtype, device=device)
    parts, weights = (output, output) if splits == 1 else _new_parts(tokens, heads, splits, made, device)
    if splits > 1 and counters is None:
        counters = torch.zeros(PROGRAMS // 2, dtype=torch.int32, device=device)
    of_fp8 = (None, None, 0, 0, 0) if exponents is None else (*exponents, *exponents[0].stride()[:3])
    stored = (keys, *keys.stride()[:3], values, *values.stride()[:3], *of_fp8, table, table.stride(0), lengths)
    score = (score_config.scale, score_config.softcap or 0.0, score_config.window or 0)
    constants = {
        "TOKENS": tokens_per_row,
        "GROUP": group,
        "WIDTH": width,
        "FEATURES": max(LEAST, triton.next_power_of_2(width)),
        "VALUE": made,
        "VALUES": max(LEAST, triton.next_power_of_2(made)),
        "PAGE": page,
        "BLOCK": min(page, 64 if max(width, made) * query.element_size() <= 256 else 32),
        "SOFTCAP": score_config.softcap is not None,
        "WINDOW": score_config.window is not None,
        "num_warps": 4,
        "num_stages": STAGES if query.element_size() == 2 else 2,
    }
    shared_splits, shared_parts, shared_weights = 0, None, None
    if shared is not None:
        tiles, members = shared.shape
        queries = MOST_QUERIES if query.element_size() == 2 else LEAST
        padded_group = triton.next_power_of_2(tokens_per_row * group)
        at_once = max(1, min(members, queries // padded_group))
        programs = tiles * (members // at_once)
        shared_splits = max(1, min(MOST_SHARED_SPLITS, PROGRAMS // (programs * kv_heads)))
        shared_parts, shared_weights = _new_parts(tokens, heads, shared_splits, made, device)
        _shared_kernel[(programs, kv_heads, shared_splits)](
            *(query, *query.stride()[:2], *stored, shared.tiles, shared.pages, shared_parts, shared_weights, *score),
            AT_ONCE=at_once, HEADS=padded_group, ROWS=max(LEAST, at_once * padded_group), SPLITS=shared_splits,
            **constants,
        )  # fmt: skip
    _attend_kernel[(count, kv_heads, splits)](
        *(query, *query.stride()[:2], key, *key.stride()[:2], value, *value.stride()[:2], *stored),
        *(score_config.sinks, output, parts, weights, counters if splits > 1 else None),
        *(None if shared is None else shared.pages, shared_parts, shared_weights, *score),
        ROWS=max(LEAST, triton.next_power_of_2(tokens_per_row * group)), SPLITS=splits, SHARED_SPLITS=shared_splits,
        SINKS=score_config.sinks is not None, **constants,
    )  # fmt: skip
    return output


def _new_parts(tokens: int, heads: int, splits: int, made: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns room for the parts: weighted sums of values, and the maximum and the total of their weights."""
    sums = torch.empty(tokens, heads, splits, made, dtype=torch.float32, device=device)
    return sums, torch.empty(tokens, heads, splits, 2, dtype=torch.float32, device=device)


@Kernel
@triton.jit
def _attend_kernel(  # noqa: PLR0912, PLR0915
    query, query_token, query_head, key, key_token, key_head_stride, value, value_token, value_head_stride,
    keys, keys_page, keys_slot, keys_head, values, values_page, values_slot, values_head, key_exponents,
    value_exponents, exponents_page, exponents_slot, exponents_head, table, table_row, lengths, sinks,
    output, parts, weights, counters, shared_pages, shared_parts, shared_weights, scale, softcap, window,
    TOKENS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, FEATURES: tl.constexpr,
    VALUE: tl.constexpr, VALUES: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr,
    SHARED_SPLITS: tl.constexpr, SOFTCAP: tl.constexpr, WINDOW: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    row, key_head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths + row).to(tl.int32)
    last = length - TOKENS  # the first new key goes there; those before it are read
    first = tl.maximum(last + 1 - window, 0) if WINDOW else 0  # that the first new token sees
    own_first, shared_length = first, 0
    if shared_pages is not None:
        shared_length = tl.load(shared_pages + row) * PAGE
        own_first = tl.maximum(first, shared_length)
    begin = own_first // BLOCK
    blocks = tl.where(last > own_first, tl.cdiv(last, BLOCK), begin)
    each = tl.cdiv(blocks - begin, SPLITS)
    begin += split * each
    end = tl.minimum(begin + each, blocks)

    member, feature, made = tl.arange(0, ROWS), tl.arange(0, FEATURES), tl.arange(0, VALUES)
    token = member // GROUP  # of the row's new ones
    head = key_head * GROUP + member % GROUP
    own = member < TOKENS * GROUP
    index = row * TOKENS + token
    at = query + index[:, None] * query_token + head[:, None] * query_head + feature[None, :]
    exact = tl.load(at, mask=own[:, None] & (feature < WIDTH)[None, :], other=0.0)
    asked, query_scale = _scaled_queries(exact, key_exponents)
    highest = tl.full((ROWS,), -1e30, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    seen = tl.zeros((ROWS, VALUES), tl.float32)
    writes = (split == 0) & (length > 0)  # one program handles the new tokens
    of_key, of_value = feature < tl.where(writes, WIDTH, 0), made < tl.where(writes, VALUE, 0)
    new_key = key + row * TOKENS * key_token + key_head * key_head_stride + feature
    new_value = value + row * TOKENS * value_token + key_head * value_head_stride + made
    newest = tl.load(new_key, mask=of_key, other=0.0)
    newest_value = tl.load(new_value, mask=of_value, other=0.0)
    own_page = tl.load(table + row * table_row + tl.maximum(last, 0) // PAGE).to(tl.int64)
    for block in range(begin, end):  # each holds at least one visible key
        place = block * BLOCK + tl.arange(0, BLOCK)
        page = tl.load(table + row * table_row + block * BLOCK // PAGE).to(tl.int64)
        loaded = (place >= first) & (place < last)
        visible = loaded[None, :]
        if WINDOW and TOKENS > 1:
            visible = visible & (place[None, :] >= (last + 1 + token - window)[:, None])
        keys_at = keys + page * keys_page + key_head * keys_head + (place % PAGE)[None, :] * keys_slot
        values_at = values + page * values_page + key_head * values_head + (place % PAGE)[:, None] * values_slot
        exponents_at = page * exponents_page + key_head * exponents_head + (place % PAGE) * exponents_slot
        highest, total, seen = _add_block(
            asked, query_scale, highest, total, seen, keys_at, values_at, key_exponents, value_exponents, exponents_at,
            loaded, visible, scale, softcap, feature, made, WIDTH, VALUE, SOFTCAP,
        )  # fmt: skip

    if writes:
        for number in tl.static_range(TOKENS):
            place = last + number
            if number > 0:
                newest = tl.load(new_key + number * key_token, mask=feature < WIDTH, other=0.0)
                newest_value = tl.load(new_value + number * value_token, mask=made < VALUE, other=0.0)
                own_page = tl.load(table + row * table_row + place // PAGE).to(tl.int64)
            own_key, own_value = newest, newest_value
            if key_exponents is not None:
                own_key, key_exponent = _quantized(newest)
                own_value, value_exponent = _quantized(newest_value)
                put_at = own_page * exponents_page + key_head * exponents_head + (place % PAGE) * exponents_slot
                tl.store(key_exponents + put_at, key_exponent)
                tl.store(value_exponents + put_at, value_exponent)
            put_at = keys + own_page * keys_page + key_head * keys_head + (place % PAGE) * keys_slot + feature
            tl.store(put_at, own_key, mask=feature < WIDTH)
            put_at = values + own_page * values_page + key_head * values_head + (place % PAGE) * values_slot + made
            tl.store(put_at, own_value, mask=made < VALUE)
            wide_key, wide_value = own_key.to(tl.float32), own_value.to(tl.float32)
            if key_exponents is not None:
                wide_key *= power_of_two(key_exponent)
                wide_value *= power_of_two(value_exponent)
            score = tl.sum(exact.to(tl.float32) * wide_key[None, :], 1) * scale
            if SOFTCAP:
                score = softcap * (2.0 * tl.sigmoid(2.0 * score / softcap) - 1.0)
            if number > 0:
                score = tl.where(token >= number, score, float("-inf"))
            if WINDOW and number < TOKENS - 1:
                score = tl.where(token - number < window, score, float("-inf"))
            higher = tl.maximum(highest, score)
            before, share = tl.exp(highest - higher), tl.exp(score - higher)
            added = share[:, None] * wide_value[None, :]
            if number > 0:  # a rejected draft may be NaN
                added = tl.where((token >= number)[:, None], added, 0.0)
            seen = seen * before[:, None] + added
            total = total * before + share
            highest = higher

    heads = tl.num_programs(1) * GROUP
    at = output + (index * heads + head)[:, None] * VALUE + made[None, :]
    held = own[:, None] & (made < VALUE)[None, :]
    shared_part = (index * heads + head) * SHARED_SPLITS
    with_shared = member < tl.where(tl.minimum(shared_length, length) > 0, TOKENS * GROUP, 0)
    if SPLITS == 1:
        if SHARED_SPLITS > 0:
            highest, total, seen = _join(
                highest, total, seen, shared_parts, shared_weights, shared_part, with_shared, made, VALUE, SHARED_SPLITS
            )
        _finish(highest, total, seen, sinks, head, own, at, held, SINKS)
    else:
        first_part = (index * heads + head) * SPLITS
        part = first_part + split
        tl.store(parts + part[:, None] * VALUE + made[None, :], seen, mask=held)
        tl.store(weights + part * 2, highest, mask=own)
        tl.store(weights + part * 2 + 1, total, mask=own)
        tl.debug_barrier()  # all threads have stored before one counts
        counter = counters + row * tl.num_programs(1) + key_head
        if tl.atomic_add(counter, 1, sem="acq_rel") == SPLITS - 1:
            tl.debug_barrier()
            highest = tl.full((ROWS,), -1e30, tl.float32)  # an idle row has none
            total = tl.zeros((ROWS,), tl.float32)
            seen = tl.zeros((ROWS, VALUES), tl.float32)
            highest, total, seen = _join(highest, total, seen, parts, weights, first_part, own, made, VALUE, SPLITS)
            if SHARED_SPLITS > 0:
                highest, total, seen = _join(
                    highest, total, seen, shared_parts, shared_weights, shared_part, with_shared, made, VALUE,
                    SHARED_SPLITS,
                )  # fmt: skip
            _finish(highest, total, seen, sinks, head, own, at, held, SINKS)
            tl.store(counter, 0)


@Kernel
@triton.jit
def _shared_kernel(
    query, query_token, query_head, keys, keys_page, keys_slot, keys_head, values, values_page, values_slot,
    values_head, key_exponents, value_exponents, exponents_page, exponents_slot, exponents_head, table, table_row,
    lengths, tiles, shared_pages, parts, weights, scale, softcap, window,
    AT_ONCE: tl.constexpr, HEADS: tl.constexpr, TOKENS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
    WIDTH: tl.constexpr, FEATURES: tl.constexpr, VALUE: tl.constexpr, VALUES: tl.constexpr, PAGE: tl.constexpr,
    BLOCK: tl.constexpr, SPLITS: tl.constexpr, SOFTCAP: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    # A program takes AT_ONCE rows of a tile, each with HEADS query heads of a key head, of which TOKENS * GROUP exist.
    key_head, split = tl.program_id(1), tl.program_id(2)
    members = tiles + tl.program_id(0) * AT_ONCE
    leader = tl.load(members).to(tl.int64)
    if leader >= 0:
        index, feature, made = tl.arange(0, ROWS), tl.arange(0, FEATURES), tl.arange(0, VALUES)
        inside = index < AT_ONCE * HEADS
        row = tl.load(members + index // HEADS, mask=inside, other=-1).to(tl.int64)
        token = index % HEADS // GROUP  # of the row's new ones
        head = key_head * GROUP + index % HEADS % GROUP
        own = (row >= 0) & (index % HEADS < TOKENS * GROUP)
        its_length = tl.load(lengths + row, mask=own, other=0).to(tl.int32)
        own = own & (its_length > 0)
        query_index = row * TOKENS + token
        at = query + query_index[:, None] * query_token + head[:, None] * query_head + feature[None, :]
        asked = tl.load(at, mask=own[:, None] & (feature < WIDTH)[None, :], other=0.0)
        asked, query_scale = _scaled_queries(asked, key_exponents)
        length = tl.load(shared_pages + leader) * PAGE
        first = tl.zeros((ROWS,), tl.int32)
        begin = 0
        if WINDOW:
            first = tl.maximum(its_length - TOKENS + 1 + token - window, 0)
            begin = tl.min(tl.where(own, first, length)) // BLOCK
        blocks = tl.maximum(length // BLOCK, begin)
        each = tl.cdiv(blocks - begin, SPLITS)
        begin += split * each
        highest = tl.full((ROWS,), -1e30, tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
        seen = tl.zeros((ROWS, VALUES), tl.float32)
        for block in range(begin, tl.minimum(begin + each, blocks)):
            place = block * BLOCK + tl.arange(0, BLOCK)
            page = tl.load(table + leader * table_row + block * BLOCK // PAGE).to(tl.int64)
            keys_at = keys + page * keys_page + key_head * keys_head + (place % PAGE)[None, :] * keys_slot
            values_at = values + page * values_page + key_head * values_head + (place % PAGE)[:, None] * values_slot
            exponents_at = page * exponents_page + key_head * exponents_head + (place % PAGE) * exponents_slot
            highest, total, seen = _add_block(
                asked, query_scale, highest, total, seen, keys_at, values_at, key_exponents, value_exponents,
                exponents_at, place >= 0, place[None, :] >= first[:, None], scale, softcap, feature, made, WIDTH,
                VALUE, SOFTCAP,
            )  # fmt: skip
        part = (query_index * (tl.num_programs(1) * GROUP) + head) * SPLITS + split
        tl.store(parts + part[:, None] * VALUE + made[None, :], seen, mask=own[:, None] & (made < VALUE)[None, :])
        tl.store(weights + part * 2, highest, mask=own)
        tl.store(weights + part * 2 + 1, total, mask=own)


@triton.jit
def _scaled_queries(queries, exponents):
    """Returns queries as products take them, and for FP8 keys the scale of each."""
    scale = tl.zeros((queries.shape[0],), tl.float32)
    if exponents is not None:
        # FP8 becomes fp16 in one instruction, bf16 in three. A power of two brings a query into the range of fp16.
        exact = queries.to(tl.float32)
        scale = power_of_two(scale_exponent(tl.max(tl.abs(exact), 1)))
        queries = (exact / scale[:, None]).to(tl.float32 if queries.dtype == tl.float32 else tl.float16)
    return queries, scale


@triton.jit
def _quantized(head):
    """Returns a head [width] in FP8, and the exponent of its scale: see `ops.fp8_kv`."""
    wide = head.to(tl.float32)
    exponent = scale_exponent(tl.max(tl.abs(wide), 0))
    return to_fp8(wide * power_of_two(-exponent)), exponent.to(tl.int8)


@triton.jit
def _add_block(
    asked, query_scale, highest, total, seen, keys_at, values_at, key_exponents, value_exponents, exponents_at, loaded,
    visible, scale, softcap, feature, made, WIDTH: tl.constexpr, VALUE: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    # `loaded` [BLOCK] are the keys to read, `visible` [ROWS or 1, BLOCK] those that a query sees.
    stored = tl.load(keys_at + feature[:, None], mask=loaded[None, :] & (feature < WIDTH)[:, None], other=0.0)
    scores = tl.dot(asked, stored.to(asked.dtype), input_precision="ieee") * scale
    if key_exponents is not None:
        key_exponent = tl.load(key_exponents + exponents_at, mask=loaded, other=0)
        scores *= query_scale[:, None] * power_of_two(key_exponent)[None, :]
    if SOFTCAP:
        scores = softcap * (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0)
    scores = tl.where(visible, scores, float("-inf"))
    higher = tl.maximum(highest, tl.max(scores, 1))
    shares = tl.exp(scores - higher[:, None])
    before = tl.exp(highest - higher)
    held = tl.load(values_at + made[None, :], mask=loaded[:, None] & (made < VALUE)[None, :], other=0.0)
    total = total * before + tl.sum(shares, 1)
    if key_exponents is None:
        seen = seen * before[:, None] + tl.dot(shares.to(held.dtype), held, input_precision="ieee")
    else:
        value_exponent = tl.load(value_exponents + exponents_at, mask=loaded, other=0)
        shares *= power_of_two(value_exponent)[None, :]
        largest = tl.maximum(tl.max(shares, 1), 1e-30)[:, None]
        parted = tl.dot((shares / largest).to(asked.dtype), held.to(asked.dtype), input_precision="ieee")
        seen = seen * before[:, None] + parted * largest
    return higher, total, seen


@triton.jit
def _join(highest, total, seen, parts, weights, first_part, own, made, VALUE: tl.constexpr, SPLITS: tl.constexpr):
    # Adds SPLITS parts of the keys, in their order.
    for number in tl.static_range(SPLITS):  # loads do not wait for each other
        part = first_part + number
        best = tl.load(weights + part * 2, mask=own, other=-1e30, cache_modifier=".cg")
        theirs = tl.load(weights + part * 2 + 1, mask=own, other=0.0, cache_modifier=".cg")
        from_part = parts + part[:, None] * VALUE + made[None, :]
        held = tl.load(from_part, mask=own[:, None] & (made < VALUE)[None, :], other=0.0, cache_modifier=".cg")
        higher = tl.maximum(highest, best)
        before, share = tl.exp(highest - higher), tl.exp(best - higher)
        seen = seen * before[:, None] + held * share[:, None]
        total = total * before + theirs * share
        highest = higher
    return highest, total, seen


@triton.jit
def _finish(highest, total, seen, sinks, head, own, at, held, SINKS: tl.constexpr):
    if SINKS:
        sink = tl.load(sinks + head, mask=own, other=0.0).to(tl.float32)
        top = tl.maximum(highest, sink)
        kept = tl.exp(highest - top)
        seen, total = seen * kept[:, None], total * kept + tl.exp(sink - top)
    result = seen / tl.maximum(total, 1e-30)[:, None]
    tl.store(at, result.to(at.dtype.element_ty), mask=held)
