"""Simulates a pipeline schedule on a clock, without processes: the entries that ranks run, each as soon as it can."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from postlude.pipeline.schedule import Action, ScheduleEntry

PipelineSchedule = Sequence[Sequence[ScheduleEntry]]
"""The entries of each pipeline rank in order, as `postlude.pipeline.schedule.rank_schedule` returns them."""


class DeadlockError(RuntimeError):
    """Every unfinished rank waits for an action that never comes."""


@dataclass(frozen=True, slots=True)
class SimulatedTimeline:
    """When each action started and finished. Actions of one entry do both together."""

    schedule: PipelineSchedule
    start: Mapping[Action, float]
    finish: Mapping[Action, float]

    @property
    def makespan(self) -> float:
        return max(self.finish.values(), default=0.0)

    @property
    def busy(self) -> tuple[float, ...]:
        return tuple(
            sum(self.finish[entry[0]] - self.start[entry[0]] for entry in entries if entry) for entries in self.schedule
        )

    @property
    def peak_in_flight(self) -> tuple[int, ...]:
        """For each rank, the most forwards that awaited their backward at a time."""
        return tuple(round(peak_held(entries, lambda _: 1)) for entries in self.schedule)


def dependencies(action: Action, *, stages: int) -> tuple[Action, ...]:
    """Returns what must have finished before.

    For an F the stage before it, for a B its own F and the B of the stage after, for a W its own B.
    """
    stage, microbatch = action.stage, action.microbatch
    assert 0 <= stage < stages
    if action.kind == "F":
        return (Action("F", stage - 1, microbatch),) if stage > 0 else ()
    if action.kind == "W":
        return (Action("B", stage, microbatch),)
    forward = Action("F", stage, microbatch)
    return (forward, Action("B", stage + 1, microbatch)) if stage < stages - 1 else (forward,)


def simulate_schedule(
    schedule: PipelineSchedule, *, stages: int, seconds: Callable[[ScheduleEntry], float], transfer_seconds: float = 0.0
) -> SimulatedTimeline:
    """Runs every rank's entries on a clock, each as soon as its rank is free and its inputs have arrived.

    `seconds` returns the duration of an entry; the output of another rank arrives `transfer_seconds` after it is
    finished. Raises DeadlockError if an entry can never start.
    """
    ranks = len(schedule)
    start: dict[Action, float] = {}
    finish: dict[Action, float] = {}
    clocks, queues = [0.0] * ranks, [deque(entries) for entries in schedule]
    progress = True
    while progress:
        progress = False
        for rank, queue in enumerate(queues):
            while queue and finish.keys() >= (needed := _needed(queue[0], stages)):
                entry = queue.popleft()
                arrivals = [finish[action] + transfer_seconds * (action.stage % ranks != rank) for action in needed]
                begin = max([clocks[rank], *arrivals])
                clocks[rank] = begin + seconds(entry)
                for action in entry:
                    start[action], finish[action] = begin, clocks[rank]
                progress = True
    blocked = [
        f"on rank {rank}, {action} waits for {' and '.join(awaited)}"
        for rank, queue in enumerate(queues)
        for action in (queue[0] if queue else ())
        if (awaited := [str(other) for other in dependencies(action, stages=stages) if other not in finish])
    ]
    if any(queues):
        raise DeadlockError(f"The pipeline is stuck: {'; '.join(blocked)}.")
    return SimulatedTimeline(schedule, start, finish)


def peak_held(
    entries: Sequence[ScheduleEntry], size: Callable[[int], float], deferred: Callable[[int], float] = lambda stage: 0.0
) -> float:
    """Returns the most that forwards of one rank hold at a time until their backward. `size` is of one of a stage.

    In an overlapped entry, the forward holds all of its own before the backward has freed anything. Forwards without a
    backward hold nothing. Backwards that a W follows then hold `deferred`.
    """
    awaited = {(action.kind, action.stage, action.microbatch) for entry in entries for action in entry}
    current = peak = 0.0
    for entry in entries:
        current += sum(size(a.stage) for a in entry if a.kind == "F" and ("B", a.stage, a.microbatch) in awaited)
        peak = max(peak, current)
        current -= sum(size(action.stage) for action in entry if action.kind == "B")
        current += sum(deferred(a.stage) for a in entry if a.kind == "B" and ("W", a.stage, a.microbatch) in awaited)
        peak = max(peak, current)
        current -= sum(deferred(action.stage) for action in entry if action.kind == "W")
    return peak


def _needed(entry: ScheduleEntry, stages: int) -> set[Action]:
    return {other for action in entry for other in dependencies(action, stages=stages)}
