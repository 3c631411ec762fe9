"""GRPO: samples a group of completions for each prompt, scores them, and trains with group-relative advantages."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from postlude.data import Batch
from postlude.data.chat import EncodedSequence
from postlude.data.datasets import RowOrder, RowSource
from postlude.data.microbatch import ROUTING, SAMPLING_MASK
from postlude.engine import Engine
from postlude.engine.reference import Reference
from postlude.objectives import SFT, Objective
from postlude.objectives.advantages import reinforce_plus_plus
from postlude.objectives.correction import mismatch_of_ratio
from postlude.recipes.checks.environment import (
    environment_checks,
    evaluation_set_checks,
    record_checks,
    training_overlap_checks,
)
from postlude.recipes.checks.objective_trial import TRIAL_SEQUENCES
from postlude.recipes.checks.preflight import Check, PreflightInputs, training_checks
from postlude.recipes.checks.second_model import second_model_check
from postlude.recipes.checks.servers import ServerUse, server_checks
from postlude.recipes.config.environments import EnvironmentMixture, environments_of
from postlude.recipes.config.policy_configs import GRPOConfig, PolicyConfig
from postlude.recipes.config.settings import build_objective
from postlude.recipes.dataset import prepare_chat
from postlude.recipes.references import open_frozen_model, prune_references, reference_name
from postlude.recipes.report.metrics import LOSS, REWARD_KL, SHARED, SKIPPED
from postlude.recipes.rollout_columns import (
    MASK,
    REWARD,
    RolloutRows,
    penalty_mean,
    policy_columns,
    reward_penalties,
    to_minibatches,
)
from postlude.recipes.rollouts.evaluation_sets import EvaluationSet, evaluate, evaluated_tasks, open_sets
from postlude.recipes.rollouts.prompts import PromptEncoding, build_environment, warm_start_example
from postlude.recipes.rollouts.queue import RolloutQueue, policy_lag
from postlude.recipes.rollouts.sampler import RolloutBatch, open_rollout_sampler, trajectory_metrics
from postlude.recipes.rollouts.selection import TrajectorySelection
from postlude.recipes.rollouts.trajectory_log import log_trajectories
from postlude.recipes.row_sources import ROWS_TAKEN, SEED_STRIDE, MixedRows, OrderedRows, StepSizes
from postlude.recipes.run.directory import checkpoint_step
from postlude.recipes.run.runtime import LOCAL_RUNTIME, Runtime
from postlude.recipes.run.split import Split
from postlude.recipes.trainer import StepMetrics, Trainer
from postlude.rollout.conversations import Trajectory
from postlude.rollout.environments import Environment
from postlude.rollout.tasks import JoinedTasks, Task, Tasks
from postlude.world.agreement import on_rank0

REDUCTIONS: Mapping[str, Callable[[list[float]], float]] = {"mean": mean, "sum": sum, "max": max, "min": min}


class GRPOTrainer(Trainer):
    """A GRPO run: SFT warm-start steps if configured, then steps that sample rollouts and train on them."""

    name = "grpo"
    config: PolicyConfig
    min_group_size = 2
    """Groups with fewer trajectories are not trained on."""
    trial_columns: tuple[str, ...] = ()
    """Columns beside `trial_batch`'s for the objective's trial call."""

    def __init__(self, config: PolicyConfig, device: str, runtime: Runtime = LOCAL_RUNTIME) -> None:
        self.warm_start_steps = config.warm_start.steps
        super().__init__(config, device, config.warm_start.optimizer if self.warm_start_steps else None, runtime)
        self.evaluate_every, self.evaluate_at_start = config.evaluation.every, config.evaluation.at_start
        self.reference: Reference | Engine | None = None
        self.objective: Objective = build_objective(config.objective)
        self.selection = TrajectorySelection(config, self.min_group_size)
        with self.close_on_error():
            if config.reference_model is not None:
                self.reference = open_frozen_model(config.reference_model, self.engine)
            self._open_tasks()
            self._plan_steps(self._step_sizes())
            self._open_queue()

    def _open_tasks(self) -> None:
        """Opens the environments and the evaluation sets, and plans which tasks are trained on, and when."""
        config, factory = self.config, self.runtime.pool_factory
        configs, self.environments = environments_of(config.environment), dict[str, Environment]()
        seeds = {name: config.seed + SEED_STRIDE * number for number, name in enumerate(configs)}
        encoding = PromptEncoding(self.tokenizer, config.sampling, self.limit)
        for name, environment in configs.items():
            self.environments[name] = self.close_at_end(build_environment(environment, seeds[name], encoding, factory))
        if any(environment.uses_chat for environment in self.environments.values()):
            prepare_chat(self.tokenizer, str(config.model))
        evaluation = config.evaluation
        self.evaluation_sets = open_sets(
            evaluation.sets,
            encoding,
            seed=config.seed,
            split_by=evaluation.split_by,
            pool_factory=factory,
            close_at_end=self.close_at_end,
        )
        tasks_by_set = {evaluation_set.name: evaluation_set.tasks for evaluation_set in self.evaluation_sets}
        tasks_by_name = {name: environment.tasks for name, environment in self.environments.items()}
        self.evaluated = evaluated_tasks(tasks_by_name, evaluation.held_out, evaluation.split_by, tasks_by_set)
        orders, first_index = dict[str, RowSource[int]](), 0
        for name, evaluated in self.evaluated.items():
            order = RowOrder(len(evaluated.tasks), seeds[name], skip=evaluated)
            indices = range(first_index, first_index + len(evaluated.tasks))
            orders[name], first_index = OrderedRows(indices, order, evaluated.count_trained), indices.stop
        self.tasks: Tasks
        self.task_sampler: RowSource[int]
        if isinstance(config.environment, EnvironmentMixture):
            self.tasks = JoinedTasks(tasks_by_name)
            self.task_sampler = MixedRows(orders, [part.weight for part in config.environment.environments])
        else:
            (self.tasks,), (self.task_sampler,) = tasks_by_name.values(), orders.values()

    def _step_sizes(self) -> StepSizes:
        """Returns how many prompts each step samples."""
        config, size = self.config, self.config.prompts_per_step
        if config.epochs is None:
            return StepSizes(size, size * config.known_steps)
        tasks = self.task_sampler.size
        assert tasks is not None, "environments know their number of tasks"
        return StepSizes.of_epochs(size, config.epochs, tasks)

    def _plan_steps(self, sizes: StepSizes) -> None:
        """Sets the number of steps, and the optimizers, whose schedules depend on it."""
        if self.config.epochs is not None:
            self.config.check_steps(sizes.steps)
        self.step_sizes, self.total_steps = sizes, self.warm_start_steps + sizes.steps
        self.prompts_taken = sizes.first_row
        self.warm_start_optimizer, self.optimizer = self.config.fit_optimizers(sizes.steps)
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
            masks_sampling=config.masks_sampling,
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
        """Returns all tasks of the run's data, and which of them are held out."""
        identities = set[bytes]().union(*(evaluated.identities for evaluated in self.evaluated.values()))
        return Split.of_tasks(self.tasks, identities, self.config.evaluation.split_by)

    def state(self) -> dict[str, Any]:
        """Returns the state of the task sampler, and the tasks whose groups are started."""
        return self.queue.state() | {ROWS_TAKEN: self.prompts_taken}

    def restore(self, checkpoint: Path) -> Mapping[str, Any]:
        """Loads a checkpoint, with the optimizer of its phase, and the reference model if GRPO has started."""
        extra = self._load_phase(checkpoint)
        sizes = self.step_sizes.continued(max(0, self.step - self.warm_start_steps), extra[ROWS_TAKEN])
        if self.config.epochs is not None and sizes.steps > self.step_sizes.steps:  # fewer epochs had a short last step
            self._plan_steps(sizes)
            extra = self._load_phase(checkpoint)  # into optimizers whose schedules have the new length
        self._set_prompts_taken(self.step, extra[ROWS_TAKEN])
        self.queue.restore(extra)
        return extra

    def _set_prompts_taken(self, step: int, prompts: int) -> None:
        """Sets how many prompts the steps before `step` took, replacements included, and with epochs the steps left."""
        self.prompts_taken = prompts
        if self.config.epochs is not None:
            self.step_sizes = self.step_sizes.continued(max(0, step - self.warm_start_steps), prompts)
            self.total_steps = self.warm_start_steps + self.step_sizes.steps

    def _load_phase(self, checkpoint: Path) -> Mapping[str, Any]:
        # A checkpoint of the last warm-start step still has the warm start's optimizer: see `_begin_step`.
        warm_start = checkpoint_step(checkpoint) <= self.warm_start_steps
        self.engine.set_optimizer(self.warm_start_optimizer if warm_start and self.warm_start_steps else self.optimizer)
        if not warm_start and self.reference_is_policy:
            last_step = checkpoint_step(checkpoint) - self.warm_start_steps - 1  # the GRPO step that wrote it
            self.engine.load(self.run.path / reference_name(last_step, self.config.reference_every))
            self.reference = self.engine.reference(offload=self.config.rollout.share_gpu)
            self.engine.set_optimizer(self.optimizer)
        return self.load_engine(checkpoint)

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
        batch = self.rollout_sampler.sample_and_scatter(self.sample_rollouts, self.engine)
        self._set_prompts_taken(self.step + 1, batch.prompts)  # only rank 0 knows yet which prompts were replaced
        return batch

    def sample_rollouts(self) -> RolloutBatch:
        """Runs on rank 0. Returns the minibatches of the step, with the sequences of all ranks."""
        prompts = self.prompts_of_step(self.step)
        trained, sampled = self.select_trajectories()
        log_trajectories(self.run, self.step + 1, sampled, self.tokenizer, save_all=self.config.save_completions)
        self.health.check_rewards(sampled, self.step + 1)
        metrics = trajectory_metrics(sampled)
        if self.config.samples_per_prompt > 1:
            new = [trajectory for trajectory in trained if not trajectory.trained_before]
            metrics["groups_trained"] = len(self.selection.groups_with_different_rewards(new)) / prompts
        metrics |= self.queue.take_metrics() | self.rollout_sampler.take_metrics()
        if (lag := policy_lag(trained, self.engine.step)) is not None:
            metrics["policy_lag"] = lag
        minibatches = to_minibatches(trained, [*map(self.selection.reward, trained)], self.config)
        return RolloutBatch(metrics, minibatches, self.prompts_taken, self.selection.rewards_before(trained))

    def select_trajectories(self) -> tuple[list[Trajectory], list[Trajectory]]:
        """Returns the trajectories to train on, and all that were sampled.

        Dynamic sampling samples other groups in the place of those that the selection leaves out, at most
        `dynamic_sampling` times and while the epochs have prompts. Episodes carried over from earlier steps join once
        they are done, beside the step's prompts.
        """
        trained, sampled = list[Trajectory](), list[Trajectory]()
        wanted = self.prompts_of_step(self.step)
        for _ in range(1 + self.config.dynamic_sampling):
            missing = wanted - len({trajectory.group for trajectory in trained})
            if self.config.epochs is not None:  # replacements take prompts of the epochs too
                missing = min(missing, self.step_sizes.total - self.prompts_taken)
            if not missing:
                break
            self._set_prompts_taken(self.step + 1, self.prompts_taken + missing)
            trajectories = self.queue.take(missing, self.step)
            sampled += trajectories
            trained += self.selection(trajectories)
        carried = self.queue.take_carried(self.step) if self.queue.carries else []
        return trained + self.selection(carried), sampled + carried

    def add_advantages(self, rows: RolloutRows) -> tuple[list[Batch], StepMetrics]:
        """Returns the minibatches of this rank with their advantages, and metrics. Every rank calls it."""
        penalties, metrics = [torch.zeros(len(mask)) for mask in rows.column(MASK)], dict[str, Any]()
        if self.config.reward_kl is not None:
            penalties = reward_penalties(rows, self.config.reward_kl)
            metrics[REWARD_KL] = penalty_mean(rows, penalties)
        assert isinstance(self.config, GRPOConfig)
        estimator = self.config.advantages
        if estimator.startswith("reinforce_plus_plus"):
            rewards = rows.column(REWARD)
            if estimator.endswith("_baseline"):
                rewards = rows.group_advantages(scale_by_std=False)
            by_token = reinforce_plus_plus(rewards, rows.column(MASK), penalties=penalties, all_sum=rows.sum)
            return rows.with_columns({"advantages": by_token}), metrics
        advantages = rows.group_advantages(
            [float(penalty.sum()) for penalty in penalties],
            leave_one_out=estimator in ("grpo_loo", "rloo"),
            scale_by_std=estimator in ("grpo", "grpo_loo"),
        )
        return rows.with_columns({"advantages": advantages}), metrics

    def train_minibatch(self, minibatch: Batch) -> StepMetrics:
        return self.train_batch(minibatch, self.objective)

    def train_minibatches(self, batch: RolloutBatch) -> StepMetrics:
        """Runs one optimizer step on each minibatch of the step's rollouts, `rollout_epochs` times."""
        if not batch.minibatches:
            return {LOSS: 0.0}
        # All log-probs are computed before the first update, with the weights that all minibatches start from.
        scored = [self._with_logprobs(minibatch) for minibatch in batch.minibatches]
        controller = self.rollout_sampler.rollout_engine.controller
        rows = RolloutRows(scored, self.engine.mesh, controller.group, batch.rewards_before)
        minibatches, advantage_metrics = self.add_advantages(rows)
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

    def _with_logprobs(self, batch: Batch) -> Batch:
        """Adds log-probs of the trainer and of the reference, as configured."""
        columns: dict[str, Any] = dict(batch.columns)
        masks = {SAMPLING_MASK: columns[SAMPLING_MASK]} if SAMPLING_MASK in columns else {}
        with self.timer("logprobs"):
            if self.config.old_logprobs == "recompute":
                routing = {ROUTING: columns[ROUTING]} if ROUTING in columns else {}
                scored = self.engine.logprobs(replace(batch, columns=routing | masks))
                columns["old_logprobs"] = scored.logprob
            if self.reference is not None:  # its own routers choose experts
                scored = self.reference.logprobs(replace(batch, columns=masks))
                columns["reference_logprobs"] = scored.logprob
        return replace(batch, columns=columns)

    @classmethod
    def checks(cls, inputs: PreflightInputs) -> list[Check]:
        config: PolicyConfig = inputs.config
        trial, numbers = trial_batch(config), [torch.zeros(len(sequence)) for sequence in TRIAL_SEQUENCES]
        trial = replace(trial, columns={**trial.columns, **dict.fromkeys(cls.trial_columns, numbers)})

        def example(task: Task, options: Mapping[str, Any]) -> EncodedSequence:
            return warm_start_example(task, inputs.tokenizer, inputs.limit, options)

        warm_start = example if config.warm_start.steps else None
        names = environments_of(config.environment)
        epochs_check = [
            Check("epochs", lambda: _check_epochs(inputs), after=tuple(f"tasks {name}".strip() for name in names))
        ]
        return [
            *training_checks(inputs, trial),
            *record_checks(inputs),
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
                ServerUse(
                    gets_weights=True,
                    compares_logprobs=config.old_logprobs == "rollout",
                    masks_sampling=config.masks_sampling,
                    replays_routing=config.replay_routing,
                ),
            ),
        ]


def trial_batch(config: PolicyConfig) -> Batch:
    """Returns a batch for the objective's trial call: two prompts, each with a good and a bad completion."""
    logprobs = [torch.full((len(sequence),), -1.0) for sequence in TRIAL_SEQUENCES]
    masks = [sequence.mask for sequence in TRIAL_SEQUENCES]
    columns = policy_columns(masks, [0, 0, 1, 1], range(4), [1.0, 0.0, 1.0, 0.0], logprobs)
    columns["advantages"] = [1.0, -1.0, 1.0, -1.0]
    if config.has_reference:
        columns["reference_logprobs"] = logprobs
    if config.masks_sampling:
        columns[SAMPLING_MASK] = [torch.tensor(sequence.tokens)[:, None] + 1 for sequence in TRIAL_SEQUENCES]
    sequences = [sequence.tokens for sequence in TRIAL_SEQUENCES]
    return Batch(sequences, columns, temperature=config.sampling.temperature)


def _check_epochs(inputs: PreflightInputs) -> str:
    """Returns how many steps the epochs are. Tasks of evaluation sets are counted, though they are left out."""
    config: PolicyConfig = inputs.config
    tasks = sum(inputs.trained_tasks)
    steps = StepSizes.of_epochs(config.prompts_per_step, config.epochs or 1, tasks).steps
    if not config.evaluation.sets:
        config.check_steps(steps)
    bound = "at most " if config.dynamic_sampling else "about " if config.evaluation.sets else ""
    return f"{bound}{steps:,} steps for {config.epochs:g} × {tasks:,} tasks"
