"""Handing out: a batch that the first rank alone has becomes one of which each rank holds its own rows."""

from __future__ import annotations

from typing import Any

from postlude.data import Batch
from postlude.data.bins import plan_bins
from postlude.world.agreement import Lead
from postlude.world.mesh import Mesh


def hand_out(batch: Batch | None, mesh: Mesh, lead: Lead[Any, Any], budget: int) -> Batch:
    """The rows that this rank runs, and the lengths of all. The first rank gives the whole batch, the others None.

    Rows go where `plan_bins` has them run, so that ranks have as much to do as if each had been given the whole batch.
    """
    ranks = lead.gather(mesh.dp.rank)
    if batch is not None and mesh.dp.size == 1:
        return lead.share([batch for _ in ranks])
    return lead.share(None if batch is None else [_held(batch, rank, mesh.dp.size, budget) for rank in ranks])


def _held(batch: Batch, rank: int, ranks: int, budget: int) -> Batch:
    """What data-parallel rank `rank` of `ranks` holds of a batch."""
    holders = [0] * len(batch)
    for number, members in enumerate(plan_bins(batch.lengths, budget, multiple_of=ranks, groups=batch.groups)):
        for member in members:
            holders[member] = number % ranks
    own = [place for place, holder in enumerate(holders) if holder == rank]
    return Batch.held(
        [batch.sequences[place] for place in own],
        {name: [values[place] for place in own] for name, values in batch.columns.items()},
        lengths=batch.lengths,
        holders=holders,
        groups=batch.groups,
    )
