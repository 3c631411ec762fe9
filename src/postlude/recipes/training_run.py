"""The training loop that every recipe shares: start or resume, step, log, evaluate, save, end. Start reading here.

A recipe is a config and a `Trainer` whose `train_step` does one step. `TrainingRun` is a trainer in its run directory.
"""

from __future__ import annotations

import functools
import logging
import signal
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from postlude.checks import USER_ERRORS
from postlude.generate.probe import WeightsDiffer
from postlude.recipes.export import BestCheckpoint, export_run, push_run
from postlude.recipes.report.finish import finish_failed_run, finish_run
from postlude.recipes.report.metrics import MEMORY, SPEED
from postlude.recipes.run.config_changes import describe_files
from postlude.recipes.run.directory import changed_files, checkpoint_step, is_rank0, open_run
from postlude.recipes.run.files import flatten, read_metrics
from postlude.recipes.run.health import UnhealthyRun
from postlude.recipes.run.machine_info import machine_info
from postlude.recipes.run.outcome import EXIT_FAILED, RunFailed, RunOutcome, clear_outcome
from postlude.recipes.run.progress import CHECKPOINT, EVALUATION, EXPORT, PUSH, STEP
from postlude.recipes.run.schedule import StepSchedule
from postlude.recipes.run.signals import StopRequested
from postlude.recipes.run.split import Split
from postlude.recipes.run.start_mode import RESUME_NEWEST, StartMode
from postlude.recipes.trainer import StepMetrics, Trainer
from postlude.serving.errors import ServerError
from postlude.world.agreement import on_rank0

LOG = logging.getLogger("postlude")
# Suffixes of checkpoints that a resumed run renames: those newer than the resumed step, and those it cannot read.
LATER, DAMAGED = "later", "damaged"


def run_training(trainer: Trainer, start_mode: StartMode = RESUME_NEWEST) -> RunOutcome:
    """Runs or resumes until the last step, a signal or a failure. Every rank calls it."""
    run = TrainingRun(trainer, start_mode)
    with closing(trainer), trainer.signals, trainer.progress.until_end():
        try:
            run.start_or_resume()
            title = f"{trainer.name} {trainer.config.model}"
            start, phases = trainer.step, run.schedule.phases
            trainer.progress.start(title, start, trainer.total_steps)
            with trainer.runtime.view(trainer.total_steps, title=title, start=start, phases=phases) as display:
                trainer.signals.show_notice = display.show_notice
                while trainer.step < trainer.total_steps and not run.stop_signal:
                    display.set_phase(trainer.phase)
                    metrics = run.train_and_log_step()
                    display.total = trainer.total_steps
                    display.update(trainer.step, metrics)
                    if run.ends_early(metrics):
                        break
            return run.stop() if run.stop_signal else run.finish()
        except UnhealthyRun as reason:
            return run.fail(f"{reason}.")
        except StopRequested as request:
            return run.stop(request)
        except BaseException as error:
            if run.resumed_step is None or not trainer.step:  # nothing to report yet
                raise
            if isinstance(error, ServerError | WeightsDiffer):
                return run.fail_in_rollout(error)
            finish_failed_run(trainer.config.run, trainer.step, error)
            # After the first step an error is no mistake in the config: report a failed run.
            if isinstance(error, USER_ERRORS) and trainer.step > run.resumed_step:
                failure = f"{type(error).__name__}: {error}".removesuffix(".")
                raise RunFailed(
                    f"after step {trainer.step} the run failed: {failure}. When that is fixed, {run.resume_hint}"
                ) from error
            raise


class TrainingRun:
    """A trainer in its run directory. Every rank has one. Before `start_or_resume` nothing is written."""

    def __init__(self, trainer: Trainer, start_mode: StartMode = RESUME_NEWEST) -> None:
        self.trainer, self.config, self.start_mode = trainer, trainer.config, start_mode
        self.resume_hint = (
            f"resume with: {start_mode.command}" if start_mode.command else "the same config resumes the run"
        )
        self.best = BestCheckpoint(kept=self.config.export == "best", after=trainer.warm_start_steps)
        self.schedule: StepSchedule  # once a checkpoint is loaded, after which there may be more steps than planned
        self.saved_step = 0
        self.resumed_step: int | None = None  # None until `start_or_resume` has finished
        self.state_before_step: dict[str, Any] | None = None  # not None during a step
        self.unlogged_step: dict[str, Any] | None = None  # "phase" and "metrics" of a step, until it is evaluated
        self.stop_signal = 0

    def start_or_resume(self) -> None:
        """Opens the run directory and loads a checkpoint. A new run without a warm start is evaluated first."""
        trainer, config, resume_from = self.trainer, self.config, self.start_mode.resume_from
        # Raises if the requested checkpoint does not exist, before anything is written.
        splits: list[Split | None] = []  # on rank 0
        on_rank0(lambda: splits.append(self._checked_split(resume_from)))
        directory = open_run(config.run, trainer.plain_config, loggers=config.loggers, changes=trainer.allowed_changes)
        trainer.run = directory
        trainer.monitor.watch(directory)
        checkpoint = self._restore_newest(resume_from)
        self.schedule = StepSchedule(
            trainer.total_steps,
            trainer.warm_start_steps,
            trainer.evaluate_every,
            trainer.evaluate_at_start,
            config.save_every,
            bool(config.export),
        )
        step = -1 if checkpoint is None else checkpoint_step(checkpoint)  # -1: before the evaluation of step 0
        self._check_length(step)  # with epochs, the length is known only now
        files = trainer.allowed_changes.files
        if is_rank0():
            clear_outcome(directory.path)
            if changed := changed_files(directory.path, files):
                LOG.warning("%s changed since the run was last started, and is used as it is.", describe_files(changed))
        saved = directory.checkpoints(incomplete=True)
        directory.rename_checkpoints([path for path in saved if checkpoint_step(path) > step], LATER)
        directory.resume_at(step)
        for split in splits:
            if split is not None:
                split.write(directory.path)
        directory.record_start(
            step=trainer.step,
            command=self.start_mode.command,
            **machine_info(trainer.engine.device),
            files=files() if is_rank0() else {},
        )
        self.saved_step = trainer.step
        self.best.resume(directory)
        if checkpoint is None:
            trainer.health.set_initial_weights(trainer.engine.weight_norm(), config.model)
            if self.schedule.evaluates_after(trainer.step) and (metrics := self._evaluate()):
                directory.log(0, metrics | trainer.timer.take(), phase="start")  # the evaluation before the first step
        elif self.unlogged_step is not None:
            if on_rank0(lambda: any(line["step"] == step for line in read_metrics(directory.path))):
                self.unlogged_step = None  # it was evaluated after it was saved
            else:
                self._evaluate_and_log()
        self.resumed_step = trainer.step
        self._sync_stop_signal_and_memory()

    def _restore_newest(self, step: int | None) -> Path | None:
        """Loads the checkpoint of `step`, or the newest. A damaged one is renamed, and the previous one is loaded."""
        directory = self.trainer.run
        damaged: list[Path] = []
        for checkpoint in on_rank0(lambda: directory.checkpoints_to_try(step)):
            try:
                self.unlogged_step = self.trainer.restore(checkpoint).get("unlogged_step")
            except (OSError, ValueError):
                problem = on_rank0(functools.partial(self.trainer.checkpoint_problem, checkpoint))
                if not problem or step is not None:
                    raise
                damaged.append(checkpoint)
                if is_rank0():
                    LOG.warning("%s The checkpoint before it is loaded, and later steps are repeated.", problem)
                continue
            directory.rename_checkpoints(damaged, DAMAGED)
            return checkpoint
        if damaged:
            raise ValueError(
                f"every checkpoint of {directory.path} is damaged; {damaged[0].name} is the newest. Start again in "
                "another directory (--run)."
            )
        return None

    def _checked_split(self, step: int | None) -> Split | None:
        """Returns the split. Raises ValueError if a resumed run has another, no checkpoint of `step`, or more steps."""
        directory = self.trainer.run
        checkpoints, split = directory.checkpoints_to_try(step), self.trainer.split()
        if checkpoints and self.trainer.plain_config.get("steps") is not None:
            self._check_length(checkpoint_step(checkpoints[0]))
        if checkpoints and split is not None:
            split.check_same(directory.path)
        return split

    def _check_length(self, step: int) -> None:
        """Raises ValueError if the run ends before `step`, which its checkpoint has made."""
        if step > self.trainer.total_steps:
            raise ValueError(
                f"{self.trainer.run.path} is at step {step} already, but the run ends at step "
                f"{self.trainer.total_steps}. Raise steps or epochs, or go back with --resume-from."
            )

    def train_and_log_step(self) -> StepMetrics:
        """Runs `train_step`, saves and evaluates if due, and logs the metrics of both. Returns them.

        An evaluation may be long, or fail: the step is saved before it, or can be, and a resumed run evaluates.
        """
        trainer = self.trainer
        phase, self.state_before_step, trainer.layer_vectors = trainer.phase, trainer.state(), {}
        if trainer.engine.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(trainer.engine.device)
        trainer.progress.phase = phase
        with trainer.progress.during(STEP), trainer.timer.step():
            metrics = trainer.train_step()
        trainer.step, self.state_before_step = trainer.step + 1, None
        trainer.progress.step, trainer.progress.total = trainer.step, trainer.total_steps
        self.schedule = replace(self.schedule, total=trainer.total_steps)  # prompts that were replaced may shorten it
        if "tokens" in metrics:
            metrics[SPEED] = metrics["tokens"] / sum(trainer.timer.seconds.values())
        metrics |= self._sync_stop_signal_and_memory() | trainer.timer.take()
        trainer.run.log_layers(trainer.step, trainer.layer_vectors)
        save_due = self.schedule.saves_after(trainer.step)
        if self.schedule.evaluates_after(trainer.step):
            self.unlogged_step = {"phase": phase, "metrics": flatten(metrics)}
            if save_due:
                self.save()
            if self.stop_signal:  # `stop` saves, and the resumed run evaluates
                return metrics
            metrics |= self._evaluate_and_log()
            save_due = save_due or self.best.step == trainer.step
        else:
            trainer.run.log(trainer.step, metrics, phase=phase)
        trainer.health.check_step(metrics, trainer.step, self.save)
        if save_due:
            self.save()
        return metrics

    def _evaluate_and_log(self) -> StepMetrics:
        """Evaluates the model after the step that is not logged yet, and logs both. Returns the new metrics."""
        metrics: StepMetrics = self._evaluate() if self.trainer.evaluate_every else {}
        metrics |= self._sync_stop_signal_and_memory() | self.trainer.timer.take()
        self._log_unlogged_step(metrics)
        self.best.update(self.trainer.run, self.trainer.step, metrics)
        return metrics

    def _evaluate(self) -> dict[str, float]:
        with self.trainer.progress.during(EVALUATION), self.trainer.timer("evaluation"):
            return self.trainer.evaluate()

    def _log_unlogged_step(self, metrics: StepMetrics) -> None:
        step, self.unlogged_step = self.unlogged_step, None
        if step is not None:
            self.trainer.run.log(self.trainer.step, step["metrics"] | metrics, phase=step["phase"])

    def _sync_stop_signal_and_memory(self) -> dict[str, float]:
        """Shares the stop signal with all ranks. Returns the largest GPU memory of any rank."""
        device = self.trainer.engine.device
        on_gpu = device.type == "cuda"
        memory = torch.cuda.max_memory_allocated(device) / 2**30 if on_gpu else 0.0
        shared = torch.tensor([float(self.trainer.signals.received), memory], dtype=torch.float64, device=device)
        dist.all_reduce(shared, op=dist.ReduceOp.MAX)
        stop_signal, most_memory = shared.tolist()
        self.stop_signal = int(stop_signal)
        return {MEMORY: most_memory} if on_gpu else {}

    def save(self) -> None:
        """Writes a checkpoint of the last finished step, if there is none. Raises `UnhealthyRun` if weights are bad."""
        if self.saved_step != self.trainer.step:
            with self.trainer.progress.during(CHECKPOINT):
                self._write_checkpoint()
        self.trainer.prune_checkpoints(self.best.step)

    def _write_checkpoint(self) -> None:
        trainer = self.trainer
        trainer.health.check_weights(trainer.engine.weight_norm(), trainer.step)
        extra = {"step": trainer.step, **trainer.health.state(), **(self.state_before_step or trainer.state())}
        if self.unlogged_step is not None:
            extra["unlogged_step"] = self.unlogged_step
        trainer.run.sync()
        trainer.save_models(trainer.run.checkpoint(trainer.step), extra)
        self.saved_step = trainer.step

    def ends_early(self, metrics: StepMetrics) -> bool:
        """Calls the user's `on_step` with a finished step. Returns whether it ends the run; then the step is saved."""
        on_step = self.trainer.runtime.on_step
        if on_step is None or not on_rank0(lambda: bool(on_step(self.trainer.step, metrics))):
            return False
        self.save()
        return True

    def finish(self) -> RunOutcome:
        """Exports the model and writes the report. Raises `UnhealthyRun` if the last optimizer step was skipped."""
        trainer = self.trainer
        trainer.health.check_last_update(trainer.step)
        trainer.run.sync()
        with trainer.progress.during(CHECKPOINT):
            trainer.engine.finish_saving()
        if self.config.export:
            with trainer.progress.during(EXPORT):
                export_run(trainer, self.best)
        outcome = self._end(RunOutcome("finished", trainer.step))
        with trainer.progress.during(PUSH):
            push_run(trainer, self.best)  # last, so that no other rank waits for the upload
        return outcome

    def stop(self, request: StopRequested | None = None) -> RunOutcome:
        """Saves and ends the run after a signal. A step that `request` interrupted is repeated on resume."""
        if request is not None:
            self.stop_signal = request.number
        self.save()
        step = self.trainer.step
        stopped_at = f"after step {step}, which is saved" if step else "before its first step"
        if self.unlogged_step is not None:
            stopped_at += "; resuming evaluates it"
        message = f"{signal.Signals(self.stop_signal).name} ended the run {stopped_at}; {self.resume_hint}"
        return self._end(RunOutcome("interrupted", step, message, 128 + self.stop_signal))

    def fail(self, message: str) -> RunOutcome:
        """Ends a run that cannot continue. Nothing is exported; the message says which checkpoint can be resumed."""
        self._log_unlogged_step({})
        self.trainer.engine.finish_saving()
        return self._end_as_failed(message)

    def fail_in_rollout(self, error: ServerError | WeightsDiffer) -> RunOutcome:
        """Saves the finished steps and ends a run whose servers failed, or whose generator has wrong weights."""
        message = str(error)
        try:
            self.save()
            self.trainer.engine.finish_saving()
        except OSError as save_error:  # for example, a full disk
            message = f"{message} The steps since the last checkpoint could not be saved: {save_error}."
        return self._end_as_failed(message)

    def _end_as_failed(self, message: str) -> RunOutcome:
        message = f"{message} {on_rank0(self._checkpoint_status)}"
        return self._end(RunOutcome("failed", self.trainer.step, message, EXIT_FAILED))

    def _checkpoint_status(self) -> str:
        checkpoints = self.trainer.run.checkpoints()
        if not checkpoints:
            return "No checkpoint was saved, and nothing was exported."
        if problem := self.trainer.checkpoint_problem(checkpoints[-1]):
            return f"{problem} Nothing was exported."
        newest = f"{checkpoints[-1].name} is complete and its weights are finite"
        return f"{newest}: {self.resume_hint}. Nothing was exported."

    def _end(self, outcome: RunOutcome) -> RunOutcome:
        self.trainer.progress.end(outcome.status, outcome.message)
        if self.trainer.step:
            on_rank0(lambda: finish_run(self.config.run, outcome))
        return outcome
