"""EvaluationSettings: how well a model answers tasks, without training it."""

from __future__ import annotations

from contextlib import ExitStack, closing
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from postlude.generate.distributed import DistributedEngine, ReplicatedGenerator
from postlude.hf.load import load_model, load_tokenizer
from postlude.hf.read_model import end_tokens, read_generation
from postlude.recipes.checks.preflight import Check, PreflightInputs, environment_checks, model_checks
from postlude.recipes.config import schema
from postlude.recipes.config.recipe_configs import EvalConfig
from postlude.recipes.config.rollout import NativeRollout
from postlude.recipes.report.finish import conclude
from postlude.recipes.report.summary import EVALUATED
from postlude.recipes.rollout_engine import check_servers, make_eval_engine
from postlude.recipes.rollouts import (
    RolloutSampler,
    build_environment,
    completion_metrics,
    evaluation_metrics,
    sample_rows,
)
from postlude.recipes.run.config_changes import MAY_CHANGE
from postlude.recipes.run.directory import check_run, open_run
from postlude.recipes.run.machine_info import machine_info
from postlude.recipes.run.outcome import RunOutcome
from postlude.recipes.run.phase_timer import PhaseTimer
from postlude.recipes.run.runtime import LOCAL_RUNTIME, Runtime
from postlude.recipes.run.start_mode import RESUME_NEWEST, StartMode
from postlude.recipes.server_commands import generator_limits
from postlude.rollout.conversations import Trajectory
from postlude.rollout.tasks import last_tasks

PAGE = 256  # tasks answered at a time


def checks(inputs: PreflightInputs) -> list[Check]:
    """What must hold before a run begins."""
    config: EvalConfig = inputs.config
    return [
        *model_checks(inputs),
        *environment_checks(inputs, config.environment, config.sampling),
        *check_servers(inputs, config.rollout, config.sampling, trained=False),
    ]


def run(
    config: EvalConfig, device: str = "cpu", start_mode: StartMode = RESUME_NEWEST, runtime: Runtime = LOCAL_RUNTIME
) -> RunOutcome:
    """Evaluate on the ranks that are started. It is done in one go: an evaluation that was ended begins again."""
    if start_mode.resume_from is not None:
        raise ValueError("an evaluation has no checkpoints to go back to; leave out --resume-from.")
    plain = schema.plain(config)
    check_run(config.run, plain, may_change=MAY_CHANGE)
    tokenizer = load_tokenizer(config.model)
    clock = PhaseTimer()
    with ExitStack() as held:
        environment = held.enter_context(
            closing(
                build_environment(
                    config.environment, config.seed, tokenizer, config.sampling, config.budget, runtime.pool_factory
                )
            )
        )
        directory = held.enter_context(open_run(config.run, plain, may_change=MAY_CHANGE, loggers=config.loggers))
        directory.resume_at(-1)
        directory.record(step=0, command=start_mode.command, **machine_info(torch.device(device)))
        engine = held.enter_context(closing(_engine(config, tokenizer, device, runtime)))
        rollouts = RolloutSampler(
            engine,
            environment,
            tokenizer,
            config.sampling,
            budget=config.budget,
            seed=config.seed,
            timed=clock,
        )
        held.enter_context(closing(rollouts.conversations))
        count = min(config.tasks, len(environment.tasks))
        chosen = last_tasks(environment.tasks, count)
        tasks = [chosen[index] for index in range(count)]
        answers: list[Trajectory] = []  # on the first rank

        def page(first: int) -> dict[str, Any]:
            answers.extend(rollouts.answer(tasks[first : first + PAGE], config.samples_per_prompt, step=0, first=first))
            return completion_metrics(answers)

        with runtime.view(count, title=f"eval {config.model}", unit="task") as live:
            for first in range(0, count, PAGE):
                live.update(min(first + PAGE, count), rollouts.on_rank0(partial(page, first)))
        if answers:
            directory.sample(0, sample_rows(answers, tokenizer))
        found = rollouts.on_rank0(
            lambda: (
                evaluation_metrics(answers, config.samples_per_prompt)
                | completion_metrics(answers)
                | rollouts.take_metrics()
            )
        )
        directory.log(0, found | clock.take(), phase=EVALUATED)
    outcome = RunOutcome("finished", 0)
    conclude(config.run, outcome)
    dist.barrier()
    return outcome


def _engine(config: EvalConfig, tokenizer: Any, device: str, runtime: Runtime) -> DistributedEngine:
    """The whole model on every rank, or servers of it."""
    default = torch.bfloat16 if device == "cuda" else torch.float32
    dtype = getattr(torch, config.dtype) if config.dtype else default
    if not isinstance(config.rollout, NativeRollout):
        return make_eval_engine(
            config.rollout, config.model, tokenizer, config.run, dtype, device, config.budget, runtime.launcher
        )
    model = load_model(
        config.model,
        dtype=dtype,
        device=device,
        mtp=config.sampling.draft is not None,
    ).eval()
    ends = end_tokens(read_generation(config.model), tokenizer.eos_token_id)
    limits = generator_limits(config.budget)
    return ReplicatedGenerator(model, tokenizer, draft=config.sampling.draft, eos_tokens=ends, **limits)
