"""RolloutQueue: groups of trajectories, started up to `max_staleness` steps before the step that trains on them."""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from postlude.data.datasets import RowSource
from postlude.recipes.rollouts.sampler import RolloutSampler
from postlude.rollout.conversations import Trajectory, TrajectoryGroup
from postlude.rollout.tasks import Tasks

LOG = logging.getLogger("postlude")


@dataclass(frozen=True)
class PendingGroup:
    """A group that was started in `step` and that no step has trained on yet."""

    task_index: int
    step: int
    group: TrajectoryGroup


class RolloutQueue:
    """Takes tasks from `task_sampler`, and samples a group of `samples_per_prompt` trajectories of each.

    A step trains on as many groups as `prompts_of_step` returns for its number: 0 after the last.

    While a step trains, the groups of the next `max_staleness` steps are being sampled. A step never trains on a group
    that was started more than `max_staleness` steps before: it waits for a group that would become too old, so no
    group is dropped. With 0, a step starts its own groups and waits for them.

    A checkpoint holds the tasks of the pending groups. A resumed run starts them again, so every task is trained on
    exactly once.
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
        self._pending: list[PendingGroup] = []
        self._tasks_to_restart: deque[int] = deque()  # tasks that were pending in the checkpoint
        self._resampled = 0  # trajectories of those tasks, until `take_metrics` reports them
        self._started: Counter[int] = Counter()  # groups by step
        self._taken: Counter[int] = Counter()
        self._staleness: list[int] = []  # of the groups taken since the last `take_metrics`, in steps

    def take(self, count: int, step: int) -> list[Trajectory]:
        """Waits for `count` groups for `step`, numbers them in this order, and returns their trajectories."""
        prefetched = sum(map(self.prompts_of_step, range(step + 1, step + 1 + self.max_staleness)))
        for _ in range(count + prefetched - len(self._pending)):
            self._start(step)
        self.rollout_sampler.wait(lambda: self._ready(count, step) is not None)
        ready = self._ready(count, step) or []
        self._pending = [pending for pending in self._pending if pending not in ready]
        self._staleness += [step - pending.step for pending in ready]
        for pending in ready:
            for trajectory in pending.group.trajectories:
                trajectory.group = self._taken[step]
            self._taken[step] += 1
        return [trajectory for pending in ready for trajectory in pending.group.trajectories]

    def take_metrics(self) -> dict[str, float]:
        """Returns the staleness of groups taken since the last call, and the number of trajectories sampled again."""
        staleness, self._staleness = self._staleness, []
        if not self.max_staleness or not staleness:
            return {}
        resampled, self._resampled = self._resampled, 0
        return {
            "staleness_mean": sum(staleness) / len(staleness),
            "staleness_max": float(max(staleness)),
            "completions_resampled": float(resampled),
        }

    def state(self) -> dict[str, Any]:
        """Returns the state of the task sampler, and the tasks that no step has trained on, for a checkpoint."""
        return {
            "sampler": self.task_sampler.state(),
            "pending_tasks": [*(pending.task_index for pending in self._pending), *self._tasks_to_restart],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continues from a `state`."""
        self.task_sampler.restore(state["sampler"])
        self._tasks_to_restart = deque(state["pending_tasks"])
        self._resampled = len(self._tasks_to_restart) * self.samples_per_prompt
        if self._resampled and self.rollout_sampler.rollout_engine.controller.is_rank0:
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
        self._started[step] += 1
        self._pending.append(PendingGroup(task_index, step, group))
        self.rollout_sampler.start(group)

    def _ready(self, count: int, step: int) -> list[PendingGroup] | None:
        """Returns the `count` oldest finished groups. None if there are fewer, or if another group would get too old.

        A group that was started in step s is due by step s + max_staleness. Of the groups that
        remain, no more may be due by a later step than the steps until then take.
        """
        finished = [pending for pending in self._pending if pending.group.done][:count]
        for due_step in range(step, step + self.max_staleness + 1):
            remaining = sum(pending.step + self.max_staleness <= due_step for pending in self._pending)
            remaining -= sum(pending.step + self.max_staleness <= due_step for pending in finished)
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
