"""Handing out: a batch that the first rank alone has becomes one of which each rank holds its own rows."""

from __future__ import annotations

from typing import Any

from postlude.data import Batch
from postlude.data.bins import plan_bins
from postlude.world.agreement import Rank0Controller
from postlude.world.mesh import Mesh


def scatter_batch(batch: Batch | None, mesh: Mesh, controller: Rank0Controller[Any, Any], budget: int) -> Batch:
    """The rows that this rank runs, and the lengths of all. The first rank gives the whole batch, the others None.

    Rows go where `plan_bins` has them run, so that ranks have as much to do as if each had been given the whole batch.
    """
    ranks = controller.gather(mesh.dp.rank)
    if batch is not None and mesh.dp.size == 1:
        return controller.scatter([batch for _ in ranks])
    return controller.scatter(None if batch is None else [_held(batch, rank, mesh.dp.size, budget) for rank in ranks])


def _held(batch: Batch, rank: int, ranks: int, budget: int) -> Batch:
    """What data-parallel rank `rank` of `ranks` holds of a batch."""
    owners = [0] * len(batch)
    for number, members in enumerate(plan_bins(batch.lengths, budget, multiple_of=ranks, groups=batch.groups)):
        for member in members:
            owners[member] = number % ranks
    own = [place for place, owner in enumerate(owners) if owner == rank]
    return Batch.sharded(
        [batch.sequences[place] for place in own],
        {name: [values[place] for place in own] for name, values in batch.columns.items()},
        lengths=batch.lengths,
        owners=owners,
        groups=batch.groups,
    )
