"""A microbatch sharded over context-parallel ranks equals the full one."""

from __future__ import annotations

from math import lcm

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from postlude.data import IGNORE, Microbatch, pack, scatter_add, shard_context, unpack
from postlude.ops.attention import ScoreConfig, attend
from postlude.world.mesh import Axis
from tests.conftest import Ranks
from tests.equality import assert_equal

sizes = st.integers(1, 5)
multiples = st.integers(1, 6)
some_lengths = st.lists(st.integers(1, 23), min_size=1, max_size=6)


def packed(lengths, budget: int = 40, multiple_of: int = 2) -> list[Microbatch]:
    """Returns microbatches of random tokens, with a column of each kind; with a single sequence the second is empty."""
    generator = torch.Generator().manual_seed(0)
    sequences = [torch.randint(1, 1000, (length,), generator=generator) for length in lengths]
    columns = {
        "per_token": [torch.randn(length, 2, generator=generator) for length in lengths],
        "per_sequence": [float(index + 1) for index in range(len(lengths))],
        "mask": [True for _ in lengths],
    }
    return pack(sequences, budget=budget, columns=columns, multiple_of=multiple_of)


def pack_together(lengths) -> Microbatch:
    """Packs all sequences into one microbatch."""
    [microbatch] = packed(lengths, budget=sum(lengths), multiple_of=1)
    return microbatch


def shard_on_all_ranks(microbatch: Microbatch, size: int, multiple_of: int = 1) -> list[Microbatch]:
    """Returns the shards of `size` context-parallel ranks."""
    return [shard_context(microbatch, Axis(size, rank), Axis(multiple_of)) for rank in range(size)]


def fields(microbatch: Microbatch) -> dict[str, torch.Tensor]:
    named = {name: getattr(microbatch, name) for name in ("tokens", "positions", "targets", "batch_indices")}
    return named | dict(microbatch.columns)


@settings(max_examples=60)
@given(some_lengths, sizes, multiples)
def test_every_token_is_on_one_rank_with_its_targets_and_columns(lengths, size, multiple_of):
    for full in packed(lengths):
        shards = shard_on_all_ranks(full, size, multiple_of)
        masks = [shard.batch_indices >= 0 for shard in shards]
        order = torch.cat([shard.batch_indices[mask] for shard, mask in zip(shards, masks, strict=True)]).argsort()
        for name, values in fields(full).items():
            gathered_values = torch.cat([fields(shard)[name][mask] for shard, mask in zip(shards, masks, strict=True)])
            assert gathered_values.dtype == values.dtype
            assert torch.equal(gathered_values[order], values[full.batch_indices.argsort()]), name


@settings(max_examples=60)
@given(some_lengths, sizes, multiples)
def test_shards_are_equal_in_size_with_minimal_padding(lengths, size, multiple_of):
    unit = 2 * size if size > 1 else 1
    for full in packed(lengths):
        shards = shard_on_all_ranks(full, size, multiple_of)
        assert {len(shard) % multiple_of for shard in shards} == {0}
        assert len({len(shard) for shard in shards}) == 1
        in_chunks = sum(-(-length // unit) * unit for length in full.packing.lengths)
        quantum = lcm(unit, size * multiple_of)
        assert sum(len(shard) for shard in shards) == -(-in_chunks // quantum) * quantum
        assert sum(shard.padding for shard in shards) == sum(len(shard) for shard in shards) - len(full)
        for shard in shards:
            assert shard.packing == shards[0].packing
            assert shard.target_count == int((shard.targets != IGNORE).sum())
            for name in ("sequences", "index", "count", "batch_tokens", "batch_targets"):
                assert getattr(shard, name) == getattr(full, name)


@settings(max_examples=60)
@given(some_lengths, sizes, multiples)
def test_padding_is_masked_and_zero(lengths, size, multiple_of):
    for full in packed(lengths):
        for shard in shard_on_all_ranks(full, size, multiple_of):
            padding = shard.batch_indices < 0
            assert shard.padding == int(padding.sum())
            assert shard.token_mask is None if shard.padding == 0 else torch.equal(shard.token_mask, ~padding)
            assert not shard.tokens[padding].any()
            assert (shard.targets[padding] == IGNORE).all()
            assert not any(column[padding].any() for column in shard.columns.values())


@settings(max_examples=60)
@given(some_lengths, st.integers(2, 5), multiples)
def test_chunks_follow_the_zigzag_order_with_sequence_positions(lengths, size, multiple_of):
    for full in packed(lengths):
        shards = shard_on_all_ranks(full, size, multiple_of)
        for sequence, (start, stop) in enumerate(shards[0].packing.slices()):
            chunks = {}
            for rank, shard in enumerate(shards):
                chunks[rank], chunks[2 * size - 1 - rank] = shard.positions[start:stop].chunk(2)
            in_order = torch.cat([chunks[number] for number in range(2 * size)])
            assert in_order.tolist() == list(range((stop - start) * size))
            assert len(in_order) >= full.packing.lengths[sequence]


@settings(max_examples=60)
@given(some_lengths, sizes, multiples, st.booleans(), st.sampled_from([(), (3,)]))
def test_scatter_add_of_all_shards_equals_unpack(lengths, size, multiple_of, shifted, trailing):
    microbatches = packed(lengths)
    values = [torch.randn(len(full), *trailing) for full in microbatches]
    expected = torch.cat(unpack(microbatches, values, shifted=shifted))
    full_output, sharded_output = torch.zeros_like(expected), torch.zeros_like(expected)
    for full, rows in zip(microbatches, values, strict=True):
        scatter_add(full, rows, full_output, shifted=shifted)
        by_index = torch.full((full.batch_tokens + 1, *trailing), float("nan"))  # the last entry is for padding
        by_index[full.batch_indices] = rows
        for shard in shard_on_all_ranks(full, size, multiple_of):
            scatter_add(shard, by_index[shard.batch_indices], sharded_output, shifted=shifted)
    assert torch.equal(full_output, expected)
    assert torch.equal(sharded_output, expected)


def test_scatter_add_takes_results_of_every_dtype():
    full = pack_together([5, 2])
    for values in (full.targets == 3, full.targets, full.targets.double()):
        output = torch.zeros(full.batch_tokens, dtype=values.dtype)
        scatter_add(full, values, output)
        assert torch.equal(output, torch.cat(unpack([full], [values])))


@pytest.mark.parametrize("softcap", [None, 1.5])
@settings(max_examples=30)
@given(some_lengths, st.integers(2, 4), multiples, st.sampled_from([None, 1, 3, 8]), st.integers(0, 100))
def test_attention_of_all_shards_equals_attention_of_full_sequences(softcap, lengths, size, multiple_of, window, seed):
    """The gather is a concatenation here; padding holds random values, so that using it would be noticed."""
    full = pack_together(lengths)
    scores = ScoreConfig(scale=0.4, window=window, softcap=softcap)
    torch.manual_seed(seed)
    inputs = [torch.randn(len(full), heads, 4, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2)]
    expected = attend(*inputs, full.packing, full.packing, scores)

    shards = shard_on_all_ranks(full, size, multiple_of)
    local = [
        [torch.cat([tensor, torch.randn_like(tensor[:1])])[shard.batch_indices] for tensor in inputs]
        for shard in shards
    ]
    _, keys, values = (torch.cat(gathered) for gathered in zip(*local, strict=True))
    actual = torch.zeros_like(expected)
    for shard, (query, _, _) in zip(shards, local, strict=True):
        context = shard.sequence_rows
        key, value = context.key_rows(keys), context.key_rows(values)
        output = attend(query, key, value, context.queries, context.keys, scores)
        scatter_add(shard, output, actual, shifted=False)

    assert_equal(actual, expected, tolerance=1e-12)
    upstream = torch.randn_like(expected)
    gradients = (torch.cat(torch.autograd.grad(tensor, inputs, upstream), dim=1) for tensor in (actual, expected))
    assert_equal(*gradients, "gradients", tolerance=1e-12)


@settings(max_examples=30)
@given(some_lengths, st.integers(2, 5))
def test_every_rank_attends_to_the_same_number_of_keys(lengths, size):
    for full in packed(lengths):
        shards = shard_on_all_ranks(full, size)
        work = {
            sum(
                query_length * (2 * key_length - query_length)
                for query_length, key_length in zip(
                    shard.sequence_rows.queries.lengths, shard.sequence_rows.keys.lengths, strict=True
                )
            )
            for shard in shards
            if shard.sequence_rows
        }
        assert len(work) <= 1


SUMMED = [7, 1, 4, 12, 2]


def sequence_loss(sums: torch.Tensor) -> torch.Tensor:
    return -F.logsigmoid(sums * torch.linspace(-1, 1, len(sums), dtype=sums.dtype)).sum()


def sums_on_rank(group: dist.ProcessGroup, values: torch.Tensor, multiple_of: int):
    """Returns one rank's sums, lengths, and gradients of its values at their positions. Padding holds NaN."""
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    full = pack_together(SUMMED)
    shard = shard_context(full, Axis(size, rank, group), Axis(multiple_of))
    local_values = torch.cat([values, torch.full_like(values[:1], float("nan"))])[shard.batch_indices].requires_grad_()
    sums = shard.sequence_sum(local_values)
    (gradient,) = torch.autograd.grad(sequence_loss(sums) * (rank + 1), local_values)  # each rank's loss is another
    by_token = torch.zeros(full.batch_tokens, dtype=values.dtype)
    scatter_add(shard, gradient, by_token, shifted=False)
    assert not gradient[shard.batch_indices < 0].any()
    return sums.detach(), shard.sequence_sum(shard.batch_indices >= 0), by_token


@pytest.mark.parametrize("multiple_of", [1, 3])
@pytest.mark.parametrize("size", [2, 4])
def test_sums_over_sharded_sequences_equal_those_of_full_ones(ranks: Ranks, size: int, multiple_of: int) -> None:
    full = pack_together(SUMMED)
    by_index = torch.randn(sum(SUMMED), dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    values = by_index.requires_grad_()
    expected = full.sequence_sum(values[full.batch_indices])
    total = sum(sequence_loss(expected) * (rank + 1) for rank in range(size))
    (gradient,) = torch.autograd.grad(total, values)
    results = ranks(size, sums_on_rank, values.detach(), multiple_of)
    for sums, lengths, _ in results:
        assert_equal(sums, expected, "sums")
        assert lengths.tolist() == list(full.packing.lengths)
    assert_equal(sum(by_token for _, _, by_token in results), gradient, "gradients")


def test_padding_is_excluded_from_sums() -> None:
    shard = shard_context(pack_together([3, 2]), Axis(), Axis(4))
    values = torch.where(shard.batch_indices < 0, float("nan"), 1.0).requires_grad_()
    sums = shard.sequence_sum(values)
    assert sums.tolist() == [3, 2]
    sums.sum().backward()
    assert values.grad.tolist() == [1, 1, 1, 1, 1, 0, 0, 0]


def test_microbatch_is_unchanged_with_one_context_parallel_rank() -> None:
    full, empty = pack_together([6, 2]), packed([6])[1]
    assert shard_context(full, Axis(), Axis(4)) is full
    assert shard_context(empty, Axis(2, 1), Axis(4)) is empty
    assert shard_context(full, Axis(), Axis(5)).packing.lengths == (6, 4)
    assert shard_context(full, Axis(), Axis(5)).sequence_rows is None


def test_to_moves_every_tensor_of_a_sharded_microbatch() -> None:
    moved = shard_context(pack_together([6, 2]), Axis(2, 1)).to("meta")
    context = moved.sequence_rows
    tensors = [*fields(moved).values(), moved.cu_seqlens, context.key_rows.rows]
    tensors += [context.queries.cu_seqlens, context.keys.cu_seqlens]
    assert {tensor.device.type for tensor in tensors} == {"meta"}


def test_column_gradients_flow_through_context_sharding() -> None:
    owned = torch.zeros(5, requires_grad=True)
    [full] = pack([[1, 2, 3, 4, 5]], budget=5, columns={"owned": [owned]})
    sum(shard.column("owned").sum() for shard in shard_on_all_ranks(full, 2)).backward()
    assert owned.grad.tolist() == [0, 1, 1, 1, 1]


def sharded_microbatch() -> Microbatch:
    return shard_context(pack_together([3, 2]), Axis(2, 0))


@pytest.mark.parametrize(
    ("attempt", "sentence"),
    [
        (
            lambda: shard_context(sharded_microbatch(), Axis(2, 0)),
            "microbatch 0 is padded or sharded already, but only a whole one can be sharded. "
            "Shard it once, as pack made it.",
        ),
        (
            lambda: unpack([sharded_microbatch()], [torch.zeros(4)]),
            "microbatch 0 is padded or sharded over ranks, but unpack splits whole sequences. "
            "Put its values back with scatter_add.",
        ),
        (
            lambda: sharded_microbatch().sequence_sum(torch.zeros(4)),
            "a sum over sequences that 2 ranks share needs the group of those ranks, but the axis they were "
            "sharded along has none. Shard along the cp axis of a Mesh.",
        ),
        (
            lambda: sharded_microbatch().sequence_sum(torch.zeros(5)),
            "values to sum have shape (5,), but the packing holds 4 tokens. Give one value per token, [4, ...].",
        ),
        (
            lambda: scatter_add(sharded_microbatch(), torch.zeros(5), torch.zeros(5)),
            "the values of microbatch 0 have shape (5,), but it holds 4 tokens. Give one value per position, [4, ...].",
        ),
        (
            lambda: scatter_add(sharded_microbatch(), torch.zeros(4, 2), torch.zeros(4, 2)),
            "`output` has shape (4, 2), but the batch has 5 tokens of shape (2,). Give zeros of shape (5, 2).",
        ),
    ],
)
def test_errors_name_the_value_the_limit_and_the_fix(attempt, sentence) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011
        attempt()
    assert str(error.value) == sentence
