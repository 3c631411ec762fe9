"""Distillation: trains on a teacher's distribution, on the completions of a dataset or on the student's own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from postlude.data import Batch
from postlude.data.chat import EncodedSequence
from postlude.data.datasets import RowSource
from postlude.engine import Engine
from postlude.engine.reference import Reference
from postlude.recipes.checks.environment import environment_checks
from postlude.recipes.checks.objective_trial import TRIAL_SEQUENCES
from postlude.recipes.checks.preflight import Check, PreflightInputs, training_checks
from postlude.recipes.checks.second_model import check_teacher, check_teacher_tokens, teacher_checks
from postlude.recipes.checks.servers import ServerUse, server_checks
from postlude.recipes.config.recipe_configs import MASK, DistillConfig, OnPolicyData
from postlude.recipes.config.settings import ObjectiveFile, build_objective
from postlude.recipes.dataset import prepare_chat
from postlude.recipes.references import open_frozen_model
from postlude.recipes.rollouts.prompts import PromptEncoding, build_environment
from postlude.recipes.rollouts.sampler import (
    HELD_OUT_SEEDS,
    TRAINING_SEEDS,
    RolloutBatch,
    RolloutSampler,
    open_rollout_sampler,
    trajectory_metrics,
)
from postlude.recipes.rollouts.trajectory_log import log_trajectories
from postlude.recipes.row_sources import ShuffledRows
from postlude.recipes.run.runtime import LOCAL_RUNTIME, Runtime
from postlude.recipes.run.split import Split
from postlude.recipes.supervised import SupervisedTrainer, dataset_checks
from postlude.recipes.trainer import StepMetrics
from postlude.rollout.environments import Transcript
from postlude.rollout.tasks import Task


class DistillTrainer(SupervisedTrainer[EncodedSequence | Task]):
    """A distillation run. The teacher is a second engine in the same layout, or the frozen model below adapters."""

    name = "distill"
    config: DistillConfig

    def __init__(self, config: DistillConfig, device: str, runtime: Runtime = LOCAL_RUNTIME) -> None:
        objective = config.objective
        self.temperature = 1.0 if isinstance(objective, ObjectiveFile) else objective.temperature
        self.rollout_sampler: RolloutSampler | None = None
        super().__init__(config, device, build_objective(objective), runtime)
        self.teacher: Reference | Engine
        with self.close_on_error():
            if config.teacher_is_base:
                self.teacher = self.engine.reference()
            else:
                self.teacher = open_frozen_model(config.teacher, self.engine)
                check_teacher(config.model, self.engine.config, config.teacher, self.teacher.config, config.top_k)
                check_teacher_tokens(
                    config.model, self.tokenizer, config.teacher, trust_remote_code=config.trust_remote_code
                )

    def open_dataset(self, data: Any, seed: int) -> RowSource[EncodedSequence | Task]:
        """Returns the dataset as tokens or, for on-policy distillation, the environment's tasks."""
        if not isinstance(data, OnPolicyData):
            return super().open_dataset(data, seed)
        config = self.config
        factory = self.runtime.pool_factory
        encoding = PromptEncoding(self.tokenizer, data.sampling, self.limit)
        environment = self.close_at_end(build_environment(data.environment, config.seed, encoding, factory))
        if environment.uses_chat:
            prepare_chat(self.tokenizer, str(config.model))
        self.rollout_sampler = open_rollout_sampler(
            self, environment, data.rollout, data.sampling, epochs=lambda: self.rows.progress
        )
        return ShuffledRows(environment.tasks, held_out=config.held_out.rows, seed=seed)

    def split(self) -> Split:
        """Returns all rows, or the tasks of the environment, and which of them are held out."""
        if self.rollout_sampler is None:
            return super().split()
        return Split.of_tasks(self.rollout_sampler.environments[""].tasks, self.rows.held_out_identities)

    def make_batch(
        self, rows: Sequence[EncodedSequence | Task], *, held_out: bool = False
    ) -> tuple[Batch, StepMetrics]:
        """Returns sequences with the teacher's most likely tokens at every position."""
        metrics: StepMetrics = {}
        if self.rollout_sampler is None:
            batch = _batch([row for row in rows if isinstance(row, EncodedSequence)])
        else:
            tasks = [row for row in rows if isinstance(row, Task)]
            sampled = self.rollout_sampler.sample_and_scatter(
                lambda: self.sample_rollouts(tasks, held_out=held_out), self.engine
            )
            (batch,), metrics = sampled.minibatches, sampled.metrics
        with self.timer("teacher"):
            logprobs, ids = self.teacher.topk(replace(batch, temperature=self.temperature), self.config.top_k)
        return _with_teacher(batch, logprobs, ids), metrics

    def sample_rollouts(self, tasks: Sequence[Task], *, held_out: bool) -> RolloutBatch:
        """Runs on rank 0. Samples the student's completions, and returns those of all ranks in one batch."""
        assert self.rollout_sampler is not None
        assert isinstance(self.config.data, OnPolicyData)
        samples = self.config.data.samples_per_prompt
        seed_stream = HELD_OUT_SEEDS if held_out else TRAINING_SEEDS
        trajectories = self.rollout_sampler.sample(tasks, samples, step=self.step, seed_stream=seed_stream)
        if not held_out:
            save_all = self.config.data.save_completions
            log_trajectories(self.run, self.step + 1, trajectories, self.tokenizer, save_all=save_all)
        self.health.check_sampled(trajectories, "the held-out tasks" if held_out else f"step {self.step + 1}")
        batch = _batch([transcript for trajectory in trajectories for transcript in trajectory.transcripts])
        if held_out:
            return RolloutBatch({}, [batch])
        return RolloutBatch(trajectory_metrics(trajectories) | self.rollout_sampler.take_metrics(), [batch])

    @staticmethod
    def checks(inputs: PreflightInputs) -> list[Check]:
        config: DistillConfig = inputs.config
        data = config.data
        data_checks = (
            dataset_checks(inputs, data)
            if not isinstance(data, OnPolicyData)
            else [
                *environment_checks(inputs, data.environment, data.sampling),
                *server_checks(inputs, data.rollout, data.sampling, ServerUse(gets_weights=True)),
            ]
        )
        return [
            *training_checks(inputs, _trial_batch(config.top_k)),
            *teacher_checks(inputs, config.teacher, config.top_k),
            *data_checks,
        ]


def _batch(sequences: Sequence[EncodedSequence | Transcript]) -> Batch:
    return Batch([sequence.tokens for sequence in sequences], {MASK: [sequence.mask for sequence in sequences]})


def _with_teacher(batch: Batch, logprobs: Sequence[Tensor], ids: Sequence[Tensor]) -> Batch:
    return replace(batch, columns={**batch.columns, "teacher_logprobs": logprobs, "teacher_ids": ids})


def _trial_batch(top_k: int) -> Batch:
    """Returns a batch for the objective's trial call, with the same teacher tokens at every position."""
    batch, best = _batch(TRIAL_SEQUENCES), torch.arange(top_k) % 8
    logprobs = [(-1.0 - best).expand(length, -1) for length in batch.lengths]
    return _with_teacher(batch, logprobs, [best.expand(length, -1) for length in batch.lengths])
