"""RolloutQueue: groups of trajectories, started up to `max_staleness` steps before the step that trains on them."""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from postlude.data.datasets import RowSource
from postlude.recipes.rollouts.sampler import RolloutSampler
from postlude.recipes.rollouts.trajectory_state import restore_trajectory, trajectory_state
from postlude.rollout.conversations import Trajectory, TrajectoryGroup
from postlude.rollout.environments import needed_episodes
from postlude.rollout.tasks import Tasks

CARRIED_METRICS = ("episodes_carried", "episodes_joined", "episodes_expired", "episodes_lost")
LOG = logging.getLogger("postlude")


@dataclass(frozen=True)
class PendingGroup:
    """A group that was started in `step` and that no step has trained on yet."""

    task_index: int
    step: int
    group: TrajectoryGroup

    @property
    def ready(self) -> bool:
        """Whether a step may train on it."""
        return self.group.done or (self.group.carries and self.group.has_enough)


@dataclass
class CarriedEpisodes:
    """Episodes of a group that a step trained on without them."""

    task_index: int
    step: int
    """The step in which they were started."""
    waiting: list[Trajectory]
    trained: list[Trajectory]
    """The trajectories of the group that steps have taken."""

    @property
    def ended(self) -> list[Trajectory]:
        return [trajectory for trajectory in self.waiting if trajectory.done]

    def state(self) -> dict[str, Any]:
        """Returns those that have ended, with the others of their group, for a checkpoint."""
        parts = {"ended": self.ended, "trained": self.trained}
        states = {name: [*map(trajectory_state, trajectories)] for name, trajectories in parts.items()}
        return {"task": self.task_index, "step": self.step, **states}

    @classmethod
    def restored(cls, state: Mapping[str, Any], tasks: Tasks) -> CarriedEpisodes:
        """Returns the episodes of a `state`."""
        restore = partial(restore_trajectory, tasks[state["task"]])
        return cls(state["task"], state["step"], [*map(restore, state["ended"])], [*map(restore, state["trained"])])


class RolloutQueue:
    """Takes tasks from `task_sampler`, and samples a group of `samples_per_prompt` trajectories of each.

    A step trains on `prompts_of_step(step)` groups: 0 after the last step.

    While a step trains, the groups of the next `max_staleness` steps are being sampled. A step never trains on a group
    that was started more than `max_staleness` steps before: it waits for a group that would become too old, so no
    group is dropped. With 0, a step starts its own groups and waits for them.

    A checkpoint holds the tasks of the pending groups. A resumed run starts them again, so every task is trained on
    exactly once.

    In an environment with `stragglers: carry`, a group is ready when it has enough trajectories. Its other episodes are
    carried: they join a later step, at most `max_staleness` steps after their group was started, or else are dropped.
    To leave room for that step, groups are started one step less ahead. A checkpoint holds carried episodes that have
    ended; a resumed run counts the others as lost.
    """

    def __init__(
        self,
        rollout_sampler: RolloutSampler,
        tasks: Tasks,
        task_sampler: RowSource[int],
        *,
        samples_per_prompt: int,
        prompts_of_step: Callable[[int], int],
        max_staleness: int,
    ) -> None:
        self.rollout_sampler, self.tasks, self.task_sampler = rollout_sampler, tasks, task_sampler
        self.samples_per_prompt, self.prompts_of_step = samples_per_prompt, prompts_of_step
        self.max_staleness = max_staleness
        self.carries = any(part.stragglers == "carry" for part in rollout_sampler.environments.values())
        self.steps_ahead = max_staleness - self.carries  # groups are started at most so many steps early
        self._pending: list[PendingGroup] = []
        self._tasks_to_restart: deque[int] = deque()  # tasks that were pending in the checkpoint
        self._resampled = 0  # trajectories of those tasks, until `take_metrics` reports them
        self._carried: list[CarriedEpisodes] = []
        self._carried_counts: Counter[str] = Counter()  # metrics since the last `take_metrics`
        self._started: Counter[int] = Counter()  # groups by step
        self._taken: Counter[int] = Counter()
        self._staleness: list[int] = []  # of the groups taken since the last `take_metrics`, in steps

    def take(self, count: int, step: int) -> list[Trajectory]:
        """Waits for `count` groups for `step`, numbers them in this order, and returns their trajectories."""
        prefetched = sum(map(self.prompts_of_step, range(step + 1, step + 1 + self.steps_ahead)))
        for _ in range(count + prefetched - len(self._pending)):
            self._start(step)
        self.rollout_sampler.wait(lambda: self._ready(count, step) is not None)
        ready = self._ready(count, step) or []
        self._pending = [pending for pending in self._pending if pending not in ready]
        self._staleness += [step - pending.step for pending in ready]
        taken: list[Trajectory] = []
        for pending in ready:
            done = [trajectory for trajectory in pending.group.trajectories if trajectory.done]
            if waiting := [trajectory for trajectory in pending.group.trajectories if trajectory not in done]:
                self._carried.append(CarriedEpisodes(pending.task_index, pending.step, waiting, done))
                self._carried_counts["episodes_carried"] += len(waiting)
            taken += self._numbered(done, step)
        return taken

    def take_carried(self, step: int) -> list[Trajectory]:
        """Returns the carried trajectories that have ended since. Those of one task are a group with a new number.

        Drops those that no later step may train on.
        """
        taken, late = list[Trajectory](), list[Trajectory]()
        for carried in self._carried:
            done = carried.ended
            carried.waiting = [trajectory for trajectory in carried.waiting if trajectory not in done]
            for trajectory in done:
                trajectory.trained_before = tuple(carried.trained)
            if done:
                self._staleness.append(step - carried.step)
                carried.trained += done
                taken += self._numbered(done, step)
            if step >= carried.step + self.max_staleness:
                late += carried.waiting
                carried.waiting = []
        self._carried = [carried for carried in self._carried if carried.waiting]
        self.rollout_sampler.conversations.drop(late)
        self._carried_counts.update(episodes_joined=len(taken), episodes_expired=len(late))
        return taken

    def _numbered(self, trajectories: list[Trajectory], step: int) -> list[Trajectory]:
        for trajectory in trajectories:
            trajectory.group = self._taken[step]
        self._taken[step] += 1
        return trajectories

    def take_metrics(self) -> dict[str, float]:
        """Returns the staleness of groups taken since the last call, and the number of trajectories sampled again."""
        staleness, self._staleness = self._staleness, []
        if not self.max_staleness or not staleness:
            return {}
        resampled, self._resampled = self._resampled, 0
        carried, self._carried_counts = self._carried_counts, Counter()
        return {
            **({name: float(carried[name]) for name in CARRIED_METRICS} if self.carries else {}),
            "staleness_mean": sum(staleness) / len(staleness),
            "staleness_max": float(max(staleness)),
            "completions_resampled": float(resampled),
        }

    def state(self) -> dict[str, Any]:
        """Returns the state of the task sampler, and what no step has trained on: tasks, and ended episodes."""
        return {
            "sampler": self.task_sampler.state(),
            "pending_tasks": [*(pending.task_index for pending in self._pending), *self._tasks_to_restart],
            "carried": sum(len(carried.waiting) for carried in self._carried),
            "carried_and_ended": [carried.state() for carried in self._carried if carried.ended],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        self.task_sampler.restore(state["sampler"])
        self._tasks_to_restart = deque(state["pending_tasks"])
        self._resampled = len(self._tasks_to_restart) * self.samples_per_prompt
        is_rank0 = self.rollout_sampler.rollout_engine.controller.is_rank0
        ended = state.get("carried_and_ended", ()) if is_rank0 else ()  # only rank 0 takes trajectories
        self._carried = [CarriedEpisodes.restored(part, self.tasks) for part in ended]
        lost = state.get("carried", 0) - sum(len(carried.waiting) for carried in self._carried)
        if lost and is_rank0:
            self._carried_counts["episodes_lost"] += lost
            LOG.warning("%d carried episodes were unfinished when the checkpoint was written; they are lost.", lost)
        if self._resampled and is_rank0:
            LOG.warning(
                "%d completions of %d tasks were unfinished when the checkpoint was written; they are sampled again.",
                self._resampled,
                len(self._tasks_to_restart),
            )

    def _start(self, step: int) -> None:
        task_index = self._tasks_to_restart.popleft() if self._tasks_to_restart else self.task_sampler.take(1)[0]
        group = self.rollout_sampler.make_group(
            self.tasks[task_index], self._started[step], self.samples_per_prompt, step=step
        )
        environment = group.source.environment
        if environment.stragglers != "wait":
            group.needed = needed_episodes(environment.needed_share, self.samples_per_prompt)
            group.carries = environment.stragglers == "carry"
        self._started[step] += 1
        self._pending.append(PendingGroup(task_index, step, group))
        self.rollout_sampler.start(group)

    def _ready(self, count: int, step: int) -> list[PendingGroup] | None:
        """Returns the `count` oldest finished groups. None if there are fewer, or if another group would get too old.

        A group that was started in step s is due by step s + steps_ahead. Of the groups that
        remain, no more may be due by a later step than the steps until then take.
        """
        finished = [pending for pending in self._pending if pending.ready][:count]
        for due_step in range(step, step + self.steps_ahead + 1):
            remaining = sum(pending.step + self.steps_ahead <= due_step for pending in self._pending)
            remaining -= sum(pending.step + self.steps_ahead <= due_step for pending in finished)
            if remaining > sum(map(self.prompts_of_step, range(step + 1, due_step + 1))):
                return None
        return finished if len(finished) == count else None


def policy_lag(trajectories: Sequence[Trajectory], step: int) -> float | None:
    """Returns the mean number of optimizer steps between the weights that sampled a token and those of `step`.

    Returns None if no completion names the version of its weights.
    """
    lags = [
        (span.end - span.start, step - int(span.version.rpartition(".")[2]))
        for trajectory in trajectories
        for completion in trajectory.completions
        for span in completion.versions
    ]
    tokens = sum(count for count, _ in lags)
    return sum(count * lag for count, lag in lags) / tokens if tokens else None
