"""When a pipeline rank launches its sends and receives, as plain data: an order that cannot deadlock.

Over NCCL, a launched send or receive is a kernel that spins until the other rank launches its side. While it spins, the
host may have to wait for it at any moment: the first launch of a kernel that is not loaded yet, an allocation, or a
full launch queue all wait for the running kernels. So the order has to work even if the host waited for every transfer
as soon as it was launched. `transfer_plan` gives such an order: it is made by running all ranks against each other with
transfers that block, and there is one global order of all transfers that every rank follows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from postlude.options import Overlap
from postlude.pipeline.schedule import Action, ScheduleEntry, rank_schedule


@dataclass(frozen=True, slots=True)
class Transfer:
    """The output of `payload` on its way from rank `source` to rank `destination`.

    An F outputs the activations that the next stage starts from, a B the gradient for the stage before.
    """

    payload: Action
    source: int
    destination: int


RankTransfers = tuple[tuple[Transfer, ...], ...]
"""Entry i is what a rank launches before its turn i, in order; the last entry what it launches after its last turn."""


@lru_cache(maxsize=64)
def transfer_plan(
    *, pp: int, vpp: int, microbatches: int, forward_only: bool = False, overlap: Overlap = False
) -> tuple[RankTransfers, ...]:
    """The transfers of every rank of a pipeline, for the turns that `rank_schedule` gives with the same arguments.

    A rank sends what a turn made right after it. It receives what a turn needs before the turn ahead of it where that
    is safe, so that the transfer is hidden behind compute, and right before the turn otherwise.
    """
    options = {"pp": pp, "vpp": vpp, "microbatches": microbatches, "forward_only": forward_only}
    return plan_transfers([rank_schedule(rank=rank, overlap=overlap, **options) for rank in range(pp)], vpp=vpp)  # type: ignore[arg-type]


def plan_transfers(schedule: list[tuple[ScheduleEntry, ...]], *, vpp: int) -> tuple[RankTransfers, ...]:
    """The same for any schedule: the turns of each rank, in order.

    Runs all ranks with transfers that block. A rank stops before each turn until everything that it has launched there
    is done: its sends, the receives of this turn, and early receives for the next one. When no rank can go on, one
    early receive is given up, gradients first: a rank mostly waits for those with nothing else to do. If there is none,
    a rank that another waits for receives earlier still.
    """
    ranks = [_Rank(turns, number, len(schedule), vpp) for number, turns in enumerate(schedule)]
    for rank in ranks:
        rank.stop()
    while any(not rank.finished for rank in ranks):
        if not _run(ranks):
            _resolve(ranks)
    return tuple(tuple(tuple(transfers) for transfers in rank.launched) for rank in ranks)


class _Rank:
    """A rank in front of its turn `position`, with the transfers that it has `posted` there and that are not done."""

    def __init__(self, schedule: tuple[ScheduleEntry, ...], number: int, pp: int, vpp: int) -> None:
        self.number, self.position, self.finished = number, 0, False
        self.needs = [list(_received(turn, pp, vpp)) for turn in schedule] + [[], []]
        self.makes = [[], *(list(_sent(turn, pp, vpp)) for turn in schedule)]
        self.done: set[Transfer] = set()
        self.posted: list[Transfer] = []
        self.early: list[Transfer] = []
        self.launched: list[list[Transfer]] = [[] for _ in self.makes]

    def stop(self) -> None:
        """Post what is to be done in front of this turn."""
        needed, ahead = ([t for t in self.needs[self.position + k] if t not in self.done] for k in (0, 1))
        self.posted, self.early = [*self.makes[self.position], *needed, *ahead], ahead

    def complete(self, transfer: Transfer) -> None:
        """One of the posted transfers happens."""
        self.posted.remove(transfer)
        self.done.add(transfer)
        self.launched[self.position].append(transfer)

    def advance(self) -> None:
        """Run the turn."""
        self.position += 1
        self.finished = self.position == len(self.makes)
        if not self.finished:
            self.stop()


def _run(ranks: list[_Rank]) -> bool:
    """Complete every transfer that both ends have posted, and let ranks go on. Returns whether anything happened."""
    happened = False
    for rank in ranks:
        for transfer in tuple(rank.posted):
            source, destination = ranks[transfer.source], ranks[transfer.destination]
            if transfer in source.posted and transfer in destination.posted:
                source.complete(transfer)
                destination.complete(transfer)
                happened = True
        if not rank.finished and not rank.posted:
            rank.advance()
            happened = True
    return happened


def _resolve(ranks: list[_Rank]) -> None:
    """Nobody can go on: give up one early receive, or else make one receive early."""
    early = [transfer for rank in ranks for transfer in rank.early if transfer in rank.posted]
    if early:
        given_up = min(early, key=lambda transfer: (transfer.payload.kind != "B", transfer.destination))
        ranks[given_up.destination].posted.remove(given_up)
        return
    stuck = [transfer for rank in ranks for transfer in rank.posted if transfer.source == rank.number]
    if not stuck:
        waiting = ", ".join(f"rank {rank.number} for {rank.posted[0].payload}" for rank in ranks if rank.posted)
        raise ValueError(f"the pipeline's order cannot run: {waiting} wait for actions that come later.")
    first = min(stuck, key=lambda transfer: (transfer.payload.microbatch, transfer.destination))
    ranks[first.destination].posted.append(first)


def _received(turn: ScheduleEntry, pp: int, vpp: int) -> Iterator[Transfer]:
    for action in turn:
        before = action.stage - 1 if action.kind == "F" else action.stage + 1
        if action.kind != "W" and 0 <= before < pp * vpp and pp > 1:
            yield Transfer(Action(action.kind, before, action.microbatch), before % pp, action.stage % pp)


def _sent(turn: ScheduleEntry, pp: int, vpp: int) -> Iterator[Transfer]:
    for action in turn:
        after = action.stage + 1 if action.kind == "F" else action.stage - 1
        if action.kind != "W" and 0 <= after < pp * vpp and pp > 1:
            yield Transfer(action, action.stage % pp, after % pp)
