"""RolloutQueue: groups of trajectories, started up to `max_staleness` steps before the step that trains on them."""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from postlude.data.datasets import Sampler
from postlude.recipes.rollouts.sampler import RolloutSampler
from postlude.rollout.conversations import Trajectory, TrajectoryGroup
from postlude.rollout.tasks import Tasks

LOG = logging.getLogger("postlude")


@dataclass(frozen=True)
class PendingGroup:
    """A group that was started in `step` and that no step has trained on yet. `index` is that of its task."""

    index: int
    step: int
    group: TrajectoryGroup


class RolloutQueue:
    """Takes tasks in the order of `sampler`, and samples a group of `samples` trajectories of each.

    Every step trains on `prompts` groups, until `total_steps`.

    While a step trains, the groups of the next `max_staleness` steps are being sampled. A step never trains on a group
    that was started more than `max_staleness` steps before: it waits for a group that would become too old, so no
    group is dropped. With 0, a step starts its own groups and waits for them.

    A checkpoint holds the tasks of the pending groups. A resumed run starts them again, so every task is trained on
    exactly once.
    """

    def __init__(
        self,
        rollouts: RolloutSampler,
        tasks: Tasks,
        sampler: Sampler,
        *,
        samples: int,
        prompts: int,
        max_staleness: int,
        total_steps: int,
    ) -> None:
        self.rollouts, self.tasks, self.sampler = rollouts, tasks, sampler
        self.samples, self.prompts = samples, prompts
        self.max_staleness, self.total_steps = max_staleness, total_steps
        self._pending: list[PendingGroup] = []
        self._restart: deque[int] = deque()  # tasks that were pending in the checkpoint
        self._resampled = 0  # trajectories of those tasks, until they are reported
        self._started: Counter[int] = Counter()  # groups by step
        self._taken: Counter[int] = Counter()
        self._staleness: list[int] = []  # steps between start and use, of the groups taken since the last report

    def take(self, count: int, step: int) -> list[Trajectory]:
        """Waits for `count` groups for `step`, numbers them in this order, and returns their trajectories."""
        prefetched = min(self.max_staleness, self.total_steps - 1 - step) * self.prompts
        for _ in range(count + prefetched - len(self._pending)):
            self._start(step)
        self.rollouts.wait(lambda: self._ready(count, step) is not None)
        taken = self._ready(count, step) or []
        self._pending = [pending for pending in self._pending if pending not in taken]
        self._staleness += [step - pending.step for pending in taken]
        for pending in taken:
            for trajectory in pending.group.trajectories:
                trajectory.group = self._taken[step]
            self._taken[step] += 1
        return [trajectory for pending in taken for trajectory in pending.group.trajectories]

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
            "sampler": self.sampler.state(),
            "begun": [*(pending.index for pending in self._pending), *self._restart],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continues from a `state`."""
        self.sampler.restore(state["sampler"])
        self._restart = deque(state.get("begun", ()))
        self._resampled = len(self._restart) * self.samples
        if self._resampled and self.rollouts.engine.controller.is_rank0:
            LOG.warning(
                "%d completions of %d tasks were unfinished when the checkpoint was written; they are sampled again.",
                self._resampled,
                len(self._restart),
            )

    def _start(self, step: int) -> None:
        index = self._restart.popleft() if self._restart else self.sampler.take(1)[0]
        group = self.rollouts.make_group(self.tasks[index], self._started[step], self.samples, step=step)
        self._started[step] += 1
        self._pending.append(PendingGroup(index, step, group))
        self.rollouts.start(group)

    def _ready(self, count: int, step: int) -> list[PendingGroup] | None:
        """Returns the `count` oldest finished groups. None if there are fewer, or if another group would get too old.

        A group that was started in step s is due by step s + max_staleness. Later steps take `prompts` groups each,
        so of the remaining groups, no more may be due by a step than the steps until then take.
        """
        taken = [pending for pending in self._pending if pending.group.done][:count]
        for due in range(step, step + self.max_staleness + 1):
            remaining = sum(pending.step + self.max_staleness <= due for pending in self._pending)
            remaining -= sum(pending.step + self.max_staleness <= due for pending in taken)
            if remaining > (due - step) * self.prompts:
                return None
        return taken if len(taken) == count else None


def policy_lag(trajectories: Sequence[Trajectory], version: int) -> float | None:
    """Returns the mean number of optimizer steps between the weights that sampled a token and `version`, or None."""
    lags = [
        (span.end - span.start, version - int(span.version.rpartition(".")[2]))
        for trajectory in trajectories
        for completion in trajectory.completions
        for span in completion.versions
    ]
    tokens = sum(count for count, _ in lags)
    return sum(count * steps for count, steps in lags) / tokens if tokens else None
