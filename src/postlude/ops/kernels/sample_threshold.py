"""The lowest logit that can be sampled in each row, by top-k, top-p and min-p. The reference finds it by sorting.

Sampling with top-k 50 and top-p 0.9 takes 0.14 ms for 128 rows of 151,936 logits on an H200, and 3.3 ms by PyTorch's
sort (benchmarks/results/small_kernels_h200.json). With top-p alone on a flat distribution it takes 2.0 ms.

The threshold is the lowest number with fewer than k tokens, or less than p of the probability, above it. It is searched
among all fp32 numbers in their order, four bits at a time: eight passes over tokens and no sorting. The passes read a
shortlist of the row's largest logits, which the maxima of its blocks give: all logits that are at least the n-th
largest of these maxima, n of them at least. Where the shortlist has too little of the probability, or no room, they
read the row.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, assignment, misc"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from postlude.ops.kernels.launch import Kernel

TOKENS = 1024  # read at a time for the shortlist
LANES, WARPS = 512, 8  # tokens read at a time in a pass: each lane has sixteen sums
MIN_LISTED = 64  # blocks with tokens in the shortlist, at first
SHORTLIST = 4096  # tokens, at most


def thresholds(
    logits: Tensor, rows: Tensor, weights: Tensor, numbers: Tensor, settings: Tensor, block_size: int
) -> Tensor:
    """Returns the threshold of each row, [n] fp32, from logits [n, vocab]; -inf where all tokens can be sampled.

    `weights` [n, blocks, 2] are those of `weigh_blocks` in `sample.py`, for blocks of `block_size` tokens. `numbers`
    and `settings` are those of `generate.decode_rows.DecodeRows`; `rows` [n] are the rows of the logits.
    """
    rows_count, vocab = logits.shape
    result = torch.empty(rows_count, dtype=torch.float32, device=logits.device)
    blocks = weights.shape[1]
    listed_blocks = torch.empty(rows_count, blocks, dtype=torch.int32, device=logits.device)
    shortlist = torch.empty(rows_count, SHORTLIST, dtype=torch.float32, device=logits.device)
    _threshold_kernel[(rows_count,)](
        *(logits, logits.stride(0), rows, weights, numbers, numbers.stride(0), settings, settings.stride(0)),
        *(listed_blocks, shortlist, result, vocab, blocks),
        BLOCK=block_size, BLOCKS=triton.next_power_of_2(blocks), TOKENS=TOKENS, LANES=LANES, MIN_LISTED=MIN_LISTED,
        SHORTLIST=SHORTLIST, num_warps=WARPS,
    )  # fmt: skip
    return result


@triton.jit
def _to_ordered_int(values):
    # Returns fp32 as int32 in the same order.
    bits = values.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _from_ordered_int(ordered):
    # Returns the fp32 of `_to_ordered_int`.
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _count_and_mass_above(logits, temperature, total, vocab, bounds, LANES: tl.constexpr):
    # Returns the number of tokens above each of `bounds` [16] int32, and their probability: fp64 [16] each.
    count, mass = tl.zeros((16, LANES), tl.int32), tl.zeros((16, LANES), tl.float64)
    for first in range(0, vocab, LANES):
        token = first + tl.arange(0, LANES)
        values = tl.load(logits + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
        values = tl.div_rn(values, tl.zeros_like(values) + temperature)
        probability = tl.exp(values - total).to(tl.float64)
        is_above = (_to_ordered_int(values)[None, :] > bounds[:, None]) & (token < vocab)[None, :]
        count += is_above.to(tl.int32)
        mass += tl.where(is_above, probability[None, :], 0.0)
    return tl.sum(count, 1).to(tl.float64), tl.sum(mass, 1)


@triton.jit
def _nth_largest(ordered, n):
    # Returns the n-th largest of these ordered ints [blocks].
    base = tl.full((), -(1 << 31), tl.int64)
    step = tl.full((), 1 << 28, tl.int64)
    for _ in range(8):
        bounds = base + (tl.arange(0, 16).to(tl.int64) + 1) * step - 1
        above = tl.sum((ordered[None, :].to(tl.int64) > bounds[:, None]).to(tl.int32), 1)
        base += tl.sum((above >= n).to(tl.int64), 0) * step
        step = step >> 4
    return base.to(tl.int32)


@triton.jit
def _write_shortlist(
    logits, temperature, total, vocab, blocks, ordered_maxima, lowest, listed_blocks, shortlist,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, TOKENS: tl.constexpr, SHORTLIST: tl.constexpr,
):  # fmt: skip
    # Writes the logits of at least `lowest`, an ordered int, to the shortlist as far as it has room. Returns their
    # number and their probability in fp64.
    block = tl.arange(0, BLOCKS)
    is_listed = (ordered_maxima >= lowest) & (block < blocks)
    tl.store(listed_blocks + tl.cumsum(is_listed.to(tl.int32), 0) - 1, block, mask=is_listed)
    tl.debug_barrier()  # other threads read them
    listed = tl.sum(is_listed.to(tl.int32), 0)
    count, mass = tl.zeros((), tl.int32), tl.zeros((), tl.float64)
    for first in range(0, listed, TOKENS // BLOCK):
        lane = tl.arange(0, TOKENS)
        entry = first + lane // BLOCK
        token = tl.load(listed_blocks + entry, mask=entry < listed, other=BLOCKS) * BLOCK + lane % BLOCK
        values = tl.load(logits + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
        values = tl.div_rn(values, tl.zeros_like(values) + temperature)
        is_kept = (_to_ordered_int(values) >= lowest) & (token < vocab)
        position = count + tl.cumsum(is_kept.to(tl.int32), 0) - 1
        tl.store(shortlist + position, values, mask=is_kept & (position < SHORTLIST))
        count += tl.sum(is_kept.to(tl.int32), 0)
        mass += tl.sum(tl.where(is_kept, tl.exp(values - total).to(tl.float64), 0.0), 0)
    tl.debug_barrier()
    return count, mass


@triton.jit
def _search_threshold(logits, temperature, total, vocab, limit, BY_COUNT: tl.constexpr, LANES: tl.constexpr):
    # Returns the lowest number with less than `limit` above it, as an ordered int: tokens with `BY_COUNT`, else their
    # probability.
    base = tl.full((), -(1 << 31), tl.int64)
    step = tl.full((), 1 << 28, tl.int64)
    for _ in range(8):
        bounds = base + (tl.arange(0, 16).to(tl.int64) + 1) * step - 1
        count, mass = _count_and_mass_above(logits, temperature, total, vocab, bounds.to(tl.int32), LANES)
        above = count if BY_COUNT else mass
        base += tl.sum((above >= limit).to(tl.int64), 0) * step
        step = step >> 4
    return base.to(tl.int32)


@triton.jit
def _search_top_k(logits, temperature, total, vocab, top_k, LANES: tl.constexpr):
    # Returns the k-th largest logit, and the probability of the k largest in fp64.
    kth = _search_threshold(logits, temperature, total, vocab, top_k, True, LANES)
    count, mass = _count_and_mass_above(logits, temperature, total, vocab, tl.zeros((16,), tl.int32) + kth, LANES)
    kth_probability = tl.exp(_from_ordered_int(kth) - total).to(tl.float64)
    return _from_ordered_int(kth), (tl.sum(mass, 0) + (16 * top_k - tl.sum(count, 0)) * kth_probability) / 16


@Kernel
@triton.jit
def _threshold_kernel(
    logits, logits_row, rows, weights, numbers, numbers_column, settings, settings_column, listed_blocks, shortlist,
    result, vocab, blocks,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, TOKENS: tl.constexpr, LANES: tl.constexpr,
    MIN_LISTED: tl.constexpr, SHORTLIST: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + index)
    logits += index * logits_row
    listed_blocks += index * blocks
    shortlist += index * SHORTLIST
    temperature = tl.load(settings + row)
    temperature = tl.where(temperature > 0, temperature, 1.0)
    is_running = tl.load(numbers + numbers_column + row) > 0
    block = tl.arange(0, BLOCKS)
    at = weights + (index * blocks + block) * 2
    weight = tl.load(at, mask=block < blocks, other=float("-inf"))
    maxima = tl.load(at + 1, mask=block < blocks, other=float("-inf"))
    highest_weight = tl.max(weight, 0)
    total = tl.log(tl.sum(tl.exp(weight - highest_weight), 0)) + highest_weight

    threshold = tl.max(maxima, 0) + tl.load(settings + 2 * settings_column + row)
    top_k = tl.load(numbers + 5 * numbers_column + row)
    top_p = tl.load(settings + settings_column + row)
    has_top_k, has_top_p = is_running & (top_k < vocab), is_running & (top_p < 1.0)

    ordered_maxima = _to_ordered_int(maxima)
    count, is_enough = tl.zeros((), tl.int32), vocab < 0
    listed = tl.maximum(tl.where(has_top_k, top_k, 0), MIN_LISTED)
    while (has_top_k | has_top_p) & (listed <= blocks):
        count, mass = _write_shortlist(
            *(logits, temperature, total, vocab, blocks, ordered_maxima, _nth_largest(ordered_maxima, listed)),
            *(listed_blocks, shortlist, BLOCK, BLOCKS, TOKENS, SHORTLIST),
        )
        # A sum in another order may differ in its last bits.
        is_enough = (count <= SHORTLIST) & (has_top_k | (mass > top_p.to(tl.float64) * (1 + 1e-9)))
        listed = tl.where(is_enough | (count > SHORTLIST), blocks + 1, 4 * listed)

    kept_mass = tl.full((), 1.0, tl.float64)
    if has_top_k:
        if is_enough:
            kth, kept_mass = _search_top_k(shortlist, 1.0, total, count, top_k.to(tl.float64), LANES)
        else:
            kth, kept_mass = _search_top_k(logits, temperature, total, vocab, top_k.to(tl.float64), LANES)
        threshold = tl.maximum(threshold, kth)
    if has_top_p:
        limit = top_p.to(tl.float64) * kept_mass
        if is_enough:
            lowest = _search_threshold(shortlist, 1.0, total, count, limit, False, LANES)
        else:
            lowest = _search_threshold(logits, temperature, total, vocab, limit, False, LANES)
        threshold = tl.maximum(threshold, _from_ordered_int(lowest))
    tl.store(result + index, threshold)
