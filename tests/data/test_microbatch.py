"""Packing and Microbatch: sums, positions and shapes."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from postlude.data import Microbatch, pack, shard_context
from postlude.ops.packing import Packing
from postlude.world.mesh import Axis

some_lengths = st.lists(st.integers(1, 9), max_size=8)


@settings(max_examples=50)
@given(some_lengths)
def test_slices_positions_and_sequence_index_agree_with_the_lengths(lengths):
    packing = Packing.from_lengths(lengths)
    assert (packing.count, packing.total, packing.max_length) == (len(lengths), sum(lengths), max(lengths, default=0))
    assert [stop - start for start, stop in packing.slices()] == lengths
    assert [0, *(stop for _, stop in packing.slices())] == packing.cu_seqlens.tolist()
    assert packing.positions().tolist() == [position for length in lengths for position in range(length)]
    assert packing.sequence_index().tolist() == [index for index, length in enumerate(lengths) for _ in range(length)]
    assert packing.positions().dtype == packing.sequence_index().dtype == torch.int64
    assert packing.cu_seqlens.dtype == torch.int32


@settings(max_examples=50)
@given(some_lengths, st.sampled_from([(), (3,), (2, 2)]))
def test_sum_equals_each_sequence_summed_alone(lengths, trailing):
    packing = Packing.from_lengths(lengths)
    values = torch.randn(packing.total, *trailing, dtype=torch.float64)
    alone = [values[start:stop].sum(0) for start, stop in packing.slices()]
    expected = torch.stack(alone) if alone else torch.zeros(0, *trailing, dtype=torch.float64)
    torch.testing.assert_close(packing.sum(values), expected)


@pytest.mark.parametrize(
    ("dtype", "summed_in"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
        (torch.bool, torch.int64),
        (torch.int32, torch.int64),
    ],
)
def test_sum_is_exact_where_a_narrow_dtype_is_not(dtype, summed_in):
    sums = Packing.from_lengths([1000, 3]).sum(torch.ones(1003, dtype=dtype))
    assert sums.dtype == summed_in
    assert sums.tolist() == [1000, 3]  # bfloat16 itself would stop at 256


def test_sum_is_differentiable():
    packing = Packing.from_lengths([2, 1, 3])
    values = torch.randn(6, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(packing.sum, (values,))


def test_packings_with_equal_lengths_are_equal():
    assert Packing.from_lengths([2, 1]) == Packing.from_lengths((2, 1))
    assert Packing.from_lengths([2, 1]) != Packing.from_lengths([1, 2])


@pytest.mark.parametrize(
    ("build", "sentence"),
    [
        (
            lambda: Packing.from_lengths([2, 0]),
            "packed sequence 1 has length 0, but the minimum is 1. Leave out empty sequences.",
        ),
        (
            lambda: Packing((2, 1), torch.tensor([0, 2], dtype=torch.int32)),
            "cu_seqlens is torch.int32 of shape (2,), but 2 lengths need torch.int32 of shape (3,). "
            "Use Packing.from_lengths.",
        ),
        (
            lambda: Packing((2,), torch.tensor([0, 2])),
            "cu_seqlens is torch.int64 of shape (2,), but 1 lengths need torch.int32 of shape (2,). "
            "Use Packing.from_lengths.",
        ),
        (
            lambda: Packing.from_lengths([2, 1]).sum(torch.zeros(4, 2)),
            "values to sum have shape (4, 2), but the packing holds 3 tokens. Give one value per token, [3, ...].",
        ),
    ],
)
def test_invalid_packings_give_clear_errors(build, sentence):
    with pytest.raises(ValueError) as error:  # noqa: PT011
        build()
    assert str(error.value) == sentence


@pytest.fixture
def microbatch() -> Microbatch:
    [microbatch] = pack([[5, 6, 7], [8, 9]], budget=8, columns={"advantages": [0.5, 2.0], "mask": [True, False]})
    return microbatch


def test_length_boundaries_and_sums_equal_the_packings(microbatch):
    assert len(microbatch) == 5
    assert microbatch.cu_seqlens.tolist() == [0, 3, 5]
    values = torch.arange(5.0, requires_grad=True)
    sums = microbatch.sequence_sum(values)
    assert sums.tolist() == [3.0, 7.0]
    (sums * torch.tensor([1.0, 10.0])).sum().backward()
    assert values.grad.tolist() == [1, 1, 1, 10, 10]


def test_a_column_is_found_by_name(microbatch):
    assert microbatch.column("advantages") is microbatch.columns["advantages"]


@pytest.mark.parametrize(
    ("columns", "available"), [({"advantages": torch.zeros(5)}, '"advantages"'), ({}, "none")], ids=["some", "none"]
)
def test_missing_column_error_lists_the_existing_columns(microbatch, columns, available):
    with pytest.raises(LookupError) as error:
        replace(microbatch, columns=columns).column("advantage")
    assert str(error.value) == (
        f'the microbatch has no column "advantage" (it has: {available}). Name one of these, or give it to '
        "pack(columns=...) or Batch(columns=...)."
    )


def test_to_moves_every_tensor_and_keeps_the_rest(microbatch):
    moved = microbatch.to("meta")
    tensors = [
        moved.tokens,
        moved.targets,
        moved.positions,
        moved.batch_indices,
        moved.cu_seqlens,
        *moved.columns.values(),
    ]
    assert {tensor.device.type for tensor in tensors} == {"meta"}
    assert moved.packing == microbatch.packing
    for name in ("sequences", "index", "count", "batch_tokens", "batch_targets"):
        assert getattr(moved, name) == getattr(microbatch, name)
    assert list(moved.columns) == list(microbatch.columns)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"tokens": torch.zeros(4, dtype=torch.int64)},
            "tokens is torch.int64 of shape (4,), but the packing holds 5 tokens. Give torch.int64 of shape (5,).",
        ),
        (
            {"positions": torch.zeros(5, dtype=torch.int32)},
            "positions is torch.int32 of shape (5,), but the packing holds 5 tokens. Give torch.int64 of shape (5,).",
        ),
        (
            {"targets": torch.zeros(5, 1, dtype=torch.int64)},
            "targets is torch.int64 of shape (5, 1), but the packing holds 5 tokens. Give torch.int64 of shape (5,).",
        ),
        (
            {"batch_indices": torch.zeros(4, dtype=torch.int64)},
            "batch_indices is torch.int64 of shape (4,), but the packing holds 5 tokens. Give torch.int64 of shape "
            "(5,).",
        ),
        (
            {"columns": {"mask": torch.zeros(6)}},
            'column "mask" has shape (6,), but the packing holds 5 tokens. Give one value per token, [5, ...].',
        ),
        (
            {"sequences": (0,)},
            "sequences has 1 indices, but 2 sequences are packed. Give the caller's index of each one.",
        ),
        ({"index": 1}, "index is 1, but the batch has 1 microbatches. Count them from 0 to count - 1."),
    ],
)
def test_inconsistent_shapes_are_refused(microbatch, changes, sentence):
    with pytest.raises(ValueError) as error:  # noqa: PT011
        replace(microbatch, **changes)
    assert str(error.value) == sentence


def test_column_stats_are_computed_for_a_device_and_not_for_a_cp_shard():
    weights = [[0.0, 1.0, 0.0, 1e-60], [1.0, 0.5, 0.0, 0.0, 2.0], [3.0]]
    ids = [torch.arange(2 * len(sequence)).view(-1, 2) - 1 for sequence in weights]
    (microbatch,) = pack(
        [[1] * len(sequence) for sequence in weights], budget=16, columns={"weights": weights, "ids": ids}
    )
    assert microbatch.column_stats == {}
    copied = microbatch.to("cpu")
    assert copied.target_count == 7  # every token but the first of a sequence is predicted
    assert copied.column_stats["weights"].nonzero == 3  # 1e-60 is none in fp32
    assert (copied.column_stats["weights"].minimum, copied.column_stats["weights"].maximum) == (0.0, 2.0)
    assert (copied.column_stats["ids"].minimum, copied.column_stats["ids"].maximum) == (1, 8)
    assert shard_context(copied, Axis(), Axis(8)).column_stats == {}
    assert pack([[1]], budget=2, columns={"weights": [[1.0]]})[0].to("cpu").column_stats["weights"].nonzero == 0
