"""pack and unpack: every token and column is at the position that predicts it, and is restored."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from postlude.data import IGNORE, pack, unpack


@st.composite
def batches(draw):
    """Draws sequences, a budget that holds each of them, and a multiple."""
    lengths = draw(st.lists(st.integers(1, 12), min_size=1, max_size=12))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    sequences = [torch.randint(0, 1000, (length,), generator=generator) for length in lengths]
    return sequences, draw(st.integers(max(lengths), 40)), draw(st.integers(1, 5))


def by_sequence(microbatches):
    """Returns (caller's index, microbatch, slice) of every packed sequence."""
    return [
        (index, microbatch, slice(*bounds))
        for microbatch in microbatches
        for index, bounds in zip(microbatch.sequences, microbatch.packing.slices(), strict=True)
    ]


@settings(max_examples=50)
@given(batches())
def test_each_sequence_is_packed_once_with_its_positions_and_next_tokens(batch):
    sequences, budget, multiple_of = batch
    microbatches = pack(sequences, budget=budget, multiple_of=multiple_of)
    assert len(microbatches) % multiple_of == 0
    assert all(len(microbatch) <= budget for microbatch in microbatches)
    assert sorted(index for index, _, _ in by_sequence(microbatches)) == list(range(len(sequences)))
    for index, microbatch, span in by_sequence(microbatches):
        tokens = sequences[index].tolist()
        assert microbatch.tokens[span].tolist() == tokens
        assert microbatch.targets[span].tolist() == [*tokens[1:], IGNORE]
        assert microbatch.positions[span].tolist() == list(range(len(tokens)))


@settings(max_examples=50)
@given(batches())
def test_token_positions_index_the_concatenated_sequences(batch):
    sequences, budget, multiple_of = batch
    microbatches = pack(sequences, budget=budget, multiple_of=multiple_of)
    laid = torch.cat(sequences)
    assert all(torch.equal(laid[microbatch.batch_indices], microbatch.tokens) for microbatch in microbatches)
    assert torch.cat([microbatch.batch_indices for microbatch in microbatches]).sort().values.tolist() == list(
        range(len(laid))
    )
    assert all(microbatch.padding == 0 and microbatch.token_mask is None for microbatch in microbatches)


@settings(max_examples=50)
@given(batches())
def test_batch_counts_are_known_before_the_step(batch):
    sequences, budget, multiple_of = batch
    microbatches = pack(sequences, budget=budget, multiple_of=multiple_of)
    tokens = sum(len(microbatch) for microbatch in microbatches)
    targets = sum(int((microbatch.targets != IGNORE).sum()) for microbatch in microbatches)
    assert all(microbatch.target_count == int((microbatch.targets != IGNORE).sum()) for microbatch in microbatches)
    assert {(microbatch.batch_tokens, microbatch.batch_targets) for microbatch in microbatches} == {(tokens, targets)}
    assert [(microbatch.index, microbatch.count) for microbatch in microbatches] == [
        (index, len(microbatches)) for index in range(len(microbatches))
    ]


@settings(max_examples=50)
@given(batches(), st.sampled_from([(), (3,), (2, 2)]))
def test_columns_are_at_the_position_that_predicts_their_token(batch, trailing):
    sequences, budget, multiple_of = batch
    per_token = [torch.randn(len(sequence), *trailing) for sequence in sequences]
    per_sequence = [float(index + 1) for index in range(len(sequences))]
    columns = {"per_token": per_token, "per_sequence": per_sequence}
    microbatches = pack(sequences, budget=budget, columns=columns, multiple_of=multiple_of)
    for index, microbatch, span in by_sequence(microbatches):
        column = microbatch.column("per_token")[span]
        for i in range(1, len(sequences[index])):
            assert torch.equal(column[i - 1], per_token[index][i])
        assert not column[-1].any()
        spread = microbatch.column("per_sequence")[span].tolist()
        assert spread == [per_sequence[index]] * (len(sequences[index]) - 1) + [0.0]


@settings(max_examples=50)
@given(batches(), st.sampled_from([(), (3,)]), st.randoms(use_true_random=False))
def test_unpack_inverts_pack(batch, trailing, generator):
    sequences, budget, multiple_of = batch
    values = [torch.randn(len(sequence), *trailing) for sequence in sequences]
    microbatches = pack(sequences, budget=budget, columns={"values": values}, multiple_of=multiple_of)
    generator.shuffle(microbatches)
    tokens = unpack(microbatches, [microbatch.tokens for microbatch in microbatches], shifted=False)
    assert all(torch.equal(*pair) for pair in zip(tokens, sequences, strict=True))
    for returned, given_values in zip(
        unpack(microbatches, [microbatch.column("values") for microbatch in microbatches]), values, strict=True
    ):
        assert torch.equal(returned[1:], given_values[1:])
        assert not returned[0].any()


@settings(max_examples=50)
@given(batches())
def test_unpacked_targets_are_the_tokens(batch):
    sequences, budget, _ = batch
    microbatches = pack(sequences, budget=budget)
    for targets, sequence in zip(
        unpack(microbatches, [microbatch.targets for microbatch in microbatches]), sequences, strict=True
    ):
        assert targets.tolist() == [0, *sequence[1:].tolist()]


@settings(max_examples=50)
@given(batches(), st.integers(1, 8))
def test_truncation_equals_packing_truncated_sequences(batch, budget):
    sequences, _, multiple_of = batch
    columns = {
        "per_token": [torch.randn(len(sequence), 2) for sequence in sequences],
        "per_sequence": list(range(len(sequences))),
    }
    kept_columns = columns | {"per_token": [values[:budget] for values in columns["per_token"]]}
    truncated = pack(sequences, budget=budget, columns=columns, truncate=True, multiple_of=multiple_of)
    packed = pack(
        [sequence[:budget] for sequence in sequences], budget=budget, columns=kept_columns, multiple_of=multiple_of
    )
    for first, second in zip(truncated, packed, strict=True):
        assert (first.sequences, first.packing, first.batch_tokens) == (
            second.sequences,
            second.packing,
            second.batch_tokens,
        )
        assert torch.equal(first.tokens, second.tokens)
        assert torch.equal(first.targets, second.targets)
        for name in columns:
            assert torch.equal(first.column(name), second.column(name))


@pytest.mark.parametrize("shifted", [True, False])
def test_unpack_is_differentiable_and_entry_0_gives_no_gradient(shifted):
    microbatches = pack([[1, 2, 3], [4], [5, 6]], budget=4, multiple_of=4)
    values = [torch.randn(len(microbatch), 2, dtype=torch.float64, requires_grad=True) for microbatch in microbatches]
    assert torch.autograd.gradcheck(lambda *values: tuple(unpack(microbatches, values, shifted=shifted)), values)


def test_column_gradients_flow_through_pack():
    logprobs = torch.zeros(3, requires_grad=True)
    [microbatch] = pack([[1, 2, 3], [4, 5]], budget=5, columns={"logprobs": [logprobs, torch.zeros(2)]})
    microbatch.column("logprobs").sum().backward()
    assert logprobs.grad.tolist() == [0, 1, 1]  # the first token is never predicted


def test_empty_microbatches_keep_dtypes_and_trailing_shapes():
    columns = {"mask": [[True, False]], "vectors": [torch.zeros(2, 3, dtype=torch.bfloat16)]}
    full, empty = pack([[1, 2]], budget=4, columns=columns, multiple_of=2)
    assert (len(full), len(empty), empty.sequences, empty.cu_seqlens.tolist()) == (2, 0, (), [0])
    assert empty.tokens.dtype == empty.targets.dtype == empty.positions.dtype == torch.int64
    assert empty.column("mask").dtype == torch.bool
    assert (empty.column("vectors").dtype, empty.column("vectors").shape) == (torch.bfloat16, (0, 3))
    assert empty.sequence_sum(torch.zeros(0, 3)).shape == (0, 3)


@pytest.mark.parametrize("dtype", [np.int64, np.int32, np.uint16, np.uint8])
def test_lists_arrays_and_tensors_of_tokens_are_the_same(dtype):
    array = np.array([3, 1, 2], dtype=dtype)
    array.flags.writeable = False  # as in a memory-mapped dataset
    [microbatch] = pack([[3, 1, 2], array, torch.from_numpy(array.astype(np.int16))], budget=9)
    assert microbatch.tokens.tolist() == [3, 1, 2] * 3
    assert microbatch.tokens.dtype == torch.int64


def test_2d_tensor_is_per_token_and_1d_tensor_is_per_sequence():
    [microbatch] = pack(torch.tensor([[1, 2], [3, 4]]), budget=4, columns={"reward": torch.tensor([1.0, 2.0])})
    assert microbatch.targets.tolist() == [2, IGNORE, 4, IGNORE]
    assert microbatch.column("reward").tolist() == [1.0, 0.0, 2.0, 0.0]


@pytest.mark.parametrize(
    ("entry", "dtype"),
    [
        (True, torch.bool),
        (1, torch.int64),
        (0.5, torch.float32),
        (np.float64(0.5), torch.float32),
        (np.int32(1), torch.int64),
        ([True, False], torch.bool),
        ([1, 2], torch.int64),
        ([1, 0.5], torch.float32),
        (np.array([0.5, 1.0]), torch.float32),
        (torch.tensor(0.5, dtype=torch.float64), torch.float64),
        (torch.tensor([1, 2], dtype=torch.int8), torch.int8),
        (torch.zeros(2, 3, dtype=torch.bfloat16), torch.bfloat16),
    ],
)
def test_tensors_keep_their_dtype_and_other_values_get_a_default(entry, dtype):
    [microbatch] = pack([[1, 2]], budget=2, columns={"column": [entry]})
    assert microbatch.column("column").dtype == dtype


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.float64])
def test_columns_are_aligned_in_every_dtype(dtype):
    """Including dtypes that numpy does not have."""
    sequences = [[1, 2, 3], [4], [5, 6, 7, 8]]
    values = [torch.arange(1, len(sequence) + 1) * (index + 1) for index, sequence in enumerate(sequences)]
    (plain,) = pack(sequences, budget=8, columns={"x": values})
    (cast,) = pack(sequences, budget=8, columns={"x": [sequence.to(dtype) for sequence in values]})
    assert cast.column("x").dtype == dtype
    assert torch.equal(cast.column("x"), plain.column("x").to(dtype))


def test_scalars_and_per_token_values_may_share_a_column():
    [microbatch] = pack([[1, 2], [3, 4, 5]], budget=5, columns={"mask": [True, [False, True, False]]})
    assert microbatch.column("mask").tolist() == [True, False, True, False, False]


PAIR = [[1, 2, 3], [4, 5]]


@pytest.mark.parametrize(
    ("sequences", "options", "sentence"),
    [
        ([], {}, "there are no sequences to pack. Skip the step when a batch is empty."),
        ([[1], []], {}, "sequence 1 has no tokens. Leave out empty sequences."),
        (
            [[1], [2, 3.5]],
            {},
            "sequence 1 holds torch.float32, but tokens are integers. Give the token ids of a tokenizer.",
        ),
        (
            [[True, False]],
            {},
            "sequence 0 holds torch.bool, but tokens are integers. Give the token ids of a tokenizer.",
        ),
        (
            [[1], "text"],
            {},
            "sequence 1 is a str that cannot be converted to a tensor of numbers. "
            "Give a tensor, a numpy array, or Python numbers.",
        ),
        (
            [[[1, 2], [3]]],
            {},
            "sequence 0 is a list that cannot be converted to a tensor of numbers. "
            "Give a tensor, a numpy array, or Python numbers.",
        ),
        (
            [torch.zeros(2, 2)],
            {},
            "sequence 0 has shape (2, 2), but a sequence is one-dimensional, [length]. "
            "Give a list with one such sequence per entry.",
        ),
        (
            [[1], [4, -100]],
            {},
            "sequence 1 holds token -100, but the minimum is 0. "
            "Mark tokens that are not trained on in a column, not in the tokens.",
        ),
        (PAIR, {"budget": 0}, "budget is 0, but the minimum is 1. Give a positive budget."),
        (PAIR, {"budget": 0, "truncate": True}, "budget is 0, but the minimum is 1. Give a positive budget."),
        (PAIR, {"multiple_of": 0}, "multiple_of is 0, but the minimum is 1. Give a positive multiple_of."),
        (
            PAIR,
            {"budget": 2},
            "sequence 0 has 3 tokens, over the budget of 2. "
            "Raise the budget to at least 3, or pack with truncate=True.",
        ),
        (
            PAIR,
            {"columns": {"mask": [1]}},
            'column "mask" has 1 entries for 2 sequences. Give one entry per sequence.',
        ),
        (
            PAIR,
            {"columns": {"mask": [1, [1, 1, 1]]}},
            'column "mask" has 3 values for sequence 1, which has 2 tokens. '
            "Give 2, one per token, or one scalar for all.",
        ),
        (
            PAIR,
            {"budget": 2, "truncate": True, "columns": {"mask": [[1, 1], 1]}},
            'column "mask" has 2 values for sequence 0, which has 3 tokens. '
            "Give 3, one per token, or one scalar for all.",
        ),
        (
            PAIR,
            {"columns": {"reward": [torch.tensor(1), torch.tensor(0.5)]}},
            'column "reward" holds torch.float32 of shape () per token for sequence 1, '
            "but torch.int64 of shape () for sequence 0. Give all the same dtype and shape.",
        ),
        (
            PAIR,
            {"columns": {"vectors": [torch.zeros(3, 4), torch.zeros(2, 5)]}},
            'column "vectors" holds torch.float32 of shape (5,) per token for sequence 1, '
            "but torch.float32 of shape (4,) for sequence 0. Give all the same dtype and shape.",
        ),
        (
            PAIR,
            {"columns": {"mask": [1, None]}},
            'column "mask" of sequence 1 is a NoneType that cannot be converted to a tensor of numbers. '
            "Give a tensor, a numpy array, or Python numbers.",
        ),
        (
            PAIR,
            {"columns": {"tokens": [1, 1]}},
            'a column is named "tokens", but a microbatch has tokens of its own. Choose another name.',
        ),
        (
            PAIR,
            {"columns": {"targets": [1, 1]}},
            'a column is named "targets", but a microbatch has targets of its own. Choose another name.',
        ),
    ],
)
def test_pack_errors_name_the_value_the_limit_and_the_fix(sequences, options, sentence):
    with pytest.raises(ValueError) as error:  # noqa: PT011
        pack(sequences, **{"budget": 8, **options})
    assert str(error.value) == sentence


def three_microbatches():
    microbatches = pack([[1, 2, 3], [4, 5, 6], [7, 8, 9]], budget=3)
    return microbatches, [torch.zeros(3) for _ in microbatches]


def test_unpack_refuses_another_number_of_values():
    microbatches, values = three_microbatches()
    with pytest.raises(
        ValueError, match=r"^there are 2 tensors of values for 3 microbatches. Give one per microbatch.$"
    ):
        unpack(microbatches, values[:2])


def test_unpack_refuses_values_of_another_length():
    microbatches, values = three_microbatches()
    values[1] = torch.zeros(4, 2)
    sentence = (
        r"^the values of microbatch 1 have shape \(4, 2\), but it holds 3 tokens. "
        r"Give one value per position, \[3, ...\].$"
    )
    with pytest.raises(ValueError, match=sentence):
        unpack(microbatches, values)


def test_unpack_refuses_an_incomplete_batch():
    microbatches, values = three_microbatches()
    sentence = r"^microbatch 0 is one of 3, but 2 were given. Give all microbatches of one pack call.$"
    with pytest.raises(ValueError, match=sentence):
        unpack(microbatches[:2], values[:2])


@pytest.mark.parametrize(
    ("chosen", "fault"),
    [
        ([0, 0, 2], "sequence 0 appears twice"),
        ([1, 2, 2], "sequence 0 is missing"),
        ([0, 2, 2], "sequence 1 is missing"),
    ],
)
def test_unpack_refuses_a_missing_or_repeated_sequence(chosen, fault):
    microbatches, values = three_microbatches()
    sentence = rf"^{fault} in these microbatches. Give each microbatch of one pack call once.$"
    with pytest.raises(ValueError, match=sentence):
        unpack([microbatches[index] for index in chosen], values)


def test_integers_and_floats_make_one_float_column():
    (microbatch,) = pack(
        [[1, 2], [3, 4, 5]], budget=8, columns={"reward": [1, 0.5], "mixed": [[0, 1], [0.5, 1.5, 2.5]]}
    )
    assert microbatch.column("reward").tolist() == [1.0, 0.0, 0.5, 0.5, 0.0]
    assert microbatch.column("mixed").tolist() == [1.0, 0.0, 1.5, 2.5, 0.0]


class TestGroups:
    def test_a_group_stays_in_one_microbatch(self) -> None:
        lengths = [5, 3, 8, 2, 12, 7, 9, 4, 6, 6]
        batch = pack([[1] * n for n in lengths], budget=20, groups=[i // 2 for i in range(10)], multiple_of=2)
        for microbatch in batch:
            assert {index ^ 1 for index in microbatch.sequences} == set(microbatch.sequences)
            assert len(microbatch) <= 20
        assert sorted(index for microbatch in batch for index in microbatch.sequences) == list(range(10))
        assert len(batch) % 2 == 0

    def test_groups_over_the_budget_are_refused(self) -> None:
        with pytest.raises(ValueError, match=r"sequences 0, 1 of group 'a' stay together and have 8 tokens"):
            pack([[1] * 4, [1] * 4, [1]], budget=6, groups=["a", "a", "b"])
        with pytest.raises(ValueError, match="2 groups for 3 sequences"):
            pack([[1], [1], [1]], budget=6, groups=[0, 1])
