"""Sampling of the next token of every row: the weight of each block of tokens, then everything else of a row.

Not measured alone: part of the recorded decode step in benchmarks/results/generate_h200.json.

The same function of a row's key and count, with the same noise, as the reference in `generate/sampler.py`.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, assignment, misc"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from postlude.ops.kernels.launch import Kernel
from postlude.ops.kernels.sample_threshold import edges

EACH = 16  # blocks a program takes
BLOCK, WITHIN = 256, 1 << 40  # those of the reference, `sample` in the generate package


def sample_next(
    logits: Tensor, rows: Tensor, numbers: Tensor, settings: Tensor, stops: Tensor, told: Tensor, limited: bool
) -> None:
    """See `slots.sample_next`, and `generate.paged_cache.Rows` for the rest."""
    count, vocab = logits.shape
    blocks = triton.cdiv(vocab, BLOCK)

    def weigh(edge: Tensor | None) -> Tensor:
        """[n, blocks, 2]: the logarithm of a block's sum of exponentials, and its highest; tokens below edges out."""
        weights = torch.empty(count, blocks, 2, dtype=torch.float32, device=logits.device)
        _weigh_kernel[(count, triton.cdiv(blocks, EACH))](
            *(logits, logits.stride(0), rows, settings, numbers, numbers.stride(0), edge, weights, vocab, blocks),
            BLOCK=BLOCK,
            EACH=EACH,
            num_warps=4,
        )
        return weights

    weights = weigh(None)
    edge = edges(logits, rows, weights, numbers, settings) if limited else None
    left = weights if edge is None else weigh(edge)
    _draw_kernel[(count,)](
        *(logits, logits.stride(0), rows, weights, left, edge, settings, numbers, numbers.stride(0)),
        *(stops, stops.stride(0), told, vocab, blocks), BLOCK=BLOCK, WITHIN=WITHIN,
        BLOCKS=triton.next_power_of_2(blocks), STOPS=len(stops), num_warps=4,
    )  # fmt: skip


@triton.jit
def scaled(logits, temperature):
    """As torch divides: rounded to the nearest."""
    logits = logits.to(tl.float32)
    return tl.div_rn(logits, tl.zeros_like(logits) + tl.where(temperature > 0, temperature, 1.0))


@Kernel
@triton.jit
def _weigh_kernel(
    logits, logits_row, rows, settings, numbers, numbers_column, edge, weights, vocab, blocks,
    BLOCK: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + place)
    if tl.load(numbers + numbers_column + row) > 0:  # not idle
        block = tl.program_id(1) * EACH + tl.arange(0, EACH)
        token = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
        values = tl.load(logits + place * logits_row + token, mask=token < vocab, other=float("-inf"))
        values = scaled(values, tl.load(settings + row))
        if edge is not None:
            values = tl.where(values < tl.load(edge + place), float("-inf"), values)
        highest = tl.max(values, 1)
        finite = tl.where(highest == float("-inf"), 0.0, highest)
        weight = tl.log(tl.sum(tl.exp(values - finite[:, None]), 1)) + finite
        at = weights + (place * blocks + block) * 2
        tl.store(at, weight, mask=block < blocks)
        tl.store(at + 1, highest, mask=block < blocks)


@triton.jit
def _mix(values):
    # uint64, see `noise.mix`.
    values = (values ^ (values >> 30)) * 0xBF58476D1CE4E5B9
    values = (values ^ (values >> 27)) * 0x94D049BB133111EB
    return values ^ (values >> 31)


@triton.jit
def _gumbel(key, places):
    # See `noise.gumbel`; `key` and `places` uint64.
    bits = _mix(key + (places + 1) * 0x9E3779B97F4A7C15)
    uniform = ((bits >> 11).to(tl.int64).to(tl.float64) + 0.5) * 1.1102230246251565e-16
    return -tl.log(-tl.log(uniform))


@triton.jit
def whole(weight):
    """The logarithm of the sum of exponentials of [n]."""
    top = tl.max(weight, 0)
    return tl.log(tl.sum(tl.exp(weight - top), 0)) + top


@triton.jit
def _likeliest(values):
    return tl.argmax(tl.where(values == values, values, float("-inf")), 0)  # noqa: PLR0124 - where it is a number


@Kernel
@triton.jit
def _draw_kernel(
    logits, logits_row, rows, weights, left, edge, settings, numbers, numbers_column, stops, stops_column, told,
    vocab, blocks,
    BLOCK: tl.constexpr, WITHIN: tl.constexpr, BLOCKS: tl.constexpr, STOPS: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + place)
    length_at, count_at = numbers + numbers_column + row, numbers + 2 * numbers_column + row
    length, count = tl.load(length_at), tl.load(count_at)
    if length > 0:
        limit, key = tl.load(numbers + 3 * numbers_column + row), tl.load(numbers + 4 * numbers_column + row)
        heat = tl.load(settings + row)
        block = tl.arange(0, BLOCKS)
        at = (place * blocks + block) * 2
        weight = tl.load(weights + at, mask=block < blocks, other=float("-inf"))
        highest = tl.load(weights + at + 1, mask=block < blocks, other=float("-inf"))
        total = whole(weight)
        sampled = total
        if edge is not None:
            weight = tl.load(left + at, mask=block < blocks, other=float("-inf"))
            sampled = whole(weight)

        key = _mix((key + count * (0x9E3779B97F4A7C15 - (1 << 64))).to(tl.uint64, bitcast=True))
        noisy = weight.to(tl.float64) + _gumbel(key, block.to(tl.uint64))
        chosen = tl.where(heat > 0, _likeliest(noisy), _likeliest(highest))
        token = chosen * BLOCK + tl.arange(0, BLOCK)
        within = tl.load(logits + place * logits_row + token, mask=token < vocab, other=float("-inf"))
        within = scaled(within, heat)
        if edge is not None:
            least = tl.where(heat > 0, tl.load(edge + place), float("-inf"))
            within = tl.where(within < least, float("-inf"), within)
        noisy = within.to(tl.float64) + _gumbel(key, WITHIN + token.to(tl.uint64))
        inside = tl.where(heat > 0, _likeliest(noisy), _likeliest(within))
        logit = tl.sum(tl.where(tl.arange(0, BLOCK) == inside, within, 0.0), 0)
        drawn = tl.minimum(chosen * BLOCK + inside, vocab - 1).to(tl.int64)  # also where logits are not numbers

        tl.store(told + row * 3, drawn.to(tl.float64))
        tl.store(told + row * 3 + 1, (logit - total).to(tl.float64))
        tl.store(told + row * 3 + 2, tl.where(heat > 0, logit - sampled, 0.0).to(tl.float64))
        ended = count + 1 >= limit
        for stop in range(STOPS):
            ended = ended | (tl.load(stops + stop * stops_column + row) == drawn)
        tl.store(numbers + row, drawn)
        tl.store(count_at, count + 1)
        tl.store(length_at, tl.where(ended, 0, length + 1))
    else:
        tl.store(told + row * 3, -1.0)
