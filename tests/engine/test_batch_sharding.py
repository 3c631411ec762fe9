"""A sharded batch equals the global one; ranks with different batches raise; a rank reads only what it needs."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from postlude import Layout
from postlude.data import Batch
from postlude.engine import Engine
from postlude.engine.batch_sharding import shard_batch
from postlude.hf.read_model import model_from_hf
from tests.engine.training import BUDGET, LENGTHS, batch, build, config, error_text, policy
from tests.equality import assert_equal
from tests.meshes import mesh

CPU = torch.device("cpu")
DENSE = config("tiny-dense", num_hidden_layers=2)
MODEL = model_from_hf(DENSE)[1]
OWNERS = (1, 0, 0, 1, 1, 0, 1, 0, 1, 1)


def part(full: Batch, rank: int, owners: Sequence[int] = OWNERS) -> Batch:
    """Returns the sharded batch of one data-parallel rank."""
    indices = [index for index, owner in enumerate(owners) if owner == rank]
    columns = {name: [entries[index] for index in indices] for name, entries in full.columns.items()}
    sequences = [full.sequences[index] for index in indices]
    return Batch.sharded(sequences, columns, lengths=full.lengths, owners=owners, groups=full.groups)


def results_of(engine: Engine, batch_or_part: Batch) -> tuple[float, dict[str, float], list[Tensor], list[Tensor]]:
    result = engine.forward_backward(batch_or_part, policy)
    gradients = [gradient.clone() for _, gradient in engine.gradients()]
    engine.zero_grad()
    return result.loss, dict(result.metrics), gradients, engine.logprobs(batch_or_part).logprob


def compare_sharded_with_global(group: dist.ProcessGroup, layout: str, owners: Sequence[int]) -> None:
    engine, full, rank = build(layout, DENSE), batch(1), mesh(Layout.parse(layout)).dp.rank
    loss, metrics, gradients, logprobs = results_of(engine, full)
    assert len(logprobs) == len(LENGTHS)
    assert [len(row) for row in logprobs] == list(LENGTHS)
    indices = [index for index, owner in enumerate(owners) if owner == rank]
    in_parts = results_of(engine, part(full, rank, owners))
    assert_equal(torch.tensor(in_parts[0]), torch.tensor(loss), "loss")
    assert_equal(torch.tensor(in_parts[1]["nll"]), torch.tensor(metrics["nll"]), "metric")
    for actual, expected in zip(in_parts[2], gradients, strict=True):
        assert_equal(actual, expected, "gradient")
    assert len(in_parts[3]) == len(indices)
    for index, actual_logprobs in zip(indices, in_parts[3], strict=True):
        assert_equal(actual_logprobs, logprobs[index], "log-probs")


@pytest.mark.parametrize(
    ("layout", "owners"),
    [
        ("dp_shard=2", OWNERS),
        ("dp_shard=2", (1,) * len(LENGTHS)),
        pytest.param("dp_shard=2,tp=2", OWNERS, marks=pytest.mark.thorough),
        pytest.param("dp_replicate=2,pp=2", OWNERS, marks=pytest.mark.slow),
        pytest.param("dp_shard=2,cp=2", OWNERS, marks=pytest.mark.slow),
    ],
)
def test_a_sharded_batch_equals_the_global_batch(ranks, layout: str, owners: Sequence[int]) -> None:
    ranks(Layout.parse(layout).world_size, compare_sharded_with_global, layout, owners)


class CountedSequences(Sequence[Any]):
    """Sequences that record which of them are read. Reading a length is not recorded."""

    class Row:
        def __init__(self, values: Tensor, read_indices: set[int], index: int) -> None:
            self.values, self.read_indices, self.index = values, read_indices, index

        def __len__(self) -> int:
            return len(self.values)

        def __array__(self, *_: Any, **__: Any) -> Any:
            self.read_indices.add(self.index)
            return self.values.numpy()

    def __init__(self, sequences: Sequence[Tensor]) -> None:
        self.read_indices: set[int] = set()
        self.rows = [self.Row(sequence, self.read_indices, index) for index, sequence in enumerate(sequences)]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Any) -> Any:
        return self.rows[index]


def read_rows(group: dist.ProcessGroup) -> tuple[set[int], set[int]]:
    sequences = CountedSequences(batch(1).sequences)
    local = shard_batch(Batch(sequences), mesh(Layout(dp_shard=4)), MODEL, budget=8 * BUDGET, device=CPU)
    return sequences.read_indices, {index for microbatch in local.microbatches for index in microbatch.sequences}


def test_a_rank_reads_only_its_own_sequences_and_those_of_the_next_rank(ranks) -> None:
    results = ranks(4, read_rows)
    for rank, (read, run) in enumerate(results):
        assert run
        assert read == run | results[(rank + 1) % 4][1]
    assert set.union(*(run for _, run in results)) == set(range(len(LENGTHS)))


def communicated_sizes(group: dist.ProcessGroup) -> tuple[int, int]:
    """Returns the most numbers that evaluate_tokens all-reduces for values [tokens, 16], and the bytes it gathers."""
    engine, global_batch = build("dp_shard=2", DENSE), batch(1)
    engine.logprobs(global_batch)  # exchanges that happen once
    summed, gathered = [0], [0]
    all_reduce, gather = dist.all_reduce, dist.all_gather_into_tensor
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_reduce", lambda t, *a, **k: (summed.append(t.numel()), all_reduce(t, *a, **k))[1])
        patch.setattr(
            dist, "all_gather_into_tensor", lambda out, *a, **k: (gathered.append(out.nbytes), gather(out, *a, **k))[1]
        )
        engine.evaluate_tokens(
            global_batch, lambda inputs: {"x": inputs.microbatch.targets[:, None].expand(-1, 16).float()}
        )
    return max(summed), gathered[-1]


def test_results_are_gathered_once_and_never_summed_over_the_world(ranks) -> None:
    for summed, gathered in ranks(2, communicated_sizes):
        assert summed < 100
        assert sum(LENGTHS) * 16 * 4 <= gathered <= 2 * (sum(LENGTHS) // 2 + BUDGET) * 16 * 4


def error_with_other_batch(group: dist.ProcessGroup, layout: str, fault: str) -> str:
    """Gives the last rank another batch and returns the error."""
    engine, global_batch, last = build(layout, DENSE), batch(1), dist.get_rank() == 1
    sequences, columns, groups = list(global_batch.sequences), dict(global_batch.columns), None
    if last and fault == "lengths":
        sequences[0] = sequences[0][1:]
        columns["mask"] = [sequences[0] * 0.0, *columns["mask"][1:]]
    if last and fault == "tokens":
        sequences = [(row + 1) % 256 for row in sequences]
    if last and fault == "columns":
        columns["advantages"] = [value + 1 for value in columns["advantages"]]
    if last and fault == "names":
        columns["more"] = [1.0] * len(sequences)
    if last and fault == "dtypes":
        columns["mask"] = [row.double() for row in columns["mask"]]
    if last and fault == "groups":
        groups = [index if index != 7 else 1 for index in range(len(sequences))]
    temperature = 0.5 if last and fault == "temperature" else 1.0
    if last and fault == "vocabulary":
        sequences = [row + 256 for row in sequences]
    if last and fault == "entries":
        columns["mask"] = columns["mask"][1:]
    error = error_text(lambda: engine.evaluate_loss(Batch(sequences, columns, groups, temperature=temperature), policy))
    engine.evaluate_loss(batch(2), policy)  # the engine is still usable
    return error


OTHER_PLAN = "ValueError: the ranks were given batches of different lengths, groups, owners, columns or temperatures"
OTHER_ROWS = "ValueError: the ranks were given different batches: not all have the same tokens and columns"


@pytest.mark.parametrize("layout", ["dp_shard=2", pytest.param("tp=2", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        ("lengths", OTHER_PLAN),
        ("names", OTHER_PLAN),
        ("groups", OTHER_PLAN),
        ("temperature", OTHER_PLAN),
        ("tokens", OTHER_ROWS),
        ("columns", OTHER_ROWS),
        ("dtypes", 'ValueError: column "mask" holds values of different dtypes or shapes on different ranks.'),
    ],
)
def test_ranks_with_different_batches_raise(ranks, layout: str, fault: str, sentence: str) -> None:
    for error in ranks(2, error_with_other_batch, layout, fault):
        assert error.startswith(sentence)


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        ("vocabulary", "but the vocabulary ends at 263. Check that the tokenizer belongs to the model."),
        ("entries", 'column "mask" has 9 entries for 10 sequences.'),
    ],
)
def test_if_one_rank_refuses_its_batch_all_ranks_raise(ranks, fault: str, sentence: str) -> None:
    first, last = ranks(2, error_with_other_batch, "dp_shard=2", fault)
    assert first == "RuntimeError: rank 1 could not read its part of the batch: its own error says why."
    assert sentence in last


def error_with_wrong_parts(group: dist.ProcessGroup, fault: str) -> str:
    engine, rank = build("dp_shard=2", DENSE), dist.get_rank()
    local_batch = part(batch(1), rank)
    sequences, owners, groups = local_batch.sequences, OWNERS, None
    if fault == "missing" and rank == 1:
        sequences = sequences[1:]
    if fault == "owner":
        owners = (2, *OWNERS[1:])
    if fault == "group":
        groups = [0, 0, *range(2, len(OWNERS))]
    return error_text(
        lambda: engine.logprobs(Batch.sharded(sequences, lengths=local_batch.lengths, owners=owners, groups=groups))
    )


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        ("missing", "data-parallel rank 1 holds sequences of 20, 25, 6, 9, 2, 12. Give it those"),
        ("owner", "sequence 0 is held by data-parallel rank 2, but there are ranks 0 to 1."),
        ("group", "sequence 1 of group 0 is held by data-parallel rank 0, but others of its group by rank 1."),
    ],
)
def test_sharded_batches_that_do_not_match_lengths_and_owners_are_refused(ranks, fault: str, sentence: str) -> None:
    *_, last = ranks(2, error_with_wrong_parts, fault)
    assert sentence in last


def shard_mixed_columns(group: dist.ProcessGroup) -> list[Any]:
    """Shards a column with integers on one rank and floats on the other, and one that a rank has no rows of."""
    dp_mesh = mesh(Layout(dp_shard=2))
    pairs = [torch.ones(3, 2), torch.ones(2, 2)]
    two_sequences = Batch([[1, 2, 3], [4, 5]], {"weight": [[1, 2, 3], [0.5, 0.5]], "pairs": pairs})
    local = shard_batch(two_sequences, dp_mesh, MODEL, budget=3, device=CPU)
    one_sequence = shard_batch(Batch([[1, 2, 3]], {"pairs": pairs[:1]}), dp_mesh, MODEL, budget=3, device=CPU)
    weight, pairs_column = local.microbatches[0].columns["weight"], one_sequence.microbatches[0].columns["pairs"]
    return [weight.dtype, local.counts, pairs_column.shape[1:], one_sequence.counts]


def test_ranks_without_rows_of_a_column_get_its_dtype_and_shape(ranks) -> None:
    for dtype, counts, trailing, fewer in ranks(2, shard_mixed_columns):
        assert dtype == torch.float32
        assert counts == {"tokens": 3, "sequences": 2, "weight": 5.5, "pairs": 6}
        assert trailing == (2,)
        assert fewer == {"tokens": 2, "sequences": 1, "pairs": 4}
