"""Flash decoding over pages: a program reads the keys of one sequence and key head once, for all heads of its group.

Not measured alone. It lets a decode step be captured as a CUDA graph: 12,124, 56,474 and 92,657 tokens/s at 16, 128 and
512 completions of a 0.6B on an H200, against 352, 2,541 and 5,035 with steps from the host (docs/benchmarks.md, "The
generator").

Where few sequences run, several programs share the keys of each, and the last of them to finish joins their parts. How
many depends on the number of rows only, so lengths stay on the device.
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

PROGRAMS = 512  # that a kernel should have at least: about four for each of a GPU's multiprocessors
MOST_SPLITS = 16
LEAST = 16  # rows of a product at least


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
) -> Tensor:
    """See `paged_attention.attend_pages`."""
    count, heads, width = query.shape
    page, kv_heads, made = keys.shape[1], keys.shape[2], values.shape[-1]
    group, device = heads // kv_heads, query.device
    splits = max(1, min(MOST_SPLITS, PROGRAMS // max(1, count * kv_heads)))
    output = torch.empty(count, heads, made, dtype=query.dtype, device=device)
    parts = output if splits == 1 else torch.empty(count, heads, splits, made, dtype=torch.float32, device=device)
    weights = parts if splits == 1 else torch.empty(count, heads, splits, 2, dtype=torch.float32, device=device)
    if splits > 1 and counters is None:
        counters = torch.zeros(PROGRAMS // 2, dtype=torch.int32, device=device)
    block = min(page, 64 if max(width, made) * query.element_size() <= 256 else 32)
    common = {"GROUP": group, "VALUE": made, "SPLITS": splits, "SINKS": score_config.sinks is not None}
    sizes = {"VALUES": max(LEAST, triton.next_power_of_2(made)), "ROWS": max(LEAST, triton.next_power_of_2(group))}
    _attend_kernel[(count, kv_heads, splits)](
        *(query, *query.stride()[:2], key, *key.stride()[:2], value, *value.stride()[:2]),
        *(keys, *keys.stride()[:3], values, *values.stride()[:3]),
        *((None, None, 0, 0, 0) if exponents is None else (*exponents, *exponents[0].stride()[:3])),
        *(table, table.stride(0), lengths, score_config.sinks, output, parts, weights),
        *(counters if splits > 1 else None, score_config.scale, score_config.softcap or 0.0, score_config.window or 0),
        WIDTH=width, FEATURES=max(LEAST, triton.next_power_of_2(width)), PAGE=page, BLOCK=block,
        SOFTCAP=score_config.softcap is not None, WINDOW=score_config.window is not None, **common, **sizes,
        num_warps=4, num_stages=3 if query.element_size() == 2 else 2,
    )  # fmt: skip
    return output


@Kernel
@triton.jit
def _attend_kernel(  # noqa: PLR0912, PLR0915 - one pass over the keys
    query,
    query_token,
    query_head,
    key,
    key_token,
    key_head_stride,
    value,
    value_token,
    value_head_stride,
    keys,
    keys_page,
    keys_slot,
    keys_head,
    values,
    values_page,
    values_slot,
    values_head,
    key_exponents,
    value_exponents,
    exponents_page,
    exponents_slot,
    exponents_head,
    table,
    table_row,
    lengths,
    sinks,
    output,
    parts,
    weights,
    counters,
    scale,
    softcap,
    window,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    FEATURES: tl.constexpr,
    VALUE: tl.constexpr,
    VALUES: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
):
    row, key_head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths + row).to(tl.int32)
    last = length - 1  # the newest token's key goes there; those before it are read
    first = tl.maximum(length - window, 0) if WINDOW else 0
    begin = first // BLOCK
    blocks = tl.where(last > first, tl.cdiv(last, BLOCK), begin)
    each = tl.cdiv(blocks - begin, SPLITS)
    begin += split * each
    end = tl.minimum(begin + each, blocks)

    member, feature, made = tl.arange(0, ROWS), tl.arange(0, FEATURES), tl.arange(0, VALUES)
    head = key_head * GROUP + member
    own = member < GROUP
    at = query + row * query_token + head[:, None] * query_head + feature[None, :]
    asked = tl.load(at, mask=own[:, None] & (feature < WIDTH)[None, :], other=0.0)
    exact = asked.to(tl.float32)
    if key_exponents is not None:
        # FP8 becomes fp16 in one instruction, bf16 in three. A power of two brings a query into the range of fp16.
        query_scale = power_of_two(scale_exponent(tl.max(tl.abs(exact), 1)))
        asked = (exact / query_scale[:, None]).to(tl.float32 if query.dtype.element_ty == tl.float32 else tl.float16)
    highest = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    seen = tl.zeros((ROWS, VALUES), tl.float32)
    if (split == 0) & (length > 0):  # one program handles the newest token
        newest = tl.load(key + row * key_token + key_head * key_head_stride + feature, mask=feature < WIDTH, other=0.0)
        own_value = tl.load(
            value + row * value_token + key_head * value_head_stride + made, mask=made < VALUE, other=0.0
        )
        page = tl.load(table + row * table_row + last // PAGE).to(tl.int64)
        if key_exponents is not None:
            newest, key_exponent = _quantized(newest)
            own_value, value_exponent = _quantized(own_value)
            put_at = page * exponents_page + key_head * exponents_head + (last % PAGE) * exponents_slot
            tl.store(key_exponents + put_at, key_exponent)
            tl.store(value_exponents + put_at, value_exponent)
        put_at = keys + page * keys_page + key_head * keys_head + (last % PAGE) * keys_slot + feature
        tl.store(put_at, newest, mask=feature < WIDTH)
        put_at = values + page * values_page + key_head * values_head + (last % PAGE) * values_slot + made
        tl.store(put_at, own_value, mask=made < VALUE)
        newest, own_value = newest.to(tl.float32), own_value.to(tl.float32)
        if key_exponents is not None:
            newest *= power_of_two(key_exponent)
            own_value *= power_of_two(value_exponent)
        highest = tl.sum(exact * newest[None, :], 1) * scale
        if SOFTCAP:
            highest = softcap * (2.0 * tl.sigmoid(2.0 * highest / softcap) - 1.0)
        total += 1.0
        seen += own_value[None, :]
    for block in range(begin, end):  # each holds at least one visible key
        place = block * BLOCK + tl.arange(0, BLOCK)
        its_page = tl.load(table + row * table_row + block * BLOCK // PAGE).to(tl.int64)
        visible = (place >= first) & (place < last)
        keys_at = keys + its_page * keys_page + key_head * keys_head
        keys_at += (place % PAGE)[None, :] * keys_slot + feature[:, None]
        stored = tl.load(keys_at, mask=visible[None, :] & (feature < WIDTH)[:, None], other=0.0)
        scores = tl.dot(asked, stored.to(asked.dtype), input_precision="ieee") * scale
        if key_exponents is not None:
            exponents_at = its_page * exponents_page + key_head * exponents_head + (place % PAGE) * exponents_slot
            key_exponent = tl.load(key_exponents + exponents_at, mask=visible, other=0)
            scores *= query_scale[:, None] * power_of_two(key_exponent)[None, :]
        if SOFTCAP:
            scores = softcap * (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0)
        scores = tl.where(visible[None, :], scores, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, 1))
        shares = tl.exp(scores - higher[:, None])
        before = tl.exp(highest - higher)
        values_at = values + its_page * values_page + key_head * values_head
        values_at += (place % PAGE)[:, None] * values_slot + made[None, :]
        held = tl.load(values_at, mask=visible[:, None] & (made < VALUE)[None, :], other=0.0)
        total = total * before + tl.sum(shares, 1)
        if key_exponents is None:
            seen = seen * before[:, None] + tl.dot(shares.to(held.dtype), held, input_precision="ieee")
        else:
            value_exponent = tl.load(value_exponents + exponents_at, mask=visible, other=0)
            shares *= power_of_two(value_exponent)[None, :]
            largest = tl.maximum(tl.max(shares, 1), 1e-30)[:, None]
            parted = tl.dot((shares / largest).to(asked.dtype), held.to(asked.dtype), input_precision="ieee")
            seen = seen * before[:, None] + parted * largest
        highest = higher

    heads = tl.num_programs(1) * GROUP
    at = output + (row * heads + head)[:, None] * VALUE + made[None, :]
    held = own[:, None] & (made < VALUE)[None, :]
    if SPLITS == 1:
        _finish(highest, total, seen, sinks, head, own, at, held, SINKS)
    else:
        first_part = (row * heads + head) * SPLITS
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
            for number in range(SPLITS):  # in order, whichever finished last
                part = first_part + number
                best = tl.load(weights + part * 2, mask=own, other=float("-inf"), cache_modifier=".cg")
                theirs = tl.load(weights + part * 2 + 1, mask=own, other=0.0, cache_modifier=".cg")
                from_part = parts + part[:, None] * VALUE + made[None, :]
                held_there = tl.load(from_part, mask=held, other=0.0, cache_modifier=".cg")
                higher = tl.maximum(highest, best)
                before, share = tl.exp(highest - higher), tl.exp(best - higher)
                seen = seen * before[:, None] + held_there * share[:, None]
                total = total * before + theirs * share
                highest = higher
            _finish(highest, total, seen, sinks, head, own, at, held, SINKS)
            tl.store(counter, 0)


@triton.jit
def _quantized(head):
    """Returns a head [width] in FP8, and the exponent of its scale: see `ops.fp8_kv`."""
    wide = head.to(tl.float32)
    exponent = scale_exponent(tl.max(tl.abs(wide), 0))
    return to_fp8(wide * power_of_two(-exponent)), exponent.to(tl.int8)


@triton.jit
def _finish(highest, total, seen, sinks, head, own, at, held, SINKS: tl.constexpr):
    if SINKS:
        sink = tl.load(sinks + head, mask=own, other=0.0).to(tl.float32)
        top = tl.maximum(highest, sink)
        kept = tl.exp(highest - top)
        seen, total = seen * kept[:, None], total * kept + tl.exp(sink - top)
    result = seen / tl.maximum(total, 1e-30)[:, None]
    tl.store(at, result.to(at.dtype.element_ty), mask=held)
