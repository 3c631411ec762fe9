"""When a pipeline rank launches its sends and receives, as plain data: an order that cannot deadlock.

Over NCCL, a launched send or receive is a kernel that spins until the other rank launches its side. While it spins,
the host may have to wait for it at any moment: the first launch of a kernel that is not loaded yet, an allocation, and
a full launch queue all wait for the running kernels. So the order must work even if the host waits for every transfer
right after its launch. `transfer_plan` simulates all ranks with transfers that block, and every rank follows the one
global order of transfers that results.

`Channels` does them: sends and receives of activations and gradients between neighbouring pipeline ranks.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor

from postlude.options import Overlap
from postlude.pipeline.schedule import Action, ScheduleEntry, rank_schedule
from postlude.world.mesh import ChannelKey, Mesh, point_to_point


@dataclass(frozen=True, slots=True)
class Transfer:
    """The transfer of the output of `payload` from rank `source` to rank `destination`.

    An F outputs the activations that the next stage starts from, a B the gradient for the stage before.
    """

    payload: Action
    source: int
    destination: int


RankTransfers = tuple[tuple[Transfer, ...], ...]
"""Item i is what a rank launches before its schedule entry i, in order; the last item what it launches at the end."""


@lru_cache(maxsize=64)
def transfer_plan(
    *, pp: int, vpp: int, microbatches: int, forward_only: bool = False, overlap: Overlap = False
) -> tuple[RankTransfers, ...]:
    """Returns the transfers of every rank of a pipeline, for the entries that `rank_schedule` returns.

    A rank sends an entry's output right after it. It receives an entry's input one entry earlier if that is safe, so
    that the transfer is hidden behind compute, and right before the entry otherwise.
    """
    options = {"pp": pp, "vpp": vpp, "microbatches": microbatches, "forward_only": forward_only}
    return plan_transfers([rank_schedule(rank=rank, overlap=overlap, **options) for rank in range(pp)], vpp=vpp)  # type: ignore[arg-type]


def plan_transfers(schedule: list[tuple[ScheduleEntry, ...]], *, vpp: int) -> tuple[RankTransfers, ...]:
    """Returns the transfers for any schedule: the entries of each rank, in order.

    Simulates all ranks with transfers that block. A rank stops before each entry until everything that it has launched
    there is done: its sends, the receives of this entry, and early receives for the next one. When no rank can
    continue, one early receive is cancelled, gradients first: a rank mostly waits for those with nothing else to do. If
    there is none, a rank that another waits for receives even earlier.
    """
    ranks = [_Rank(entries, number, len(schedule), vpp) for number, entries in enumerate(schedule)]
    for rank in ranks:
        rank.post()
    while any(not rank.finished for rank in ranks):
        if not _complete_transfers(ranks):
            _resolve_deadlock(ranks)
    return tuple(tuple(tuple(transfers) for transfers in rank.launched) for rank in ranks)


class _Rank:
    """A simulated rank before its entry `position`, with the transfers that it has `posted` and that are not done."""

    def __init__(self, schedule: tuple[ScheduleEntry, ...], number: int, pp: int, vpp: int) -> None:
        self.number, self.position, self.finished = number, 0, False
        self.receives = [list(_received(entry, pp, vpp)) for entry in schedule] + [[], []]
        self.sends = [[], *(list(_sent(entry, pp, vpp)) for entry in schedule)]
        self.done: set[Transfer] = set()
        self.posted: list[Transfer] = []
        self.early: list[Transfer] = []
        self.launched: list[list[Transfer]] = [[] for _ in self.sends]

    def post(self) -> None:
        """Posts the transfers before this entry: sends, receives of this entry, and early receives of the next."""
        needed, early = ([t for t in self.receives[self.position + k] if t not in self.done] for k in (0, 1))
        self.posted, self.early = [*self.sends[self.position], *needed, *early], early

    def complete(self, transfer: Transfer) -> None:
        self.posted.remove(transfer)
        self.done.add(transfer)
        self.launched[self.position].append(transfer)

    def advance(self) -> None:
        self.position += 1
        self.finished = self.position == len(self.sends)
        if not self.finished:
            self.post()


def _complete_transfers(ranks: list[_Rank]) -> bool:
    """Completes every transfer that both ends have posted, and advances ranks. Returns whether anything happened."""
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


def _resolve_deadlock(ranks: list[_Rank]) -> None:
    """Resolves a deadlock: cancels one early receive, or else makes one receive early."""
    early = [transfer for rank in ranks for transfer in rank.early if transfer in rank.posted]
    if early:
        cancelled = min(early, key=lambda transfer: (transfer.payload.kind != "B", transfer.destination))
        ranks[cancelled.destination].posted.remove(cancelled)
        return
    stuck = [transfer for rank in ranks for transfer in rank.posted if transfer.source == rank.number]
    if not stuck:
        waiting = ", ".join(f"rank {rank.number} for {rank.posted[0].payload}" for rank in ranks if rank.posted)
        raise ValueError(f"the pipeline's schedule cannot run: {waiting} wait for actions that come later.")
    first = min(stuck, key=lambda transfer: (transfer.payload.microbatch, transfer.destination))
    ranks[first.destination].posted.append(first)


def _received(entry: ScheduleEntry, pp: int, vpp: int) -> Iterator[Transfer]:
    for action in entry:
        before = action.stage - 1 if action.kind == "F" else action.stage + 1
        if action.kind != "W" and 0 <= before < pp * vpp and pp > 1:
            yield Transfer(Action(action.kind, before, action.microbatch), before % pp, action.stage % pp)


def _sent(entry: ScheduleEntry, pp: int, vpp: int) -> Iterator[Transfer]:
    for action in entry:
        after = action.stage + 1 if action.kind == "F" else action.stage - 1
        if action.kind != "W" and 0 <= after < pp * vpp and pp > 1:
            yield Transfer(action, action.stage % pp, after % pp)


class Channels:
    """FIFO point-to-point channels between neighbouring pipeline ranks: one per kind and direction.

    Gloo sends host memory only, so a device's tensors are copied through the host.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.groups = mesh.channels
        self.pp, self.rank = mesh.pp.size, mesh.pp.rank
        self.through_host = bool(self.groups) and dist.get_backend(next(iter(self.groups.values()))) == "gloo"
        self.pending: dict[ChannelKey, deque[tuple[dist.Work, Tensor]]] = defaultdict(deque)

    def send(self, action: Action, tensor: Tensor, max_pending: int | None = None) -> None:
        """Sends the output of `action` to the stage that needs it, without waiting.

        If more than `max_pending` in the channel were not received yet, waits for the oldest.
        """
        if tensor.numel() == 0:
            return
        channel = action.kind, self.rank
        group, pending = self.groups[channel], self.pending[channel]
        tensor = (tensor.cpu() if self.through_host else tensor).contiguous()
        pending.append((point_to_point(dist.isend, tensor, group), tensor))
        while pending and (pending[0][0].is_completed() or (max_pending is not None and len(pending) > max_pending)):
            pending.popleft()[0].wait()  # on a GPU the stream waits, and may then reuse the memory

    def receive(
        self, action: Action, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> Callable[[], Tensor]:
        """Launches the receive of another rank's output of `action`. Returns a function that waits for it."""
        if 0 in shape:  # then nothing is sent
            return lambda: torch.zeros(shape, dtype=dtype, device=device)
        group = self.groups[action.kind, action.stage % self.pp]
        tensor = torch.empty(shape, dtype=dtype, device="cpu" if self.through_host else device)
        work = point_to_point(dist.irecv, tensor, group)

        def wait() -> Tensor:
            work.wait()
            return tensor.to(device)

        return wait

    def finish(self) -> None:
        """Waits until everything sent has arrived."""
        for pending in self.pending.values():
            while pending:
                pending.popleft()[0].wait()
