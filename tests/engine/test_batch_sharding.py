"""A batch in parts equals the whole; ranks with different batches are told; each rank reads only what it runs."""

from __future__ import annotations

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
from tests.engine.training import BUDGET, LENGTHS, batch, build, config, policy, told
from tests.equality import assert_equal
from tests.meshes import mesh

CPU = torch.device("cpu")
DENSE = config("tiny-dense", num_hidden_layers=2)
MODEL = model_from_hf(DENSE)[1]
HOLDERS = (1, 0, 0, 1, 1, 0, 1, 0, 1, 1)


def part(whole: Batch, rank: int, owners: Sequence[int] = HOLDERS) -> Batch:
    """What one data-parallel rank holds of a batch."""
    own = [index for index, owner in enumerate(owners) if owner == rank]
    columns = {name: [entries[index] for index in own] for name, entries in whole.columns.items()}
    sequences = [whole.sequences[index] for index in own]
    return Batch.sharded(sequences, columns, lengths=whole.lengths, owners=owners, groups=whole.groups)


def answers(engine: Engine, given: Batch) -> tuple[float, dict[str, float], list[Tensor], list[Tensor]]:
    result = engine.forward_backward(given, policy)
    gradients = [gradient.clone() for _, gradient in engine.gradients()]
    engine.zero_grad()
    return result.loss, dict(result.metrics), gradients, engine.logprobs(given).logprob


def both_ways(group: dist.ProcessGroup, layout: str, owners: Sequence[int]) -> None:
    engine, whole, rank = build(layout, DENSE), batch(1), mesh(Layout.parse(layout)).dp.rank
    loss, metrics, gradients, logprobs = answers(engine, whole)
    assert len(logprobs) == len(LENGTHS)
    assert [len(each) for each in logprobs] == list(LENGTHS)
    own = [index for index, owner in enumerate(owners) if owner == rank]
    in_parts = answers(engine, part(whole, rank, owners))
    assert_equal(torch.tensor(in_parts[0]), torch.tensor(loss), "loss")
    assert_equal(torch.tensor(in_parts[1]["nll"]), torch.tensor(metrics["nll"]), "metric")
    for one, other in zip(in_parts[2], gradients, strict=True):
        assert_equal(one, other, "gradient")
    assert len(in_parts[3]) == len(own)
    for index, found in zip(own, in_parts[3], strict=True):
        assert_equal(found, logprobs[index], "log-probs")


@pytest.mark.parametrize(
    ("layout", "owners"),
    [
        ("dp_shard=2", HOLDERS),
        ("dp_shard=2", (1,) * len(LENGTHS)),
        pytest.param("dp_shard=2,tp=2", HOLDERS, marks=pytest.mark.slow),
        pytest.param("dp_replicate=2,pp=2", HOLDERS, marks=pytest.mark.slow),
        pytest.param("dp_shard=2,cp=2", HOLDERS, marks=pytest.mark.slow),
    ],
)
def test_a_batch_held_in_parts_equals_the_whole(ranks, layout: str, owners: Sequence[int]) -> None:
    ranks(Layout.parse(layout).world_size, both_ways, layout, owners)


class Counted(Sequence[Any]):
    """Sequences that count which of them are read; their lengths are free."""

    class Row:
        def __init__(self, values: Tensor, seen: set[int], index: int) -> None:
            self.values, self.seen, self.index = values, seen, index

        def __len__(self) -> int:
            return len(self.values)

        def __array__(self, *_: Any, **__: Any) -> Any:
            self.seen.add(self.index)
            return self.values.numpy()

    def __init__(self, sequences: Sequence[Tensor]) -> None:
        self.seen: set[int] = set()
        self.rows = [self.Row(each, self.seen, index) for index, each in enumerate(sequences)]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Any) -> Any:
        return self.rows[index]


def read_rows(group: dist.ProcessGroup) -> tuple[set[int], set[int]]:
    sequences = Counted(batch(1).sequences)
    found = shard_batch(Batch(sequences), mesh(Layout(dp_shard=4)), MODEL, budget=8 * BUDGET, device=CPU)
    return sequences.seen, {index for each in found.microbatches for index in each.sequences}


def test_a_rank_reads_what_it_runs_and_what_the_next_one_does(ranks) -> None:
    found = ranks(4, read_rows)
    for rank, (seen, run) in enumerate(found):
        assert run
        assert seen == run | found[(rank + 1) % 4][1]
    assert set.union(*(run for _, run in found)) == set(range(len(LENGTHS)))


def carried(group: dist.ProcessGroup) -> tuple[int, int]:
    """The most numbers that an evaluation of [tokens, 16] sums over ranks, and the bytes it gathers from them."""
    engine, given = build("dp_shard=2", DENSE), batch(1)
    engine.logprobs(given)  # whatever is told once
    summed, gathered = [0], [0]
    all_reduce, gather = dist.all_reduce, dist.all_gather_into_tensor
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_reduce", lambda t, *a, **k: (summed.append(t.numel()), all_reduce(t, *a, **k))[1])
        patch.setattr(
            dist, "all_gather_into_tensor", lambda out, *a, **k: (gathered.append(out.nbytes), gather(out, *a, **k))[1]
        )
        engine.evaluate_tokens(given, lambda inputs: {"x": inputs.microbatch.targets[:, None].expand(-1, 16).float()})
    return max(summed), gathered[-1]


def test_results_are_gathered_once_and_never_summed_over_the_world(ranks) -> None:
    for summed, gathered in ranks(2, carried):
        assert summed < 100
        assert sum(LENGTHS) * 16 * 4 <= gathered <= 2 * (sum(LENGTHS) // 2 + BUDGET) * 16 * 4


def differently(group: dist.ProcessGroup, layout: str, fault: str) -> str:
    """The last rank is given something else."""
    engine, given, last = build(layout, DENSE), batch(1), dist.get_rank() == 1
    sequences, columns, groups = list(given.sequences), dict(given.columns), None
    if last and fault == "lengths":
        sequences[0] = sequences[0][1:]
        columns["mask"] = [sequences[0] * 0.0, *columns["mask"][1:]]
    if last and fault == "tokens":
        sequences = [(each + 1) % 256 for each in sequences]
    if last and fault == "columns":
        columns["advantages"] = [value + 1 for value in columns["advantages"]]
    if last and fault == "names":
        columns["more"] = [1.0] * len(sequences)
    if last and fault == "dtypes":
        columns["mask"] = [each.double() for each in columns["mask"]]
    if last and fault == "groups":
        groups = [index if index != 7 else 1 for index in range(len(sequences))]
    if last and fault == "vocabulary":
        sequences = [each + 256 for each in sequences]
    if last and fault == "entries":
        columns["mask"] = columns["mask"][1:]
    complaint = told(lambda: engine.evaluate_loss(Batch(sequences, columns, groups), policy))
    engine.evaluate_loss(batch(2), policy)  # the engine is whole
    return complaint


OTHER_PLAN = "ValueError: the ranks were given batches of different lengths, groups, owners or columns, or different"
OTHER_ROWS = "ValueError: the ranks were given different batches: not all have the same tokens and columns"


@pytest.mark.parametrize("layout", ["dp_shard=2", pytest.param("tp=2", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        ("lengths", OTHER_PLAN),
        ("names", OTHER_PLAN),
        ("groups", OTHER_PLAN),
        ("tokens", OTHER_ROWS),
        ("columns", OTHER_ROWS),
        ("dtypes", 'ValueError: column "mask" holds values of different dtypes or shapes on different ranks.'),
    ],
)
def test_ranks_with_different_batches_are_told(ranks, layout: str, fault: str, sentence: str) -> None:
    for complaint in ranks(2, differently, layout, fault):
        assert complaint.startswith(sentence)


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        ("vocabulary", "but the vocabulary ends at 263. Check that the tokenizer belongs to the model."),
        ("entries", 'column "mask" has 9 entries for 10 sequences.'),
    ],
)
def test_where_one_rank_refuses_its_batch_all_do(ranks, fault: str, sentence: str) -> None:
    first, last = ranks(2, differently, "dp_shard=2", fault)
    assert first == "RuntimeError: rank 1 could not read its part of the batch: its own error says why."
    assert sentence in last


def held_wrongly(group: dist.ProcessGroup, fault: str) -> str:
    engine, rank = build("dp_shard=2", DENSE), dist.get_rank()
    given = part(batch(1), rank)
    sequences, owners, groups = given.sequences, HOLDERS, None
    if fault == "missing" and rank == 1:
        sequences = sequences[1:]
    if fault == "owner":
        owners = (2, *HOLDERS[1:])
    if fault == "group":
        groups = [0, 0, *range(2, len(HOLDERS))]
    return told(lambda: engine.logprobs(Batch.sharded(sequences, lengths=given.lengths, owners=owners, groups=groups)))


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        ("missing", "data-parallel rank 1 holds sequences of 20, 25, 6, 9, 2, 12. Give it those"),
        ("owner", "sequence 0 is held by data-parallel rank 2, but there are ranks 0 to 1."),
        ("group", "sequence 1 of group 0 is held by data-parallel rank 0, but others of its group by rank 1."),
    ],
)
def test_parts_that_do_not_fit_are_refused(ranks, fault: str, sentence: str) -> None:
    *_, last = ranks(2, held_wrongly, fault)
    assert sentence in last


def numbers(group: dist.ProcessGroup) -> list[Any]:
    """A column of which one rank has whole numbers and the other has none at all, in a batch of two sequences."""
    here = mesh(Layout(dp_shard=2))
    pairs = [torch.ones(3, 2), torch.ones(2, 2)]
    both = Batch([[1, 2, 3], [4, 5]], {"weight": [[1, 2, 3], [0.5, 0.5]], "pairs": pairs})
    found = shard_batch(both, here, MODEL, budget=3, device=CPU)
    one = shard_batch(Batch([[1, 2, 3]], {"pairs": pairs[:1]}), here, MODEL, budget=3, device=CPU)
    weight, pair = found.microbatches[0].columns["weight"], one.microbatches[0].columns["pairs"]
    return [weight.dtype, found.counts, pair.shape[1:], one.counts]


def test_ranks_agree_about_columns_of_which_they_have_little(ranks) -> None:
    for dtype, counts, trailing, fewer in ranks(2, numbers):
        assert dtype == torch.float32
        assert counts == {"tokens": 3, "sequences": 2, "weight": 5.5, "pairs": 6}
        assert trailing == (2,)
        assert fewer == {"tokens": 2, "sequences": 1, "pairs": 4}
