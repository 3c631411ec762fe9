"""Orders on a clock, without a process: what a rank waits for, sends and receives, and when everything is done."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Literal

from postlude.pipeline.order import Action, Turn


@dataclass(frozen=True, slots=True)
class Transfer:
    """One end of moving what `payload` made: the activations of an F to the next stage, the gradient of a B back."""

    end: Literal["send", "receive"]
    payload: Action
    source: int
    destination: int

    @property
    def channel(self) -> tuple[Literal["F", "B"], int, int]:
        """What the payload travels in: (kind, source rank, destination rank), first in first out."""
        return self.payload.kind, self.source, self.destination


class DeadlockError(RuntimeError):
    """Orders in which every unfinished rank waits for an action that never comes."""


def dependencies(action: Action, *, stages: int) -> tuple[Action, ...]:
    """What must have finished before: for an F the stage before it, for a B its own F and the B of the stage after."""
    stage, microbatch = action.stage, action.microbatch
    assert 0 <= stage < stages
    if action.kind == "F":
        return (Action("F", stage - 1, microbatch),) if stage > 0 else ()
    forward = Action("F", stage, microbatch)
    return (forward, Action("B", stage + 1, microbatch)) if stage < stages - 1 else (forward,)


def transfers(actions: Iterable[Action], *, pp: int, vpp: int) -> tuple[Transfer, ...]:
    """What a rank receives before and sends after each action of its order, in that order."""
    moves: list[Transfer] = []
    for action in actions:
        rank = action.stage % pp
        for needed in dependencies(action, stages=pp * vpp):
            if (source := needed.stage % pp) != rank:
                moves.append(Transfer("receive", needed, source, rank))
        next_stage = action.stage + (1 if action.kind == "F" else -1)
        if 0 <= next_stage < pp * vpp and (destination := next_stage % pp) != rank:
            moves.append(Transfer("send", action, rank, destination))
    return tuple(moves)


@dataclass(frozen=True, slots=True)
class Timeline:
    """When each action started and finished, and the most forwards each rank held that still awaited a backward."""

    orders: tuple[tuple[Action, ...], ...]
    start: Mapping[Action, float]
    finish: Mapping[Action, float]
    peak_in_flight: tuple[int, ...]

    @property
    def makespan(self) -> float:
        """When the last action finished."""
        return max(self.finish.values(), default=0.0)

    @property
    def bubble(self) -> float:
        """Idle time over busy time, of all ranks together: 0.25 makes a step a quarter longer than its work."""
        busy = sum(self.finish[action] - self.start[action] for action in chain.from_iterable(self.orders))
        return self.makespan * len(self.orders) / busy - 1 if busy else 0.0


def simulate(
    orders: Sequence[Sequence[Action]],
    *,
    pp: int,
    vpp: int,
    forward_time: float = 1.0,
    backward_time: float = 2.0,
    transfer_time: float = 0.0,
) -> Timeline:
    """Run every rank's order on a clock, each action as soon as its rank is free and its dependencies have arrived.

    Times are those of one stage; what another rank made arrives `transfer_time` after it was finished. Raises
    DeadlockError if an action can never start.
    """
    times = {"F": forward_time, "B": backward_time}
    start: dict[Action, float] = {}
    finish: dict[Action, float] = {}
    clocks, queues = [0.0] * pp, [deque(actions) for actions in orders]
    progress = True
    while progress:
        progress = False
        for rank, queue in enumerate(queues):
            while queue and finish.keys() >= set(needed := dependencies(queue[0], stages=pp * vpp)):
                action = queue.popleft()
                arrivals = [finish[other] + (transfer_time if other.stage % pp != rank else 0) for other in needed]
                start[action] = max([clocks[rank], *arrivals])
                finish[action] = clocks[rank] = start[action] + times[action.kind]
                progress = True
    if stuck := {rank: queue[0] for rank, queue in enumerate(queues) if queue}:
        blocked = []
        for rank, action in stuck.items():
            awaited = " and ".join(str(other) for other in dependencies(action, stages=pp * vpp) if other not in finish)
            blocked.append(f"on rank {rank}, {action} waits for {awaited}")
        raise DeadlockError(f"The pipeline is stuck: {'; '.join(blocked)}.")
    return Timeline(tuple(map(tuple, orders)), start, finish, tuple(map(_peak_in_flight, orders)))


def _peak_in_flight(actions: Sequence[Action]) -> int:
    awaited = {(action.stage, action.microbatch) for action in actions if action.kind == "B"}
    changes = [1 if action.kind == "F" else -1 for action in actions if (action.stage, action.microbatch) in awaited]
    return max(accumulate(changes, initial=0))


def simulate_turns(all_turns: Sequence[Sequence[Turn]], *, pp: int, vpp: int) -> tuple[float, tuple[int, ...]]:
    """When the last turn ends, with a forward 1 and a backward 2, and the most forwards in flight on each rank.

    All of a turn begins together and ends together.
    """
    finish: dict[Action, float] = {}
    clocks, held, peaks = [0.0] * pp, [0] * pp, [0] * pp
    queues = [deque(each) for each in all_turns]
    progress = True
    while progress:
        progress = False
        for rank, queue in enumerate(queues):
            while queue and finish.keys() >= (needed := _needed(queue[0], pp * vpp)):
                turn = queue.popleft()
                begin = max([clocks[rank], *(finish[other] for other in needed)])
                clocks[rank] = begin + sum({"F": 1.0, "B": 2.0}[action.kind] for action in turn)
                finish |= dict.fromkeys(turn, clocks[rank])
                held[rank] += sum(action.kind == "F" for action in turn)
                peaks[rank] = max(peaks[rank], held[rank])
                held[rank] -= sum(action.kind == "B" for action in turn)
                progress = True
    if any(queues):
        raise DeadlockError(f"The pipeline is stuck at {[queue[0] for queue in queues if queue]}.")
    return max(clocks), tuple(peaks)


def _needed(turn: Turn, stages: int) -> set[Action]:
    return {other for action in turn for other in dependencies(action, stages=stages)}
