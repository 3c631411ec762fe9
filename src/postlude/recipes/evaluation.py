"""The recipe `eval`: samples completions of tasks and scores them, without training."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from postlude.generate.distributed import DistributedEngine, ReplicatedGenerator
from postlude.hf.load import load_model
from postlude.hf.read_model import end_tokens, read_generation_config, read_model
from postlude.recipes.checks.environment import environment_checks, evaluation_set_checks
from postlude.recipes.checks.preflight import Check, PreflightInputs, model_checks
from postlude.recipes.checks.servers import ServerUse, server_checks
from postlude.recipes.config import schema
from postlude.recipes.config.recipe_configs import EvalConfig
from postlude.recipes.config.rollout import NativeRollout
from postlude.recipes.dataset import prepare_chat
from postlude.recipes.report.finish import finish_run
from postlude.recipes.report.summary import EVALUATED
from postlude.recipes.rollouts.engine import make_eval_engine
from postlude.recipes.rollouts.evaluation_sets import evaluate, evaluation_metrics, open_sets
from postlude.recipes.rollouts.prompts import PromptEncoding, build_environment
from postlude.recipes.rollouts.sampler import RolloutSampler, trajectory_metrics
from postlude.recipes.rollouts.server_commands import generator_limits
from postlude.recipes.rollouts.trajectory_log import log_trajectories
from postlude.recipes.run.config_changes import allowed_changes
from postlude.recipes.run.directory import check_run, is_rank0, open_run
from postlude.recipes.run.health import warn_of_truncation
from postlude.recipes.run.machine_info import machine_info
from postlude.recipes.run.monitor import RunMonitor
from postlude.recipes.run.outcome import RunOutcome
from postlude.recipes.run.progress import EVALUATION, RunProgress
from postlude.recipes.run.runtime import LOCAL_RUNTIME, Runtime
from postlude.recipes.run.schedule import StepTimer
from postlude.recipes.run.split import Split, split_of_model
from postlude.recipes.run.start_mode import RESUME_NEWEST, StartMode
from postlude.recipes.sequence_limit import SequenceLimit, sequence_limit
from postlude.rollout.conversations import Trajectory
from postlude.rollout.tasks import Task, Tasks, last_tasks
from postlude.world.agreement import on_rank0

CHUNK = 256  # tasks sampled at a time


def checks(inputs: PreflightInputs) -> list[Check]:
    config: EvalConfig = inputs.config
    return [
        *model_checks(inputs),
        *environment_checks(inputs, config.environment, config.sampling),
        *evaluation_set_checks(inputs, config.sets, config.sampling, "sets"),
        *server_checks(inputs, config.rollout, config.sampling, ServerUse(gets_weights=False)),
    ]


def run(
    config: EvalConfig, device: str = "cpu", start_mode: StartMode = RESUME_NEWEST, runtime: Runtime = LOCAL_RUNTIME
) -> RunOutcome:
    """Evaluates `config`. Every rank calls it. An evaluation that was interrupted starts again from the beginning."""
    if start_mode.resume_from is not None:
        raise ValueError("an evaluation has no checkpoints; leave out --resume-from.")
    plain = schema.plain(config)
    changes = replace(allowed_changes(config), files=dict)
    check_run(config.run, plain, changes=changes)
    progress, samples = RunProgress(), config.samples_per_prompt
    with ExitStack() as resources, progress.until_end():
        monitor = resources.enter_context(closing(RunMonitor(config.run, config.observe, progress)))
        timer = StepTimer(progress, monitor.recorder)
        tokenizer = config.load_tokenizer()
        limit = sequence_limit(config, read_model(config.model)[1])
        encoding = PromptEncoding(tokenizer, config.sampling, limit)
        environment = build_environment(config.environment, config.seed, encoding, runtime.pool_factory)
        resources.enter_context(closing(environment))
        if environment.uses_chat:
            prepare_chat(tokenizer, str(config.model))
        sets = open_sets(
            config.sets,
            encoding,
            seed=config.seed,
            pool_factory=runtime.pool_factory,
            split_by=config.split_by,
            close_at_end=lambda set_environment: resources.enter_context(closing(set_environment)),
        )
        split = split_of_model(config.model)
        tasks = _tasks(config, environment.tasks, config.tasks, split)
        if split is not None:
            sets = [
                replace(
                    entry, tasks=_tasks(config, entry.source.environment.tasks, config.sets[entry.name].tasks, split)
                )
                for entry in sets
                if entry.source is not None  # which only held-out tasks of training lack
            ]
        directory = resources.enter_context(open_run(config.run, plain, changes=changes, loggers=config.loggers))
        resources.enter_context(closing(monitor))  # before the directory is released
        monitor.watch(directory)
        directory.resume_at(-1)
        directory.record_start(step=0, command=start_mode.command, **machine_info(torch.device(device)))
        engine = resources.enter_context(closing(_make_engine(config, tokenizer, device, limit, runtime)))
        rollout_sampler = RolloutSampler(engine, environment, encoding, seed=config.seed, timer=timer)
        resources.enter_context(closing(rollout_sampler))
        count = len(tasks)
        trajectories: list[Trajectory] = []  # on rank 0

        def sample_chunk(first: int) -> dict[str, Any]:
            trajectories.extend(
                rollout_sampler.sample(tasks[first : first + CHUNK], samples, step=0, first_group=first)
            )
            return trajectory_metrics(trajectories)

        title, progress.phase, progress.activity = f"eval {config.model}", EVALUATED, EVALUATION
        progress.start(title, 0, count, "task")
        with runtime.view(count, title=title, unit="task") as live:
            for first in range(0, count, CHUNK):
                metrics = rollout_sampler.sync_and_run_on_rank0(partial(sample_chunk, first))
                progress.step = min(first + CHUNK, count)
                live.update(progress.step, metrics)
        if trajectories:
            log_trajectories(directory, 0, trajectories, tokenizer, save_all=config.save_completions)
        metrics = rollout_sampler.sync_and_run_on_rank0(
            lambda: (
                evaluation_metrics(trajectories, samples, config.solved)
                | evaluate(rollout_sampler, sets, step=0)
                | trajectory_metrics(trajectories)
                | rollout_sampler.take_metrics()
            )
        )
        directory.log(0, metrics | timer.take(), phase=EVALUATED)
        if is_rank0():
            warn_of_truncation(metrics, "of the evaluation")
        outcome = RunOutcome("finished", 0)
        progress.end(outcome.status)
    on_rank0(lambda: finish_run(config.run, outcome))
    return outcome


def _tasks(config: EvalConfig, tasks: Tasks, count: int, split: Split | None) -> Sequence[Task]:
    """Returns the tasks to evaluate: the last ones, without those that the run of the model was trained on."""
    if split is None:
        last = last_tasks(tasks, min(count, len(tasks)), config.split_by)
        return [last[index] for index in range(len(last))]
    if split.split_by != config.split_by:
        raise ValueError(
            f"split_by is {config.split_by}, but the run of {config.model} has held out tasks by {split.split_by}. Set "
            f"split_by to {split.split_by}."
        )
    return split.untrained(tasks, count, config.model)


def _make_engine(
    config: EvalConfig, tokenizer: Any, device: str, limit: SequenceLimit, runtime: Runtime
) -> DistributedEngine:
    """Returns a whole model on every rank, or servers."""
    default = torch.bfloat16 if device == "cuda" else torch.float32
    dtype = getattr(torch, config.dtype) if config.dtype else default
    if not isinstance(config.rollout, NativeRollout):
        return make_eval_engine(
            config.rollout, config.model, tokenizer, config.run, dtype, device, limit, runtime.launcher
        )
    draft = config.sampling.draft
    model = load_model(config.model, dtype=dtype, device=device, mtp=draft is not None).eval()
    model.batch_invariant = config.batch_invariant
    eos_tokens = end_tokens(read_generation_config(config.model), tokenizer)
    return ReplicatedGenerator(
        model,
        tokenizer,
        draft=draft,
        eos_tokens=eos_tokens,
        kv_cache_dtype=config.rollout.kv_cache_dtype,
        quantization=config.rollout.quantization,
        **generator_limits(limit),
    )
