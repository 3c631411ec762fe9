"""Every rank holds as much of the experts as every other, however few they are, and nothing else changes by it."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch.distributed as dist

from postlude import Layout
from postlude.engine import Engine
from postlude.model.parallel import held
from postlude.verify.cases import Case
from tests.engine.training import build, config, optimizer_state, same, train, weights
from tests.meshes import verify


def few(experts: int) -> Any:
    return config("tiny-moe", num_experts=experts, num_experts_per_tok=2)


def sizes(engine: Engine) -> set[int]:
    """How many elements this rank holds of each expert matrix."""
    experts = [part.module for stage in engine.stages.values() for part in stage.apart() if part.experts]
    return {held(parameter).numel() for module in experts for parameter in module.parameters()}


def moved(group: Any, layout: str, other: str, experts: int, directory: str) -> tuple[set[int], Any, Any, bool]:
    """Elements held, the first weights, those after a step, and whether another layout has the same from disk."""
    engine = build(layout, few(experts))
    first = weights(engine)
    train(engine, [1])
    engine.save(directory)
    again, there = build(layout, few(experts), seed=1), build(other, few(experts), seed=1)
    again.load(directory)
    there.load(directory)
    alike = same(weights(there), weights(engine)) and same(optimizer_state(again), optimizer_state(engine))
    return sizes(engine), first, weights(engine), alike


LAYOUTS = [
    pytest.param("dp_shard=2", "dp_replicate=2", 3, marks=pytest.mark.slow),  # neither divides the experts
    pytest.param("dp_shard=4", "dp_shard=4,ep=2", 2, marks=pytest.mark.thorough),  # more ranks than experts
    pytest.param("dp_shard=4,ep=2", "tp=2,dp_shard=2", 2, marks=pytest.mark.thorough),  # two ranks share one expert
]


@pytest.mark.parametrize(("layout", "other", "experts"), LAYOUTS)
def test_few_experts_are_spread_evenly_streamed_and_saved(
    ranks: Any, tmp_path: Any, layout: str, other: str, experts: int
) -> None:
    ((whole, first, _, _),) = ranks(1, moved, "", "", experts, str(tmp_path / "one"))
    size = Layout.parse(layout).world_size
    answers = ranks(size, moved, layout, other, experts, str(tmp_path / "many"))
    for held_here, streamed, stepped, alike in answers:
        assert held_here == {each // size for each in whole}
        assert same(streamed, first)
        assert same(stepped, answers[0][2])
        assert alike


@pytest.mark.parametrize(("layout", "other", "experts"), LAYOUTS)
def test_few_experts_learn_as_on_one_rank(ranks: Any, layout: str, other: str, experts: int) -> None:
    case = Case(few(experts), Layout.parse(layout), "grpo")
    report = ranks(case.layout.world_size, verify, case)[0]
    assert report.passes(), (report.loss, report.logprob, report.entropy, report.worst)


def exchanges(group: Any) -> dict[str, int]:
    """All-to-alls of a forward and backward."""
    found, exchange = Counter[str](), dist.all_to_all_single
    for recompute in ("none", "selective", "full"):
        engine = build("dp_shard=2,ep=2", few(4), recompute=recompute)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dist, "all_to_all_single", lambda *a, **k: (found.update([recompute]), exchange(*a, **k))[1])  # noqa: B023
            train(engine, [1])
    return dict(found)


@pytest.mark.slow
def test_selective_recompute_repeats_no_exchange_and_full_repeats_them(ranks: Any) -> None:
    for found in ranks(2, exchanges):
        assert 0 < found["none"] == found["selective"] < found["full"]
