"""RolloutSampler: samples trajectories on rank 0, scores them with an environment, and scatters them to all ranks."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from math import isnan
from statistics import mean
from typing import TypeVar

from postlude.data import Batch
from postlude.data.turn_encoding import turn_ends
from postlude.engine import Engine
from postlude.engine.batch_sharding import scatter_batch
from postlude.generate.distributed import DistributedEngine
from postlude.pool.worker_pool import FAILURE_KINDS
from postlude.recipes.config.rollout import Rollout
from postlude.recipes.config.settings import SamplingSettings
from postlude.recipes.report.metrics import (
    COMPONENTS,
    DRAFT_LENGTH,
    DRAFTS,
    LENGTH,
    LENGTHS,
    MASK_SIZE,
    REUSED,
    REWARD,
    REWARDS,
    WORKERS_LOST,
)
from postlude.recipes.rollouts.engine import make_rollout_engine, offloading
from postlude.recipes.rollouts.prompts import PromptEncoding, encode_prompt
from postlude.recipes.run.schedule import StepTimer
from postlude.recipes.run.signals import StopSignals
from postlude.recipes.trainer import StepMetrics, Trainer
from postlude.rollout.conversations import (
    DROPPED,
    REWARD_FAILED,
    Conversations,
    PromptSource,
    Trajectory,
    TrajectoryGroup,
)
from postlude.rollout.environments import Environment
from postlude.rollout.model_calls import combine_seeds
from postlude.rollout.reward_call import NOT_TRAINING, TrainerState
from postlude.rollout.tasks import Task

YOUNG_OBJECTS = 1000  # new objects before a collection of the youngest generation, which takes half a millisecond
FROZEN_AT_START = 5000  # most objects that a process has frozen by itself: Python 3.12 freezes some hundreds
YOUNG_COLLECTIONS, FULL_COLLECTIONS = 1, 100  # the other two thresholds of `gc.set_threshold`


@contextlib.contextmanager
def short_collections() -> Iterator[None]:
    """Keeps garbage collections short inside: existing objects are frozen, and new ones are collected often.

    A full collection visits all objects, 300,000 after torch and transformers are imported, while every thread waits.
    Does nothing in a process that has frozen its objects already.
    """
    if gc.get_freeze_count() > FROZEN_AT_START:
        yield
        return
    thresholds = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, YOUNG_COLLECTIONS, FULL_COLLECTIONS)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()


HEALTH_CHECK_SECONDS = 0.5  # with `background`, at most so long between checks of the engine's health and of signals
TRAINING_SEEDS, HELD_OUT_SEEDS = 0, 1  # seed streams: training and evaluation of a task use different seeds
Result = TypeVar("Result")


@dataclass(frozen=True)
class RolloutBatch:
    """The minibatches and metrics of the rollouts of one step."""

    metrics: StepMetrics
    minibatches: list[Batch]
    """After `RolloutSampler.sample_and_scatter` each holds the sequences of this rank."""
    prompts: int = 0
    """Prompts of this step and all earlier ones, replacements included."""
    rewards_before: Mapping[int, Sequence[float]] = field(default_factory=dict)
    """By group, the rewards of its trajectories that an earlier step trained on."""


class RolloutSampler:
    """Samples and scores trajectories. Only rank 0 sends requests; `sample_and_scatter` gives every rank its sequences.

    `offloaded_engine` is the training engine if it is moved to host memory while rollouts are sampled
    (`rollout.share_gpu`), else None. `trainer_state` says how far the run is, for reward functions. With
    `masks_sampling` completions that are trained on have sampling masks, where `encoding.sampling` filters tokens.
    """

    def __init__(
        self,
        rollout_engine: DistributedEngine,
        environment: Environment | Mapping[str, Environment],
        encoding: PromptEncoding,
        *,
        seed: int,
        timer: StepTimer,
        background: bool = False,
        signals: StopSignals | None = None,
        offloaded_engine: Engine | None = None,
        trainer_state: Callable[[], TrainerState] = TrainerState,
        masks_sampling: bool = False,
    ) -> None:
        settings, tokenizer, limit = encoding.sampling, encoding.tokenizer, encoding.limit
        self.rollout_engine, self.encoding, self.settings = rollout_engine, encoding, settings
        self.environments = environment if isinstance(environment, Mapping) else {"": environment}
        # The generator ends turns by itself; servers are told, since their model's files may not say what ends one.
        self.stop_tokens = tuple(dict.fromkeys([*settings.stop_ids(tokenizer), *turn_ends(tokenizer)]))
        self.limit, self.seed, self.timer, self.masks_sampling = limit, seed, timer, masks_sampling
        self.background, self.signals, self.offloaded_engine = background, signals, offloaded_engine
        self._read_trainer_state, self._trainer_state = trainer_state, NOT_TRAINING
        self._reported_lost_workers = 0
        self._until_close = ExitStack()
        if any(part.starts_episodes for part in self.environments.values()):
            self._until_close.enter_context(short_collections())
        self.sources = {name: encoding.source(part) for name, part in self.environments.items()}
        # In the background sampling overlaps training: `wait` then times only the waiting.
        self.conversations = Conversations(
            rollout_engine,
            budget=limit.tokens(),
            background=background and rollout_engine.controller.is_rank0,
            timer=(lambda _: nullcontext()) if background else timer,
            recorder=timer.recorder,
        )

    def close(self) -> None:
        """Ends the conversations in progress."""
        with self._until_close:
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
        if self.offloaded_engine is None:
            return self.rollout_engine.controller.on_rank0(work)
        with offloading(self.offloaded_engine, self.timer), self._awake():
            return self.rollout_engine.controller.on_rank0(work)

    @contextmanager
    def _awake(self) -> Iterator[None]:
        """Lets the rollout engine use the memory that the trainer has freed, inside the `with` block."""
        try:
            with self.timer("wake"):
                self.rollout_engine.wake()
            yield
        finally:
            with self.timer("sleep"):
                self.rollout_engine.sleep()

    def sample_and_scatter(self, sample: Callable[[], RolloutBatch], engine: Engine) -> RolloutBatch:
        """Calls `sample` on rank 0. Every rank of `engine` gets the metrics and its own sequences of each minibatch."""
        sampled: list[Batch] = []  # on rank 0

        def sample_on_rank0() -> tuple[StepMetrics, int, int, Mapping[int, Sequence[float]]]:
            batch = sample()
            sampled.extend(batch.minibatches)
            return batch.metrics, len(sampled), batch.prompts, batch.rewards_before

        metrics, count, prompts, rewards_before = self.sync_and_run_on_rank0(sample_on_rank0)
        controller, share = self.rollout_engine.controller, engine.share_prefixes
        batches: Sequence[Batch | None] = sampled or [None] * count
        return RolloutBatch(
            metrics,
            [scatter_batch(batch, engine.mesh, controller, self.limit.budget, share) for batch in batches],
            prompts,
            rewards_before,
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

        By default `sampling` is that of training, and `source` that of the task's environment.
        """
        source, sampling = source or self.sources[task.environment], sampling or self.settings
        starts = source.environment.starts_episodes
        prompt = () if starts else encode_prompt(source.encoder, task, self.limit, sampling)
        params = replace(
            sampling.params,
            stop_tokens=self.stop_tokens,
            seed=combine_seeds(self.seed, step, seed_stream, number),
            return_sampling_mask=self.masks_sampling and seed_stream == TRAINING_SEEDS,
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
    masks_sampling: bool = False,
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
            PromptEncoding(trainer.tokenizer, sampling, trainer.limit),
            seed=config.seed,
            timer=trainer.timer,
            signals=trainer.signals,
            background=background,
            offloaded_engine=offloaded_engine,
            trainer_state=lambda: TrainerState(trainer.step, epochs(), trainer.total_steps),
            masks_sampling=masks_sampling,
        )
    )


def trajectory_metrics(trajectories: Sequence[Trajectory]) -> StepMetrics:
    """Returns rewards, their components, lengths and the acceptance rate of speculative tokens.

    Rewards and components leave out `excluded` trajectories. Failed and dropped ones are reported as a fraction of all.
    What a dropped one sampled is not known, so lengths and turns leave it out.
    """
    components = [trajectory.components for trajectory in trajectories]
    trajectories = [trajectory for trajectory in trajectories if trajectory.score is not DROPPED]
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
    if any(len(trajectory.transcripts) != 1 for trajectory in trajectories):
        metrics["branches_mean"] = mean(len(trajectory.transcripts) for trajectory in trajectories)
    completions = [completion for trajectory in trajectories for completion in trajectory.completions]
    if reused := sum(completion.reused_prompt_tokens for completion in completions):
        metrics[REUSED] = reused
    if drafted := sum(completion.drafted for completion in completions):
        metrics[DRAFTS] = sum(completion.accepted for completion in completions) / drafted
        metrics[DRAFT_LENGTH] = 1.0 + metrics[DRAFTS]  # the depth drafts one token
    transcripts = [transcript for trajectory in trajectories for transcript in trajectory.transcripts]
    if sizes := [len(mask) for transcript in transcripts for mask in transcript.sampling_mask if mask]:
        metrics[MASK_SIZE] = mean(sizes)
    kinds = (REWARD_FAILED, *FAILURE_KINDS, *DROPPED.components)
    failures = [{kind: values[kind] for kind in kinds if kind in values} for values in components]
    for name in dict.fromkeys(trajectory.task.environment for trajectory in scored):
        part = [trajectory for trajectory in scored if trajectory.task.environment == name]
        if name:
            metrics[f"{COMPONENTS}{name}"] = mean(trajectory.reward for trajectory in part)
        metrics |= _means(
            f"{COMPONENTS}{name}/" if name else COMPONENTS, [trajectory.components for trajectory in part]
        )
    return metrics | _means(COMPONENTS, failures)


def _means(prefix: str, components: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for values in components for name in values)
    numbers = {name: [values.get(name, 0.0) for values in components] for name in names}
    known = {name: [number for number in values if not isnan(number)] for name, values in numbers.items()}
    return {f"{prefix}{name}": mean(values) for name, values in known.items() if values}
