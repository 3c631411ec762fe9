"""RolloutSampler: samples trajectories on rank 0, scores them with an environment, and scatters them to all ranks."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from math import isnan
from statistics import mean
from typing import Any, TypeVar

from postlude.data import Batch
from postlude.data.chat_tokenizer import ChatTokenizer
from postlude.data.turn_encoding import turn_ends
from postlude.engine import Engine
from postlude.engine.batch_sharding import scatter_batch
from postlude.generate.distributed import DistributedEngine
from postlude.generate.protocol import Completion
from postlude.pool.worker_pool import FAILURE_KINDS
from postlude.recipes.config.rollout import Rollout
from postlude.recipes.config.settings import SamplingSettings
from postlude.recipes.report.metrics import COMPONENTS, DRAFTS, LENGTH, LENGTHS, REWARD, REWARDS, WORKERS_LOST
from postlude.recipes.rollouts.engine import make_rollout_engine, offloading
from postlude.recipes.rollouts.prompts import encode_prompt, prompt_source
from postlude.recipes.run.completion_tables import CompletionRow
from postlude.recipes.run.directory import RunDirectory, Sample
from postlude.recipes.run.schedule import StepTimer
from postlude.recipes.run.signals import StopSignals
from postlude.recipes.sequence_limit import SequenceLimit
from postlude.recipes.trainer import StepMetrics, Trainer
from postlude.rollout.conversations import (
    REWARD_FAILED,
    Conversations,
    PromptSource,
    Trajectory,
    TrajectoryGroup,
    combine_seeds,
)
from postlude.rollout.environments import Environment
from postlude.rollout.reward_call import NOT_TRAINING, TrainerState
from postlude.rollout.tasks import Task

HEALTH_CHECK_SECONDS = 0.5  # with `background`, at most so long between checks of the engine's health and of signals
LOGGED_SAMPLES = 8  # trajectories per step that are written to samples.jsonl
TRAINING_SEEDS, HELD_OUT_SEEDS = 0, 1  # seed streams: training and evaluation of a task use different seeds
Result = TypeVar("Result")


@dataclass(frozen=True)
class RolloutBatch:
    """The minibatches and metrics of the rollouts of one step."""

    metrics: StepMetrics
    minibatches: list[Batch]
    """After `RolloutSampler.sample_and_scatter` each holds the sequences of this rank."""


class RolloutSampler:
    """Samples and scores trajectories. Only rank 0 sends requests; `sample_and_scatter` gives every rank its sequences.

    `offloaded_engine` is the training engine if it is moved to host memory while rollouts are sampled
    (`rollout.share_gpu`), else None. `trainer_state` says how far the run is, for reward functions.
    """

    def __init__(
        self,
        rollout_engine: DistributedEngine,
        environment: Environment | Mapping[str, Environment],
        tokenizer: ChatTokenizer,
        settings: SamplingSettings,
        *,
        limit: SequenceLimit,
        seed: int,
        timer: StepTimer,
        background: bool = False,
        signals: StopSignals | None = None,
        offloaded_engine: Engine | None = None,
        trainer_state: Callable[[], TrainerState] = TrainerState,
    ) -> None:
        self.rollout_engine, self.settings = rollout_engine, settings
        self.environments = environment if isinstance(environment, Mapping) else {"": environment}
        # The generator ends turns by itself; servers are told, since their model's files may not say what ends one.
        self.stop_tokens = tuple(dict.fromkeys([*settings.stop_ids(tokenizer), *turn_ends(tokenizer)]))
        self.limit, self.seed, self.timer = limit, seed, timer
        self.background, self.signals, self.offloaded_engine = background, signals, offloaded_engine
        self._read_trainer_state, self._trainer_state = trainer_state, NOT_TRAINING
        self._reported_lost_workers = 0
        self.tokenizer = tokenizer
        self.sources = {
            name: prompt_source(part, tokenizer, settings, limit) for name, part in self.environments.items()
        }
        # In the background sampling overlaps training: `wait` then times only the waiting.
        self.conversations = Conversations(
            rollout_engine,
            budget=limit.tokens(),
            background=background and rollout_engine.controller.is_rank0,
            timer=(lambda _: nullcontext()) if background else timer,
        )

    def close(self) -> None:
        """Ends the conversations in progress."""
        self.conversations.close()

    def _check_health_and_signals(self) -> None:
        self.rollout_engine.check_health()
        if self.signals is not None:
            self.signals.check()

    def sync_and_run_on_rank0(self, work: Callable[[], Result]) -> Result:
        """Syncs weights to the rollout engine, calls `work` on rank 0 and returns its result on every rank."""
        with self.timer("weight_sync"):
            self.rollout_engine.sync_weights()
        self._trainer_state = self._read_trainer_state()
        with offloading(self.offloaded_engine, self.timer):
            return self.rollout_engine.controller.on_rank0(work)

    def sample_and_scatter(self, sample: Callable[[], RolloutBatch], engine: Engine) -> RolloutBatch:
        """Calls `sample` on rank 0. Every rank of `engine` gets the metrics and its own sequences of each minibatch."""
        sampled: list[Batch] = []  # on rank 0

        def sample_on_rank0() -> tuple[StepMetrics, int]:
            batch = sample()
            sampled.extend(batch.minibatches)
            return batch.metrics, len(sampled)

        metrics, count = self.sync_and_run_on_rank0(sample_on_rank0)
        controller, share = self.rollout_engine.controller, engine.share_prefixes
        batches: Sequence[Batch | None] = sampled or [None] * count
        return RolloutBatch(
            metrics,
            [scatter_batch(batch, engine.mesh, controller, self.limit.budget, share) for batch in batches],
        )

    def sample(
        self, tasks: Sequence[Task], samples: int, *, step: int, first_group: int = 0, seed_stream: int = TRAINING_SEEDS
    ) -> list[Trajectory]:
        """Returns `samples` trajectories of each task, group by group. Groups are numbered from `first_group`."""
        return self.sample_groups(
            [
                self.make_group(task, first_group + index, samples, step=step, seed_stream=seed_stream)
                for index, task in enumerate(tasks)
            ]
        )

    def make_group(
        self,
        task: Task,
        number: int,
        samples: int,
        *,
        step: int,
        seed_stream: int = TRAINING_SEEDS,
        sampling: SamplingSettings | None = None,
        source: PromptSource | None = None,
    ) -> TrajectoryGroup:
        """Returns a group that is not started yet. Its seed derives from `step`, `seed_stream` and `number`.

        `sampling` and `source` are by default those of training; of several environments, the task's.
        """
        source, sampling = source or self.sources[task.environment], sampling or self.settings
        prompt = encode_prompt(source.encoder, task, self.limit, sampling)
        params = replace(
            sampling.params, stop_tokens=self.stop_tokens, seed=combine_seeds(self.seed, step, seed_stream, number)
        )
        return TrajectoryGroup.of(task, number, prompt, params, samples, source, self._trainer_state)

    def start(self, group: TrajectoryGroup) -> None:
        self.conversations.start(group)

    def wait(self, done: Callable[[], bool]) -> None:
        """Waits until `done()` is true, while started groups are sampled."""
        with self.timer("rollout") if self.background else nullcontext():
            while not done():
                self._check_health_and_signals()
                self.conversations.poll(HEALTH_CHECK_SECONDS)

    def sample_groups(self, groups: Sequence[TrajectoryGroup]) -> list[Trajectory]:
        """Starts groups, waits for them and returns their trajectories, group by group."""
        for group in groups:
            self.start(group)
        self.wait(lambda: all(group.done for group in groups))
        return [trajectory for group in groups for trajectory in group.trajectories]

    def take_metrics(self) -> dict[str, float]:
        """Returns metrics of the rollout engine and the reward workers since the last call."""
        metrics = self.rollout_engine.take_metrics()
        counts = [environment.lost_workers for environment in self.environments.values()]
        if known := [count for count in counts if count is not None]:
            metrics[WORKERS_LOST] = float(sum(known) - self._reported_lost_workers)
            self._reported_lost_workers = sum(known)
        return metrics


def open_rollout_sampler(
    trainer: Trainer,
    environment: Environment | Mapping[str, Environment],
    rollout: Rollout,
    sampling: SamplingSettings,
    *,
    epochs: Callable[[], float],
    record_routing: bool = False,
    background: bool = False,
) -> RolloutSampler:
    """Opens a rollout engine that gets the trainer's weights, and returns its sampler. The trainer closes both.

    `epochs` returns how many epochs of the tasks were started.
    """
    config, offloaded_engine = trainer.config, trainer.engine if rollout.share_gpu else None
    with offloading(offloaded_engine, trainer.timer):  # a server measures the free memory when it starts
        rollout_engine = trainer.close_at_end(
            make_rollout_engine(
                rollout,
                trainer.engine,
                trainer.tokenizer,
                config.run,
                sampling,
                limit=trainer.limit,
                record_routing=record_routing,
                launcher=trainer.runtime.launcher,
                background=background,
            )
        )
    return trainer.close_at_end(
        RolloutSampler(
            rollout_engine,
            environment,
            trainer.tokenizer,
            sampling,
            limit=trainer.limit,
            seed=config.seed,
            timer=trainer.timer,
            signals=trainer.signals,
            background=background,
            offloaded_engine=offloaded_engine,
            trainer_state=lambda: TrainerState(trainer.step, epochs(), trainer.total_steps),
        )
    )


def trajectory_metrics(trajectories: Sequence[Trajectory]) -> StepMetrics:
    """Returns rewards, their components, lengths and the acceptance rate of speculative tokens.

    Rewards and components leave out `excluded` trajectories. Failed reward calls are reported as a fraction of all.
    """
    scored = [trajectory for trajectory in trajectories if not trajectory.excluded]
    rewards = [trajectory.reward for trajectory in scored]
    lengths = [trajectory.length for trajectory in trajectories]
    metrics: StepMetrics = {}
    if rewards:
        average = mean(rewards)
        metrics = {REWARD: average, "reward_std": mean((reward - average) ** 2 for reward in rewards) ** 0.5}
    metrics |= {
        LENGTH: mean(lengths),
        "truncated": mean(trajectory.truncated for trajectory in trajectories),
        "turns_mean": mean(len(trajectory.completions) for trajectory in trajectories),
        REWARDS: rewards,
        LENGTHS: lengths,
    }
    completions = [completion for trajectory in trajectories for completion in trajectory.completions]
    if drafted := sum(completion.drafted for completion in completions):
        metrics[DRAFTS] = sum(completion.accepted for completion in completions) / drafted
    kinds = (REWARD_FAILED, *FAILURE_KINDS)
    components = [trajectory.components for trajectory in trajectories]
    failures = [{kind: values[kind] for kind in kinds if kind in values} for values in components]
    for name in dict.fromkeys(trajectory.task.environment for trajectory in scored):
        part = [trajectory for trajectory in scored if trajectory.task.environment == name]
        if name:
            metrics[f"{COMPONENTS}{name}"] = mean(trajectory.reward for trajectory in part)
        metrics |= _means(
            f"{COMPONENTS}{name}/" if name else COMPONENTS, [trajectory.components for trajectory in part]
        )
    return metrics | _means(COMPONENTS, failures)


def log_trajectories(
    run: RunDirectory, step: int, trajectories: Sequence[Trajectory], tokenizer: Any, *, save_all: bool
) -> None:
    """Writes a few trajectories of a step for the report, and with `save_all` all of them as a table."""
    run.log_samples(step, _sample_rows(trajectories, tokenizer))
    if save_all:
        run.log_completions(step, [_completion_row(step, trajectory) for trajectory in trajectories])


def _completion_row(step: int, trajectory: Trajectory) -> CompletionRow:
    prompt, completions = trajectory.task.prompt, trajectory.completions
    return CompletionRow(
        step=step,
        group=trajectory.group,
        environment=trajectory.task.environment,
        prompt=prompt if isinstance(prompt, str) else json.dumps(prompt, ensure_ascii=False),
        completion=_joined_text(completions),
        reward=None if trajectory.excluded or isnan(trajectory.reward) else trajectory.reward,
        components={name: value for name, value in trajectory.components.items() if not isnan(value)},
        truncated=trajectory.truncated,
        tokens=[token for completion in completions for token in completion.tokens],
        logprobs=[logprob for completion in completions for logprob in completion.logprobs],
    )


def _joined_text(completions: Sequence[Completion]) -> str:
    return "\n…\n".join(completion.text or "" for completion in completions)


def _sample_rows(trajectories: Sequence[Trajectory], tokenizer: Any) -> list[Sample]:
    """Returns a few of the trajectories as rows of samples.jsonl, the completions of their turns joined by "…"."""
    rows = []
    for trajectory in trajectories[:: max(1, len(trajectories) // LOGGED_SAMPLES)][:LOGGED_SAMPLES]:
        prompt, completions = trajectory.task.prompt, trajectory.completions
        tokens = [token for completion in completions for token in completion.tokens]
        rows.append(
            Sample(
                prompt=prompt if isinstance(prompt, str) else str(prompt[-1]["content"]),
                completion=_joined_text(completions),
                reward=trajectory.reward,
                components={name: value for name, value in trajectory.components.items() if not isnan(value)},
                tokens=tokens,
                token_strings=[tokenizer.decode([token]) for token in tokens],
                logprobs=[logprob for completion in completions for logprob in completion.logprobs],
            )
        )
    return rows


def _means(prefix: str, components: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for values in components for name in values)
    numbers = {name: [values.get(name, 0.0) for values in components] for name in names}
    known = {name: [number for number in values if not isnan(number)] for name, values in numbers.items()}
    return {f"{prefix}{name}": mean(values) for name, values in known.items() if values}
