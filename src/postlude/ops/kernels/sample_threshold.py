"""The lowest logit that can be sampled in each row, by top-k, top-p and min-p. The reference finds it by sorting.

Slower than a sort where rows are few: sampling with top-k and top-p takes 4.6 ms for 128 rows of 151,936 logits on an
H200, and 3.3 ms by PyTorch's sort (benchmarks/results/small_kernels_h200.json). It gives the reference's tokens, needs
no memory for sorted rows, and a CUDA graph can hold it. One program reads its row seventeen times: the time is that of
one row, up to as many rows as there are multiprocessors.

The threshold is the lowest number with fewer than k tokens, or less than p of the probability, above it. It is searched
among all fp32 numbers in their order, four bits at a time: eight passes over the row and no sorting.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, assignment, misc"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from postlude.ops.kernels.launch import Kernel

TOKENS = 1024  # read at a time


def thresholds(logits: Tensor, rows: Tensor, weights: Tensor, numbers: Tensor, settings: Tensor) -> Tensor:
    """Returns the threshold of each row, [n] fp32, from logits [n, vocab]; -inf where all tokens can be sampled.

    `weights` [n, blocks, 2] are those of `weigh_blocks` in `sample.py`. `numbers` and `settings` are those of
    `generate.decode_rows.DecodeRows`; `rows` [n] are the rows of the logits.
    """
    rows_count, vocab = logits.shape
    result = torch.empty(rows_count, dtype=torch.float32, device=logits.device)
    blocks = weights.shape[1]
    _threshold_kernel[(rows_count,)](
        *(logits, logits.stride(0), rows, weights, numbers, numbers.stride(0), settings, settings.stride(0), result),
        *(vocab, blocks), BLOCKS=triton.next_power_of_2(blocks), TOKENS=TOKENS, num_warps=8,
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
def _count_and_mass_above(logits, temperature, total, vocab, bounds, TOKENS: tl.constexpr):
    # Returns the number of tokens above each of `bounds` [16] int32, and their probability: fp64 [16] each.
    count, mass = tl.zeros((16,), tl.float64), tl.zeros((16,), tl.float64)
    for first in range(0, vocab, TOKENS):
        token = first + tl.arange(0, TOKENS)
        values = tl.load(logits + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
        values = tl.div_rn(values, tl.zeros_like(values) + temperature)
        probability = tl.exp(values - total).to(tl.float64)
        is_above = (_to_ordered_int(values)[None, :] > bounds[:, None]) & (token < vocab)[None, :]
        count += tl.sum(is_above.to(tl.int32), 1).to(tl.float64)
        mass += tl.sum(tl.where(is_above, probability[None, :], 0.0), 1)
    return count, mass


@triton.jit
def _search_threshold(logits, temperature, total, vocab, limit, by_count, TOKENS: tl.constexpr):
    # Returns the lowest number with less than `limit` above it, as an ordered int: tokens with `by_count`, else their
    # probability.
    base = tl.full((), -(1 << 31), tl.int64)
    step = tl.full((), 1 << 28, tl.int64)
    for _ in range(8):
        bounds = base + (tl.arange(0, 16).to(tl.int64) + 1) * step - 1
        count, mass = _count_and_mass_above(logits, temperature, total, vocab, bounds.to(tl.int32), TOKENS)
        base += tl.sum((tl.where(by_count, count, mass) >= limit).to(tl.int64), 0) * step
        step = step >> 4
    return base.to(tl.int32)


@Kernel
@triton.jit
def _threshold_kernel(
    logits, logits_row, rows, weights, numbers, numbers_column, settings, settings_column, result, vocab, blocks,
    BLOCKS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + index)
    logits += index * logits_row
    temperature = tl.load(settings + row)
    temperature = tl.where(temperature > 0, temperature, 1.0)
    is_running = tl.load(numbers + numbers_column + row) > 0
    block = tl.arange(0, BLOCKS)
    at = weights + (index * blocks + block) * 2
    weight = tl.load(at, mask=block < blocks, other=float("-inf"))
    highest = tl.max(tl.load(at + 1, mask=block < blocks, other=float("-inf")), 0)
    highest_weight = tl.max(weight, 0)
    total = tl.log(tl.sum(tl.exp(weight - highest_weight), 0)) + highest_weight

    threshold = highest + tl.load(settings + 2 * settings_column + row)
    top_k = tl.load(numbers + 5 * numbers_column + row).to(tl.float64)
    kept_mass = tl.full((), 1.0, tl.float64)
    if is_running & (top_k < vocab):
        kth = _search_threshold(logits, temperature, total, vocab, top_k, True, TOKENS)
        count, mass = _count_and_mass_above(logits, temperature, total, vocab, tl.zeros((16,), tl.int32) + kth, TOKENS)
        kth_probability = tl.exp(_from_ordered_int(kth) - total).to(tl.float64)
        kept_mass = (tl.sum(mass, 0) + (16 * top_k - tl.sum(count, 0)) * kth_probability) / 16
        threshold = tl.maximum(threshold, _from_ordered_int(kth))
    top_p = tl.load(settings + settings_column + row)
    if is_running & (top_p < 1.0):
        threshold = tl.maximum(
            threshold,
            _from_ordered_int(
                _search_threshold(logits, temperature, total, vocab, top_p.to(tl.float64) * kept_mass, False, TOKENS)
            ),
        )
    tl.store(result + index, threshold)
