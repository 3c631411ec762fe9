"""A microbatch cut over the ranks of a context-parallel axis equals the whole one."""

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
    """Microbatches of random tokens, with a column of each kind; of a single sequence the second is empty."""
    generator = torch.Generator().manual_seed(0)
    sequences = [torch.randint(1, 1000, (length,), generator=generator) for length in lengths]
    columns = {
        "per_token": [torch.randn(length, 2, generator=generator) for length in lengths],
        "per_sequence": [float(index + 1) for index in range(len(lengths))],
        "mask": [True for _ in lengths],
    }
    return pack(sequences, budget=budget, columns=columns, multiple_of=multiple_of)


def pack_together(lengths) -> Microbatch:
    """All in one microbatch."""
    [microbatch] = packed(lengths, budget=sum(lengths), multiple_of=1)
    return microbatch


def shard_on_all_ranks(microbatch: Microbatch, size: int, multiple_of: int = 1) -> list[Microbatch]:
    """What each of `size` ranks holds of it."""
    return [shard_context(microbatch, Axis(size, rank), multiple_of=multiple_of) for rank in range(size)]


def fields(microbatch: Microbatch) -> dict[str, torch.Tensor]:
    named = {name: getattr(microbatch, name) for name in ("tokens", "positions", "targets", "batch_indices")}
    return named | dict(microbatch.columns)


@settings(max_examples=60)
@given(some_lengths, sizes, multiples)
def test_every_token_is_on_one_rank_with_its_targets_and_columns(lengths, size, multiple_of):
    for whole in packed(lengths):
        parts = shard_on_all_ranks(whole, size, multiple_of)
        real = [part.batch_indices >= 0 for part in parts]
        order = torch.cat([part.batch_indices[mask] for part, mask in zip(parts, real, strict=True)]).argsort()
        for name, values in fields(whole).items():
            held = torch.cat([fields(part)[name][mask] for part, mask in zip(parts, real, strict=True)])
            assert held.dtype == values.dtype
            assert torch.equal(held[order], values[whole.batch_indices.argsort()]), name


@settings(max_examples=60)
@given(some_lengths, sizes, multiples)
def test_ranks_are_even_and_padding_is_no_more_than_it_must_be(lengths, size, multiple_of):
    unit = 2 * size if size > 1 else 1
    for whole in packed(lengths):
        parts = shard_on_all_ranks(whole, size, multiple_of)
        assert {len(part) % multiple_of for part in parts} == {0}
        assert len({len(part) for part in parts}) == 1
        in_chunks = sum(-(-length // unit) * unit for length in whole.packing.lengths)
        quantum = lcm(unit, size * multiple_of)
        assert sum(len(part) for part in parts) == -(-in_chunks // quantum) * quantum
        assert sum(part.padding for part in parts) == sum(len(part) for part in parts) - len(whole)
        for part in parts:
            assert part.packing == parts[0].packing
            assert part.target_count == int((part.targets != IGNORE).sum())
            for name in ("sequences", "index", "count", "batch_tokens", "batch_targets"):
                assert getattr(part, name) == getattr(whole, name)


@settings(max_examples=60)
@given(some_lengths, sizes, multiples)
def test_padding_is_masked_and_zero(lengths, size, multiple_of):
    for whole in packed(lengths):
        for part in shard_on_all_ranks(whole, size, multiple_of):
            padding = part.batch_indices < 0
            assert part.padding == int(padding.sum())
            assert part.token_mask is None if part.padding == 0 else torch.equal(part.token_mask, ~padding)
            assert not part.tokens[padding].any()
            assert (part.targets[padding] == IGNORE).all()
            assert not any(column[padding].any() for column in part.columns.values())


@settings(max_examples=60)
@given(some_lengths, st.integers(2, 5), multiples)
def test_chunks_are_the_zigzag_with_positions_of_the_sequence(lengths, size, multiple_of):
    for whole in packed(lengths):
        parts = shard_on_all_ranks(whole, size, multiple_of)
        for sequence, (start, stop) in enumerate(parts[0].packing.slices()):
            chunks = {}
            for rank, part in enumerate(parts):
                chunks[rank], chunks[2 * size - 1 - rank] = part.positions[start:stop].chunk(2)
            straight = torch.cat([chunks[number] for number in range(2 * size)])
            assert straight.tolist() == list(range((stop - start) * size))
            assert len(straight) >= whole.packing.lengths[sequence]


@settings(max_examples=60)
@given(some_lengths, sizes, multiples, st.booleans(), st.sampled_from([(), (3,)]))
def test_scatter_add_of_all_shards_equals_unpack(lengths, size, multiple_of, shifted, trailing):
    microbatches = packed(lengths)
    values = [torch.randn(len(whole), *trailing) for whole in microbatches]
    expected = torch.cat(unpack(microbatches, values, shifted=shifted))
    whole_into, cut_into = torch.zeros_like(expected), torch.zeros_like(expected)
    for whole, rows in zip(microbatches, values, strict=True):
        scatter_add(whole, rows, whole_into, shifted=shifted)
        by_place = torch.full((whole.batch_tokens + 1, *trailing), float("nan"))  # padding's is the last
        by_place[whole.batch_indices] = rows
        for part in shard_on_all_ranks(whole, size, multiple_of):
            scatter_add(part, by_place[part.batch_indices], cut_into, shifted=shifted)
    assert torch.equal(whole_into, expected)
    assert torch.equal(cut_into, expected)


def test_scatter_add_takes_results_of_every_dtype():
    whole = pack_together([5, 2])
    for values in (whole.targets == 3, whole.targets, whole.targets.double()):
        into = torch.zeros(whole.batch_tokens, dtype=values.dtype)
        scatter_add(whole, values, into)
        assert torch.equal(into, torch.cat(unpack([whole], [values])))


@pytest.mark.parametrize("softcap", [None, 1.5])
@settings(max_examples=30)
@given(some_lengths, st.integers(2, 4), multiples, st.sampled_from([None, 1, 3, 8]), st.integers(0, 100))
def test_attention_of_all_shards_equals_attention_of_full_sequences(softcap, lengths, size, multiple_of, window, seed):
    """The gather is a concatenation here; what padding holds is random, so that it would show."""
    whole = pack_together(lengths)
    scores = ScoreConfig(scale=0.4, window=window, softcap=softcap)
    torch.manual_seed(seed)
    inputs = [torch.randn(len(whole), heads, 4, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2)]
    expected = attend(*inputs, whole.packing, whole.packing, scores)

    parts = shard_on_all_ranks(whole, size, multiple_of)
    local = [[torch.cat([each, torch.randn_like(each[:1])])[part.batch_indices] for each in inputs] for part in parts]
    _, keys, values = (torch.cat(gathered) for gathered in zip(*local, strict=True))
    actual = torch.zeros_like(expected)
    for part, (query, _, _) in zip(parts, local, strict=True):
        context = part.cp_shard
        output = attend(query, keys[context.key_rows], values[context.key_rows], context.queries, context.keys, scores)
        scatter_add(part, output, actual, shifted=False)

    assert_equal(actual, expected, tolerance=1e-12)
    upstream = torch.randn_like(expected)
    gradients = (torch.cat(torch.autograd.grad(each, inputs, upstream), dim=1) for each in (actual, expected))
    assert_equal(*gradients, "gradients", tolerance=1e-12)


@settings(max_examples=30)
@given(some_lengths, st.integers(2, 5))
def test_every_rank_attends_to_as_many_keys(lengths, size):
    for whole in packed(lengths):
        parts = shard_on_all_ranks(whole, size)
        work = {
            sum(
                asking * (2 * asked - asking)
                for asking, asked in zip(part.cp_shard.queries.lengths, part.cp_shard.keys.lengths, strict=True)
            )
            for part in parts
            if part.cp_shard
        }
        assert len(work) <= 1


SUMMED = [7, 1, 4, 12, 2]


def sequence_loss(sums: torch.Tensor) -> torch.Tensor:
    return -F.logsigmoid(sums * torch.linspace(-1, 1, len(sums), dtype=sums.dtype)).sum()


def summed_over_ranks(group: dist.ProcessGroup, values: torch.Tensor, multiple_of: int):
    """One rank's sums, its lengths, and the gradients of its values at their places. Padding holds NaN."""
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    whole = pack_together(SUMMED)
    part = shard_context(whole, Axis(size, rank, group), multiple_of=multiple_of)
    own = torch.cat([values, torch.full_like(values[:1], float("nan"))])[part.batch_indices].requires_grad_()
    sums = part.sequence_sum(own)
    (gradient,) = torch.autograd.grad(sequence_loss(sums) * (rank + 1), own)  # each rank's loss is another
    by_token = torch.zeros(whole.batch_tokens, dtype=values.dtype)
    scatter_add(part, gradient, by_token, shifted=False)
    assert not gradient[part.batch_indices < 0].any()
    return sums.detach(), part.sequence_sum(part.batch_indices >= 0), by_token


@pytest.mark.parametrize("multiple_of", [1, 3])
@pytest.mark.parametrize("size", [2, 4])
def test_sums_over_sharded_sequences_equal_those_of_full_ones(ranks: Ranks, size: int, multiple_of: int) -> None:
    whole = pack_together(SUMMED)
    by_place = torch.randn(sum(SUMMED), dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    values = by_place.requires_grad_()
    expected = whole.sequence_sum(values[whole.batch_indices])
    total = sum(sequence_loss(expected) * (rank + 1) for rank in range(size))
    (gradient,) = torch.autograd.grad(total, values)
    answers = ranks(size, summed_over_ranks, values.detach(), multiple_of)
    for sums, lengths, _ in answers:
        assert_equal(sums, expected, "sums")
        assert lengths.tolist() == list(whole.packing.lengths)
    assert_equal(sum(by_token for _, _, by_token in answers), gradient, "gradients")


def test_padding_does_not_count_in_a_sum() -> None:
    part = shard_context(pack_together([3, 2]), Axis(), multiple_of=4)
    values = torch.where(part.batch_indices < 0, float("nan"), 1.0).requires_grad_()
    sums = part.sequence_sum(values)
    assert sums.tolist() == [3, 2]
    sums.sum().backward()
    assert values.grad.tolist() == [1, 1, 1, 1, 1, 0, 0, 0]


def test_what_needs_no_cut_is_returned_as_it_is() -> None:
    whole, empty = pack_together([6, 2]), packed([6])[1]
    assert shard_context(whole, Axis(), multiple_of=4) is whole
    assert shard_context(empty, Axis(2, 1), multiple_of=4) is empty
    assert shard_context(whole, Axis(), multiple_of=5).packing.lengths == (6, 4)
    assert shard_context(whole, Axis(), multiple_of=5).cp_shard is None


def test_to_moves_every_tensor_of_a_sharded_microbatch() -> None:
    moved = shard_context(pack_together([6, 2]), Axis(2, 1)).to("meta")
    context = moved.cp_shard
    tensors = [*fields(moved).values(), moved.cu_seqlens, context.key_rows]
    tensors += [context.queries.cu_seqlens, context.keys.cu_seqlens]
    assert {tensor.device.type for tensor in tensors} == {"meta"}


def test_gradients_reach_the_columns_owner_through_a_cut() -> None:
    owned = torch.zeros(5, requires_grad=True)
    [whole] = pack([[1, 2, 3, 4, 5]], budget=5, columns={"owned": [owned]})
    sum(part.column("owned").sum() for part in shard_on_all_ranks(whole, 2)).backward()
    assert owned.grad.tolist() == [0, 1, 1, 1, 1]


def one_cut() -> Microbatch:
    return shard_context(pack_together([3, 2]), Axis(2, 0))


@pytest.mark.parametrize(
    ("attempt", "sentence"),
    [
        (
            lambda: shard_context(pack_together([3]), Axis(), multiple_of=0),
            "multiple_of is 0, but the least is 1. Give a positive multiple_of.",
        ),
        (
            lambda: shard_context(one_cut(), Axis(2, 0)),
            "microbatch 0 is padded or sharded already, but only a whole one can be sharded. "
            "Shard it once, as pack made it.",
        ),
        (
            lambda: unpack([one_cut()], [torch.zeros(4)]),
            "microbatch 0 is padded or sharded over ranks, but unpack splits whole sequences. "
            "Put its values back with scatter_add.",
        ),
        (
            lambda: one_cut().sequence_sum(torch.zeros(4)),
            "a sum over sequences that 2 ranks share needs the group of those ranks, but the axis they were "
            "sharded along has none. Shard along the cp axis of a Mesh.",
        ),
        (
            lambda: one_cut().sequence_sum(torch.zeros(5)),
            "values to sum have shape (5,), but the packing holds 4 tokens. Give one value per token, [4, ...].",
        ),
        (
            lambda: scatter_add(one_cut(), torch.zeros(5), torch.zeros(5)),
            "the values of microbatch 0 have shape (5,), but it holds 4 tokens. Give one value per position, [4, ...].",
        ),
        (
            lambda: scatter_add(one_cut(), torch.zeros(4, 2), torch.zeros(4, 2)),
            "`output` has shape (4, 2), but the batch has 5 tokens of shape (2,). Give zeros of shape (5, 2).",
        ),
    ],
)
def test_errors_name_the_value_the_limit_and_the_mend(attempt, sentence) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011
        attempt()
    assert str(error.value) == sentence
