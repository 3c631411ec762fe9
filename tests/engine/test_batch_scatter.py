"""scatter_batch: training equals a batch given to all ranks, and a rank gets only its own rows."""

from typing import Any

import pytest

from postlude import Batch, Engine, Layout
from postlude.engine.batch_sharding import scatter_batch
from postlude.hf.builtin import BUILTIN
from postlude.objectives import SFT
from postlude.world.agreement import Rank0Controller
from tests.conftest import Ranks
from tests.meshes import mesh

ROWS = [list(b"some"), list(b"rows of unequal"), list(b"length"), list(b"to"), list(b"be handed out")]


def learned(group: Any, layout: Layout) -> tuple[list[list[int]], list[float], float, list[float]]:
    engine = Engine(BUILTIN["tiny-dense"](), mesh=mesh(layout), budget=24, seed=3)
    controller: Rank0Controller[Any, Any] = Rank0Controller(lambda _: None)
    masks = [[1] * len(row) for row in ROWS]
    full_batch = Batch(ROWS, {"loss_mask": masks, "place": [float(place) for place in range(len(ROWS))]})
    batch = scatter_batch(full_batch if controller.is_rank0 else None, engine.mesh, controller, engine.options.budget)
    actual = [float(logprobs.sum()) for logprobs in engine.logprobs(batch).logprob]
    result = engine.forward_backward(batch, SFT(over="loss_mask"))
    return [list(row) for row in batch.sequences], list(batch.columns["place"]), result.loss, actual


@pytest.mark.parametrize(
    "layout",
    [
        Layout(dp_shard=2),
        pytest.param(Layout(pp=2), marks=pytest.mark.thorough),
        pytest.param(Layout(dp_shard=2, tp=2), marks=pytest.mark.thorough),
    ],
    ids=str,
)
def test_training_on_a_scattered_batch_equals_the_global_batch(ranks: Ranks, layout: Layout) -> None:
    ((rows, places, loss, logprobs),) = ranks(1, learned, Layout())
    assert (rows, places) == (ROWS, [0.0, 1.0, 2.0, 3.0, 4.0])
    places_by_rank: dict[int, set[int]] = {}
    for rank, (sequences, local_count, is_equal, actual) in enumerate(ranks(layout.world_size, learned, layout)):
        assert sequences == [ROWS[int(place)] for place in local_count]
        assert is_equal == pytest.approx(loss, rel=1e-5)
        assert actual == pytest.approx([logprobs[int(place)] for place in local_count], rel=1e-4)
        places_by_rank.setdefault(rank // layout.tp if layout.dp_shard > 1 else 0, set()).update(
            int(place) for place in local_count
        )
    assert sorted(place for places in places_by_rank.values() for place in places) == [0, 1, 2, 3, 4], (
        "each row has one owner"
    )
