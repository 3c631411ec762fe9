"""Loss normalisation: microbatches of a batch add up to its mean, however it is divided over ranks."""

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from postlude.data import Batch, Microbatch, pack, shard_context
from postlude.engine.normalizer import LossNormalizer
from postlude.engine.pass_metrics import LossRecord, MetricIndex, reduce_pass
from postlude.layout import Layout
from postlude.objectives import Loss, Metric, largest, mean, smallest, total
from tests.equality import assert_equal
from tests.meshes import mesh

LENGTHS = (5, 1, 8, 3, 12, 2)
GENERATOR = torch.Generator().manual_seed(0)
VALUES = [torch.randn(length, generator=GENERATOR) for length in LENGTHS]
MASK = [(torch.rand(length, generator=GENERATOR) < 0.5).float() for length in LENGTHS]
SHARE = [torch.rand(length, generator=GENERATOR) for length in LENGTHS]
BATCH = Batch([[1] * length for length in LENGTHS], {"value": VALUES, "mask": MASK, "share": SHARE})


def microbatches(budget: int = 64, multiple_of: int = 1) -> list[Microbatch]:
    return pack(BATCH.sequences, budget=budget, columns=BATCH.columns, multiple_of=multiple_of)


def without_first_tokens(values: list[Tensor]) -> Tensor:
    """Returns the predicted tokens: all but the first of each sequence."""
    return torch.cat([value[1:] for value in values]).double()


def weighted_loss(over: str) -> Tensor:
    return {
        "tokens": torch.ones_like(without_first_tokens(VALUES)),
        "mask": without_first_tokens(MASK),
        "share": without_first_tokens(SHARE),
    }[over]


@pytest.mark.parametrize("over", ["tokens", "mask", "share"])
@pytest.mark.parametrize(("budget", "multiple_of"), [(64, 1), (12, 1), (12, 8)])
def test_a_loss_is_the_weighted_mean_of_the_whole_batch(over: str, budget: int, multiple_of: int) -> None:
    parts = microbatches(budget, multiple_of)
    scale = LossNormalizer(parts)
    actual = sum(scale.loss(Loss(part.column("value"), over=over), part) for part in parts)
    expected = (without_first_tokens(VALUES) * weighted_loss(over)).sum() / weighted_loss(over).sum()
    assert_equal(torch.as_tensor(actual), expected, over)


@pytest.mark.parametrize("over", ["tokens", "mask", "share", "sequences"])
def test_scalar_loss_is_a_weighted_sum(over: str) -> None:
    parts = microbatches(12)
    scale = LossNormalizer(parts)

    def values(part: Microbatch) -> Tensor:
        return part.sequence_sum(part.column("value")) if over == "sequences" else part.column("value")

    by_one = sum(scale.loss(Loss(values(part), over=over), part) for part in parts)
    summed = sum(scale.loss(Loss((values(part) * scale.weights(over, part)).sum(), over=over), part) for part in parts)
    assert_equal(torch.as_tensor(summed), torch.as_tensor(by_one), over)
    if over == "sequences":
        assert_equal(torch.as_tensor(by_one), without_first_tokens(VALUES).sum() / len(LENGTHS), over)


def test_losses_over_different_counts_add_up_and_scale() -> None:
    (part,) = microbatches()
    scale = LossNormalizer([part])
    tokens, masked = Loss(part.column("value")), Loss(part.column("value"), over="mask")
    sequences = Loss(part.sequence_sum(part.column("value")), over="sequences")
    one_by_one = scale.loss(tokens, part) + 0.5 * scale.loss(masked, part) - 2.0 * scale.loss(sequences, part)
    assert_equal(scale.loss(tokens + 0.5 * masked + -2.0 * sequences, part), one_by_one, "loss")
    assert_equal(scale.loss(2.0 * (tokens + masked), part), 2.0 * scale.loss(tokens + masked, part), "loss")


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_nan_at_zero_weight_reaches_neither_loss_nor_gradient_nor_metric(bad: float) -> None:
    parts = microbatches(12)
    clean, spoilt = torch.zeros(()), torch.zeros(())
    scale, gradients = LossNormalizer(parts), []
    tallies = LossRecord(scale), LossRecord(scale)
    for part in parts:
        for fill, tally in ((0.0, tallies[0]), (bad, tallies[1])):
            values = part.column("value").where(part.column("mask") != 0, fill).requires_grad_()
            added = scale.loss(Loss(values, over="mask"), part)
            added.backward()
            gradients.append(values.grad)
            for name, kind in (("mean", mean), ("sum", total), ("max", largest), ("min", smallest)):
                tally.metrics.add(name, kind(values, over="mask"), part)
            if fill == 0.0:
                clean += added.detach()
            else:
                spoilt += added.detach()
    assert torch.equal(clean, spoilt)
    assert all(
        torch.equal(clean_gradient, spoilt_gradient)
        for clean_gradient, spoilt_gradient in zip(gradients[::2], gradients[1::2], strict=True)
    )
    assert reduce(tallies[0]) == reduce(tallies[1])


def test_batch_with_nothing_to_train_on_is_refused_with_clear_error() -> None:
    parts = pack([[1, 2, 3]], budget=8, columns={"mask": [0.0]})
    with pytest.raises(ValueError, match='a mean over "mask", whose weights sum to 0 in this'):
        LossNormalizer(parts).loss(Loss(torch.ones(3), over="mask"), parts[0])
    with pytest.raises(LookupError, match='has no column "msk" \\(it has: "mask"\\)'):
        LossNormalizer(parts).loss(Loss(torch.ones(3), over="msk"), parts[0])
    with pytest.raises(
        LookupError, match=r'a mean over "tokens \+1", whose sum over the step is not known \(known are: "tokens"\)'
    ):
        LossNormalizer(parts, {"tokens": 2.0}).count("tokens", 1)


@pytest.mark.parametrize(
    ("values", "over", "expected_shape"),
    [((4,), "tokens", "(3,)"), ((3, 1), "mask", "(3,)"), ((3,), "sequences", "(1,)")],
)
def test_values_of_another_shape_are_refused_with_clear_error(
    values: tuple[int, ...], over: str, expected_shape: str
) -> None:
    (part,) = pack([[1, 2, 3]], budget=8, columns={"mask": [1.0]})
    sentence = f'values over "{over}" have shape {values}, but this microbatch has weights of shape {expected_shape}.'
    with pytest.raises(ValueError, match=r"over .* have shape") as loss:
        LossNormalizer([part]).loss(Loss(torch.ones(values), over=over), part)
    with pytest.raises(ValueError, match=r"over .* have shape") as metric:
        LossRecord(LossNormalizer([part])).metrics.add("x", mean(torch.ones(values), over), part)
    assert sentence in str(loss.value)
    assert sentence in str(metric.value)


def reduce(record: LossRecord, index: MetricIndex | None = None, reports_results: bool = True) -> dict[str, float]:
    return dict(reduce_pass(record, index or MetricIndex(), reports_results=reports_results).metrics)


REDUCTIONS = {"mean": mean, "sum": total, "max": largest, "min": smallest}


def reduced(weights: Tensor, values: Tensor) -> dict[str, float]:
    counted = values[weights != 0]
    weighted = (values * weights).sum()
    metrics = {"mean": weighted / weights.sum(), "sum": weighted, "max": counted.max(), "min": counted.min()}
    return {name: float(value) for name, value in metrics.items()}


def metrics(part: Microbatch) -> dict[str, tuple[Metric, str]]:
    values, sums = part.column("value"), part.sequence_sum(part.column("value"))
    return {
        f"{name} over {over}": (kind(sums if over == "sequences" else values, over), name)
        for name, kind in REDUCTIONS.items()
        for over in ("tokens", "mask", "share", "sequences")
    }


def check_metrics(actual: dict[str, float]) -> None:
    sums = torch.stack([values[1:].double().sum() for values in VALUES])
    for over in ("tokens", "mask", "share", "sequences"):
        weights = torch.ones(len(LENGTHS)) if over == "sequences" else weighted_loss(over)
        for name, expected in reduced(weights, sums if over == "sequences" else without_first_tokens(VALUES)).items():
            assert_equal(torch.tensor(actual[f"{name} over {over}"]), torch.tensor(expected), f"{name} over {over}")


@pytest.mark.parametrize(("budget", "multiple_of"), [(64, 1), (12, 1), (12, 8)])
def test_metrics_are_reduced_as_declared_over_microbatches(budget: int, multiple_of: int) -> None:
    parts = microbatches(budget, multiple_of)
    tally = LossRecord(LossNormalizer(parts))
    for part in parts:
        for name, (metric, _) in metrics(part).items():
            tally.metrics.add(name, metric, part)
    check_metrics(reduce(tally))


def over_ranks(group: Any, layout: str) -> tuple[float, float, dict[str, float]]:
    """Returns the loss over sequences, per sequence and as a sum, and every metric."""
    dp_cp_mesh = mesh(Layout.parse(layout))
    all_parts = microbatches(12, dp_cp_mesh.dp.size)
    local_microbatches = [
        shard_context(part, dp_cp_mesh.cp) for part in all_parts[dp_cp_mesh.dp.rank :: dp_cp_mesh.dp.size]
    ]
    scale = LossNormalizer(all_parts, cp_size=dp_cp_mesh.cp.size)
    tally, summed = LossRecord(scale), LossRecord(scale)
    for part in local_microbatches:
        values = part.sequence_sum(part.column("value"))
        tally.metrics.add_loss(scale.loss(Loss(values, over="sequences"), part))
        summed.metrics.add_loss(scale.loss(Loss(values.sum(), over="sequences"), part))
        for name, (metric, _) in metrics(part).items():
            tally.metrics.add(name, metric, part)
    actual = reduce(tally)
    return actual.pop("loss"), reduce(summed)["loss"], actual


@pytest.mark.parametrize("layout", ["dp_shard=2", "cp=2"])
def test_losses_and_metrics_over_ranks_equal_the_full_batch(ranks: Any, layout: str) -> None:
    expected = without_first_tokens(VALUES).sum() / len(LENGTHS)
    for by_one, summed, actual in ranks(2, over_ranks, layout):
        assert_equal(torch.tensor(by_one), expected, "loss over sequences")
        assert_equal(torch.tensor(summed), expected, "loss over sequences as a sum")
        check_metrics(actual)


def rank_without_output(group: Any) -> dict[str, float]:
    parts = microbatches()
    tally = LossRecord(LossNormalizer(parts))
    if group.rank() == 1:
        tally.metrics.add("value", total(parts[0].column("value")), parts[0])
        tally.metrics.add_loss(torch.tensor(2.0))
    return reduce(tally, reports_results=group.rank() == 1)


def test_rank_without_output_gets_the_metrics_of_other_ranks(ranks: Any) -> None:
    for actual in ranks(2, rank_without_output):
        assert actual["loss"] == 2.0
        assert_equal(torch.tensor(actual["value"]), without_first_tokens(VALUES).sum(), "sum")


def three_steps(group: Any) -> list[tuple[dict[str, float], int]]:
    """Each rank has one metric the other lacks, and a new one in the last step. Counts exchanges of names."""
    parts, metric_index, gathers = microbatches(), MetricIndex(), []
    gather = dist.all_gather_object
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_gather_object", lambda *a, **k: (gathers.append(1), gather(*a, **k)))
        actual = []
        for step in range(4):
            tally = LossRecord(LossNormalizer(parts))
            names = [f"of rank {group.rank()}", "of both", *["late"] * (step == 3 and group.rank() == 1)]
            for name in names:
                tally.metrics.add(name, largest(torch.tensor([1.0 + group.rank()] * len(parts[0]))), parts[0])
            tally.metrics.add("sum", total(torch.ones(())), parts[0])
            actual.append((reduce(tally, metric_index), len(gathers)))
    return actual


def test_metric_names_are_gathered_only_when_new(ranks: Any) -> None:
    known = {"of rank 0": 1.0, "of rank 1": 2.0, "of both": 2.0, "sum": 2.0}
    for first, second, third, last in ranks(2, three_steps):
        assert first == (known, 1)
        assert second == third == (known, 1)
        assert last == ({**known, "late": 2.0}, 2)


def test_metrics_are_copied_to_the_host_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each separate read would synchronise with the GPU."""
    parts = microbatches(12)
    tally, reads = LossRecord(LossNormalizer(parts)), []
    for name in ("tolist", "item", "__float__", "__int__", "__bool__"):
        read = getattr(Tensor, name)
        monkeypatch.setattr(Tensor, name, lambda self, read=read: (reads.append(1), read(self))[1])
    for part in parts:
        for name, (metric, _) in metrics(part).items():
            tally.metrics.add(name, metric, part)
    actual = reduce(tally)
    monkeypatch.undo()
    assert len(reads) == 1
    check_metrics(actual)


def many_metrics(group: Any) -> list[dict[str, float]]:
    parts, metric_index, actual = microbatches(), MetricIndex(), []
    for count in (2, 300, 300, 2):
        tally = LossRecord(LossNormalizer(parts))
        for index in range(count):
            tally.metrics.add(
                f"a metric with a long name, number {index}", total(torch.full((), float(index))), parts[0]
            )
        actual.append(reduce(tally, metric_index, group.rank() == 1))
    return actual


def test_more_metrics_than_the_buffer_holds_are_reduced(ranks: Any) -> None:
    for actual in ranks(2, many_metrics):
        for count, numbers in zip((2, 300, 300, 2), actual, strict=True):
            assert list(numbers.values()) == [float(index) for index in range(count)]


def test_a_metric_index_drops_old_names_when_it_is_full() -> None:
    metric_index = MetricIndex()
    for start in (0, 200):
        metric_index.add([(str(index), "sum") for index in range(start, start + 200)])
    assert list(metric_index.slots) == [(str(index), "sum") for index in range(200, 400)]


def test_metric_without_counts_is_nan_and_mixed_reductions_are_refused() -> None:
    (part,) = pack([[1, 2, 3]], budget=8, columns={"mask": [0.0]})
    tally = LossRecord(LossNormalizer([part]))
    for name, kind in REDUCTIONS.items():
        tally.metrics.add(name, kind(torch.ones(3), over="mask"), part)
    actual = reduce(tally)
    assert actual.pop("sum") == 0.0
    assert all(map(math.isnan, actual.values()))
    with pytest.raises(ValueError, match='metric "mean" is a mean in one microbatch and a max in another'):
        tally.metrics.add("mean", largest(torch.ones(3)), part)


def test_weights_that_sum_to_zero_still_count() -> None:
    (part,) = pack([[1, 2, 3]], budget=8, columns={"sign": [[0.0, 1.0, -1.0]]})
    tally = LossRecord(LossNormalizer([part]))
    values = torch.tensor([5.0, 3.0, 9.0])  # of positions 0 and 1, with weights 1 and -1
    for name, kind in REDUCTIONS.items():
        tally.metrics.add(name, kind(values, over="sign"), part)
    actual = reduce(tally)
    assert (actual["sum"], actual["max"], actual["min"]) == (2.0, 5.0, 3.0)


@pytest.mark.parametrize("place", [0, 1])
def test_nan_in_max_and_min_metrics_is_propagated(place: int) -> None:
    parts = pack([[1, 2], [1, 2, 3]], budget=3)
    tally = LossRecord(LossNormalizer(parts))
    for index, part in enumerate(parts):
        for name in ("max", "min"):
            tally.metrics.add(
                name, REDUCTIONS[name](torch.full((len(part),), float("nan") if index == place else 1.0)), part
            )
    assert all(map(math.isnan, reduce(tally).values()))
