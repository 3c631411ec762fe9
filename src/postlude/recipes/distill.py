"""Distillation: take on a teacher's distribution, on answers that were written or on the student's own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from postlude.data import Batch
from postlude.data.chat import Encoded
from postlude.engine import Engine
from postlude.engine.handing import hand_out
from postlude.recipes.config.configs import MASK, DistillConfig, OwnAnswers
from postlude.recipes.config.settings import ObjectiveFile, built
from postlude.recipes.examples import Examples, Indexed
from postlude.recipes.preflight import (
    Check,
    Subject,
    check_teacher,
    check_teacher_tokens,
    of_environment,
    of_rows,
    of_teacher,
    of_training,
)
from postlude.recipes.rollouts import HELD_OUT, TRAINED, Rollouts, environment_of, shown, summary
from postlude.recipes.run.beginning import NEWEST, Beginning
from postlude.recipes.run.ending import Ending
from postlude.recipes.serving import engine_of, of_servers
from postlude.recipes.supervised import SupervisedTrainer
from postlude.recipes.trainer import train
from postlude.recipes.trial import ANSWERS
from postlude.recipes.where import HERE, Where
from postlude.rollout.environments import Transcript
from postlude.rollout.tasks import Task


class DistillTrainer(SupervisedTrainer[Encoded | Task]):
    """A run of distillation. Student and teacher are engines in the same layout."""

    name = "distill"

    def __init__(self, config: DistillConfig, device: str, where: Where = HERE) -> None:
        self.config = config
        chosen = config.objective
        self.temperature = 1.0 if isinstance(chosen, ObjectiveFile) else chosen.temperature
        self.rollouts: Rollouts | None = None
        self.answered: Batch | None = None  # on the first rank: what is about to be handed out
        super().__init__(config, device, built(chosen), where)
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

    def read(self) -> Indexed[Encoded | Task]:
        """Written answers, or tasks for the student to answer."""
        data, budget = self.config.data, self.config.budget
        if isinstance(data, Examples):
            return self.encoded(data)
        environment = self.hold(
            environment_of(data.environment, self.config.seed, self.tokenizer, data.answers, budget, self.where.hire)
        )
        drawing = self.hold(
            engine_of(
                data.rollout,
                self.engine,
                self.tokenizer,
                self.config.run,
                data.answers,
                budget=budget,
                machine=self.where.machine,
            )
        )
        self.rollouts = Rollouts(
            drawing,
            environment,
            self.tokenizer,
            data.answers,
            budget=budget,
            seed=self.config.seed,
            timed=self.timed,
            signals=self.signals,
        )
        self.hold(self.rollouts.conversations)
        return environment.tasks

    def batch_of(self, rows: Sequence[Encoded | Task], *, held_out: bool = False) -> tuple[Batch, dict[str, Any]]:
        """Sequences with the teacher's likeliest tokens at every position."""
        if self.rollouts is None:
            batch, found = _batch([row for row in rows if isinstance(row, Encoded)]), {}
        else:
            tasks = [row for row in rows if isinstance(row, Task)]
            found = self.rollouts.led(lambda: self.answer(tasks, held_out=held_out))
            batch = hand_out(self.answered, self.engine.mesh, self.rollouts.engine.lead, self.config.budget)
            self.answered = None
        with self.timed("teacher"):
            logprobs, ids = self.teacher.topk(batch, self.config.top_k, temperature=self.temperature)
        return _with_teacher(batch, logprobs, ids), found

    def answer(self, tasks: Sequence[Task], *, held_out: bool) -> dict[str, Any]:
        """On the first rank: have the student answer; returns what is to be told of it."""
        assert self.rollouts is not None
        assert isinstance(self.config.data, OwnAnswers)
        kind = HELD_OUT if held_out else TRAINED
        answers = self.rollouts.answer(tasks, self.config.data.samples, step=self.step, kind=kind)
        self.answered = _batch([each.transcript for each in answers])
        if held_out:
            return {}
        self.run.sample(self.step + 1, shown(answers, self.tokenizer))
        return summary(answers) | self.rollouts.take_metrics()


def _batch(sequences: Sequence[Encoded | Transcript]) -> Batch:
    return Batch([each.tokens for each in sequences], {MASK: [each.mask for each in sequences]})


def _with_teacher(batch: Batch, logprobs: Sequence[Tensor], ids: Sequence[Tensor]) -> Batch:
    return replace(batch, columns={**batch.columns, "teacher_logprobs": logprobs, "teacher_ids": ids})


def _trial(top_k: int) -> Batch:
    """A batch to try the objective on. The teacher's likeliest tokens are the same few at every position."""
    batch, best = _batch(ANSWERS), torch.arange(top_k) % 8
    logprobs = [(-1.0 - best).expand(length, -1) for length in batch.lengths]
    return _with_teacher(batch, logprobs, [best.expand(length, -1) for length in batch.lengths])


def checks(subject: Subject) -> list[Check]:
    """What must hold before a run begins."""
    config: DistillConfig = subject.config
    subject.others.append(config.teacher)
    data = config.data
    learned_on = (
        of_rows(subject, data)
        if isinstance(data, Examples)
        else [
            *of_environment(subject, data.environment, data.answers),
            *of_servers(subject, data.rollout, data.answers, trained=True),
        ]
    )
    return [
        *of_training(subject, _trial(config.top_k)),
        *of_teacher(subject, config.teacher, config.top_k),
        *learned_on,
    ]


def run(config: DistillConfig, device: str = "cpu", beginning: Beginning = NEWEST, where: Where = HERE) -> Ending:
    """Run or continue `config` on the ranks that are started."""
    return train(DistillTrainer(config, device, where), beginning)
