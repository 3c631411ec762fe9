"""Tests of the kernels over pages. `test_kernels.py` runs this file: on a GPU, or through Triton's
interpreter, which must be chosen before triton is first imported."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from postlude.ops import paged_attention
from postlude.ops.attention import ScoreConfig, reference_attention
from postlude.ops.fp8_kv import FP8, dequantize_heads, quantize_heads, round_heads
from postlude.ops.packing import Packing
from postlude.ops.paged_attention import PAGE_SIZE, attend_pages, new_page_store
from postlude.ops.shared_pages import TILE_ROWS, SharedPages, shared_tiles
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
    """Stores keys [length, heads, width] of sequences in randomly ordered pages. Returns store and page table."""
    store = new_page_store(16, heads, width, torch.float32, torch.device(DEVICE))
    store.copy_(normal(*store.shape, seed=9))  # what lies past an end is not zero
    order = torch.randperm(16, generator=torch.Generator().manual_seed(seed)).tolist()
    table = torch.zeros(len(wholes), 3, dtype=torch.int32)
    for row, sequence in enumerate(wholes):
        for number, piece in enumerate(sequence.split(PAGE_SIZE) if len(sequence) else ()):
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
    (keys, table), (values, value_table) = (
        paged(sequences, heads[1], width) for sequences, width in zip(wholes, widths, strict=True)
    )
    assert torch.equal(table, value_table)
    query, lengths = normal(len(LENGTHS), heads[0], widths[0], seed=1), torch.tensor(LENGTHS, device=DEVICE)
    scores = replace(SCORES[name], sinks=normal(heads[0], seed=2) if sinks else None)
    running = [row for row, length in enumerate(LENGTHS) if length]
    new = [
        torch.stack(
            [sequence[-1] if len(sequence) else sequence.new_zeros(sequence.shape[1:]) for sequence in sequences]
        )
        for sequences in wholes
    ]
    whole_stores = keys.clone(), values.clone()
    for row in running:  # they are yet to be written
        for store in (keys, values):
            store[table[row, (LENGTHS[row] - 1) // PAGE_SIZE], (LENGTHS[row] - 1) % PAGE_SIZE] = 9.0
    actual = attend_pages(query, *new, keys, values, table, lengths, scores, backend=backend)
    assert torch.equal(keys, whole_stores[0])
    assert torch.equal(values, whole_stores[1])
    packed = [torch.cat(sequences) for sequences in wholes]
    queries, key_packing = (
        Packing.from_lengths([1] * 4, DEVICE),
        Packing.from_lengths([n for n in LENGTHS if n], DEVICE),
    )
    expected = reference_attention(query[running], *packed, queries, key_packing, scores)
    assert_equal(actual[running], expected, name)
    assert actual.isfinite().all()


@pytest.mark.parametrize("rows", [1, 5, 150])
def test_number_of_splits_does_not_change_the_result(rows: int) -> None:
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


GROUPS = {
    # pages that the rows of a group share, and the length of each: 0 has ended
    "uneven": ((2, (130, 0, 150, 192)), (1, (65, 180)), (0, (100,)), (0, (0,)), (2, (129,))),
    "first has ended": ((1, (0, 70, 65)), (2, (0, 0))),
    "more than a tile": ((1, tuple(65 + row % 7 for row in range(TILE_ROWS + 3))),),
}


def grouped(groups, heads: int, width: int) -> tuple[Tensor, Tensor, Tensor, list[Tensor], dict[int, list[int]]]:
    """A store, its table and lengths, the keys of each row without its newest, and each row's pages. Groups alternate.

    Rows that have ended keep their pages, as they do until the host knows.
    """
    placed = sorted((place, group) for group, (_, lengths) in enumerate(groups) for place in range(len(lengths)))
    rows = len(placed)
    store = new_page_store(4 * rows, heads, width, torch.float32, torch.device(DEVICE))
    store.copy_(normal(*store.shape, seed=9))
    free = torch.randperm(4 * rows, generator=torch.Generator().manual_seed(3)).tolist()
    prefixes = [[free.pop() for _ in range(shared)] for shared, _ in groups]
    table, lengths, wholes, pages = torch.zeros(rows, 3, dtype=torch.int32), [], [], {}
    for row, (place, group) in enumerate(placed):
        length = groups[group][1][place]
        pages[row] = prefixes[group] + [free.pop() for _ in range(3 - len(prefixes[group]))]
        table[row] = torch.tensor(pages[row])
        lengths.append(length)
        wholes.append(store[pages[row]].flatten(0, 1)[: max(length - 1, 0)].clone())
    return store, table.to(DEVICE), torch.tensor(lengths, device=DEVICE), wholes, pages


def shared_pages_of(pages: dict[int, list[int]]) -> SharedPages:
    shared = SharedPages.of(len(pages), shared_tiles(pages))
    return SharedPages(shared.tiles.to(DEVICE), shared.pages.to(DEVICE))


@pytest.mark.parametrize("sinks", [False, True], ids=["plain", "sinks"])
@pytest.mark.parametrize(("heads", "widths"), [((6, 2), (16, 10)), ((32, 1), (16, 16)), ((2, 2), (16, 16))])
@pytest.mark.parametrize("name", SCORES)
@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_shared_pages_equal_attention_of_each_row(backend, groups, name: str, heads, widths, sinks: bool) -> None:
    """In float64. Groups have rows of different lengths; some have finished or have one row."""
    if (groups == "more than a tile" and (name != "plain" or sinks or heads != (2, 2))) or (
        groups == "first has ended" and (sinks or heads == (2, 2))
    ):
        pytest.skip("the others have this score and these heads")
    keys, table, lengths, all_keys, pages = grouped(GROUPS[groups], heads[1], widths[0])
    values, _, _, all_values, _ = grouped(GROUPS[groups], heads[1], widths[1])
    rows = len(table)
    query, scores = normal(rows, heads[0], widths[0], seed=1), SCORES[name]
    scores = replace(scores, sinks=normal(heads[0], seed=2) if sinks else None)
    key, value = normal(rows, heads[1], widths[0], seed=4), normal(rows, heads[1], widths[1], seed=5)
    running = lengths.nonzero()[:, 0].tolist()
    actual = attend_pages(
        query, key, value, keys, values, table, lengths, scores, shared=shared_pages_of(pages), backend=backend
    )
    packed = [
        torch.cat([torch.cat((wholes[row], new[row : row + 1])) for row in running]).double()
        for wholes, new in ((all_keys, key), (all_values, value))
    ]
    queries = Packing.from_lengths([1] * len(running), DEVICE)
    running_packing = Packing.from_lengths(lengths[running].tolist(), DEVICE)
    exact = replace(scores, sinks=None if scores.sinks is None else scores.sinks.double())
    expected = reference_attention(query[running].double(), *packed, queries, running_packing, exact)
    assert_equal(actual[running].double(), expected, name)
    assert actual.isfinite().all()


def test_shared_pages_are_read_once_per_tile() -> None:
    """The kernel reads the page table of the tile's first row only."""
    groups = GROUPS["uneven"]
    keys, table, lengths, _, pages = grouped(groups, 2, 16)
    values, *_ = grouped(groups, 2, 16)
    inputs = normal(len(table), 4, 16), normal(len(table), 2, 16, seed=3), normal(len(table), 2, 16, seed=4)
    shared, wrong = shared_pages_of(pages), table.clone()
    for tile in shared.tiles.tolist():
        for row in tile[1:]:
            if row >= 0:
                wrong[row, : int(shared.pages[row])] = 0
    for backend in ("torch", "triton"):
        expected, actual = (
            attend_pages(
                *inputs,
                keys.clone(),
                values.clone(),
                block_table,
                lengths,
                SCORES["plain"],
                shared=shared,
                backend=backend,
            )
            for block_table in (table, wrong)
        )
        assert torch.equal(actual[lengths > 0], expected[lengths > 0])
    assert not torch.equal(table, wrong)


@pytest.mark.parametrize("fp8", [False, True], ids=["", "fp8"])
@pytest.mark.parametrize("shared", [False, True], ids=["", "shared"])
@pytest.mark.parametrize(("heads", "tokens_per_row"), [((6, 2), 2), ((32, 1), 2), ((2, 2), 3)])
@pytest.mark.parametrize("name", SCORES)
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_several_tokens_per_row_equal_one_at_a_time(backend, name, heads, tokens_per_row, shared, fp8) -> None:
    """Across a page border, with idle rows, and with a sequence of these tokens only."""
    if heads != (6, 2) and (name not in ("plain", "window of one") or not shared):
        pytest.skip("the others have this score")
    groups = ((2, (131, 0, 192)), (1, (PAGE_SIZE + tokens_per_row, 129)), (0, (tokens_per_row,)))
    keys, table, lengths, _, pages = grouped(groups, heads[1], 16)
    values, *_ = grouped(groups, heads[1], 10)
    exponents = None
    if fp8:
        quantized = []
        for store in (keys, values):
            stored, exponent = quantize_heads(store)
            quantized.append((new_page_store(*store.shape[:1], *store.shape[2:], FP8, store.device), exponent))
            quantized[-1][0].copy_(stored)
        (keys, key_exponents), (values, value_exponents) = quantized
        exponents = key_exponents, value_exponents
    scores = replace(SCORES[name], sinks=normal(heads[0], seed=2))
    tokens = len(table) * tokens_per_row
    query, key = normal(tokens, heads[0], 16), normal(tokens, heads[1], 16, seed=3)
    value = normal(tokens, heads[1], 10, seed=4)
    one_by_one = [keys.clone(), values.clone(), *(store.clone() for store in exponents or ())]
    outputs = []
    for number in range(tokens_per_row):
        before = torch.where(lengths > 0, lengths - tokens_per_row + 1 + number, 0)
        new = (part[number::tokens_per_row] for part in (query, key, value))
        its_exponents = (one_by_one[2], one_by_one[3]) if fp8 else None
        outputs.append(
            attend_pages(*new, *one_by_one[:2], table, before, scores, exponents=its_exponents, backend="torch")
        )
    expected = torch.stack(outputs, 1)
    by_row = shared_pages_of(pages) if shared else None
    actual = attend_pages(
        *(query, key, value, keys, values, table, lengths, scores), exponents=exponents, shared=by_row, backend=backend
    )
    running = lengths > 0
    assert_equal(actual.unflatten(0, (-1, tokens_per_row))[running], expected[running], name)
    for store, expected_store in zip((keys, values, *(exponents or ())), one_by_one, strict=True):
        assert torch.equal(store.view(torch.int8), expected_store.view(torch.int8))


def test_heads_too_large_for_a_tile_are_refused() -> None:
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
    """Heads of which every fifth token is 1,000 times as large and every seventh 1,000 times as small."""
    sequence = normal(length, heads, width, seed=seed)
    tokens = torch.arange(length, device=DEVICE)
    return sequence * torch.where(tokens % 5 == 3, 1e3, torch.where(tokens % 7 == 4, 1e-3, 1.0))[:, None, None]


@pytest.mark.parametrize("sinks", [False, True], ids=["plain", "sinks"])
@pytest.mark.parametrize(("heads", "widths"), [((6, 2), (16, 10)), ((3, 1), (24, 24))])
@pytest.mark.parametrize("name", SCORES)
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_fp8_pages_equal_float64_attention_over_rounded_heads(backend, name, heads, widths, sinks) -> None:
    """Values have outlier tokens, and so do keys where the softmax would not then see one key only."""
    wholes = [
        [normal(length, heads[1], widths[0], seed=length) for length in LENGTHS],
        [outliers(length, heads[1], widths[1], seed=length) for length in LENGTHS],
    ]
    (keys, key_exponents, table), (values, value_exponents, _) = (
        fp8_stores(sequences, heads[1], width) for sequences, width in zip(wholes, widths, strict=True)
    )
    query, lengths = normal(len(LENGTHS), heads[0], widths[0], seed=1), torch.tensor(LENGTHS, device=DEVICE)
    scores = replace(SCORES[name], sinks=normal(heads[0], seed=2) if sinks else None)
    running = [row for row, length in enumerate(LENGTHS) if length]
    new = [
        torch.stack(
            [sequence[-1] if len(sequence) else sequence.new_zeros(sequence.shape[1:]) for sequence in sequences]
        )
        for sequences in wholes
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
    packed = [round_heads(torch.cat(sequences)).double() for sequences in wholes]
    queries, key_packing = (
        Packing.from_lengths([1] * 4, DEVICE),
        Packing.from_lengths([n for n in LENGTHS if n], DEVICE),
    )
    wide = replace(scores, sinks=None if scores.sinks is None else scores.sinks.double())
    expected = reference_attention(query[running].double(), *packed, queries, key_packing, wide)
    assert_equal(actual[running], expected.float(), name)


@pytest.mark.parametrize("factor", [1.0, 1e-4, 3e4])
def test_fp8_error_is_below_one_sixteenth(factor: float) -> None:
    """e4m3 has three bits: a value is off by 2**-4 of itself at most, and by 2**-10 of 448 where it is tiny."""
    heads = outliers(70, 3, 64, seed=5) * factor
    quantized, exponents = quantize_heads(heads)
    rounded = dequantize_heads(quantized, exponents, torch.float32)
    largest = heads.abs().amax(-1, keepdim=True)
    assert ((rounded - heads).abs() <= torch.maximum(heads.abs() / 16, largest * 2**-17)).all()
    assert (quantized.float().abs().amax(-1) > 200).all()  # the scale is the smallest power of two
    assert torch.equal(rounded.bfloat16().float(), rounded)
    assert torch.equal(round_heads(rounded), rounded)


def test_fp8_of_zero_and_non_finite_values() -> None:
    heads = torch.zeros(3, 1, 16, device=DEVICE)
    heads[1, 0, 3], heads[2, 0, 5] = float("nan"), float("inf")
    rounded = round_heads(heads)
    assert torch.equal(rounded[0], heads[0])
    assert not rounded[1, 0, 3].isfinite()
    assert not rounded[2, 0, 5].isfinite()
