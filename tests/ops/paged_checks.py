"""What the kernels over pages must do. `test_paged_attention.py` runs this file: on a GPU, or through Triton's
interpreter, which must be chosen before triton is first imported."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from postlude.ops import paged_attention
from postlude.ops.attention import ScoreConfig, reference_attention
from postlude.ops.fp8_kv import FP8, dequantize_heads, quantize_heads, round_heads
from postlude.ops.packing import Packing
from postlude.ops.paged_attention import PAGE_SIZE, attend_pages, new_page_store
from tests.equality import assert_equal

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LENGTHS = (5, 0, PAGE_SIZE + 1, 2 * PAGE_SIZE, 1)
SCORES = {
    "plain": ScoreConfig(scale=0.3),
    "window": ScoreConfig(scale=0.3, window=70),
    "window of one": ScoreConfig(scale=0.3, window=1),
    "softcap": ScoreConfig(scale=0.3, softcap=1.5),
}


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def paged(wholes: list[Tensor], heads: int, width: int, seed: int = 3) -> tuple[Tensor, Tensor]:
    """Keys of sequences, [length, heads, width] each, in pages of a store in any order, and the table."""
    store = new_page_store(16, heads, width, torch.float32, torch.device(DEVICE))
    store.copy_(normal(*store.shape, seed=9))  # what lies past an end is not zero
    order = torch.randperm(16, generator=torch.Generator().manual_seed(seed)).tolist()
    table = torch.zeros(len(wholes), 3, dtype=torch.int32)
    for row, whole in enumerate(wholes):
        for number, piece in enumerate(whole.split(PAGE_SIZE) if len(whole) else ()):
            page = order.pop()
            table[row, number] = page
            store[page, : len(piece)] = piece
    return store, table.to(DEVICE)


@pytest.mark.parametrize("sinks", [False, True], ids=["plain", "sinks"])
@pytest.mark.parametrize(("heads", "widths"), [((6, 2), (16, 10)), ((3, 1), (24, 24)), ((2, 2), (16, 16))])
@pytest.mark.parametrize("name", SCORES)
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_pages_equal_packed_attention(backend, name: str, heads, widths, sinks: bool) -> None:
    wholes = [[normal(length, heads[1], width, seed=length) for length in LENGTHS] for width in widths]
    (keys, table), (values, same) = (paged(each, heads[1], width) for each, width in zip(wholes, widths, strict=True))
    assert torch.equal(table, same)
    query, lengths = normal(len(LENGTHS), heads[0], widths[0], seed=1), torch.tensor(LENGTHS, device=DEVICE)
    scores = replace(SCORES[name], sinks=normal(heads[0], seed=2) if sinks else None)
    running = [row for row, length in enumerate(LENGTHS) if length]
    new = [
        torch.stack([whole[-1] if len(whole) else whole.new_zeros(whole.shape[1:]) for whole in each])
        for each in wholes
    ]
    whole_stores = keys.clone(), values.clone()
    for row in running:  # they are yet to be written
        for store in (keys, values):
            store[table[row, (LENGTHS[row] - 1) // PAGE_SIZE], (LENGTHS[row] - 1) % PAGE_SIZE] = 9.0
    actual = attend_pages(query, *new, keys, values, table, lengths, scores, backend=backend)
    assert torch.equal(keys, whole_stores[0])
    assert torch.equal(values, whole_stores[1])
    packed = [torch.cat(each) for each in wholes]
    queries, asked = Packing.from_lengths([1] * 4, DEVICE), Packing.from_lengths([n for n in LENGTHS if n], DEVICE)
    expected = reference_attention(query[running], *packed, queries, asked, scores)
    assert_equal(actual[running], expected, name)
    assert actual.isfinite().all()


@pytest.mark.parametrize("rows", [1, 5, 150])
def test_any_number_of_splits_gives_the_same(rows: int) -> None:
    lengths = torch.tensor([(37 * row) % (3 * PAGE_SIZE + 1) for row in range(rows)], device=DEVICE)
    lengths[0] = 3 * PAGE_SIZE
    keys, values = (new_page_store(3 * rows, 2, 16, torch.float32, torch.device(DEVICE)) for _ in range(2))
    keys.copy_(normal(*keys.shape, seed=1))
    values.copy_(normal(*values.shape, seed=2))
    table = torch.arange(3 * rows, dtype=torch.int32).view(rows, 3).to(DEVICE)
    query, key, value = normal(rows, 4, 16), normal(rows, 2, 16, seed=3), normal(rows, 2, 16, seed=4)
    actual, expected = (
        attend_pages(query, key, value, keys.clone(), values.clone(), table, lengths, SCORES["plain"], backend=backend)
        for backend in ("triton", "torch")
    )
    assert_equal(actual[lengths > 0], expected[lengths > 0], "splits")


def test_heads_that_no_tile_has_room_for_are_refused() -> None:
    wide = paged_attention.MAX_HEAD_DIM + 1
    store = new_page_store(1, 1, wide, torch.float32, torch.device(DEVICE))
    table, lengths = (
        torch.zeros(1, 1, dtype=torch.int32, device=DEVICE),
        torch.ones(1, dtype=torch.int64, device=DEVICE),
    )
    with pytest.raises(RuntimeError, match="its tiles have room for heads of 256, and these have 257"):
        attend_pages(*[normal(1, 1, wide)] * 3, store, store, table, lengths, SCORES["plain"], backend="triton")


def fp8_stores(wholes: list[Tensor], heads: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """`paged` in FP8: the store, the exponents and the table."""
    store, table = paged(wholes, heads, width)
    quantized, exponents = quantize_heads(store)
    paged_store = new_page_store(16, heads, width, FP8, torch.device(DEVICE))
    paged_exponents = new_page_store(16, heads, 1, torch.int8, torch.device(DEVICE))
    return paged_store.copy_(quantized), paged_exponents.copy_(exponents), table


def outliers(length: int, heads: int, width: int, seed: int) -> Tensor:
    """Heads of which every fifth token is 1,000 times as large, every seventh 1,000 times as small."""
    whole = normal(length, heads, width, seed=seed)
    tokens = torch.arange(length, device=DEVICE)
    return whole * torch.where(tokens % 5 == 3, 1e3, torch.where(tokens % 7 == 4, 1e-3, 1.0))[:, None, None]


@pytest.mark.parametrize("sinks", [False, True], ids=["plain", "sinks"])
@pytest.mark.parametrize(("heads", "widths"), [((6, 2), (16, 10)), ((3, 1), (24, 24))])
@pytest.mark.parametrize("name", SCORES)
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_fp8_pages_equal_packed_attention_in_float64_to_rounded_heads(backend, name, heads, widths, sinks) -> None:
    """Values have outlier tokens, and keys too where the softmax does not then see one key alone."""
    wholes = [
        [normal(length, heads[1], widths[0], seed=length) for length in LENGTHS],
        [outliers(length, heads[1], widths[1], seed=length) for length in LENGTHS],
    ]
    (keys, key_exponents, table), (values, value_exponents, _) = (
        fp8_stores(each, heads[1], width) for each, width in zip(wholes, widths, strict=True)
    )
    query, lengths = normal(len(LENGTHS), heads[0], widths[0], seed=1), torch.tensor(LENGTHS, device=DEVICE)
    scores = replace(SCORES[name], sinks=normal(heads[0], seed=2) if sinks else None)
    running = [row for row, length in enumerate(LENGTHS) if length]
    new = [
        torch.stack([whole[-1] if len(whole) else whole.new_zeros(whole.shape[1:]) for whole in each])
        for each in wholes
    ]
    stores = (keys, values, key_exponents, value_exponents)
    expected_stores = [store.clone() for store in stores]
    for row in running:  # they are yet to be written
        for store in stores:
            store[table[row, (LENGTHS[row] - 1) // PAGE_SIZE], (LENGTHS[row] - 1) % PAGE_SIZE] = 9
    exponents = (key_exponents, value_exponents)
    actual = attend_pages(query, *new, keys, values, table, lengths, scores, exponents=exponents, backend=backend)
    for store, expected_store in zip(stores, expected_stores, strict=True):
        assert torch.equal(store.view(torch.int8), expected_store.view(torch.int8))
    packed = [round_heads(torch.cat(each)).double() for each in wholes]
    queries, asked = Packing.from_lengths([1] * 4, DEVICE), Packing.from_lengths([n for n in LENGTHS if n], DEVICE)
    wide = replace(scores, sinks=None if scores.sinks is None else scores.sinks.double())
    expected = reference_attention(query[running].double(), *packed, queries, asked, wide)
    assert_equal(actual[running], expected.float(), name)


@pytest.mark.parametrize("factor", [1.0, 1e-4, 3e4])
def test_fp8_heads_are_within_a_sixteenth(factor: float) -> None:
    """e4m3 has three bits: a value is off by 2**-4 of itself at most, and by 2**-10 of 448 where it is tiny."""
    heads = outliers(70, 3, 64, seed=5) * factor
    quantized, exponents = quantize_heads(heads)
    rounded = dequantize_heads(quantized, exponents, torch.float32)
    largest = heads.abs().amax(-1, keepdim=True)
    assert ((rounded - heads).abs() <= torch.maximum(heads.abs() / 16, largest * 2**-17)).all()
    assert (quantized.float().abs().amax(-1) > 200).all()  # the scale is the smallest power of two
    assert torch.equal(rounded.bfloat16().float(), rounded)
    assert torch.equal(round_heads(rounded), rounded)


def test_fp8_of_zero_and_of_numbers_that_are_not_finite() -> None:
    heads = torch.zeros(3, 1, 16, device=DEVICE)
    heads[1, 0, 3], heads[2, 0, 5] = float("nan"), float("inf")
    rounded = round_heads(heads)
    assert torch.equal(rounded[0], heads[0])
    assert not rounded[1, 0, 3].isfinite()
    assert not rounded[2, 0, 5].isfinite()
