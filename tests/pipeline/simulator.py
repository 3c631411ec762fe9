"""Schedules timed by the planner with given stage times."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from postlude.pipeline.schedule import Action, ScheduleEntry
from postlude.plan.simulator import SimulatedTimeline, simulate_schedule

USUAL = {"F": 1.0, "B": 2.0}


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
