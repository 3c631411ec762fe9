"""RolloutQueue: groups of answers for the steps of a run, begun so many steps before the one that learns from them."""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from postlude.data.datasets import Sampler
from postlude.recipes.rollouts import RolloutSampler
from postlude.rollout.conversations import Trajectory, TrajectoryGroup
from postlude.rollout.tasks import Tasks

LOG = logging.getLogger("postlude")


@dataclass(frozen=True)
class PendingGroup:
    """A group that no step has learned from yet."""

    index: int
    """Of its task."""
    step: int
    """That its answers were begun in, with the weights of then."""
    group: TrajectoryGroup


class RolloutQueue:
    """Groups of `samples` answers to tasks in the sampler's order, `prompts` a step, up to `last`.

    While a step learns, those of the next `ahead` steps are under way. None is learned from more than `ahead` steps
    after it was begun: a step that would leave one behind waits for it, so none is ever dropped. With ahead=0 a step's
    answers are begun when it begins, and waited for.

    A checkpoint holds the tasks of groups that were begun and not learned from. They are begun again: no task is lost,
    none is learned from twice.
    """

    def __init__(
        self,
        rollouts: RolloutSampler,
        tasks: Tasks,
        sampler: Sampler,
        *,
        samples: int,
        prompts: int,
        ahead: int,
        last: int,
    ) -> None:
        self.rollouts, self.tasks, self.sampler = rollouts, tasks, sampler
        self.samples, self.prompts, self.ahead, self.last = samples, prompts, ahead, last
        self._begun: list[PendingGroup] = []
        self._again: deque[int] = deque()  # tasks that were under way when the run was left
        self._redrawn = 0  # answers of theirs, until that is told
        self._begun_in: Counter[int] = Counter()  # groups, by step
        self._taken_in: Counter[int] = Counter()
        self._stale: list[int] = []  # steps between the beginning of groups and their learning

    def take(self, count: int, step: int) -> list[Trajectory]:
        """The answers of `count` groups to learn from in `step`, whose groups are numbered as they are taken."""
        later = min(self.ahead, self.last - 1 - step) * self.prompts
        for _ in range(count + later - len(self._begun)):
            self._begin(step)
        self.rollouts.wait(lambda: self._ready(count, step) is not None)
        taken = self._ready(count, step) or []
        self._begun = [each for each in self._begun if each not in taken]
        self._stale += [step - each.step for each in taken]
        for each in taken:
            for answer in each.group.trajectories:
                answer.group = self._taken_in[step]
            self._taken_in[step] += 1
        return [answer for each in taken for answer in each.group.trajectories]

    def take_metrics(self) -> dict[str, float]:
        """How old the weights were that answers were begun with, in steps, and what was drawn again."""
        stale, self._stale = self._stale, []
        if not self.ahead or not stale:
            return {}
        redrawn, self._redrawn = self._redrawn, 0
        return {
            "staleness_mean": sum(stale) / len(stale),
            "staleness_max": float(max(stale)),
            "completions_resampled": float(redrawn),
        }

    def state(self) -> dict[str, Any]:
        """Where the sampler stands, and which of its tasks no step has learned from yet."""
        return {"sampler": self.sampler.state(), "begun": [*(each.index for each in self._begun), *self._again]}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from where `state` was taken."""
        self.sampler.restore(state["sampler"])
        self._again = deque(state.get("begun", ()))
        self._redrawn = len(self._again) * self.samples
        if self._redrawn and self.rollouts.engine.controller.is_rank0:
            LOG.warning(
                "%d answers to %d tasks were under way when the checkpoint was written; they are drawn again.",
                self._redrawn,
                len(self._again),
            )

    def _begin(self, step: int) -> None:
        index = self._again.popleft() if self._again else self.sampler.take(1)[0]
        group = self.rollouts.group(self.tasks[index], self._begun_in[step], self.samples, step=step)
        self._begun_in[step] += 1
        self._begun.append(PendingGroup(index, step, group))
        self.rollouts.conversations.begin(group)

    def _ready(self, count: int, step: int) -> list[PendingGroup] | None:
        """The `count` oldest groups that are over; None where there are fewer, or where others cannot wait.

        Steps to come take `prompts` groups each, so of those that are due by a step, no more may be left now than the
        steps until then can take.
        """
        taken = [each for each in self._begun if each.group.done][:count]
        for due in range(step, step + self.ahead + 1):
            left = sum(each.step + self.ahead <= due for each in self._begun)
            left -= sum(each.step + self.ahead <= due for each in taken)
            if left > (due - step) * self.prompts:
                return None
        return taken if len(taken) == count else None


def policy_lag(answers: Sequence[Trajectory], version: int) -> float | None:
    """Optimizer steps between the weights that tokens were sampled with and `version`, on average; None if not told."""
    ages = [
        (span.end - span.start, version - int(span.version.rpartition(".")[2]))
        for each in answers
        for completion in each.completions
        for span in completion.versions
    ]
    tokens = sum(count for count, _ in ages)
    return sum(count * steps for count, steps in ages) / tokens if tokens else None
