"""Device code of `kernels/attention.py`: forward, the queries' gradient, the keys' and values' gradient.

`table` has a row for each tile. The programs of all heads of one tile follow one another. Scores are in base 2. `runs`
are rows of keys that a tile's queries see in front of their own segment, where sequences share tokens; else None.

WIDTH and VALUE are the widths of key and value heads; WIDE and VALUE_WIDE are the powers of two that hold them. GROUP
query heads share a key head, and a tile holds PACK of them. Parameters `x_stride` and `x_head` are strides of x: from
token to token and from head to head.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, assignment, misc"

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
UNSEEN = tl.constexpr(-1.0e30)  # finite: a tile may hide all its keys from a query, which sees its own in the last


@triton.jit
def _load(base, row, row_stride, valid, feature, WIDTH: tl.constexpr, WIDE: tl.constexpr, MASKED: tl.constexpr):
    """Loads [rows, WIDE]: zero past the features and, where MASKED, in rows that are not valid."""
    at = base + row[:, None] * row_stride + feature[None, :]
    if WIDTH != WIDE:
        loaded = tl.load(at, mask=valid[:, None] & (feature < WIDTH)[None, :], other=0.0)
    elif MASKED:
        loaded = tl.load(at, mask=valid[:, None], other=0.0)
    else:
        loaded = tl.load(at)
    return loaded


@triton.jit
def _load_keys(
    base, row, head, first, key_position, stride, length, feature,
    WIDTH: tl.constexpr, WIDE: tl.constexpr, MASKED: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Loads [KEYS, WIDE]: the keys from position `first` on of a sequence that starts at `row`."""
    if TMA:
        loaded = base.load([row + first, head, 0]).reshape(key_position.shape[0], WIDE)
    else:
        lane = tl.arange(0, key_position.shape[0])
        loaded = _load(
            base + first * tl.cast(stride, tl.int64), lane, stride, key_position < length, feature, WIDTH, WIDE, MASKED
        )
    return loaded


@triton.jit
def _scores(product, scale, softcap, SOFTCAP: tl.constexpr):
    """Returns scores and the factor that brings them to base 2. The compiler fuses the factor with what follows."""
    if SOFTCAP:
        scores, factor = softcap * (2.0 * tl.sigmoid(product * (2.0 * scale / softcap)) - 1.0), LOG2E
    else:
        scores, factor = product, scale * LOG2E
    return scores, factor


@triton.jit
def _softcap_slope(scores, softcap, SOFTCAP: tl.constexpr):
    if SOFTCAP:
        share = scores * (1.0 / softcap)
        slope = 1.0 - share * share
    else:
        slope = 1.0
    return slope


@triton.jit
def _is_visible(query_position, key_position, window, WINDOW: tl.constexpr):
    visible = key_position <= query_position
    if WINDOW:
        visible &= key_position > query_position - window
    return visible


@triton.jit
def _forward_tiles(
    state, total, maximum, query, keys, key_stride, values, value_stride, key_row, kv_head, query_position, start, stop,
    length, scale, window, softcap,
    WIDTH: tl.constexpr, VALUE: tl.constexpr, WIDE: tl.constexpr, VALUE_WIDE: tl.constexpr, KEYS: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, MASKED: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Attends to keys from `start` to `stop`. Every query sees all of them unless MASKED."""
    feature, value_feature = tl.arange(0, WIDE), tl.arange(0, VALUE_WIDE)
    for first in range(start, stop, KEYS):
        key_position = first + tl.arange(0, KEYS)
        key = _load_keys(
            keys, key_row, kv_head, first, key_position, key_stride, length, feature, WIDTH, WIDE, MASKED, TMA
        )  # fmt: skip
        scores, factor = _scores(tl.dot(query, tl.trans(key)), scale, softcap, SOFTCAP)
        if MASKED:
            visible = _is_visible(query_position[:, None], key_position[None, :], window, WINDOW)
            scores = tl.where(visible, scores, UNSEEN)
        new_maximum = tl.maximum(maximum, tl.max(scores, 1) * factor)
        weight = tl.exp2(scores * factor - new_maximum[:, None])
        if MASKED:  # and where a query has seen nothing yet, the product above, which is not rounded, may win
            weight = tl.where(visible, weight, 0.0)
        decay = tl.exp2(maximum - new_maximum)
        total = total * decay + tl.sum(weight, 1)
        value = _load_keys(
            values, key_row, kv_head, first, key_position, value_stride, length, value_feature,
            VALUE, VALUE_WIDE, MASKED, TMA,
        )  # fmt: skip
        state = tl.dot(weight.to(value.dtype), value, state * decay[:, None])
        maximum = new_maximum
    return state, total, maximum


@triton.jit
def _key_borders(position, queries, window, KEYS: tl.constexpr, WINDOW: tl.constexpr):
    """Returns bounds of the keys that so many `queries` from `position` on see: the first, in whole tiles; the first
    and the end of those that all these queries see; the end of all."""
    start, full, full_stop, stop = 0, 0, (position + 1) // KEYS * KEYS, position + queries
    if WINDOW:
        start = tl.maximum(position - window + 1, 0) // KEYS * KEYS
        full = tl.minimum((tl.maximum(stop - window, 0) + KEYS - 1) // KEYS * KEYS, stop)
        full_stop = tl.maximum(full, full_stop)
    return start, full, full_stop, stop


@triton.jit
def _query_borders(
    position, before, count, window, QUERIES: tl.constexpr, KEYS: tl.constexpr, WINDOW: tl.constexpr
):  # fmt: skip
    """Returns bounds of the queries that see keys from `position` on: the first that sees one; the first and the end,
    in whole tiles from there, of those that see all of them; the end of those that see any. The sequence has `count`
    queries, and `before` keys before the first query's own."""
    start = tl.maximum(position - before, 0)
    full = tl.maximum(position + KEYS - 1 - before, start)
    full = tl.minimum(start + (full - start + QUERIES - 1) // QUERIES * QUERIES, count)
    full_stop, stop = count, count
    if WINDOW:
        stop = tl.minimum(count, tl.maximum(position + KEYS - 1 + window - before, start))
        full_length = tl.maximum(position + window - before - full, 0) // QUERIES * QUERIES
        full = tl.minimum(full, stop)
        full_stop = tl.minimum(full + full_length, stop)
    return start, full, full_stop, stop


@triton.jit
def _query_entry(table, runs, tile):
    """Returns where the table's row of a tile of queries starts."""
    return table + tile * (4 if runs is None else 6)


@triton.jit(do_not_specialize=["scale", "window", "softcap"])
def forward_kernel(
    query, key, value, sinks, output, lse, table, runs, scale, window, softcap,
    query_stride: tl.constexpr, query_head: tl.constexpr, key_stride: tl.constexpr, key_head: tl.constexpr,
    value_stride: tl.constexpr, value_head: tl.constexpr, heads: tl.constexpr,
    WIDTH: tl.constexpr, VALUE: tl.constexpr, WIDE: tl.constexpr, VALUE_WIDE: tl.constexpr, GROUP: tl.constexpr,
    PACK: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    TMA: tl.constexpr,
):  # fmt: skip
    parts = heads // PACK
    entry, part = _query_entry(table, runs, tl.program_id(0) // parts), tl.program_id(0) % parts
    first, rows_left, key_row, position = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2), tl.load(entry + 3)
    lane = tl.arange(0, QUERIES * PACK)
    row, head = lane // PACK, part * PACK + lane % PACK
    kv_head = part * PACK // GROUP
    valid, query_position = row < rows_left, position + row
    feature, value_feature = tl.arange(0, WIDE), tl.arange(0, VALUE_WIDE)
    query += first.to(tl.int64) * query_stride
    query_tile = _load(query, row * query_stride + head * query_head, 1, valid, feature, WIDTH, WIDE, True)
    keys, values = key, value
    if not TMA:
        keys += key_row.to(tl.int64) * key_stride + kv_head * key_head
        values += key_row.to(tl.int64) * value_stride + kv_head * value_head

    state = tl.zeros((QUERIES * PACK, VALUE_WIDE), tl.float32)
    if sinks is None:
        maximum = tl.full((QUERIES * PACK,), UNSEEN, tl.float32)
        total = tl.zeros((QUERIES * PACK,), tl.float32)
    else:
        maximum = tl.load(sinks + head).to(tl.float32) * LOG2E
        total = tl.full((QUERIES * PACK,), 1.0, tl.float32)
    borders = _key_borders(position, tl.minimum(rows_left, QUERIES), window, KEYS, WINDOW)
    for part in tl.static_range(0 if WINDOW else 1, 3):
        state, total, maximum = _forward_tiles(
            state, total, maximum, query_tile, keys, key_stride, values, value_stride, key_row, kv_head, query_position,
            borders[part], borders[part + 1], borders[3], scale, window, softcap,
            WIDTH, VALUE, WIDE, VALUE_WIDE, KEYS, WINDOW, SOFTCAP, part != 1, TMA,
        )  # fmt: skip
    if runs is not None:
        first_run, run_count = tl.load(entry + 4), tl.load(entry + 5)
        for run in range(first_run, first_run + run_count):
            run_row, length = tl.load(runs + run * 2), tl.load(runs + run * 2 + 1)
            run_keys, run_values = key, value
            if not TMA:
                run_keys += run_row.to(tl.int64) * key_stride + kv_head * key_head
                run_values += run_row.to(tl.int64) * value_stride + kv_head * value_head
            whole, last_key = length // KEYS * KEYS, length - 1 + 0 * row  # every query sees all of the run
            state, total, maximum = _forward_tiles(
                state, total, maximum, query_tile, run_keys, key_stride, run_values, value_stride, run_row, kv_head,
                last_key, 0, whole, length, scale, window, softcap,
                WIDTH, VALUE, WIDE, VALUE_WIDE, KEYS, False, SOFTCAP, False, TMA,
            )  # fmt: skip
            state, total, maximum = _forward_tiles(
                state, total, maximum, query_tile, run_keys, key_stride, run_values, value_stride, run_row, kv_head,
                last_key, whole, length, length, scale, window, softcap,
                WIDTH, VALUE, WIDE, VALUE_WIDE, KEYS, False, SOFTCAP, True, TMA,
            )  # fmt: skip
    index = (first + row).to(tl.int64) * heads + head
    tl.store(lse + index, (maximum + tl.log2(total)) * (1.0 / LOG2E), mask=valid)
    state = state / total[:, None]
    mask = valid[:, None] & (value_feature < VALUE)[None, :]
    tl.store(output + index[:, None] * VALUE + value_feature[None, :], state.to(output.dtype.element_ty), mask=mask)


@triton.jit
def _query_gradient_tiles(
    grad_sum, query, gradient, lse, delta, keys, key_stride, values, value_stride, key_row, kv_head, query_position,
    start, stop, length, scale, window, softcap,
    WIDTH: tl.constexpr, VALUE: tl.constexpr, WIDE: tl.constexpr, VALUE_WIDE: tl.constexpr, KEYS: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, MASKED: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    feature, value_feature = tl.arange(0, WIDE), tl.arange(0, VALUE_WIDE)
    for first in range(start, stop, KEYS):
        key_position = first + tl.arange(0, KEYS)
        key = _load_keys(
            keys, key_row, kv_head, first, key_position, key_stride, length, feature, WIDTH, WIDE, MASKED, TMA
        )  # fmt: skip
        value = _load_keys(
            values, key_row, kv_head, first, key_position, value_stride, length, value_feature,
            VALUE, VALUE_WIDE, MASKED, TMA,
        )  # fmt: skip
        scores, factor = _scores(tl.dot(query, tl.trans(key)), scale, softcap, SOFTCAP)
        weight = tl.exp2(scores * factor - lse[:, None])
        if MASKED:
            weight = tl.where(_is_visible(query_position[:, None], key_position[None, :], window, WINDOW), weight, 0.0)
        grad_weight = tl.dot(gradient, tl.trans(value))
        grad_score = weight * (grad_weight - delta[:, None]) * _softcap_slope(scores, softcap, SOFTCAP)
        grad_sum = tl.dot(grad_score.to(key.dtype), key, grad_sum)
    return grad_sum


@triton.jit(do_not_specialize=["scale", "window", "softcap"])
def query_gradient_kernel(
    query, key, value, output, gradient, lse, delta, grad_query, table, runs, scale, window, softcap,
    query_stride: tl.constexpr, query_head: tl.constexpr, key_stride: tl.constexpr, key_head: tl.constexpr,
    value_stride: tl.constexpr, value_head: tl.constexpr, heads: tl.constexpr,
    WIDTH: tl.constexpr, VALUE: tl.constexpr, WIDE: tl.constexpr, VALUE_WIDE: tl.constexpr, GROUP: tl.constexpr,
    PACK: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    TMA: tl.constexpr,
):  # fmt: skip
    """Computes the gradient of one tile of queries, and `delta`, Σ output · gradient, for the other kernel."""
    parts = heads // PACK
    entry, part = _query_entry(table, runs, tl.program_id(0) // parts), tl.program_id(0) % parts
    first, rows_left, key_row, position = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2), tl.load(entry + 3)
    lane = tl.arange(0, QUERIES * PACK)
    row, head = lane // PACK, part * PACK + lane % PACK
    kv_head = part * PACK // GROUP
    valid, query_position = row < rows_left, position + row
    feature, value_feature = tl.arange(0, WIDE), tl.arange(0, VALUE_WIDE)
    query += first.to(tl.int64) * query_stride
    query_tile = _load(query, row * query_stride + head * query_head, 1, valid, feature, WIDTH, WIDE, True)
    index = (first + row).to(tl.int64) * heads + head
    grad_tile = _load(gradient, index, VALUE, valid, value_feature, VALUE, VALUE_WIDE, True)
    output_tile = _load(output, index, VALUE, valid, value_feature, VALUE, VALUE_WIDE, True)
    delta_tile = tl.sum(output_tile.to(tl.float32) * grad_tile.to(tl.float32), 1)
    tl.store(delta + index, delta_tile, mask=valid)
    lse_tile = tl.load(lse + index, mask=valid, other=float("inf")) * LOG2E
    keys, values = key, value
    if not TMA:
        keys += key_row.to(tl.int64) * key_stride + kv_head * key_head
        values += key_row.to(tl.int64) * value_stride + kv_head * value_head

    grad_sum = tl.zeros((QUERIES * PACK, WIDE), tl.float32)
    borders = _key_borders(position, tl.minimum(rows_left, QUERIES), window, KEYS, WINDOW)
    for part in tl.static_range(0 if WINDOW else 1, 3):
        grad_sum = _query_gradient_tiles(
            grad_sum, query_tile, grad_tile, lse_tile, delta_tile, keys, key_stride, values, value_stride, key_row,
            kv_head, query_position, borders[part], borders[part + 1], borders[3], scale, window, softcap, WIDTH, VALUE,
            WIDE, VALUE_WIDE, KEYS, WINDOW, SOFTCAP, part != 1, TMA,
        )  # fmt: skip
    if runs is not None:
        first_run, run_count = tl.load(entry + 4), tl.load(entry + 5)
        for run in range(first_run, first_run + run_count):
            run_row, length = tl.load(runs + run * 2), tl.load(runs + run * 2 + 1)
            run_keys, run_values = key, value
            if not TMA:
                run_keys += run_row.to(tl.int64) * key_stride + kv_head * key_head
                run_values += run_row.to(tl.int64) * value_stride + kv_head * value_head
            whole, last_key = length // KEYS * KEYS, length - 1 + 0 * row
            grad_sum = _query_gradient_tiles(
                grad_sum, query_tile, grad_tile, lse_tile, delta_tile, run_keys, key_stride, run_values, value_stride,
                run_row, kv_head, last_key, 0, whole, length, scale, window, softcap, WIDTH, VALUE,
                WIDE, VALUE_WIDE, KEYS, False, SOFTCAP, False, TMA,
            )  # fmt: skip
            grad_sum = _query_gradient_tiles(
                grad_sum, query_tile, grad_tile, lse_tile, delta_tile, run_keys, key_stride, run_values, value_stride,
                run_row, kv_head, last_key, whole, length, length, scale, window, softcap, WIDTH, VALUE,
                WIDE, VALUE_WIDE, KEYS, False, SOFTCAP, True, TMA,
            )  # fmt: skip
    mask = valid[:, None] & (feature < WIDTH)[None, :]
    grad_query_at = grad_query + index[:, None] * WIDTH + feature[None, :]
    tl.store(grad_query_at, (grad_sum * scale).to(grad_query.dtype.element_ty), mask=mask)


@triton.jit
def _key_gradient_tiles(
    grad_key, grad_value, key, value, query, query_stride, query_head, gradient, lse, delta, query_row, key_position,
    head, heads, before, start, stop, count, scale, window, softcap,
    WIDTH: tl.constexpr, VALUE: tl.constexpr, WIDE: tl.constexpr, VALUE_WIDE: tl.constexpr, PACK: tl.constexpr,
    QUERIES: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, MASKED: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Adds what queries `start` to `stop` of a sequence's `count` give."""
    feature, value_feature = tl.arange(0, WIDE), tl.arange(0, VALUE_WIDE)
    lane = tl.arange(0, QUERIES * PACK)
    query_head_index = head + lane % PACK
    for first in range(start, stop, QUERIES):
        row = first + lane // PACK
        valid = row < count
        rows_at = row * heads + query_head_index
        if TMA:
            query_tile = query.load([query_row + first, head, 0]).reshape(QUERIES * PACK, WIDE)
            grad_tile = gradient.load([query_row + first, head, 0]).reshape(QUERIES * PACK, VALUE_WIDE)
        else:
            row_in_tile = lane // PACK
            query_tile = _load(
                query + first * tl.cast(query_stride, tl.int64),
                row_in_tile * query_stride + query_head_index * query_head, 1, valid, feature, WIDTH, WIDE, True,
            )  # fmt: skip
            grad_tile = _load(
                gradient + first * tl.cast(heads, tl.int64) * VALUE, row_in_tile * heads + query_head_index, VALUE,
                valid, value_feature, VALUE, VALUE_WIDE, True,
            )  # fmt: skip
        lse_tile = (
            tl.load(lse + rows_at, mask=valid, other=float("inf")) * LOG2E
        )  # rows that are not valid have weight zero
        delta_tile = tl.load(delta + rows_at, mask=valid, other=0.0)
        scores, factor = _scores(tl.dot(key, tl.trans(query_tile)), scale, softcap, SOFTCAP)  # [KEYS, rows]
        weight = tl.exp2(scores * factor - lse_tile[None, :])
        if MASKED:
            weight = tl.where(_is_visible((before + row)[None, :], key_position[:, None], window, WINDOW), weight, 0.0)
        grad_value = tl.dot(weight.to(grad_tile.dtype), grad_tile, grad_value)
        grad_weight = tl.dot(value, tl.trans(grad_tile))
        grad_score = weight * (grad_weight - delta_tile[None, :]) * _softcap_slope(scores, softcap, SOFTCAP)
        grad_key = tl.dot(grad_score.to(query_tile.dtype), query_tile, grad_key)
    return grad_key, grad_value


@triton.jit(do_not_specialize=["scale", "window", "softcap"])
def key_gradient_kernel(
    query, key, value, gradient, lse, delta, grad_key, grad_value, table, scale, window, softcap,
    grad_value_stride: tl.constexpr, query_stride: tl.constexpr, query_head: tl.constexpr, key_stride: tl.constexpr,
    key_head: tl.constexpr, value_stride: tl.constexpr, value_head: tl.constexpr, heads: tl.constexpr,
    WIDTH: tl.constexpr, VALUE: tl.constexpr, WIDE: tl.constexpr, VALUE_WIDE: tl.constexpr, GROUP: tl.constexpr,
    PACK: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    TMA: tl.constexpr,
):  # fmt: skip
    """Computes the gradients of one tile of keys and values, over all heads that share them."""
    kv_heads = heads // GROUP
    entry, kv_head = table + tl.program_id(0) // kv_heads * 6, tl.program_id(0) % kv_heads
    first, rows_left, position = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
    query_row, count, before = tl.load(entry + 3), tl.load(entry + 4), tl.load(entry + 5)
    lane = tl.arange(0, KEYS)
    valid, key_position = lane < rows_left, position + lane
    feature, value_feature = tl.arange(0, WIDE), tl.arange(0, VALUE_WIDE)
    key_tile = _load(
        key + first.to(tl.int64) * key_stride + kv_head * key_head, lane, key_stride, valid, feature, WIDTH, WIDE, True
    )
    value_tile = _load(
        value + first.to(tl.int64) * value_stride + kv_head * value_head,
        lane, value_stride, valid, value_feature, VALUE, VALUE_WIDE, True,
    )  # fmt: skip
    if not TMA:
        query += query_row.to(tl.int64) * query_stride
        gradient += query_row.to(tl.int64) * heads * VALUE
    lse += query_row.to(tl.int64) * heads
    delta += query_row.to(tl.int64) * heads

    grad_key_sum = tl.zeros((KEYS, WIDE), tl.float32)
    grad_value_sum = tl.zeros((KEYS, VALUE_WIDE), tl.float32)
    borders = _query_borders(position, before, count, window, QUERIES, KEYS, WINDOW)
    for pack in range(GROUP // PACK):
        for part in tl.static_range(3 if WINDOW else 2):
            grad_key_sum, grad_value_sum = _key_gradient_tiles(
                grad_key_sum, grad_value_sum, key_tile, value_tile, query, query_stride, query_head, gradient, lse,
                delta, query_row, key_position, kv_head * GROUP + pack * PACK, heads, before, borders[part],
                borders[part + 1], count, scale, window, softcap, WIDTH, VALUE, WIDE, VALUE_WIDE, PACK, QUERIES, WINDOW,
                SOFTCAP, part != 1, TMA,
            )  # fmt: skip
    row = (first + lane).to(tl.int64)[:, None]
    mask = valid[:, None] & (feature < WIDTH)[None, :]
    at = (row * kv_heads + kv_head) * WIDTH + feature[None, :]
    tl.store(grad_key + at, (grad_key_sum * scale).to(grad_key.dtype.element_ty), mask=mask)
    mask = valid[:, None] & (value_feature < VALUE)[None, :]
    at = row * grad_value_stride + kv_head * VALUE + value_feature[None, :]
    tl.store(grad_value + at, grad_value_sum.to(grad_value.dtype.element_ty), mask=mask)
