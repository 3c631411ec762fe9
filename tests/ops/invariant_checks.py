"""Tests of the batch-invariant kernels. `test_kernels.py` runs it on a GPU or in the interpreter."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from postlude.ops.attention import ScoreConfig, reference_attention
from postlude.ops.kernels import attention, invariant_attention, invariant_linear
from postlude.ops.packing import Packing
from postlude.ops.paged_attention import PAGE_SIZE, new_page_store
from tests.equality import assert_equal

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
# The interpreter multiplies no bf16, and is slow.
HALF = torch.bfloat16 if GPU else torch.float16
SIZES = (1000, 1088, 4096) if GPU else (70, 48, 40)  # rows, features, columns
LENGTHS = (5, 700, PAGE_SIZE + 1, 2 * PAGE_SIZE, 1, 1333) if GPU else (5, PAGE_SIZE + 9, 1)
SCORES = {
    "plain": ScoreConfig(scale=0.3),
    "window": ScoreConfig(scale=0.3, window=70),
    "window of one": ScoreConfig(scale=0.3, window=1),
    "softcap": ScoreConfig(scale=0.3, softcap=1.5),
}


def normal(*shape: int, dtype: torch.dtype = HALF, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", [HALF, torch.float32], ids=["half", "fp32"])
@pytest.mark.parametrize("out_dtype", [None, torch.float32], ids=["rounded", "unrounded"])
def test_linear_row_is_bit_identical_in_every_batch_and_tile(dtype, out_dtype) -> None:
    count, width, columns = SIZES
    rows, weight, bias = normal(count, width, dtype=dtype), normal(columns, width, dtype=dtype, seed=1), None
    tiles = invariant_linear.HALF_TILES if dtype == HALF else (invariant_linear.FP32_TILE,)

    def product(some: Tensor, tile: invariant_linear.InvariantLinearTile | None = None) -> Tensor:
        out = torch.full((len(some), columns), torch.nan, dtype=out_dtype or dtype, device=DEVICE)
        return invariant_linear.product(some, weight, bias, out, tile)

    full_output = product(rows)
    exact = rows.double() @ weight.double().t()
    assert_equal(full_output.double(), exact, "product", tolerance=1e-5 if full_output.dtype == torch.float32 else 4e-3)
    for tile in tiles:
        assert torch.equal(product(rows, tile), full_output), tile
    for start, stop in ((0, 1), (3, 10), (count - 65, count), (count // 2, count)):
        assert torch.equal(product(rows[start:stop]), full_output[start:stop])
    shuffled = torch.randperm(count, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    assert torch.equal(product(rows[shuffled]), full_output[shuffled])


def test_linear_with_bias_and_strided_rows() -> None:
    rows, weight, bias = normal(9, 3, 16, dtype=torch.float32)[:, 1], normal(5, 16, dtype=torch.float32), normal(5)
    out = torch.empty(9, 5, device=DEVICE)
    invariant_linear.product(rows, weight, bias, out)
    assert_equal(out, rows @ weight.t() + bias.float())


def packed(heads: tuple[int, int], widths: tuple[int, int], dtype: torch.dtype) -> tuple[Packing, list[Tensor]]:
    packing = Packing.from_lengths(LENGTHS, DEVICE)
    shapes = ((heads[0], widths[0]), (heads[1], widths[0]), (heads[1], widths[1]))
    return packing, [normal(packing.total, *shape, dtype=dtype, seed=seed) for seed, shape in enumerate(shapes)]


def attend_full_sequences(packing: Packing, parts: list[Tensor], scores: ScoreConfig) -> tuple[Tensor, Tensor]:
    step = invariant_attention.ROWS // invariant_attention.packed_heads(parts[0].shape[1] // parts[1].shape[1])
    tiles = attention._table(attention._query_table, packing, packing, scores.window, step)
    return invariant_attention.forward(*parts, scores.sinks, tiles, scores.scale, scores.window, scores.softcap)


SMALL = ((6, 2), (16, 16))
HEADS = [((3, 1), (24, 16)), ((2, 2), (32, 32))]
if GPU:
    HEADS += [((16, 8), (128, 128)), ((28, 4), (128, 128)), ((8, 1), (256, 256)), ((130, 2), (64, 64))]
CASES = [(name, *SMALL, sinks) for name in SCORES for sinks in (False, True)]
CASES += [("plain", *heads, False) for heads in HEADS]


@pytest.mark.parametrize(("name", "heads", "widths", "sinks"), CASES)
def test_paged_decoding_is_bit_identical_to_full_sequences(name: str, heads, widths, sinks: bool) -> None:
    packing, parts = packed(heads, widths, HALF)
    scores = replace(SCORES[name], sinks=normal(heads[0], seed=5) if sinks else None)
    full_output, _ = attend_full_sequences(packing, parts, scores)
    exact = reference_attention(*(part.float() for part in parts), packing, packing, scores)
    assert_equal(full_output.float(), exact, "attention", tolerance=1e-2)
    for back in (1, 3):  # the last and an earlier token of each sequence
        running = [(start, stop - back) for start, stop in packing.slices() if stop - back >= start]
        last = torch.tensor([place for _, place in running], device=DEVICE)
        lengths = torch.tensor([place - start + 1 for start, place in running] + [0], device=DEVICE)
        stores, tables = zip(*(pages(packing, part, running) for part in parts[1:]), strict=True)
        query, key, value = (torch.cat((part[last], part[:1])) for part in parts)
        decoded = invariant_attention.attend_pages(query, key, value, *stores, tables[0], lengths, scores)
        assert torch.equal(decoded[:-1], full_output[last])
        for store, part in zip(stores, parts[1:], strict=True):
            for row, (start, place) in enumerate(running):
                offset = place - start
                assert torch.equal(store[tables[0][row, offset // PAGE_SIZE].long(), offset % PAGE_SIZE], part[place])


def pages(packing: Packing, part: Tensor, running: list[tuple[int, int]]) -> tuple[Tensor, Tensor]:
    """Returns pages in random order with the keys before the newest, other values past the end, and the page table."""
    page_count = -(-packing.max_length // PAGE_SIZE)
    store = new_page_store(page_count * (len(running) + 1), part.shape[1], part.shape[2], HALF, torch.device(DEVICE))
    store.copy_(normal(*store.shape, seed=9))
    order = torch.randperm(len(store), generator=torch.Generator().manual_seed(3)).to(DEVICE, torch.int32)
    table = order.view(-1, page_count)
    for row, (start, place) in enumerate(running):
        for number, piece in enumerate(part[start:place].split(PAGE_SIZE)):
            store[int(table[row, number]), : len(piece)] = piece
    return store, table.contiguous()


@pytest.mark.parametrize("name", SCORES)
def test_query_is_bit_identical_in_every_tile(name: str) -> None:
    """Alone, as in decoding from a row cache, and among its neighbours."""
    packing, parts = packed((6, 2), (16, 16), HALF)
    scores = SCORES[name]
    full_output, _ = attend_full_sequences(packing, parts, scores)
    first = torch.arange(packing.total, device=DEVICE)
    starts = packing.cu_seqlens[packing.sequence_index()]
    tiles = torch.stack((first, torch.ones_like(first), starts, packing.positions()), 1).int()
    assert torch.equal(invariant_attention.attend_rows(*parts, tiles, scores), full_output)


@pytest.mark.parametrize("name", SCORES)
def test_lse_equals_that_of_the_ordinary_forward(name: str) -> None:
    """The ordinary backward reads it."""
    packing, parts = packed((6, 2), (16, 16), HALF)
    scores = replace(SCORES[name], sinks=normal(6, seed=5))
    numbers = (scores.scale, scores.window, scores.softcap)
    expected = attention.forward(
        *parts, scores.sinks, attention.AttentionCall.of(tuple(parts), packing, packing, *numbers)
    )
    actual = attend_full_sequences(packing, parts, scores)
    assert_equal(actual[1], expected[1], "lse", tolerance=1e-4)
    assert_equal(actual[0].float(), expected[0].float(), "output", tolerance=1e-2)


@pytest.mark.parametrize("dtype", [HALF, torch.float32], ids=["half", "fp32"])
def test_grouped_linear_row_is_bit_identical_to_linear(dtype) -> None:
    """For any number of rows per expert, including none, and with every tile."""
    _, width, columns = SIZES
    counts = torch.tensor((0, 1, 200, 64, 0, 65, 7) if GPU else (0, 1, 33, 0, 7), device=DEVICE)
    rows = normal(int(counts.sum()), width, dtype=dtype)
    weight = normal(len(counts), columns, width, dtype=dtype, seed=1)
    expected = torch.empty(len(rows), columns, dtype=dtype, device=DEVICE)
    for piece, out, matrix in zip(rows.split(counts.tolist()), expected.split(counts.tolist()), weight, strict=True):
        invariant_linear.product(piece, matrix, None, out)
    for tile in (None, *(invariant_linear.HALF_TILES if dtype == HALF else ())):
        assert torch.equal(invariant_linear.grouped_product(rows, weight, counts, tile), expected), tile
