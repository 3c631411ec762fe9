"""Distillation: take on a teacher's distribution, on answers that were written or on the student's own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from postlude.data import Batch
from postlude.data.chat import EncodedSequence
from postlude.engine import Engine
from postlude.engine.batch_scatter import scatter_batch
from postlude.recipes.checks.objective_trial import ANSWERS
from postlude.recipes.checks.preflight import (
    Check,
    PreflightInputs,
    check_teacher,
    check_teacher_tokens,
    dataset_checks,
    environment_checks,
    teacher_checks,
    training_checks,
)
from postlude.recipes.config.recipe_configs import MASK, DistillConfig, OnPolicyData
from postlude.recipes.config.settings import ObjectiveFile, build_objective
from postlude.recipes.data.rows import Examples, IndexedRows
from postlude.recipes.rollout_engine import check_servers, make_rollout_engine
from postlude.recipes.rollouts import (
    HELD_OUT,
    TRAINED,
    RolloutSampler,
    build_environment,
    completion_metrics,
    sample_rows,
)
from postlude.recipes.run.outcome import RunOutcome
from postlude.recipes.run.runtime import LOCAL_RUNTIME, Runtime
from postlude.recipes.run.start_mode import RESUME_NEWEST, StartMode
from postlude.recipes.supervised import SupervisedTrainer
from postlude.recipes.trainer import train
from postlude.rollout.environments import Transcript
from postlude.rollout.tasks import Task


class DistillTrainer(SupervisedTrainer[EncodedSequence | Task]):
    """A run of distillation. Student and teacher are engines in the same layout."""

    name = "distill"

    def __init__(self, config: DistillConfig, device: str, runtime: Runtime = LOCAL_RUNTIME) -> None:
        self.config = config
        chosen = config.objective
        self.temperature = 1.0 if isinstance(chosen, ObjectiveFile) else chosen.temperature
        self.rollouts: RolloutSampler | None = None
        self.answered: Batch | None = None  # on the first rank: what is about to be handed out
        super().__init__(config, device, build_objective(chosen), runtime)
        with self.opening():
            self.teacher = Engine(
                config.teacher,
                budget=config.budget,
                compute_dtype=self.engine.compute_dtype,
                device=device,
                seed=config.seed,
                mesh=self.engine.mesh,
            )
            check_teacher(config.model, self.engine.config, config.teacher, self.teacher.config, config.top_k)
            check_teacher_tokens(config.model, self.tokenizer, config.teacher)

    def read(self) -> IndexedRows[EncodedSequence | Task]:
        """Written answers, or tasks for the student to answer."""
        data, budget = self.config.data, self.config.budget
        if isinstance(data, Examples):
            return self.encoded(data)
        environment = self.hold(
            build_environment(
                data.environment, self.config.seed, self.tokenizer, data.sampling, budget, self.runtime.pool_factory
            )
        )
        drawing = self.hold(
            make_rollout_engine(
                data.rollout,
                self.engine,
                self.tokenizer,
                self.config.run,
                data.sampling,
                budget=budget,
                launcher=self.runtime.launcher,
            )
        )
        self.rollouts = RolloutSampler(
            drawing,
            environment,
            self.tokenizer,
            data.sampling,
            budget=budget,
            seed=self.config.seed,
            timed=self.timed,
            signals=self.signals,
        )
        self.hold(self.rollouts.conversations)
        return environment.tasks

    def batch_of(
        self, rows: Sequence[EncodedSequence | Task], *, held_out: bool = False
    ) -> tuple[Batch, dict[str, Any]]:
        """Sequences with the teacher's likeliest tokens at every position."""
        if self.rollouts is None:
            batch, found = _batch([row for row in rows if isinstance(row, EncodedSequence)]), {}
        else:
            tasks = [row for row in rows if isinstance(row, Task)]
            found = self.rollouts.on_rank0(lambda: self.answer(tasks, held_out=held_out))
            batch = scatter_batch(self.answered, self.engine.mesh, self.rollouts.engine.controller, self.config.budget)
            self.answered = None
        with self.timed("teacher"):
            logprobs, ids = self.teacher.topk(batch, self.config.top_k, temperature=self.temperature)
        return _with_teacher(batch, logprobs, ids), found

    def answer(self, tasks: Sequence[Task], *, held_out: bool) -> dict[str, Any]:
        """On the first rank: have the student answer; returns what is to be told of it."""
        assert self.rollouts is not None
        assert isinstance(self.config.data, OnPolicyData)
        kind = HELD_OUT if held_out else TRAINED
        answers = self.rollouts.answer(tasks, self.config.data.samples_per_prompt, step=self.step, kind=kind)
        self.answered = _batch([each.transcript for each in answers])
        if held_out:
            return {}
        self.run.sample(self.step + 1, sample_rows(answers, self.tokenizer))
        return completion_metrics(answers) | self.rollouts.take_metrics()


def _batch(sequences: Sequence[EncodedSequence | Transcript]) -> Batch:
    return Batch([each.tokens for each in sequences], {MASK: [each.mask for each in sequences]})


def _with_teacher(batch: Batch, logprobs: Sequence[Tensor], ids: Sequence[Tensor]) -> Batch:
    return replace(batch, columns={**batch.columns, "teacher_logprobs": logprobs, "teacher_ids": ids})


def _trial(top_k: int) -> Batch:
    """A batch to try the objective on. The teacher's likeliest tokens are the same few at every position."""
    batch, best = _batch(ANSWERS), torch.arange(top_k) % 8
    logprobs = [(-1.0 - best).expand(length, -1) for length in batch.lengths]
    return _with_teacher(batch, logprobs, [best.expand(length, -1) for length in batch.lengths])


def checks(inputs: PreflightInputs) -> list[Check]:
    """What must hold before a run begins."""
    config: DistillConfig = inputs.config
    inputs.others.append(config.teacher)
    data = config.data
    learned_on = (
        dataset_checks(inputs, data)
        if isinstance(data, Examples)
        else [
            *environment_checks(inputs, data.environment, data.sampling),
            *check_servers(inputs, data.rollout, data.sampling, trained=True),
        ]
    )
    return [
        *training_checks(inputs, _trial(config.top_k)),
        *teacher_checks(inputs, config.teacher, config.top_k),
        *learned_on,
    ]


def run(
    config: DistillConfig, device: str = "cpu", start_mode: StartMode = RESUME_NEWEST, runtime: Runtime = LOCAL_RUNTIME
) -> RunOutcome:
    """Run or continue `config` on the ranks that are started."""
    return train(DistillTrainer(config, device, runtime), start_mode)
