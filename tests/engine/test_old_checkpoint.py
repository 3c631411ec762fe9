"""A checkpoint that was written once and for all loads, and training continues with the losses of its engine.

`data/dense` was written on one rank, `data/moe` by Layout(dp_shard=2, ep=2): each after two steps on `batch(0)` and
`batch(1)`. LOSSES are those of the next three steps of the engine that wrote it.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from postlude import AdamW, Batch, Engine, Layout
from postlude.engine import checkpoint
from postlude.objectives import SFT
from tests.conftest import Ranks
from tests.meshes import mesh

DATA = Path(__file__).parent / "data"
LOSSES = {
    "dense": [4.2076990604400635, 4.265082120895386, 4.158007264137268],
    "moe": [4.20496392250061, 4.250152111053467, 4.295097589492798],
}


def batch(seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    return Batch([torch.randint(64, (length,), generator=generator) for length in (14, 9, 5, 12)])


def continued(group: Any, name: str, layout: str) -> tuple[dict[str, Any], int, list[float]]:
    """Returns the checkpoint's `extra` and step, and the losses of three more steps."""
    optimizer = AdamW(lr=1e-2, weight_decay=0.1)
    engine = Engine(DATA / name, mesh=mesh(Layout.parse(layout)), optimizer=optimizer, budget=32)
    extra, losses = engine.load(DATA / name), []
    step = engine.step
    for seed in (2, 3, 4):
        losses.append(engine.forward_backward(batch(seed), SFT()).loss)
        engine.optimizer_step()
    return extra, step, losses


@pytest.mark.parametrize(
    ("name", "layout"), [("dense", ""), ("dense", "tp=2"), ("moe", ""), ("moe", "dp_shard=2,ep=2")]
)
def test_old_checkpoint_loads_and_training_continues(ranks: Ranks, name: str, layout: str) -> None:
    for extra, step, losses in ranks(Layout.parse(layout).world_size, continued, name, layout):
        assert (extra, step) == ({"epoch": 4}, 2)
        assert losses == pytest.approx(LOSSES[name], rel=1e-5)


@pytest.mark.parametrize("name", LOSSES)
def test_old_checkpoint_passes_verification(name: str) -> None:
    checkpoint.check_checkpoint(DATA / name)
