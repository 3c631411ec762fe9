"""Reward: scores completions of one turn. A new kind of reward is a subclass, in a file of its own.

`FunctionReward` calls a function of the user, `ModelReward` a reward model, `JudgeReward` a model behind a server.
`WeightedSum` adds several of them up.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from postlude.data.chat_template import shorten
from postlude.rollout.rewards import Score

if TYPE_CHECKING:
    from postlude.rollout.episode import AssistantTurn, Episode
    from postlude.rollout.tasks import Task

WAIT_SECONDS = 0.02  # how long one of several rewards is waited for before the others are polled again
Scored: TypeAlias = "list[tuple[Episode, Score]]"


class Reward(ABC):
    """Scores the last completion of episodes. Many may wait at once."""

    name: str
    """What messages call it."""
    needs_group: bool = False
    """Whether it scores completions only once all of one prompt were submitted."""

    @abstractmethod
    def submit(self, episode: Episode) -> None:
        """Takes an episode whose last completion is to be scored."""

    @abstractmethod
    def poll(self, timeout: float | None = 0.0) -> Scored:
        """Returns the scores that are there, each once.

        Waits up to `timeout` seconds for the first one. Without limit (None) it may still return none, where scores
        depend on completions that were not submitted yet.
        """

    @abstractmethod
    def trial_call(self, task: Task, turn: AssistantTurn) -> None:
        """Scores one completion before a run starts. Raises ValueError if that fails."""

    @property
    def lost_workers(self) -> int | None:
        """Workers lost through no fault of a call, and retried. None where that cannot happen."""
        return None

    def close(self) -> None:  # noqa: B027 - most hold nothing
        """Releases what it holds."""


@dataclass(frozen=True)
class Weighted:
    """A reward and its weight in a sum."""

    reward: Reward
    weight: float = 1.0

    def __post_init__(self) -> None:
        if not math.isfinite(self.weight):
            raise ValueError(f"the weight of {self.reward.name} is {self.weight}, but a weight is a finite number.")


class WeightedSum(Reward):
    """The sum of weight · reward. Its components are the value of each reward by name, before the weight.

    The components of a reward that has some are named "name/component". If one of the rewards of a completion fails, so
    does the sum, unless its weight is 0: then only its own value is missing, and "name/failed" is 1. A reward that does
    not apply to a completion is left out; one must.
    """

    def __init__(self, rewards: Mapping[str, Weighted]) -> None:
        if not rewards:
            raise ValueError("a sum of rewards has at least one. Name one.")
        self.rewards, self.name = dict(rewards), ", ".join(rewards)
        self.needs_group = any(weighted.reward.needs_group for weighted in rewards.values())
        self._scores: dict[int, dict[str, Score]] = {}  # by id of the episode

    @property
    def lost_workers(self) -> int | None:
        return sum_of_known(weighted.reward.lost_workers for weighted in self.rewards.values())

    def submit(self, episode: Episode) -> None:
        self._scores[id(episode)] = {}
        for weighted in self.rewards.values():
            weighted.reward.submit(episode)

    def poll(self, timeout: float | None = 0.0) -> Scored:
        """Returns the sums of episodes that all rewards have scored."""
        deadline = time.monotonic() + (WAIT_SECONDS if timeout is None else timeout)
        while True:
            complete: Scored = []
            for name, weighted in self.rewards.items():
                for episode, score in weighted.reward.poll(0.0):
                    scores = self._scores[id(episode)]
                    scores[name] = score
                    if len(scores) == len(self.rewards):
                        del self._scores[id(episode)]
                        complete.append((episode, self._sum(scores)))
            remaining = deadline - time.monotonic()
            if complete or remaining <= 0:
                return complete
            time.sleep(min(WAIT_SECONDS, remaining))

    def trial_call(self, task: Task, turn: AssistantTurn) -> None:
        for weighted in self.rewards.values():
            weighted.reward.trial_call(task, turn)

    def close(self) -> None:
        """Closes every reward, also if closing one raises."""
        with ExitStack() as stack:
            for weighted in self.rewards.values():
                stack.callback(weighted.reward.close)

    def _sum(self, scores: Mapping[str, Score]) -> Score:
        weights = {name: self.rewards[name].weight for name in self.rewards if scores[name].applies}
        weighted = [name for name in self.rewards if self.rewards[name].weight]
        if weighted and not any(scores[name].applies for name in weighted):
            return scores[weighted[0]]
        failed = next((scores[name] for name in weights if weights[name] and scores[name].error is not None), None)
        if failed is not None:
            return failed
        components = dict.fromkeys(self.rewards, math.nan)
        for name in weights:
            components[name] = math.nan if scores[name].error is not None else scores[name].reward
            components |= {f"{name}/{component}": value for component, value in scores[name].components.items()}
            if scores[name].error is not None:
                components[f"{name}/failed"] = 1.0
        return Score(math.fsum(weights[name] * scores[name].reward for name in weights if weights[name]), components)


def sum_of_known(counts: Iterable[int | None]) -> int | None:
    """Returns the sum of the counts that are known; None if none is."""
    known = [count for count in counts if count is not None]
    return sum(known) if known else None


def trial_failure(error: object, task: Task, turn: AssistantTurn) -> ValueError:
    """Returns the error of a trial call that failed."""
    return ValueError(
        f"{str(error).rstrip('.')}. That was a trial on {task.name} with the completion {shorten(turn.text)}: a reward "
        "function that fails there would fail all through the run. Fix it."
    )


def name_rows(tasks: Sequence[Task]) -> str:
    """Returns the row of one completion, or the number of completions and the row of the first."""
    first = tasks[0].name or "a task without a name"
    return first if len(tasks) == 1 else f"{len(tasks)} completions, the first of {first}"
