"""Checkpoints load in another layout over NCCL, and weights are exported bit-exact from every layout."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from postlude import Engine, Layout
from tests.conftest import Ranks
from tests.engine.training import BUDGET, DAMPED, batch, bitwise_equal, config, policy
from tests.equality import assert_equal
from tests.nccl.conftest import mesh

MOE = config("tiny-moe")


def build(layout: str, seed: int = 0) -> Engine:
    return Engine(
        MOE, mesh=mesh(Layout.parse(layout)), budget=BUDGET, optimizer=DAMPED, seed=seed, compute_dtype=torch.float32
    )


def train(engine: Engine, seeds: range) -> list[float]:
    losses = []
    for seed in seeds:
        losses.append(engine.forward_backward(batch(seed), policy).loss)
        engine.optimizer_step()
    return losses


def weights(engine: Engine) -> dict[str, Tensor]:
    return {name: tensor.cpu() for name, tensor in engine.stream_weights()}


def save_and_continue(group: Any, layout: str, directory: str) -> tuple[dict[str, Tensor], list[float]]:
    engine = build(layout)
    train(engine, range(2))
    engine.save(directory)
    saved = weights(engine)
    return saved, train(engine, range(2, 5))


def load_and_continue(group: Any, layout: str, directory: str) -> tuple[dict[str, Tensor], list[float]]:
    engine = build(layout, seed=1)
    engine.load(directory)
    return weights(engine), train(engine, range(2, 5))


@pytest.mark.parametrize(
    ("before", "after"), [("pp=2", "dp_shard=2,ep=2"), ("dp_shard=2,ep=2", "pp=2,tp=2"), ("pp=2,tp=2", "")]
)
def test_training_continues_from_checkpoint_in_another_layout(
    nccl_ranks: Ranks, before: str, after: str, tmp_path: Path
) -> None:
    sizes = [Layout.parse(layout).world_size for layout in (before, after)]
    saved, losses = nccl_ranks(sizes[0], save_and_continue, before, str(tmp_path / "saved"))[0]
    loaded, actual = nccl_ranks(sizes[1], load_and_continue, after, str(tmp_path / "saved"))[0]
    assert bitwise_equal(saved, loaded)
    assert_equal(torch.tensor(actual), torch.tensor(losses), "losses after the checkpoint", tolerance=1e-4)


def stream(group: Any, layout: str) -> dict[str, Tensor]:
    return weights(build(layout))


@pytest.mark.parametrize("layout", ["pp=2", "dp_shard=2,ep=2", "pp=2,vpp=2,tp=2"])
def test_weights_streamed_from_layout_are_bit_exact(nccl_ranks: Ranks, layout: str) -> None:
    expected = nccl_ranks(1, stream, "")[0]
    for actual in nccl_ranks(Layout.parse(layout).world_size, stream, layout):
        assert bitwise_equal(actual, expected)
