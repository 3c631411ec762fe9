"""Evaluation: how well a model answers tasks, without training it."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import torch
import torch.distributed as dist

from postlude.hf.load import load_model, load_tokenizer
from postlude.recipes import schema
from postlude.recipes.clock import Clock
from postlude.recipes.conclusion import conclude
from postlude.recipes.configs import EvalConfig
from postlude.recipes.ending import Ending
from postlude.recipes.live import LiveView
from postlude.recipes.preflight import Check, Subject, of_environment, of_model
from postlude.recipes.rollouts import Answered, Rollouts, scores, shown, summary
from postlude.recipes.run import open_run
from postlude.recipes.verdict import EVALUATED, REPORT
from postlude.rollout.gathered import SharedGenerator

PAGE = 256  # tasks answered at a time


def checks(subject: Subject) -> list[Check]:
    """What must hold before a run begins."""
    return [*of_model(subject), *of_environment(subject, subject.config.environment, subject.config.answers)]


def run(config: EvalConfig, device: str = "cpu") -> Path:
    """Evaluate on the ranks that are started. Returns the report's path."""
    directory = open_run(
        config.run, schema.plain(type(config), config), may_change=("run", "wandb"), wandb=config.wandb
    )
    directory.resume_at(-1)
    tokenizer = load_tokenizer(config.model)
    default = torch.bfloat16 if device == "cuda" else torch.float32
    model = load_model(
        config.model, dtype=getattr(torch, config.dtype) if config.dtype else default, device=device
    ).eval()
    clock = Clock()
    with closing(directory), closing(config.environment.build(config.seed)) as environment:
        rollouts = Rollouts(
            SharedGenerator(model, tokenizer),
            environment,
            tokenizer,
            config.answers,
            budget=config.budget,
            seed=config.seed,
            timed=clock,
        )
        count = min(config.tasks, len(environment.tasks))
        tasks = [environment.tasks[index] for index in range(len(environment.tasks) - count, len(environment.tasks))]
        answers: list[Answered] = []
        with LiveView(count, title=f"eval {config.model}") as live:
            for first in range(0, count, PAGE):
                answers += rollouts.answer(tasks[first : first + PAGE], config.samples, step=0, first=first)
                live.update(min(first + PAGE, count), summary(answers))
        directory.sample(0, shown(answers, tokenizer))
        directory.log(0, scores(answers, config.samples) | summary(answers) | clock.take(), phase=EVALUATED)
    conclude(config.run, Ending("finished", 0))
    dist.barrier()
    return config.run / REPORT
