"""Device code of `kernels/attention.py`: forward, the queries' gradient, the keys' and values' gradient.

`table` has a row for each tile. The programs of all heads of one tile follow one another. Scores are in base 2.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, assignment, misc"

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
UNSEEN = tl.constexpr(-1.0e30)  # finite: a tile may hide all its keys from a query, which sees its own in the last


@triton.jit
def _load(base, row, row_stride, real, feature, WIDTH: tl.constexpr, WIDE: tl.constexpr, MASKED: tl.constexpr):
    """Loads [rows, WIDE]: zero past the features and, where MASKED, in rows that are not real."""
    at = base + row[:, None] * row_stride + feature[None, :]
    if WIDTH != WIDE:
        loaded = tl.load(at, mask=real[:, None] & (feature < WIDTH)[None, :], other=0.0)
    elif MASKED:
        loaded = tl.load(at, mask=real[:, None], other=0.0)
    else:
        loaded = tl.load(at)
    return loaded


@triton.jit
def _load_keys(
    base, row, head, first, place, stride, length, feature,
    WIDTH: tl.constexpr, WIDE: tl.constexpr, MASKED: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Loads [KEYS, WIDE]: the keys from position `first` on of a sequence that starts at `row`."""
    if TMA:
        loaded = base.load([row + first, head, 0]).reshape(place.shape[0], WIDE)
    else:
        lane = tl.arange(0, place.shape[0])
        loaded = _load(
            base + first * tl.cast(stride, tl.int64), lane, stride, place < length, feature, WIDTH, WIDE, MASKED
        )
    return loaded


@triton.jit
def _rate(product, scale, softcap, SOFTCAP: tl.constexpr):
    """Returns scores and the factor that brings them to base 2. The compiler fuses the factor with what follows."""
    if SOFTCAP:
        rated, factor = softcap * (2.0 * tl.sigmoid(product * (2.0 * scale / softcap)) - 1.0), LOG2E
    else:
        rated, factor = product, scale * LOG2E
    return rated, factor


@triton.jit
def _bend(rated, softcap, SOFTCAP: tl.constexpr):
    """Returns the derivative of the score with respect to the score without a softcap."""
    if SOFTCAP:
        share = rated * (1.0 / softcap)
        bent = 1.0 - share * share
    else:
        bent = 1.0
    return bent


@triton.jit
def _seen(at, place, window, WINDOW: tl.constexpr):
    """Returns whether a query at position `at` sees the key at `place`; both broadcast."""
    seen = place <= at
    if WINDOW:
        seen &= place > at - window
    return seen


@triton.jit
def _forward_tiles(
    state, total, top, query, keys, key_stride, values, value_stride, key_row, key_of, at, start, stop, length,
    scale, window, softcap,
    WIDTH: tl.constexpr, VALUE: tl.constexpr, WIDE: tl.constexpr, VALUE_WIDE: tl.constexpr, KEYS: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, MASKED: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Attends to keys from `start` to `stop`. Every query sees all of them unless MASKED."""
    feature, value_feature = tl.arange(0, WIDE), tl.arange(0, VALUE_WIDE)
    for first in range(start, stop, KEYS):
        place = first + tl.arange(0, KEYS)
        key = _load_keys(
            keys, key_row, key_of, first, place, key_stride, length, feature, WIDTH, WIDE, MASKED, TMA
        )  # fmt: skip
        rated, factor = _rate(tl.dot(query, tl.trans(key)), scale, softcap, SOFTCAP)
        if MASKED:
            seen = _seen(at[:, None], place[None, :], window, WINDOW)
            rated = tl.where(seen, rated, UNSEEN)
        higher = tl.maximum(top, tl.max(rated, 1) * factor)
        weight = tl.exp2(rated * factor - higher[:, None])
        if MASKED:  # and where a query has seen nothing yet, the product above, which is not rounded, may win
            weight = tl.where(seen, weight, 0.0)
        kept = tl.exp2(top - higher)
        total = total * kept + tl.sum(weight, 1)
        value = _load_keys(
            values, key_row, key_of, first, place, value_stride, length, value_feature,
            VALUE, VALUE_WIDE, MASKED, TMA,
        )  # fmt: skip
        state = tl.dot(weight.to(value.dtype), value, state * kept[:, None])
        top = higher
    return state, total, top


@triton.jit
def _key_borders(position, shown, window, KEYS: tl.constexpr, WINDOW: tl.constexpr):
    """Returns bounds of the keys that `shown` queries from `position` on see: the first, in whole tiles; the first and
    the end of those that all these queries see; the end of all."""
    start, full, full_stop, stop = 0, 0, (position + 1) // KEYS * KEYS, position + shown
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
        whole = tl.maximum(position + window - before - full, 0) // QUERIES * QUERIES
        full = tl.minimum(full, stop)
        full_stop = tl.minimum(full + whole, stop)
    return start, full, full_stop, stop


@triton.jit(do_not_specialize=["scale", "window", "softcap"])
def forward_kernel(
    query, key, value, sinks, output, lse, table, scale, window, softcap,
    query_stride: tl.constexpr, query_head: tl.constexpr, key_stride: tl.constexpr, key_head: tl.constexpr,
    value_stride: tl.constexpr, value_head: tl.constexpr, heads: tl.constexpr,
    WIDTH: tl.constexpr, VALUE: tl.constexpr, WIDE: tl.constexpr, VALUE_WIDE: tl.constexpr, GROUP: tl.constexpr,
    PACK: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    TMA: tl.constexpr,
):  # fmt: skip
    """Computes the output and lse of one tile of queries."""
    parts = heads // PACK
    entry, part = table + tl.program_id(0) // parts * 4, tl.program_id(0) % parts
    first, left, key_row, position = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2), tl.load(entry + 3)
    lane = tl.arange(0, QUERIES * PACK)
    row, head = lane // PACK, part * PACK + lane % PACK
    key_of = part * PACK // GROUP
    real, at = row < left, position + row
    feature, value_feature = tl.arange(0, WIDE), tl.arange(0, VALUE_WIDE)
    query += first.to(tl.int64) * query_stride
    asked = _load(query, row * query_stride + head * query_head, 1, real, feature, WIDTH, WIDE, True)
    keys, values = key, value
    if not TMA:
        keys += key_row.to(tl.int64) * key_stride + key_of * key_head
        values += key_row.to(tl.int64) * value_stride + key_of * value_head

    state = tl.zeros((QUERIES * PACK, VALUE_WIDE), tl.float32)
    if sinks is None:
        top = tl.full((QUERIES * PACK,), UNSEEN, tl.float32)
        total = tl.zeros((QUERIES * PACK,), tl.float32)
    else:
        top = tl.load(sinks + head).to(tl.float32) * LOG2E
        total = tl.full((QUERIES * PACK,), 1.0, tl.float32)
    borders = _key_borders(position, tl.minimum(left, QUERIES), window, KEYS, WINDOW)
    for part in tl.static_range(0 if WINDOW else 1, 3):
        state, total, top = _forward_tiles(
            state, total, top, asked, keys, key_stride, values, value_stride, key_row, key_of, at,
            borders[part], borders[part + 1], borders[3], scale, window, softcap,
            WIDTH, VALUE, WIDE, VALUE_WIDE, KEYS, WINDOW, SOFTCAP, part != 1, TMA,
        )  # fmt: skip
    place = (first + row).to(tl.int64) * heads + head
    tl.store(lse + place, (top + tl.log2(total)) * (1.0 / LOG2E), mask=real)
    state = state / total[:, None]
    held = real[:, None] & (value_feature < VALUE)[None, :]
    tl.store(output + place[:, None] * VALUE + value_feature[None, :], state.to(output.dtype.element_ty), mask=held)


@triton.jit
def _query_gradient_tiles(
    state, query, gradient, lse, delta, keys, key_stride, values, value_stride, key_row, key_of, at, start, stop,
    length, scale, window, softcap,
    WIDTH: tl.constexpr, VALUE: tl.constexpr, WIDE: tl.constexpr, VALUE_WIDE: tl.constexpr, KEYS: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, MASKED: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    feature, value_feature = tl.arange(0, WIDE), tl.arange(0, VALUE_WIDE)
    for first in range(start, stop, KEYS):
        place = first + tl.arange(0, KEYS)
        key = _load_keys(
            keys, key_row, key_of, first, place, key_stride, length, feature, WIDTH, WIDE, MASKED, TMA
        )  # fmt: skip
        value = _load_keys(
            values, key_row, key_of, first, place, value_stride, length, value_feature,
            VALUE, VALUE_WIDE, MASKED, TMA,
        )  # fmt: skip
        rated, factor = _rate(tl.dot(query, tl.trans(key)), scale, softcap, SOFTCAP)
        weight = tl.exp2(rated * factor - lse[:, None])
        if MASKED:
            weight = tl.where(_seen(at[:, None], place[None, :], window, WINDOW), weight, 0.0)
        by_weight = tl.dot(gradient, tl.trans(value))
        by_score = weight * (by_weight - delta[:, None]) * _bend(rated, softcap, SOFTCAP)
        state = tl.dot(by_score.to(key.dtype), key, state)
    return state


@triton.jit(do_not_specialize=["scale", "window", "softcap"])
def query_gradient_kernel(
    query, key, value, output, gradient, lse, delta, for_query, table, scale, window, softcap,
    query_stride: tl.constexpr, query_head: tl.constexpr, key_stride: tl.constexpr, key_head: tl.constexpr,
    value_stride: tl.constexpr, value_head: tl.constexpr, heads: tl.constexpr,
    WIDTH: tl.constexpr, VALUE: tl.constexpr, WIDE: tl.constexpr, VALUE_WIDE: tl.constexpr, GROUP: tl.constexpr,
    PACK: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    TMA: tl.constexpr,
):  # fmt: skip
    """Computes the gradient of one tile of queries, and `delta`, Σ output · gradient, for the other kernel."""
    parts = heads // PACK
    entry, part = table + tl.program_id(0) // parts * 4, tl.program_id(0) % parts
    first, left, key_row, position = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2), tl.load(entry + 3)
    lane = tl.arange(0, QUERIES * PACK)
    row, head = lane // PACK, part * PACK + lane % PACK
    key_of = part * PACK // GROUP
    real, at = row < left, position + row
    feature, value_feature = tl.arange(0, WIDE), tl.arange(0, VALUE_WIDE)
    query += first.to(tl.int64) * query_stride
    asked = _load(query, row * query_stride + head * query_head, 1, real, feature, WIDTH, WIDE, True)
    place = (first + row).to(tl.int64) * heads + head
    upstream = _load(gradient, place, VALUE, real, value_feature, VALUE, VALUE_WIDE, True)
    made = _load(output, place, VALUE, real, value_feature, VALUE, VALUE_WIDE, True)
    own_delta = tl.sum(made.to(tl.float32) * upstream.to(tl.float32), 1)
    tl.store(delta + place, own_delta, mask=real)
    own_lse = tl.load(lse + place, mask=real, other=float("inf")) * LOG2E
    keys, values = key, value
    if not TMA:
        keys += key_row.to(tl.int64) * key_stride + key_of * key_head
        values += key_row.to(tl.int64) * value_stride + key_of * value_head

    state = tl.zeros((QUERIES * PACK, WIDE), tl.float32)
    borders = _key_borders(position, tl.minimum(left, QUERIES), window, KEYS, WINDOW)
    for part in tl.static_range(0 if WINDOW else 1, 3):
        state = _query_gradient_tiles(
            state, asked, upstream, own_lse, own_delta, keys, key_stride, values, value_stride, key_row, key_of, at,
            borders[part], borders[part + 1], borders[3], scale, window, softcap,
            WIDTH, VALUE, WIDE, VALUE_WIDE, KEYS, WINDOW, SOFTCAP, part != 1, TMA,
        )  # fmt: skip
    held = real[:, None] & (feature < WIDTH)[None, :]
    at_output = for_query + place[:, None] * WIDTH + feature[None, :]
    tl.store(at_output, (state * scale).to(for_query.dtype.element_ty), mask=held)


@triton.jit
def _key_gradient_tiles(
    for_key, for_value, key, value, query, query_stride, query_head, gradient, lse, delta, query_row, place, head,
    heads, before, start, stop, count, scale, window, softcap,
    WIDTH: tl.constexpr, VALUE: tl.constexpr, WIDE: tl.constexpr, VALUE_WIDE: tl.constexpr, PACK: tl.constexpr,
    QUERIES: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, MASKED: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Adds what queries `start` to `stop` of a sequence's `count` give."""
    feature, value_feature = tl.arange(0, WIDE), tl.arange(0, VALUE_WIDE)
    lane = tl.arange(0, QUERIES * PACK)
    own_head = head + lane % PACK
    for first in range(start, stop, QUERIES):
        row = first + lane // PACK
        real = row < count
        at = row * heads + own_head
        if TMA:
            asked = query.load([query_row + first, head, 0]).reshape(QUERIES * PACK, WIDE)
            upstream = gradient.load([query_row + first, head, 0]).reshape(QUERIES * PACK, VALUE_WIDE)
        else:
            shift = lane // PACK
            asked = _load(
                query + first * tl.cast(query_stride, tl.int64), shift * query_stride + own_head * query_head, 1,
                real, feature, WIDTH, WIDE, True,
            )  # fmt: skip
            upstream = _load(
                gradient + first * tl.cast(heads, tl.int64) * VALUE, shift * heads + own_head, VALUE,
                real, value_feature, VALUE, VALUE_WIDE, True,
            )  # fmt: skip
        own_lse = tl.load(lse + at, mask=real, other=float("inf")) * LOG2E  # what is not real weighs nothing
        own_delta = tl.load(delta + at, mask=real, other=0.0)
        rated, factor = _rate(tl.dot(key, tl.trans(asked)), scale, softcap, SOFTCAP)  # [KEYS, rows]
        weight = tl.exp2(rated * factor - own_lse[None, :])
        if MASKED:
            weight = tl.where(_seen((before + row)[None, :], place[:, None], window, WINDOW), weight, 0.0)
        for_value = tl.dot(weight.to(upstream.dtype), upstream, for_value)
        by_weight = tl.dot(value, tl.trans(upstream))
        by_score = weight * (by_weight - own_delta[None, :]) * _bend(rated, softcap, SOFTCAP)
        for_key = tl.dot(by_score.to(asked.dtype), asked, for_key)
    return for_key, for_value


@triton.jit(do_not_specialize=["scale", "window", "softcap"])
def key_gradient_kernel(
    query, key, value, gradient, lse, delta, for_key, for_value, table, scale, window, softcap,
    for_value_stride: tl.constexpr, query_stride: tl.constexpr, query_head: tl.constexpr, key_stride: tl.constexpr,
    key_head: tl.constexpr, value_stride: tl.constexpr, value_head: tl.constexpr, heads: tl.constexpr,
    WIDTH: tl.constexpr, VALUE: tl.constexpr, WIDE: tl.constexpr, VALUE_WIDE: tl.constexpr, GROUP: tl.constexpr,
    PACK: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    TMA: tl.constexpr,
):  # fmt: skip
    """Computes the gradients of one tile of keys and values, over all heads that share them."""
    kv_heads = heads // GROUP
    entry, key_of = table + tl.program_id(0) // kv_heads * 6, tl.program_id(0) % kv_heads
    first, left, position = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
    query_row, count, before = tl.load(entry + 3), tl.load(entry + 4), tl.load(entry + 5)
    lane = tl.arange(0, KEYS)
    real, place = lane < left, position + lane
    feature, value_feature = tl.arange(0, WIDE), tl.arange(0, VALUE_WIDE)
    own_key = _load(
        key + first.to(tl.int64) * key_stride + key_of * key_head, lane, key_stride, real, feature, WIDTH, WIDE, True
    )
    own_value = _load(
        value + first.to(tl.int64) * value_stride + key_of * value_head,
        lane, value_stride, real, value_feature, VALUE, VALUE_WIDE, True,
    )  # fmt: skip
    if not TMA:
        query += query_row.to(tl.int64) * query_stride
        gradient += query_row.to(tl.int64) * heads * VALUE
    lse += query_row.to(tl.int64) * heads
    delta += query_row.to(tl.int64) * heads

    key_state = tl.zeros((KEYS, WIDE), tl.float32)
    value_state = tl.zeros((KEYS, VALUE_WIDE), tl.float32)
    borders = _query_borders(position, before, count, window, QUERIES, KEYS, WINDOW)
    for pack in range(GROUP // PACK):
        for part in tl.static_range(3 if WINDOW else 2):
            key_state, value_state = _key_gradient_tiles(
                key_state, value_state, own_key, own_value, query, query_stride, query_head, gradient, lse, delta,
                query_row, place, key_of * GROUP + pack * PACK, heads, before, borders[part], borders[part + 1], count,
                scale, window, softcap,
                WIDTH, VALUE, WIDE, VALUE_WIDE, PACK, QUERIES, WINDOW, SOFTCAP, part != 1, TMA,
            )  # fmt: skip
    row = (first + lane).to(tl.int64)[:, None]
    held = real[:, None] & (feature < WIDTH)[None, :]
    at = (row * kv_heads + key_of) * WIDTH + feature[None, :]
    tl.store(for_key + at, (key_state * scale).to(for_key.dtype.element_ty), mask=held)
    held = real[:, None] & (value_feature < VALUE)[None, :]
    at = row * for_value_stride + key_of * VALUE + value_feature[None, :]
    tl.store(for_value + at, value_state.to(for_value.dtype.element_ty), mask=held)
