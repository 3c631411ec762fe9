"""The slab planner covers every logit once, stays within its budget, and uses a frozen operand to save memory."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from postlude.ops.linear_logprobs.plan import (
    GIB,
    KIB,
    MIB,
    Plan,
    Shape,
    plan_gradients,
    plan_quantized_sweep,
    plan_statistics,
    plan_sweep,
)

SIZES = st.builds(
    Shape,
    rows=st.integers(0, 300_000),
    columns=st.integers(0, 300_000),
    hidden=st.integers(1, 8192),
    logit_bytes=st.sampled_from([4, 8, 12]),
    device=st.sampled_from(["cpu", "cuda"]),
)


def accumulator_bytes(plan: Plan, shape: Shape) -> int:
    """Returns the bytes of the accumulated gradient."""
    return 4 * shape.hidden * (shape.rows if plan.axis == "vocabulary" else shape.columns)


def slab_bytes(plan: Plan, shape: Shape) -> int:
    """Returns the bytes of a slab."""
    rows, columns = plan.largest(shape)
    return rows * columns * shape.logit_bytes


@settings(max_examples=150)
@given(shape=SIZES, budget=st.none() | st.integers(1, 8 * GIB), which=st.sampled_from(["forward", "backward", "sweep"]))
def test_slabs_cover_everything_once_within_the_budget(shape: Shape, budget: int | None, which: str) -> None:
    if budget is not None:  # keep the number of slabs in reason
        budget = max(budget, shape.rows * 4 * KIB, shape.columns * 4 * KIB)
    if which == "forward":
        plan, summed = plan_statistics(shape, budget), 0
    elif which == "backward":
        plan = plan_gradients(shape, hidden_gradient=True, weight_gradient=True, memory_budget=budget)
        summed = accumulator_bytes(plan, shape)
    else:
        plan = plan_sweep(shape, weight_gradient=True, memory_budget=budget)
        summed = accumulator_bytes(plan, shape) if plan.count(shape) > 1 else 0
    assert plan.size >= 1
    if budget is not None and plan.size > 1 and budget > summed:
        assert slab_bytes(plan, shape) + summed <= budget
    if plan.count(shape) <= 2000:
        blocks = list(plan.slabs(shape))
        assert len(blocks) == plan.count(shape)
        rows = [block[0] for block in blocks] if plan.axis == "token" else [slice(0, shape.rows)]
        columns = [block[1] for block in blocks] if plan.axis == "vocabulary" else [slice(0, shape.columns)]
        for parts, total in ((rows, shape.rows), (columns, shape.columns)):
            edges = [0, *(part.stop for part in parts)]
            assert edges[:-1] == [part.start for part in parts] or not blocks
            assert edges[-1] == total or not blocks


def test_smallest_budget_gives_one_column_per_slab() -> None:
    assert plan_statistics(Shape(100, 1000, 64), 1).size == 1
    assert plan_gradients(Shape(100, 1000, 64), hidden_gradient=True, weight_gradient=True, memory_budget=1).size == 1
    assert plan_sweep(Shape(100, 1000, 64), weight_gradient=True, memory_budget=1).size == 1


@pytest.mark.parametrize(("columns", "sizes"), [(5000, [2560, 2440]), (8192, [4096, 4096]), (4000, [4000])])
def test_slabs_are_equal_shares_in_whole_tiles(columns: int, sizes: list[int]) -> None:
    shape = Shape(16384, columns, 4096)  # by default 4096 columns a slab
    assert [part.stop - part.start for _, part in plan_statistics(shape).slabs(shape)] == sizes


@pytest.mark.parametrize(("hidden", "weight", "axis"), [(True, False, "token"), (False, True, "vocabulary")])
def test_a_frozen_operand_needs_no_accumulator(hidden: bool, weight: bool, axis: str) -> None:
    """With one gradient, slabs run along the dimension in which it is complete per slab, for any shape."""
    for shape in (Shape(8192, 131_072, 4096), Shape(200_000, 32_000, 4096)):
        assert plan_gradients(shape, hidden_gradient=hidden, weight_gradient=weight).axis == axis


def test_smaller_accumulator_is_chosen() -> None:
    assert plan_gradients(Shape(8192, 131_072, 4096), hidden_gradient=True, weight_gradient=True).axis == "vocabulary"
    assert plan_gradients(Shape(200_000, 62_080, 2048), hidden_gradient=True, weight_gradient=True).axis == "token"


def test_weight_in_another_dtype_makes_slabs_run_over_the_vocabulary() -> None:
    shape = Shape(40_000, 32_000, 1024)
    plain = plan_gradients(shape, hidden_gradient=True, weight_gradient=True)
    cast = plan_gradients(shape, hidden_gradient=True, weight_gradient=True, weight_cast=True)
    assert (plain.axis, cast.axis) == ("token", "vocabulary")


@pytest.mark.parametrize(
    ("rows", "hidden", "columns", "limit"),
    [
        (8192, 4096, 131_072, 1.3),  # the leanest peer's extra memory on an H200, in GiB
        (8192, 2048, 62_080, 0.5),
        (32_768, 2048, 248_320, 1.8),
        (262_144, 2048, 248_320, 8.0),
    ],
)
@pytest.mark.parametrize("logit_bytes", [4, 2], ids=["logits", "fused"])
def test_default_peak_on_a_gpu(rows: int, hidden: int, columns: int, limit: float, logit_bytes: int) -> None:
    """Slab, accumulator and both bf16 gradients together fit within the memory that the leanest peer uses."""
    shape = Shape(rows, columns, hidden, logit_bytes)
    plan = plan_gradients(shape, hidden_gradient=True, weight_gradient=True)
    gradients = {"vocabulary": 2 * rows * hidden, "token": 2 * columns * hidden}
    complete = sum(gradients.values()) - gradients[plan.axis]
    summed = accumulator_bytes(plan, shape)
    sweeping = complete + summed + slab_bytes(plan, shape)
    casting = complete + summed + gradients[plan.axis]
    numbers_a_token = 64 * rows
    assert max(sweeping, casting) + numbers_a_token <= limit * GIB
    assert slab_bytes(plan_statistics(shape), shape) <= max(sweeping, casting)
    assert slab_bytes(plan, shape) >= 64 * MIB


def test_single_pass_uses_one_slab_where_it_fits() -> None:
    """With one slab nothing is accumulated: each gradient is written once."""
    shape = Shape(8192, 131_072, 4096)
    assert plan_sweep(shape, weight_gradient=True).count(shape) == 1
    wide = Shape(32_768, 248_320, 2048)
    plan = plan_sweep(wide, weight_gradient=True)
    assert plan.count(wide) > 1
    assert slab_bytes(plan, wide) + accumulator_bytes(plan, wide) <= 4 * GIB


@pytest.mark.parametrize(
    ("rows", "hidden", "columns"),
    [
        (8192, 4096, 131_072),
        (8192, 2048, 62_080),
        (12_000, 3072, 100_352),
        (3000, 5120, 151_936),
        (65_536, 2048, 62_080),
        (32_768, 2048, 248_320),
        (262_144, 2048, 248_320),
    ],
)
def test_single_pass_with_quantized_logits_uses_no_more_memory_than_liger(rows: int, hidden: int, columns: int) -> None:
    """Liger holds both gradients and a chunk of bf16 logits, a power of two of rows, about as large as hidden."""
    logits = 2 * columns * (1 << (-(-rows // -(-columns // hidden)) - 1).bit_length())
    gradients = 2 * hidden * (rows + columns)
    shape = Shape(rows, columns, hidden, 2 + 12 / 256)
    plan, exact = plan_quantized_sweep(shape, weight_gradient=True)
    assert not exact
    numbers_a_token = 64 * rows
    assert slab_bytes(plan, shape) + gradients + numbers_a_token <= 1.2 * (gradients + logits)
    assert plan.size >= 1024


def test_quantized_logits_use_fp32_accumulation_where_memory_allows() -> None:
    small = Shape(65_536, 32_000, 1024, 2 + 12 / 256)
    plan, exact = plan_quantized_sweep(small, weight_gradient=True)
    assert plan.count(small) > 1
    assert exact
    large = Shape(8192, 131_072, 4096, 2 + 12 / 256)
    training = Shape(13_850, 151_936, 2048, 2.05)
    sizes = [plan_quantized_sweep(training, weight_gradient=True, in_training=each)[0].size for each in (False, True)]
    assert sizes == [1024, 2048]
    wide = Shape(13_850, 500_000, 2048, 2.05)
    plan, _ = plan_quantized_sweep(wide, weight_gradient=True, in_training=True)
    assert plan.size * wide.columns * wide.logit_bytes <= GIB
    plan, exact = plan_quantized_sweep(large, weight_gradient=True, memory_budget=GIB)
    assert plan.count(large) > 1
    assert not exact
    plan, exact = plan_quantized_sweep(large, weight_gradient=True, memory_budget=4 * GIB)
    assert plan.count(large) == 1 or exact
    assert plan_quantized_sweep(large, weight_gradient=True, memory_budget=1)[0].size == 1
    for budget in (GIB, 4 * GIB):
        plan, exact = plan_quantized_sweep(
            Shape(65_536, 131_072, 2048, 2.1), weight_gradient=True, memory_budget=budget
        )
        summed = exact * 4 * 131_072 * 2048
        assert slab_bytes(plan, Shape(65_536, 131_072, 2048, 2.1)) + summed <= budget
