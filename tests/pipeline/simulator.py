"""Transfers of each action of a rank, and schedules timed by the planner with given stage times."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from postlude.pipeline.schedule import Action, ScheduleEntry
from postlude.plan.simulator import SimulatedTimeline, dependencies, simulate_schedule

USUAL = {"F": 1.0, "B": 2.0}


@dataclass(frozen=True, slots=True)
class Transfer:
    """One end of a transfer: the activations of an F to the next stage, or the gradient of a B back."""

    end: Literal["send", "receive"]
    payload: Action
    source: int
    destination: int

    @property
    def channel(self) -> tuple[Literal["F", "B"], int, int]:
        """The channel of the payload: (kind, source rank, destination rank), first in first out."""
        return self.payload.kind, self.source, self.destination


def transfers(actions: Iterable[Action], *, pp: int, vpp: int) -> tuple[Transfer, ...]:
    """Returns the receives before and the sends after each action of a rank's schedule, in order."""
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


def simulate(
    orders: Sequence[Sequence[Action]],
    *,
    pp: int,
    vpp: int,
    forward_time: float = 1.0,
    backward_time: float = 2.0,
    transfer_time: float = 0.0,
) -> SimulatedTimeline:
    """Times every rank's order, one action per turn."""
    times = {"F": forward_time, "B": backward_time}
    schedule = [[(action,) for action in actions] for actions in orders]
    return simulate_schedule(
        schedule, stages=pp * vpp, seconds=lambda turn: times[turn[0].kind], transfer_seconds=transfer_time
    )


def simulate_turns(
    schedule: Sequence[Sequence[ScheduleEntry]],
    *,
    pp: int,
    vpp: int,
    times: Mapping[str, float] = MappingProxyType(USUAL),
) -> SimulatedTimeline:
    """Times every rank's turns, by default with a forward of 1 and a backward of 2."""
    return simulate_schedule(schedule, stages=pp * vpp, seconds=lambda turn: sum(times[action.kind] for action in turn))
