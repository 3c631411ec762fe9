"""GRPO: samples a group of completions for each prompt, scores them, and trains with group-relative advantages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from postlude.data import Batch
from postlude.data.chat import EncodedSequence
from postlude.data.datasets import RowOrder, RowSource
from postlude.data.microbatch import ROUTING
from postlude.engine import Engine
from postlude.engine.reference import Reference
from postlude.objectives import SFT, Objective
from postlude.objectives.advantages import grpo, reinforce_plus_plus
from postlude.objectives.correction import mismatch_of_ratio
from postlude.recipes.chat_template import prepare_chat
from postlude.recipes.checks.environment import environment_checks, evaluation_set_checks, training_overlap_checks
from postlude.recipes.checks.objective_trial import TRIAL_SEQUENCES
from postlude.recipes.checks.preflight import Check, PreflightInputs, training_checks
from postlude.recipes.checks.second_model import second_model_check
from postlude.recipes.checks.servers import server_checks
from postlude.recipes.config.environments import EnvironmentMixture, environments_of
from postlude.recipes.config.policy_configs import GRPOConfig, PolicyConfig
from postlude.recipes.config.settings import build_objective
from postlude.recipes.references import open_frozen_model, prune_references, reference_name
from postlude.recipes.report.metrics import LOSS, REWARD_KL, SHARED, SKIPPED
from postlude.recipes.rollout_columns import (
    GROUP,
    MASK,
    REWARD,
    RolloutRows,
    overlong_fraction,
    penalty_mean,
    policy_columns,
    reward_penalties,
    routing_column,
)
from postlude.recipes.rollouts.evaluation_sets import EvaluationSet, evaluate, evaluated_tasks, open_sets
from postlude.recipes.rollouts.prompts import build_environment, warm_start_example
from postlude.recipes.rollouts.queue import RolloutQueue, policy_lag
from postlude.recipes.rollouts.sampler import RolloutBatch, log_trajectories, open_rollout_sampler, trajectory_metrics
from postlude.recipes.row_sources import SEED_STRIDE, MixedRows, OrderedRows, StepSizes
from postlude.recipes.run.directory import checkpoint_step
from postlude.recipes.run.runtime import LOCAL_RUNTIME, Runtime
from postlude.recipes.run.split import Split
from postlude.recipes.trainer import StepMetrics, Trainer
from postlude.recipes.training_run import run_recipe
from postlude.rollout.conversations import Trajectory
from postlude.rollout.environments import Environment, is_chat
from postlude.rollout.tasks import JoinedTasks, Task, Tasks
from postlude.world.agreement import on_rank0

REDUCTIONS: Mapping[str, Callable[[list[float]], float]] = {"mean": mean, "sum": sum, "max": max, "min": min}


class GRPOTrainer(Trainer):
    """A GRPO run: SFT warm-start steps if configured, then steps that sample rollouts and train on them."""

    name = "grpo"
    config: PolicyConfig
    min_group_size = 2
    """Groups with fewer trajectories are not trained on."""

    def __init__(self, config: PolicyConfig, device: str, runtime: Runtime = LOCAL_RUNTIME) -> None:
        self.warm_start_steps = config.warm_start.steps
        super().__init__(config, device, config.warm_start.optimizer if self.warm_start_steps else None, runtime)
        self.evaluate_every, self.evaluate_at_start = config.evaluation.every, config.evaluation.at_start
        self.reference: Reference | Engine | None = None
        self.objective: Objective = build_objective(config.objective)
        with self.close_on_error():
            if config.reference_model is not None:
                self.reference = open_frozen_model(config.reference_model, self.engine)
            self._open_tasks()
            self._plan_steps()
            self._open_queue()

    def _open_tasks(self) -> None:
        """Opens the environments and the evaluation sets, and plans which tasks are trained on, and when."""
        config, factory = self.config, self.runtime.pool_factory
        settings, self.environments = environments_of(config.environment), dict[str, Environment]()
        seeds = {name: config.seed + SEED_STRIDE * number for number, name in enumerate(settings)}
        for name, part in settings.items():
            self.environments[name] = self.close_at_end(
                build_environment(part, seeds[name], self.tokenizer, config.sampling, self.limit, factory)
            )
        if any(is_chat(environment.tasks[0].prompt) for environment in self.environments.values()):
            prepare_chat(self.tokenizer, str(config.model))
        evaluation = config.evaluation
        self.evaluation_sets = open_sets(
            evaluation.sets,
            self.tokenizer,
            config.sampling,
            seed=config.seed,
            limit=self.limit,
            split_by=evaluation.split_by,
            pool_factory=factory,
            close_at_end=self.close_at_end,
        )
        tasks_by_set = {evaluation_set.name: evaluation_set.tasks for evaluation_set in self.evaluation_sets}
        tasks_by_name = {name: environment.tasks for name, environment in self.environments.items()}
        self.evaluated = evaluated_tasks(tasks_by_name, evaluation.held_out, evaluation.split_by, tasks_by_set)
        orders, first = dict[str, RowSource[int]](), 0
        for name, evaluated in self.evaluated.items():
            order = RowOrder(len(evaluated.tasks), seeds[name], skip=evaluated)
            indices = range(first, first + len(evaluated.tasks))
            orders[name], first = OrderedRows(indices, order, evaluated.count_trained), indices.stop
        self.tasks: Tasks
        self.task_sampler: RowSource[int]
        if isinstance(config.environment, EnvironmentMixture):
            self.tasks = JoinedTasks(tasks_by_name)
            self.task_sampler = MixedRows(orders, [part.weight for part in config.environment.environments])
        else:
            (self.tasks,), (self.task_sampler,) = tasks_by_name.values(), orders.values()

    def _plan_steps(self) -> None:
        """Sets the number of steps, and the optimizers, whose schedules depend on it."""
        config, size = self.config, self.config.prompts_per_step
        if config.epochs is None:
            self.step_sizes = StepSizes(size, size * config.known_steps)
        else:
            tasks = self.task_sampler.size
            assert tasks is not None, "environments know their number of tasks"
            self.step_sizes = StepSizes.of_epochs(size, config.epochs, tasks)
            config.check_steps(self.step_sizes.steps)
        self.total_steps = self.warm_start_steps + self.step_sizes.steps
        self.warm_start_optimizer, self.optimizer = config.fit_optimizers(self.step_sizes.steps)
        first = self.warm_start_optimizer if self.warm_start_steps else self.optimizer
        if first != self.engine.options.optimizer:  # the length of its schedule is known only now
            self.engine.set_optimizer(first)

    def _open_queue(self) -> None:
        config, staleness = self.config, self.config.asynchrony.max_staleness
        self.rollout_sampler = open_rollout_sampler(
            self,
            self.environments,
            config.rollout,
            config.sampling,
            epochs=lambda: self.task_sampler.progress,
            record_routing=config.replay_routing,
            background=staleness > 0,
        )
        self.queue = RolloutQueue(
            self.rollout_sampler,
            self.tasks,
            self.task_sampler,
            samples_per_prompt=config.samples_per_prompt,
            prompts_of_step=self.prompts_of_step,
            max_staleness=staleness,
        )

    def prompts_of_step(self, step: int) -> int:
        """Returns the number of prompts of a step. The last one of the epochs has those that are left."""
        return self.step_sizes.of_step(step - self.warm_start_steps)

    @property
    def phase(self) -> str:
        """Returns "sft" for warm-start steps, else the name of the recipe."""
        return "sft" if self.step < self.warm_start_steps else self.name

    def split(self) -> Split:
        """Returns which tasks are held out, of which there are."""
        identities = set[bytes]().union(*(evaluated.identities for evaluated in self.evaluated.values()))
        return Split.of_tasks(self.tasks, identities, self.config.evaluation.split_by)

    def state(self) -> dict[str, Any]:
        """Returns the state of the task sampler, and the tasks whose groups are started."""
        return self.queue.state()

    def restore(self, checkpoint: Path) -> Mapping[str, Any]:
        """Loads a checkpoint, with the optimizer of its phase, and the reference model if GRPO has started."""
        # A checkpoint of the last warm-start step still has the warm start's optimizer: see `_begin_step`.
        warm_start = checkpoint_step(checkpoint) <= self.warm_start_steps
        self.engine.set_optimizer(self.warm_start_optimizer if warm_start and self.warm_start_steps else self.optimizer)
        if not warm_start and self.reference_is_policy:
            last_step = checkpoint_step(checkpoint) - self.warm_start_steps - 1  # the GRPO step that wrote it
            self.engine.load(self.run.path / reference_name(last_step, self.config.reference_every))
            self.reference = self.engine.reference(offload=self.config.rollout.share_gpu)
            self.engine.set_optimizer(self.optimizer)
        extra = self.load_engine(checkpoint)
        self.queue.restore(extra)
        return extra

    def train_step(self) -> StepMetrics:
        """Runs one warm-start or GRPO step."""
        if self.step < self.warm_start_steps:
            return self.train_warm_start()
        batch = self.collect_rollouts()
        # Not before sampling: a signal that interrupts sampling saves the engine as it was before the step.
        self._begin_step(self.step - self.warm_start_steps)
        return batch.metrics | self.train_minibatches(batch)

    def evaluate(self) -> dict[str, float]:
        """Returns the mean reward and pass@k on held-out tasks and on other sets."""
        sampler, config = self.rollout_sampler, self.config.evaluation
        held_out = [
            replace(evaluated.tasks[index], environment=name)
            for name, evaluated in self.evaluated.items()
            for index in evaluated.held_out
        ]
        sets = [EvaluationSet("", None, held_out, config)] if held_out else []
        sets += self.evaluation_sets
        return sampler.sync_and_run_on_rank0(lambda: evaluate(sampler, sets, step=self.step))

    def train_warm_start(self) -> StepMetrics:
        """Runs one SFT step on the tasks' reference answers."""
        tasks = [self.tasks[index] for index in self.task_sampler.take(self.config.warm_start.batch_size)]
        options = {name: environment.template_options for name, environment in self.environments.items()}
        examples = [warm_start_example(task, self.tokenizer, self.limit, options[task.environment]) for task in tasks]
        batch = Batch(
            [example.tokens for example in examples], {"response_mask": [example.mask for example in examples]}
        )
        return self.train_batch(batch, SFT(over="response_mask"))

    def collect_rollouts(self) -> RolloutBatch:
        """Samples trajectories on rank 0 and scatters them. Every rank calls it and gets its own sequences."""
        return self.rollout_sampler.sample_and_scatter(self.sample_rollouts, self.engine)

    def sample_rollouts(self) -> RolloutBatch:
        """Runs on rank 0. Returns the minibatches of the step, with the sequences of all ranks."""
        trained, sampled = self.select_trajectories()
        log_trajectories(self.run, self.step + 1, sampled, self.tokenizer, save_all=self.config.save_completions)
        self.health.check_rewards(sampled, self.step + 1)
        metrics = trajectory_metrics(sampled)
        if self.config.samples_per_prompt > 1:
            prompts = self.prompts_of_step(self.step)
            metrics["groups_trained"] = len(self._groups_with_different_rewards(trained)) / prompts
        metrics |= self.queue.take_metrics() | self.rollout_sampler.take_metrics()
        if (lag := policy_lag(trained, self.engine.step)) is not None:
            metrics["policy_lag"] = lag
        return RolloutBatch(metrics, self._minibatches(trained))

    def select_trajectories(self) -> tuple[list[Trajectory], list[Trajectory]]:
        """Returns the trajectories to train on, and all that were sampled.

        Training leaves out `excluded` trajectories, truncated ones if `overlong` masks them, and groups of
        which only one trajectory is left. Dynamic sampling also excludes groups whose rewards are all equal, and
        samples other groups in their place, at most `dynamic_sampling` times.
        """
        config = self.config
        trained: list[Trajectory] = []
        sampled: list[Trajectory] = []
        for _ in range(1 + config.dynamic_sampling):
            missing = self.prompts_of_step(self.step) - len({trajectory.group for trajectory in trained})
            if not missing:
                break
            trajectories = self.queue.take(missing, self.step)
            sampled += trajectories
            usable = [
                trajectory
                for trajectory in trajectories
                if not trajectory.excluded and not (config.overlong == "mask" and trajectory.truncated)
            ]
            sizes = Counter(trajectory.group for trajectory in usable)
            groups = self._groups_with_different_rewards(usable) if config.dynamic_sampling else sizes.keys()
            trained += [
                trajectory
                for trajectory in usable
                if sizes[trajectory.group] >= self.min_group_size and trajectory.group in groups
            ]
        return trained, sampled

    def add_advantages(self, rows: RolloutRows) -> tuple[list[Batch], StepMetrics]:
        """Returns the minibatches of this rank with their advantages, and metrics. Every rank calls it."""
        rewards, groups = rows.column(REWARD), rows.gather(rows.column(GROUP))
        penalties, metrics = [torch.zeros(len(mask)) for mask in rows.column(MASK)], dict[str, Any]()
        if self.config.reward_kl is not None:
            penalties = reward_penalties(rows, self.config.reward_kl)
            metrics[REWARD_KL] = penalty_mean(rows, penalties)
        assert isinstance(self.config, GRPOConfig)
        estimator = self.config.advantages
        if estimator.startswith("reinforce_plus_plus"):
            if estimator.endswith("_baseline"):
                rewards = rows.local(grpo(rows.gather(rewards), groups, scale_by_std=False).tolist())
            by_token = reinforce_plus_plus(rewards, rows.column(MASK), penalties=penalties, all_sum=rows.sum)
            return rows.with_columns({"advantages": by_token}), metrics
        penalized = [reward - float(penalty.sum()) for reward, penalty in zip(rewards, penalties, strict=True)]
        leave_one_out, scale_by_std = estimator in ("grpo_loo", "rloo"), estimator in ("grpo", "grpo_loo")
        advantages = grpo(rows.gather(penalized), groups, leave_one_out=leave_one_out, scale_by_std=scale_by_std)
        return rows.with_columns({"advantages": rows.local(advantages.tolist())}), metrics

    def train_minibatch(self, minibatch: Batch) -> StepMetrics:
        """Runs one optimizer step and returns its metrics."""
        return self.train_batch(minibatch, self.objective)

    def train_minibatches(self, batch: RolloutBatch) -> StepMetrics:
        """Runs one optimizer step on each minibatch of the step's rollouts, `rollout_epochs` times."""
        if not batch.minibatches:
            return {LOSS: 0.0}
        # All log-probs are computed before the first update, with the weights that all minibatches start from.
        scored = [self._with_logprobs(minibatch) for minibatch in batch.minibatches]
        controller = self.rollout_sampler.rollout_engine.controller
        minibatches, advantage_metrics = self.add_advantages(RolloutRows(scored, self.engine.mesh, controller.group))
        results = [
            self.train_minibatch(minibatch) for _ in range(self.config.rollout_epochs) for minibatch in minibatches
        ]
        metrics: StepMetrics = dict(advantage_metrics)
        for name in dict.fromkeys(name for result in results for name in result):
            reduce = REDUCTIONS[self.reductions.get(name, "mean")]
            metrics[name] = reduce([result[name] for result in results if name in result])
        # If the rollout engine's log-probs are the old ones, the objective has no others to compare them with. But the
        # first minibatch trains with the weights that sampled it: its ratio is that engine's mismatch with the trainer.
        if self.config.first_ratio_is_mismatch and "kl_old" in results[0]:
            metrics |= mismatch_of_ratio(results[0])
        return metrics | {name: sum(result[name] for result in results) for name in ("tokens", SHARED, SKIPPED)}

    def _begin_step(self, step: int) -> None:
        """Replaces the optimizer of a warm start, and makes the current weights the reference, if that is due."""
        if step == 0 and self.warm_start_steps:
            self.engine.set_optimizer(self.optimizer)
        every = self.config.reference_every
        if self.reference_is_policy and (step == 0 or (every and step % every == 0)):
            name = reference_name(step, every)
            self.run.discard(name)  # left by an earlier start of the run
            self.engine.save(self.run.path / name)
            self.reference = self.engine.reference(offload=self.config.rollout.share_gpu)
            on_rank0(lambda: prune_references(self.run, self.warm_start_steps, every))

    @property
    def reference_is_policy(self) -> bool:
        """Whether the reference is a copy of the policy's earlier weights."""
        return self.config.has_reference and self.config.reference_model is None

    def _minibatches(self, trajectories: Sequence[Trajectory]) -> list[Batch]:
        """Returns the minibatches, with the columns that need no forward pass. Groups are assigned round-robin."""
        config = self.config
        transcripts = [trajectory.transcript for trajectory in trajectories]
        logprobs = [torch.tensor(transcript.logprobs) for transcript in transcripts]
        masks = [transcript.mask for transcript in transcripts]
        groups = [trajectory.group for trajectory in trajectories]
        positive = [float(trajectory.reward >= 1.0) for trajectory in trajectories]
        columns = policy_columns(masks, groups, positive, logprobs)
        columns |= {REWARD: [self._reward(trajectory) for trajectory in trajectories], GROUP: groups}
        if config.replay_routing:
            columns[ROUTING] = routing_column(trajectories)
        count = config.minibatches
        group_indices = {group: index for index, group in enumerate(dict.fromkeys(groups))}
        minibatches = []
        for number in range(count):
            rows = [row for row, group in enumerate(groups) if group_indices[group] % count == number]
            if rows:
                minibatch_columns = {name: [values[row] for row in rows] for name, values in columns.items()}
                sequences = [transcripts[row].tokens for row in rows]
                minibatches.append(Batch(sequences, minibatch_columns, temperature=config.sampling.temperature))
        return minibatches

    def _with_logprobs(self, batch: Batch) -> Batch:
        """Adds log-probs of the trainer and of the reference, as configured."""
        columns: dict[str, Any] = dict(batch.columns)
        with self.timer("logprobs"):
            if self.config.old_logprobs == "recompute":
                routing = {ROUTING: columns[ROUTING]} if ROUTING in columns else {}
                scored = self.engine.logprobs(replace(batch, columns=routing))
                columns["old_logprobs"] = scored.logprob
            if self.reference is not None:  # it routes tokens itself
                scored = self.reference.logprobs(replace(batch, columns={}))
                columns["reference_logprobs"] = scored.logprob
        return replace(batch, columns=columns)

    def _reward(self, trajectory: Trajectory) -> float:
        config = self.config
        fraction = overlong_fraction(trajectory, config.sampling.max_new_tokens, config.overlong_buffer)
        return trajectory.reward - config.overlong_penalty * fraction

    def _groups_with_different_rewards(self, trajectories: Sequence[Trajectory]) -> set[int]:
        """Returns the groups whose rewards are not all equal."""
        rewards: dict[int, set[float]] = {}
        for trajectory in trajectories:
            rewards.setdefault(trajectory.group, set()).add(self._reward(trajectory))
        return {group for group, values in rewards.items() if len(values) > 1}


def trial_batch(config: PolicyConfig) -> Batch:
    """Returns a batch for the objective's trial call: two prompts, each with a good and a bad completion."""
    logprobs = [torch.full((len(sequence),), -1.0) for sequence in TRIAL_SEQUENCES]
    masks = [sequence.mask for sequence in TRIAL_SEQUENCES]
    columns = policy_columns(masks, [0, 0, 1, 1], [1.0, 0.0, 1.0, 0.0], logprobs)
    columns["advantages"] = [1.0, -1.0, 1.0, -1.0]
    if config.has_reference:
        columns["reference_logprobs"] = logprobs
    sequences = [sequence.tokens for sequence in TRIAL_SEQUENCES]
    return Batch(sequences, columns, temperature=config.sampling.temperature)


def checks(inputs: PreflightInputs, extra_columns: Mapping[str, Any] | None = None) -> list[Check]:
    """Returns the preflight checks. `extra_columns` are added to the batch of the objective's trial call."""
    config: PolicyConfig = inputs.config
    trial = trial_batch(config)
    trial = replace(trial, columns={**trial.columns, **(extra_columns or {})})

    def example(task: Task, options: Mapping[str, Any]) -> EncodedSequence:
        return warm_start_example(task, inputs.tokenizer, inputs.limit, options)

    warm_start = example if config.warm_start.steps else None
    names = environments_of(config.environment)
    epochs_check = [
        Check("epochs", lambda: _check_epochs(inputs), after=tuple(f"tasks {name}".strip() for name in names))
    ]
    routing_checks = [Check("replay_routing", lambda: _check_replay(inputs), after=("model",))]
    return [
        *training_checks(inputs, trial),
        *(routing_checks if config.replay_routing else []),
        *second_model_check(inputs, "reference_model", config.reference_model),
        *(
            check
            for name, part in environments_of(config.environment).items()
            for check in environment_checks(
                inputs, part, config.sampling, name=name, example=warm_start, held_out=config.evaluation
            )
        ),
        *(epochs_check if config.epochs is not None else []),
        *evaluation_set_checks(inputs, config.evaluation.sets, config.sampling, "evaluation.sets"),
        *(
            check
            for name, part in environments_of(config.environment).items()
            for check in training_overlap_checks(part, config.evaluation, name)
        ),
        *server_checks(
            inputs,
            config.rollout,
            config.sampling,
            gets_weights=True,
            compares_logprobs=config.old_logprobs == "rollout",
        ),
    ]


run = partial(run_recipe, GRPOTrainer)


def _check_epochs(inputs: PreflightInputs) -> str:
    """Returns how many steps the epochs are. Tasks of evaluation sets are counted, though they are left out."""
    config: PolicyConfig = inputs.config
    tasks = sum(inputs.trained_tasks)
    steps = StepSizes.of_epochs(config.prompts_per_step, config.epochs or 1, tasks).steps
    if not config.evaluation.sets:
        config.check_steps(steps)
    return f"{'about ' * bool(config.evaluation.sets)}{steps:,} steps for {config.epochs:g} × {tasks:,} tasks"


def _check_replay(inputs: PreflightInputs) -> str:
    _, model_config = inputs.model
    routers = model_config.routers
    if not routers:
        raise ValueError(
            f"replay_routing sends tokens to the experts that they were sampled with, but {inputs.config.model} has "
            "no experts. Set it to false."
        )
    return f"{len(routers)} MoE blocks"
