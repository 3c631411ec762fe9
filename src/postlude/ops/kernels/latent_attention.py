"""Flash decoding over pages of latents: one key head for all query heads, whose first features are the values too.

A program takes up to 16 queries of a row and reads each latent once: a tile is a factor of both products. The latents
of a row are split among several programs, and the last of them to finish merges what they left, in the order of the
latents. Lengths stay on the device.

With latents of 512 and 64 features and 16 heads it takes 368 µs for 64 rows of 16,384 latents on an H200: 3.3 TB/s of
4.8. With 256 latents it takes 15, 30 and 69 µs for 16, 128 and 512 rows. Of more than 16 heads each 16 read the latents
again, mostly from the L2 cache. Queries as columns of the products, for which a Hopper GPU reads tiles from shared
memory, gave illegal memory accesses with Triton 3.6.

In the kernel's parameters `x_token`, `x_head`, `x_page`, `x_slot` and `x_row` are strides of `x`.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, assignment, misc"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from postlude.ops.kernels.launch import Kernel, Launcher
from postlude.ops.norm import Norm

QUERIES = 16  # rows of a product: with more, queries and sums of values do not fit in registers
MAX_SPLITS = 16
PROGRAMS = 256  # that the kernel should have: two for each of a GPU's multiprocessors
ROTATED_HEADS = 32  # that a program rotates


@dataclass(frozen=True)
class Tiles:
    """How the kernel divides its work. `keys` are the latents of a tile."""

    keys: int
    warps: int
    stages: int
    splits: int
    min_blocks: int = 1
    """Blocks of latents that a program reads at least, if there are so many."""

    @staticmethod
    def of(programs: int, itemsize: int) -> Tiles:
        """Returns the tiles for so many programs if none is split."""
        splits = max(1, min(MAX_SPLITS, PROGRAMS // max(1, programs)))
        return Tiles(64, warps=4, stages=2, splits=splits) if itemsize == 2 else Tiles(16, 4, 1, splits)


def attend(
    query: Tensor,
    query_rotated: Tensor,
    new: Tensor,
    store: Tensor,
    table: Tensor,
    lengths: Tensor,
    scale: float,
    counters: Tensor | None = None,
    tiles: Tiles | None = None,
) -> Tensor:
    rows, (tokens, heads, size), rope = len(lengths), query.shape, query_rotated.shape[-1]
    tokens_per_row = tokens // max(rows, 1)
    query_blocks = triton.cdiv(tokens_per_row * heads, QUERIES)
    tiles = tiles or Tiles.of(rows * query_blocks, query.element_size())
    output = torch.empty(tokens, heads, size, dtype=query.dtype, device=query.device)
    partial, statistics = output, output
    if tiles.splits > 1:
        partial = torch.empty(tokens, heads, tiles.splits, size, dtype=torch.float32, device=query.device)
        statistics = torch.empty(tokens, heads, tiles.splits, 2, dtype=torch.float32, device=query.device)
        if counters is None:
            counters = torch.zeros(rows * query_blocks, dtype=torch.int32, device=query.device)
    _attend_kernel[(query_blocks, rows, tiles.splits)](
        query, *query.stride()[:2], query_rotated, *query_rotated.stride()[:2], new, new.stride(0), store,
        *store.stride()[:2], table, table.stride(0), lengths, output, partial, statistics,
        counters if tiles.splits > 1 else None, scale, tiles.splits, tiles.min_blocks,
        TOKENS=tokens_per_row, HEADS=heads, QUERIES=QUERIES, LATENT=size,
        LATENT_WIDE=max(QUERIES, triton.next_power_of_2(size)), ROPE=rope,
        ROPE_WIDE=max(QUERIES, triton.next_power_of_2(rope)), PAGE=store.shape[1], KEYS=tiles.keys,
        SPLIT=tiles.splits > 1, num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    return output


def rotate(
    query: Tensor, latent: Tensor, norm: Norm, table: tuple[Tensor, Tensor], interleaved: bool
) -> tuple[Tensor, Tensor]:
    tokens, heads, rope = query.shape
    size = latent.shape[1] - rope
    rotated = torch.empty(tokens, heads, rope, dtype=query.dtype, device=query.device)
    latents = torch.empty(tokens, size + rope, dtype=latent.dtype, device=latent.device)
    tile_heads = min(ROTATED_HEADS, triton.next_power_of_2(heads))
    constants = (
        *query.stride(), latent.stride(0), heads, tile_heads, size,
        triton.next_power_of_2(size), rope // 2, triton.next_power_of_2(rope // 2), interleaved,
    )  # fmt: skip
    tensors = (query, latent, norm.weight, *table, rotated, latents)
    _rotate((tokens, 1 + triton.cdiv(heads, tile_heads), 1), tensors, (norm.eps, norm.offset), constants, 4)
    return rotated, latents


@Kernel
@triton.jit(do_not_specialize=["splits", "min_blocks"])
def _attend_kernel(  # noqa: PLR0915
    query, query_token, query_head, query_rotated, rotated_token, rotated_head, new, new_token, store, store_page,
    store_slot, table, table_row, lengths, output, partial, statistics, counters, scale, splits, min_blocks,
    TOKENS: tl.constexpr, HEADS: tl.constexpr, QUERIES: tl.constexpr, LATENT: tl.constexpr, LATENT_WIDE: tl.constexpr,
    ROPE: tl.constexpr, ROPE_WIDE: tl.constexpr, PAGE: tl.constexpr, KEYS: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    query_block, row, split = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    length = tl.load(lengths + row).to(tl.int32)
    stored = tl.maximum(length - TOKENS, 0)  # the first new latent goes there; those before it are read
    blocks = tl.cdiv(stored, KEYS)
    split_blocks = tl.maximum(tl.cdiv(blocks, splits), min_blocks)
    used_splits = tl.maximum(tl.cdiv(blocks, split_blocks), 1)
    start = split * split_blocks
    stop = tl.minimum(start + split_blocks, blocks)

    if split < used_splits:
        lane = query_block * QUERIES + tl.arange(0, QUERIES)
        token, head = lane // HEADS, lane % HEADS
        valid = lane < TOKENS * HEADS
        index = row * TOKENS + token
        feature, rope_feature = tl.arange(0, LATENT_WIDE), tl.arange(0, ROPE_WIDE)
        in_latent, in_rope = (feature < LATENT)[None, :], (rope_feature < ROPE)[None, :]
        query_at = query + (index * query_token + head * query_head)[:, None] + feature[None, :]
        rotated_at = query_rotated + (index * rotated_token + head * rotated_head)[:, None] + rope_feature[None, :]
        latent_query = tl.load(query_at, mask=valid[:, None] & in_latent, other=0.0)
        rope_query = tl.load(rotated_at, mask=valid[:, None] & in_rope, other=0.0)
        maximum = tl.full((QUERIES,), -1e30, tl.float32)
        total = tl.zeros((QUERIES,), tl.float32)
        state = tl.zeros((QUERIES, LATENT_WIDE), tl.float32)
        log2_scale = scale * 1.4426950408889634  # weights are powers of two
        for block in range(start, stop):
            position = block * KEYS + tl.arange(0, KEYS)
            page = tl.load(table + row * table_row + block * KEYS // PAGE).to(tl.int64)
            at = store + page * store_page + (position % PAGE)[:, None] * store_slot
            loaded = (position < stored)[:, None]
            latents = tl.load(at + feature[None, :], mask=loaded & in_latent, other=0.0)
            ropes = tl.load(at + LATENT + rope_feature[None, :], mask=loaded & in_rope, other=0.0)
            maximum, total, state = _attend_tile(
                latent_query, rope_query, latents, ropes, latents, (position < stored)[None, :], log2_scale, maximum,
                total, state,
            )  # fmt: skip

        if (split == 0) & (length > 0):  # one program handles the new tokens
            place = tl.arange(0, QUERIES)
            is_new = (place < TOKENS)[:, None]
            at = new + (row * TOKENS + place)[:, None] * new_token
            latents = tl.load(at + feature[None, :], mask=is_new & in_latent, other=0.0)
            ropes = tl.load(at + LATENT + rope_feature[None, :], mask=is_new & in_rope, other=0.0)
            if query_block == 0:
                position = stored + place
                page = tl.load(table + row * table_row + position // PAGE, mask=place < TOKENS, other=0).to(tl.int64)
                at = store + (page * store_page + (position % PAGE) * store_slot)[:, None]
                tl.store(at + feature[None, :], latents, mask=is_new & in_latent)
                tl.store(at + LATENT + rope_feature[None, :], ropes, mask=is_new & in_rope)
            values = latents
            if TOKENS > 1:  # a rejected draft may be NaN
                values = tl.where(tl.abs(latents.to(tl.float32)) >= 0.0, latents, 0.0).to(latents.dtype)
            visible = (place < TOKENS)[None, :] & (place[None, :] <= token[:, None])
            maximum, total, state = _attend_tile(
                latent_query, rope_query, latents, ropes, values, visible, log2_scale, maximum, total, state
            )

        out_at = output + ((index * HEADS + head) * LATENT)[:, None] + feature[None, :]
        out_mask = valid[:, None] & in_latent
        if used_splits == 1:
            _store_output(state, total, out_at, out_mask)
        elif SPLIT:
            first_split = (index * HEADS + head) * splits
            partial_at = partial + (first_split * LATENT)[:, None] + feature[None, :]
            tl.store(partial_at + split * LATENT, state, mask=out_mask)
            tl.store(statistics + (first_split + split) * 2, maximum, mask=valid)
            tl.store(statistics + (first_split + split) * 2 + 1, total, mask=valid)
            tl.debug_barrier()  # all threads have stored before one counts
            counter = counters + row * tl.num_programs(0) + query_block
            if tl.atomic_add(counter, 1, sem="acq_rel") == used_splits - 1:
                tl.debug_barrier()
                maximum = tl.full((QUERIES,), -1e30, tl.float32)
                for number in range(used_splits):
                    at = statistics + (first_split + number) * 2
                    maximum = tl.maximum(maximum, tl.load(at, mask=valid, other=-1e30, cache_modifier=".cg"))
                total = tl.zeros((QUERIES,), tl.float32)
                state = tl.zeros((QUERIES, LATENT_WIDE), tl.float32)
                for number in range(used_splits):
                    at = statistics + (first_split + number) * 2
                    weight = tl.exp2(tl.load(at, mask=valid, other=-1e30, cache_modifier=".cg") - maximum)
                    total += weight * tl.load(at + 1, mask=valid, other=0.0, cache_modifier=".cg")
                    split_state = tl.load(partial_at + number * LATENT, mask=out_mask, other=0.0, cache_modifier=".cg")
                    state += weight[:, None] * split_state
                _store_output(state, total, out_at, out_mask)
                tl.store(counter, 0)


@triton.jit
def _attend_tile(latent_query, rope_query, latents, ropes, values, visible, log2_scale, maximum, total, state):
    scores = tl.dot(latent_query, tl.trans(latents), input_precision="ieee")
    scores = tl.dot(rope_query, tl.trans(ropes), scores, input_precision="ieee") * log2_scale
    scores = tl.where(visible, scores, float("-inf"))
    new_maximum = tl.maximum(maximum, tl.max(scores, 1))
    weights, decay = tl.exp2(scores - new_maximum[:, None]), tl.exp2(maximum - new_maximum)
    total = total * decay + tl.sum(weights, 1)
    state = tl.dot(weights.to(values.dtype), values, state * decay[:, None], input_precision="ieee")
    return new_maximum, total, state


@triton.jit
def _store_output(state, total, out_at, out_mask):
    result = state / tl.maximum(total, 1e-30)[:, None]
    tl.store(out_at, result.to(out_at.dtype.element_ty), mask=out_mask)


@triton.jit(do_not_specialize=["eps", "offset"])
def _rotate_kernel(
    query, latent, weight, cos, sin, rotated, latents, eps, offset,
    QUERY_TOKEN: tl.constexpr, QUERY_HEAD: tl.constexpr, QUERY_FEATURE: tl.constexpr, LATENT_TOKEN: tl.constexpr,
    HEADS: tl.constexpr, TILE_HEADS: tl.constexpr, SIZE: tl.constexpr, SIZE_WIDE: tl.constexpr, HALF: tl.constexpr,
    HALF_WIDE: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    # The first program of a token takes its latent, the others some heads of its query each.
    token, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    pair = tl.arange(0, HALF_WIDE)
    in_pairs = pair < HALF
    cosine = tl.load(cos + token * 2 * HALF + pair, mask=in_pairs, other=0.0)
    sine = tl.load(sin + token * 2 * HALF + pair, mask=in_pairs, other=0.0)
    first_at, second_at = pair, HALF + pair
    if INTERLEAVED:
        first_at, second_at = 2 * pair, 2 * pair + 1
    if tile == 0:
        feature = tl.arange(0, SIZE_WIDE)
        latent_at = latent + token * LATENT_TOKEN
        values = tl.load(latent_at + feature, mask=feature < SIZE, other=0.0).to(tl.float32)
        scale = tl.load(weight + feature, mask=feature < SIZE, other=0.0).to(tl.float32) + offset
        normed = values * tl.rsqrt(tl.sum(values * values, 0) / SIZE + eps) * scale
        output = latents + token * (SIZE + 2 * HALF)
        tl.store(output + feature, normed.to(latents.dtype.element_ty), mask=feature < SIZE)
        key_first = tl.load(latent_at + SIZE + first_at, mask=in_pairs, other=0.0).to(tl.float32)
        key_second = tl.load(latent_at + SIZE + second_at, mask=in_pairs, other=0.0).to(tl.float32)
        _store_pairs(output + SIZE + pair, HALF, key_first, key_second, cosine, sine, in_pairs)
    else:
        head = (tile - 1) * TILE_HEADS + tl.arange(0, TILE_HEADS)[:, None]
        mask = (head < HEADS) & in_pairs[None, :]
        query_at = query + token * QUERY_TOKEN + head * QUERY_HEAD
        first = tl.load(query_at + first_at[None, :] * QUERY_FEATURE, mask=mask, other=0.0).to(tl.float32)
        second = tl.load(query_at + second_at[None, :] * QUERY_FEATURE, mask=mask, other=0.0).to(tl.float32)
        rotated_at = rotated + (token * HEADS + head) * 2 * HALF + pair[None, :]
        _store_pairs(rotated_at, HALF, first, second, cosine[None, :], sine[None, :], mask)


@triton.jit
def _store_pairs(at, half: tl.constexpr, first, second, cosine, sine, mask):
    # Rotates the two features of pairs. The second goes `half` after the first.
    tl.store(at, (first * cosine - second * sine).to(at.dtype.element_ty), mask=mask)
    tl.store(at + half, (second * cosine + first * sine).to(at.dtype.element_ty), mask=mask)


_rotate = Launcher(_rotate_kernel)
