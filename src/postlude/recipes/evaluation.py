"""Evaluation: how well a model answers tasks, without training it."""

from __future__ import annotations

from contextlib import ExitStack, closing
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from postlude.hf.load import load_model, load_tokenizer
from postlude.hf.reading import end_tokens, read_generation
from postlude.recipes.clock import Clock
from postlude.recipes.conclusion import conclude
from postlude.recipes.config import schema
from postlude.recipes.config.configs import EvalConfig
from postlude.recipes.config.rollout import Native
from postlude.recipes.preflight import Check, Subject, of_environment, of_model
from postlude.recipes.rollouts import Rollouts, environment_of, scores, shown, summary
from postlude.recipes.run.beginning import NEWEST, Beginning
from postlude.recipes.run.changes import MAY_CHANGE
from postlude.recipes.run.directory import check_run, open_run
from postlude.recipes.run.ending import Ending
from postlude.recipes.run.surroundings import surroundings
from postlude.recipes.serving import of_servers, served
from postlude.recipes.started import native_length
from postlude.recipes.verdict import EVALUATED
from postlude.recipes.where import HERE, Where
from postlude.rollout.conversations import Answered
from postlude.rollout.gathered import RankedEngine, SharedGenerator
from postlude.rollout.tasks import last_tasks

PAGE = 256  # tasks answered at a time


def checks(subject: Subject) -> list[Check]:
    """What must hold before a run begins."""
    config: EvalConfig = subject.config
    return [
        *of_model(subject),
        *of_environment(subject, config.environment, config.answers),
        *of_servers(subject, config.rollout, config.answers, trained=False),
    ]


def run(config: EvalConfig, device: str = "cpu", beginning: Beginning = NEWEST, where: Where = HERE) -> Ending:
    """Evaluate on the ranks that are started. It is done in one go: an evaluation that was ended begins again."""
    if beginning.resume_from is not None:
        raise ValueError("an evaluation has no checkpoints to go back to; leave out --resume-from.")
    plain = schema.plain(config)
    check_run(config.run, plain, may_change=MAY_CHANGE)
    tokenizer = load_tokenizer(config.model)
    clock = Clock()
    with ExitStack() as held:
        environment = held.enter_context(
            closing(
                environment_of(config.environment, config.seed, tokenizer, config.answers, config.budget, where.hire)
            )
        )
        directory = held.enter_context(open_run(config.run, plain, may_change=MAY_CHANGE, sinks=config.sinks))
        directory.resume_at(-1)
        directory.record(step=0, command=beginning.command, **surroundings(torch.device(device)))
        engine = held.enter_context(closing(_engine(config, tokenizer, device, where)))
        rollouts = Rollouts(
            engine,
            environment,
            tokenizer,
            config.answers,
            budget=config.budget,
            seed=config.seed,
            timed=clock,
        )
        held.enter_context(closing(rollouts.conversations))
        count = min(config.tasks, len(environment.tasks))
        chosen = last_tasks(environment.tasks, count)
        tasks = [chosen[index] for index in range(count)]
        answers: list[Answered] = []  # on the first rank

        def page(first: int) -> dict[str, Any]:
            answers.extend(rollouts.answer(tasks[first : first + PAGE], config.samples, step=0, first=first))
            return summary(answers)

        with where.view(count, title=f"eval {config.model}", unit="task") as live:
            for first in range(0, count, PAGE):
                live.update(min(first + PAGE, count), rollouts.led(partial(page, first)))
        if answers:
            directory.sample(0, shown(answers, tokenizer))
        found = rollouts.led(lambda: scores(answers, config.samples) | summary(answers) | rollouts.take_metrics())
        directory.log(0, found | clock.take(), phase=EVALUATED)
    ending = Ending("finished", 0)
    conclude(config.run, ending)
    dist.barrier()
    return ending


def _engine(config: EvalConfig, tokenizer: Any, device: str, where: Where) -> RankedEngine:
    """The whole model on every rank, or servers of it."""
    default = torch.bfloat16 if device == "cuda" else torch.float32
    dtype = getattr(torch, config.dtype) if config.dtype else default
    if not isinstance(config.rollout, Native):
        return served(config.rollout, config.model, tokenizer, config.run, dtype, device, config.budget, where.machine)
    model = load_model(
        config.model,
        dtype=dtype,
        device=device,
        mtp=config.answers.draft is not None,
    ).eval()
    ends = end_tokens(read_generation(config.model), tokenizer.eos_token_id)
    limits = native_length(config.budget)
    return SharedGenerator(model, tokenizer, draft=config.answers.draft, eos_tokens=ends, **limits)
