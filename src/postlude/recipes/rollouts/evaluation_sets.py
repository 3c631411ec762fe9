"""Evaluation on held-out tasks and on named sets: which tasks, how they are sampled, and their metrics."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from math import comb
from statistics import mean

from postlude.data.task_identity import TaskSet
from postlude.pool.worker_pool import PoolFactory
from postlude.recipes.config.settings import EvaluationSetSettings, PassSettings
from postlude.recipes.report.metrics import COMPONENTS, EVAL, LENGTH, PASS, REWARD
from postlude.recipes.rollouts.prompts import PromptEncoding, build_environment
from postlude.recipes.rollouts.sampler import HELD_OUT_SEEDS, RolloutSampler
from postlude.rollout.conversations import REWARD_FAILED, PromptSource, Trajectory, TrajectoryGroup
from postlude.rollout.environments import Environment
from postlude.rollout.tasks import SplitBy, Task, Tasks, hold_out, last_tasks, task_identity


@dataclass(frozen=True)
class EvaluationSet:
    """Tasks that are sampled and scored, and not trained on."""

    name: str
    """The prefix of its metrics; "" for the held-out tasks of training."""
    source: PromptSource | None
    """None takes that of each task's environment in training."""
    tasks: Sequence[Task]
    settings: PassSettings

    def groups(self, sampler: RolloutSampler, step: int) -> list[TrajectoryGroup]:
        """Returns the groups to sample. Their seeds depend on the name, not on the other sets."""
        sampling = self.settings.sampling(sampler.settings)
        encoding = replace(sampler.encoding, sampling=sampling)
        environments = {} if self.source else sampler.environments
        sources = {name: encoding.source(environment) for name, environment in environments.items()}
        seeds, samples = HELD_OUT_SEEDS + zlib.crc32(self.name.encode()), self.settings.samples_per_prompt
        return [
            sampler.make_group(
                task,
                index,
                samples,
                step=step,
                seed_stream=seeds,
                sampling=sampling,
                source=self.source or sources[task.environment],
            )
            for index, task in enumerate(self.tasks)
        ]

    def metrics(self, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        samples, solved = self.settings.samples_per_prompt, self.settings.solved
        parts = {self.name: trajectories}
        for name in sorted({trajectory.task.environment for trajectory in trajectories} - {""}):
            parts[name] = [trajectory for trajectory in trajectories if trajectory.task.environment == name]
        return {
            f"{EVAL}{part}/{name.removeprefix(EVAL)}" if part else name: value
            for part, part_trajectories in parts.items()
            for name, value in evaluation_metrics(part_trajectories, samples, solved).items()
        }


class EvaluatedTasks:
    """Tasks that are not trained on: those held out, and those of the sets.

    A task of a set may come from a dataset with other columns: `split_by` "row" compares the columns that both have.
    """

    def __init__(self, tasks: Tasks, count: int, split_by: SplitBy, sets: Mapping[str, Sequence[Task]]) -> None:
        self.tasks, self.split_by = tasks, split_by
        rows = hold_out(tasks, count, split_by) if count else None
        self.held_out: Sequence[int] = [] if rows is None else rows.indices
        self._rows: Container[int] = () if rows is None else rows
        of_sets = {task_identity(task, split_by) for set_tasks in sets.values() for task in set_tasks}
        self.identities = of_sets if rows is None else of_sets | rows.tasks.identities
        self._sets = [_TasksByColumns(set_tasks, split_by) for set_tasks in sets.values() if set_tasks]
        if all(index in self for index in range(len(tasks))):
            names = ", ".join(sets)
            raise ValueError(
                f"every one of the {len(tasks)} tasks is held out or has a prompt of evaluation.sets ({names}), and at "
                "least one must be left to train on. Give sets of other prompts."
            )

    def count_trained(self) -> int:
        """Returns how many tasks are trained on. Generated tasks may take long, and are taken as different."""
        if getattr(self.tasks, "source", ""):
            return len(self.tasks) - len(self.held_out)
        return sum(index not in self for index in range(len(self.tasks)))

    def __contains__(self, index: object) -> bool:
        if not isinstance(index, int):
            return False
        return index in self._rows or any(self.tasks[index] in tasks for tasks in self._sets)


def evaluated_tasks(
    environments: Mapping[str, Tasks], count: int, split_by: SplitBy, sets: Mapping[str, Sequence[Task]]
) -> dict[str, EvaluatedTasks]:
    """Returns the tasks of each environment that are not trained on: also those that another environment holds out."""
    if len(environments) == 1:
        return {name: EvaluatedTasks(tasks, count, split_by, sets) for name, tasks in environments.items()}
    held_out = {
        name: [tasks[index] for index in hold_out(tasks, count, split_by).indices] if count else []
        for name, tasks in environments.items()
    }
    return {
        name: EvaluatedTasks(
            tasks, count, split_by, {**sets, **{other: held_out[other] for other in environments if other != name}}
        )
        for name, tasks in environments.items()
    }


class _TasksByColumns:
    """Tasks of a set, compared with others by the columns that both have."""

    def __init__(self, tasks: Sequence[Task], split_by: SplitBy) -> None:
        self.tasks, self.split_by = tasks, split_by
        self.columns = frozenset(tasks[0].example).intersection(*(task.example for task in tasks))
        self._by_columns: dict[frozenset[str], TaskSet] = {}

    def __contains__(self, task: Task) -> bool:
        columns = self.columns.intersection(task.example) if self.split_by == "row" else frozenset()
        if columns not in self._by_columns:
            identities = (task_identity(other, self.split_by, columns) for other in self.tasks)
            self._by_columns[columns] = TaskSet(identities)
        return task_identity(task, self.split_by, columns) in self._by_columns[columns]


def open_sets(
    settings: Mapping[str, EvaluationSetSettings],
    encoding: PromptEncoding,
    *,
    seed: int,
    split_by: SplitBy,
    pool_factory: PoolFactory | None,
    close_at_end: Callable[[Environment], Environment],
) -> list[EvaluationSet]:
    """Returns the sets with their environments, which `close_at_end` closes. Tasks are generated from `seed` + 1."""
    sets = []
    for name, set_settings in settings.items():
        of_set = replace(encoding, sampling=set_settings.sampling(encoding.sampling))
        environment = close_at_end(build_environment(set_settings.environment, seed + 1, of_set, pool_factory))
        tasks = tasks_of_set(environment.tasks, set_settings, split_by)
        sets.append(EvaluationSet(name, of_set.source(environment), tasks, set_settings))
    return sets


def tasks_of_set(tasks: Tasks, settings: EvaluationSetSettings, split_by: SplitBy) -> list[Task]:
    """Returns the tasks of a set: the last different ones of its environment."""
    chosen = last_tasks(tasks, min(settings.tasks, len(tasks)), split_by)
    return [chosen[index] for index in range(len(chosen))]


def evaluate(sampler: RolloutSampler, sets: Sequence[EvaluationSet], *, step: int) -> dict[str, float]:
    """Samples all sets together, on rank 0. Returns their metrics."""
    groups_by_set = [evaluation_set.groups(sampler, step) for evaluation_set in sets]
    sampler.sample_groups([group for groups in groups_by_set for group in groups])
    metrics: dict[str, float] = {}
    for evaluation_set, groups in zip(sets, groups_by_set, strict=True):
        metrics |= evaluation_set.metrics([trajectory for group in groups for trajectory in group.trajectories])
    return metrics


def evaluation_metrics(trajectories: Sequence[Trajectory], samples: int, solved: float = 1.0) -> dict[str, float]:
    """Returns the mean reward, and pass@k for powers of two k. A reward of at least `solved` is a pass.

    A trajectory whose reward call failed is left out of the mean, and counts as not passed.
    """
    scored = [trajectory for trajectory in trajectories if not trajectory.excluded]
    passes = Counter(trajectory.group for trajectory in scored if trajectory.reward >= solved)
    failures = [samples - passes[group] for group in dict.fromkeys(trajectory.group for trajectory in trajectories)]
    metrics = {f"{EVAL}{REWARD}": mean(trajectory.reward for trajectory in scored)} if scored else {}
    metrics[f"{EVAL}{LENGTH}"] = mean([trajectory.length for trajectory in trajectories])
    if failed := sum(REWARD_FAILED in trajectory.components for trajectory in trajectories):
        metrics[f"{EVAL}{COMPONENTS}{REWARD_FAILED}"] = failed / len(trajectories)
    k = 1
    while k <= samples:
        metrics[f"{PASS}{k}"] = mean(1.0 - comb(count, k) / comb(samples, k) for count in failures)
        k *= 2
    return metrics
