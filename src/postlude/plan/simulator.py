"""A schedule on a clock, without a process: the very turns that pipeline ranks run, each as soon as it can."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from postlude.pipeline.schedule import Action, ScheduleEntry

PipelineSchedule = Sequence[Sequence[ScheduleEntry]]
"""For each pipeline rank its turns in order, as `postlude.pipeline.schedule.rank_schedule` gives them."""


class DeadlockError(RuntimeError):
    """Orders in which every unfinished rank waits for an action that never comes."""


@dataclass(frozen=True, slots=True)
class SimulatedTimeline:
    """When each action started and finished. Those of one turn do both together."""

    schedule: PipelineSchedule
    start: Mapping[Action, float]
    finish: Mapping[Action, float]

    @property
    def makespan(self) -> float:
        """When the last action finished."""
        return max(self.finish.values(), default=0.0)

    @property
    def busy(self) -> tuple[float, ...]:
        """How long each rank was at work."""
        return tuple(
            sum(self.finish[turn[0]] - self.start[turn[0]] for turn in turns if turn) for turns in self.schedule
        )

    @property
    def bubble(self) -> float:
        """Idle time over busy time, of all ranks together: 0.25 makes a step a quarter longer than its work."""
        busy = sum(self.busy)
        return self.makespan * len(self.schedule) / busy - 1 if busy else 0.0

    @property
    def peak_in_flight(self) -> tuple[int, ...]:
        """The most forwards that each rank held at one time and that still awaited a backward."""
        return tuple(round(peak_held(turns, lambda _: 1)) for turns in self.schedule)


def dependencies(action: Action, *, stages: int) -> tuple[Action, ...]:
    """What must have finished before: for an F the stage before it, for a B its own F and the B of the stage after.

    A W has its own B before it.
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
    """Run every rank's turns on a clock, each as soon as its rank is free and all it starts from has arrived.

    `seconds` says how long a turn takes; what another rank made arrives `transfer_seconds` after it was finished.
    Raises DeadlockError if a turn can never start.
    """
    ranks = len(schedule)
    start: dict[Action, float] = {}
    finish: dict[Action, float] = {}
    clocks, queues = [0.0] * ranks, [deque(turns) for turns in schedule]
    progress = True
    while progress:
        progress = False
        for rank, queue in enumerate(queues):
            while queue and finish.keys() >= (needed := _needed(queue[0], stages)):
                turn = queue.popleft()
                arrivals = [finish[each] + transfer_seconds * (each.stage % ranks != rank) for each in needed]
                begin = max([clocks[rank], *arrivals])
                clocks[rank] = begin + seconds(turn)
                for action in turn:
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
    turns: Sequence[ScheduleEntry], size: Callable[[int], float], put_off: Callable[[int], float] = lambda stage: 0.0
) -> float:
    """The most that forwards of one rank hold at one time until their backward; `size` says what one of a stage does.

    In a turn of both, the forward holds all of its own before the backward has let go. Forwards that no backward
    follows hold nothing. Backwards that a W follows go on to hold `put_off`.
    """
    awaited = {(action.kind, action.stage, action.microbatch) for turn in turns for action in turn}
    held = most = 0.0
    for turn in turns:
        held += sum(size(a.stage) for a in turn if a.kind == "F" and ("B", a.stage, a.microbatch) in awaited)
        most = max(most, held)
        held -= sum(size(action.stage) for action in turn if action.kind == "B")
        held += sum(put_off(a.stage) for a in turn if a.kind == "B" and ("W", a.stage, a.microbatch) in awaited)
        most = max(most, held)
        held -= sum(put_off(action.stage) for action in turn if action.kind == "W")
    return most


def _needed(turn: ScheduleEntry, stages: int) -> set[Action]:
    return {other for action in turn for other in dependencies(action, stages=stages)}
