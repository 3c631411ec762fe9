"""The training loop that every recipe shares: start or resume, step, log, evaluate, save, end. Start reading here.

A recipe is a config (a `TrainingConfig`) and a `Trainer` whose `train_step` does one step. All randomness derives from
the seed and the step, so a resumed run equals an uninterrupted one, unless servers sample its rollouts.
"""

from __future__ import annotations

import functools
import logging
import signal
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any, Protocol, TypeAlias, TypeVar

import torch
import torch.distributed as dist

from postlude.checks import USER_ERRORS
from postlude.data import Batch
from postlude.engine import Engine
from postlude.engine.checkpoint import checkpoint_problem
from postlude.engine.options import EngineOptions
from postlude.generate.probe import WeightsDiffer
from postlude.hf.export import ModelCard
from postlude.objectives import Objective
from postlude.objectives.loss import Reduction
from postlude.optimizer import OptimizerConfig
from postlude.recipes.config import schema
from postlude.recipes.config.recipe_configs import MASK
from postlude.recipes.config.settings import TrainingConfig
from postlude.recipes.export import BestCheckpoint, export_run, push_run
from postlude.recipes.mtp import MTPLoss, model_source
from postlude.recipes.report.finish import finish_failed_run, finish_run
from postlude.recipes.report.metrics import LOSS, MEMORY, SHARED, SKIPPED, SPEED
from postlude.recipes.run.config_changes import MAY_CHANGE, check_same_config
from postlude.recipes.run.directory import (
    ReadOnlyRun,
    RunDirectory,
    changed_files,
    check_run,
    checkpoint_step,
    flatten,
    is_rank0,
    open_run,
    read_metrics,
)
from postlude.recipes.run.health import MODEL, Health, UnhealthyRun
from postlude.recipes.run.input_files import input_files
from postlude.recipes.run.machine_info import machine_info
from postlude.recipes.run.outcome import EXIT_FAILED, RunFailed, RunOutcome, clear_outcome
from postlude.recipes.run.runtime import LOCAL_RUNTIME, Runtime
from postlude.recipes.run.schedule import StepSchedule
from postlude.recipes.run.signals import StopRequested, StopSignals
from postlude.recipes.run.split import Split
from postlude.recipes.run.start_mode import RESUME_NEWEST, StartMode
from postlude.recipes.run.step_timer import StepTimer
from postlude.recipes.sequence_limit import sequence_limit
from postlude.serving.errors import ServerError
from postlude.world.agreement import on_rank0

LOG = logging.getLogger("postlude")
# Suffixes of checkpoints that a resumed run renames: those newer than the resumed step, and those it cannot read.
LATER, DAMAGED = "later", "damaged"
StepMetrics: TypeAlias = dict[str, Any]
"""Metrics of a step by name: numbers, or lists of numbers."""


class Closable(Protocol):
    """Anything with `close`."""

    def close(self) -> None:
        """Releases what it holds."""


Resource = TypeVar("Resource", bound=Closable)


class Trainer(ABC):
    """A run in progress: its directory, its engine and its current step. Every rank has one.

    The constructor reads and checks everything that the run needs. Before `start_or_resume` nothing is written to the
    run directory but the files of servers that the constructor launches.
    """

    name: str
    """The recipe's name, under which its steps are logged."""
    config: TrainingConfig
    total_steps: int
    """The run ends after this step."""
    evaluate_every: int = 0
    """Steps between evaluations; 0 for none. The first is before the recipe's own steps, and the last at the end."""
    evaluate_at_start: bool = True
    """Whether there is an evaluation before the recipe's own steps."""
    warm_start_steps: int = 0
    """SFT steps before the recipe's own steps."""
    loss_column: str = MASK
    """The column of a batch that marks the tokens to train on; the MTP loss is averaged over it."""

    def __init__(
        self,
        config: TrainingConfig,
        device: str,
        optimizer: OptimizerConfig | None = None,
        runtime: Runtime = LOCAL_RUNTIME,
    ) -> None:
        self.config, self.runtime = config, runtime
        self.resources = ExitStack()  # closed in reverse order by `close`
        self.run: RunDirectory = ReadOnlyRun(config.run)  # until `start_or_resume`
        self.plain_config = schema.plain(config)
        check_same_config(self.plain_config)
        # How the config of an existing run is compared with this one.
        self.config_comparison: dict[str, Any] = {
            "may_change": MAY_CHANGE,
            "defaults": schema.default_values(type(config)),
            "files": functools.cache(functools.partial(input_files, config)),
        }
        check_run(config.run, self.plain_config, **self.config_comparison)
        torch.manual_seed(config.seed)  # only a user's objective may use the global generator
        self.tokenizer: Any = config.load_tokenizer()
        self.with_mtp_loss = MTPLoss(config.mtp, self.loss_column)
        options = EngineOptions.of(
            config,
            optimizer=optimizer or config.optimizer,
            compute_dtype=None if config.dtype is None else getattr(torch, config.dtype),
            device=device,
            critic=config.has_value_head,
            mtp=config.mtp is not None,
            batch_invariant=config.batch_invariant,
        )
        self.engine = Engine(model_source(config.model, config.mtp), **vars(options))
        self.limit = sequence_limit(config, self.engine.config)
        self.step = 0
        self.saved_step = 0
        self.resumed_step: int | None = None  # None until `start_or_resume` has finished
        self.state_before_step: dict[str, Any] | None = None  # not None during a step
        self.unlogged_step: dict[str, Any] | None = None  # "phase" and "metrics" of a step, until it is evaluated
        self.initial_weight_norm = 0.0
        self.resume_hint = ""
        self.stop_signal = 0
        self.signals = StopSignals(verbose=is_rank0())
        self.reductions: dict[str, Reduction] = {}  # how each metric is combined over minibatches
        self.layer_vectors: dict[str, list[float]] = {}  # sums over the step's minibatches
        self.health = Health(config.limits, config.max_skipped_steps, verbose=is_rank0())
        self.timer = StepTimer()

    @classmethod
    def run_config(
        cls, config: Any, device: str = "cpu", start_mode: StartMode = RESUME_NEWEST, runtime: Runtime = LOCAL_RUNTIME
    ) -> RunOutcome:
        """Starts or resumes the run of `config`, and returns when it has ended. Every rank calls it."""
        return run_training(cls(config, device, runtime=runtime), start_mode)

    @property
    def phase(self) -> str:
        """The name under which the next step is logged: "sft" in a warm start, else the recipe's `name`."""
        return self.name

    @abstractmethod
    def train_step(self) -> StepMetrics:
        """Runs the next training step, of one or more optimizer steps, and returns its metrics."""

    @abstractmethod
    def evaluate(self) -> dict[str, float]:
        """Returns metrics of the current model on held-out data."""

    def split(self) -> Split | None:
        """Returns which tasks are held out and which there are, for the run directory; None where nothing is."""
        return None

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """Returns the JSON-serialisable state that a checkpoint holds besides the engine."""

    @abstractmethod
    def restore(self, checkpoint: Path) -> None:
        """Loads a checkpoint: the engine, and what `state` returned."""

    def load_engine(self, checkpoint: Path) -> dict[str, Any]:
        """Loads the engine and the step of a checkpoint. Returns the checkpoint's `extra` dict."""
        extra = self.engine.load(checkpoint)
        # Checkpoints of earlier versions call it "first_norm".
        self.initial_weight_norm = extra.get("initial_weight_norm", extra.get("first_norm", 0.0))
        skipped = extra.get("skipped", {})  # in checkpoints of earlier versions a number
        self.step, self.health.skipped = extra["step"], dict(skipped) if isinstance(skipped, dict) else {MODEL: skipped}
        self.unlogged_step = extra.get("unlogged_step")
        return extra

    def close_at_end(self, resource: Resource) -> Resource:
        """Returns `resource`, which `close` will close."""
        return self.resources.enter_context(closing(resource))

    @contextmanager
    def close_on_error(self) -> Iterator[None]:
        """Closes all resources if the block raises. A subclass's constructor uses it."""
        try:
            yield
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Closes the run directory and all resources."""
        with closing(self.run):
            self.resources.close()

    def start_or_resume(self, start_mode: StartMode) -> None:
        """Opens the run directory and loads a checkpoint. A new run without a warm start is evaluated first."""
        # Raises if the requested checkpoint does not exist, before anything is written.
        splits: list[Split | None] = []  # on rank 0
        on_rank0(lambda: splits.append(self._checked_split(start_mode.resume_from)))
        self.run = open_run(self.config.run, self.plain_config, loggers=self.config.loggers, **self.config_comparison)
        self.resume_hint = (
            f"resume with: {start_mode.command}" if start_mode.command else "the same config resumes the run"
        )
        checkpoint = self._restore_newest(start_mode.resume_from)
        step = -1 if checkpoint is None else checkpoint_step(checkpoint)  # -1: before the evaluation of step 0
        if step > self.total_steps:
            raise ValueError(
                f"{self.run.path} is at step {step} already, but the run ends at step {self.total_steps}. Raise steps, "
                "or go back with --resume-from."
            )
        if is_rank0():
            clear_outcome(self.run.path)
            if changed := changed_files(self.run.path, self.config_comparison["files"]):
                LOG.warning("%s changed since the run was last started; the run uses the new files.", changed)
        saved = self.run.checkpoints(incomplete=True)
        self.run.rename_checkpoints([path for path in saved if checkpoint_step(path) > step], LATER)
        self.run.resume_at(step)
        for split in splits:
            if split is not None:
                split.write(self.run.path)
        self.run.record_start(
            step=self.step,
            command=start_mode.command,
            **machine_info(self.engine.device),
            files=self.config_comparison["files"]() if is_rank0() else {},
        )
        self.saved_step = self.step
        self.best = BestCheckpoint(kept=self.config.export == "best", after=self.warm_start_steps)
        self.best.resume(self.run)
        if checkpoint is None:
            norm = self.engine.weight_norm()
            self.initial_weight_norm = self.health.check_initial_weights(norm, self.config.model)
            if self.schedule.evaluates_after(self.step) and (metrics := self._evaluate()):
                self.run.log(0, metrics | self.timer.take(), phase="start")  # the evaluation before the first step
        elif self.unlogged_step is not None:
            if on_rank0(lambda: any(line["step"] == step for line in read_metrics(self.run.path))):
                self.unlogged_step = None  # it was evaluated after it was saved
            else:
                self._evaluate_and_log()
        self.resumed_step = self.step
        self._sync_stop_signal_and_memory()

    def _restore_newest(self, step: int | None) -> Path | None:
        """Loads the checkpoint of `step`, or the newest. A damaged one is renamed, and the previous one is loaded."""
        damaged: list[Path] = []
        for checkpoint in on_rank0(lambda: self.run.checkpoints_to_try(step)):
            try:
                self.restore(checkpoint)
            except (OSError, ValueError):
                problem = on_rank0(functools.partial(checkpoint_problem, checkpoint))
                if not problem or step is not None:
                    raise
                damaged.append(checkpoint)
                if is_rank0():
                    LOG.warning("%s The checkpoint before it is loaded, and later steps are repeated.", problem)
                continue
            self.run.rename_checkpoints(damaged, DAMAGED)
            return checkpoint
        if damaged:
            raise ValueError(
                f"every checkpoint of {self.run.path} is damaged; {damaged[0].name} is the newest. Start again in "
                "another directory (--run)."
            )
        return None

    def _checked_split(self, step: int | None) -> Split | None:
        """Returns the split. Raises ValueError if a resumed run has another, or no checkpoint of `step`."""
        checkpoints, split = self.run.checkpoints_to_try(step), self.split()
        if checkpoints and split is not None:
            split.check_same(self.run.path)
        return split

    def train_and_log_step(self) -> StepMetrics:
        """Runs `train_step`, saves and evaluates if due, and logs the metrics of both. Returns them.

        An evaluation may be long, or fail: the step is saved before it, or can be, and a resumed run evaluates.
        """
        phase, self.state_before_step, self.layer_vectors = self.phase, self.state(), {}
        if self.engine.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.engine.device)
        metrics = self.train_step()
        self.step, self.state_before_step = self.step + 1, None
        if "tokens" in metrics:
            metrics[SPEED] = metrics["tokens"] / sum(self.timer.seconds.values())
        metrics |= self._sync_stop_signal_and_memory() | self.timer.take()
        self.run.log_layers(self.step, self.layer_vectors)
        save_due = self.schedule.saves_after(self.step)
        if self.schedule.evaluates_after(self.step):
            self.unlogged_step = {"phase": phase, "metrics": flatten(metrics)}
            if save_due:
                self.save()
            if self.stop_signal:  # `stop` saves, and the resumed run evaluates
                return metrics
            metrics |= self._evaluate_and_log()
            save_due = save_due or self.best.step == self.step
        else:
            self.run.log(self.step, metrics, phase=phase)
        self.health.check_step(metrics, self.step, self.save)
        if save_due:
            self.save()
        return metrics

    def train_batch(self, batch: Batch, objective: Objective) -> StepMetrics:
        """Runs one optimizer step on a batch; a training step may have several. Returns its metrics."""
        with self.timer("train"):
            result = self.engine.forward_backward(batch, self.with_mtp_loss(objective))
            update = self.engine.optimizer_step()
        self.reductions.update(result.reductions)
        for name, vector in result.layer_vectors.items():
            sums = self.layer_vectors.get(name, [0.0] * len(vector))
            self.layer_vectors[name] = [sum(pair) for pair in zip(sums, vector, strict=True)]
        self.health.check_update(result.loss, update.skipped, self.step + 1)
        metrics = {LOSS: result.loss, **result.metrics, "grad_norm": update.grad_norm, "lr": update.lr}
        return metrics | {SKIPPED: float(update.skipped), "tokens": result.tokens, SHARED: result.shared_tokens}

    def save(self) -> None:
        """Writes a checkpoint of the last finished step, if there is none. Raises `UnhealthyRun` if weights are bad."""
        if self.saved_step != self.step:
            self._write_checkpoint()
        self.run.prune(self.config.keep_checkpoints, self.best.step)

    def _write_checkpoint(self) -> None:
        self.health.check_weights(self.engine.weight_norm(), self.initial_weight_norm, self.step)
        extra = {"step": self.step, "initial_weight_norm": self.initial_weight_norm, "skipped": self.health.skipped}
        extra |= self.state_before_step or self.state()
        if self.unlogged_step is not None:
            extra["unlogged_step"] = self.unlogged_step
        self.run.sync()
        self.engine.save(self.run.checkpoint(self.step), extra=extra, tokenizer=self.tokenizer)
        self.saved_step = self.step

    def ends_early(self, metrics: StepMetrics) -> bool:
        """Calls the user's `on_step` with a finished step. Returns whether it ends the run; then the step is saved."""
        on_step = self.runtime.on_step
        if on_step is None or not on_rank0(lambda: bool(on_step(self.step, metrics))):
            return False
        self.save()
        return True

    @property
    def schedule(self) -> StepSchedule:
        """Which steps are evaluated and saved."""
        return StepSchedule(
            self.total_steps,
            self.warm_start_steps,
            self.evaluate_every,
            self.evaluate_at_start,
            self.config.save_every,
            bool(self.config.export),
        )

    def _evaluate_and_log(self) -> StepMetrics:
        """Evaluates the model after the step that is not logged yet, and logs both. Returns the new metrics."""
        metrics: StepMetrics = self._evaluate() if self.evaluate_every else {}
        metrics |= self._sync_stop_signal_and_memory() | self.timer.take()
        self._log_unlogged_step(metrics)
        self.best.update(self.run, self.step, metrics)
        return metrics

    def _evaluate(self) -> dict[str, float]:
        with self.timer("evaluation"):
            return self.evaluate()

    def _log_unlogged_step(self, metrics: StepMetrics) -> None:
        step, self.unlogged_step = self.unlogged_step, None
        if step is not None:
            self.run.log(self.step, step["metrics"] | metrics, phase=step["phase"])

    def _sync_stop_signal_and_memory(self) -> dict[str, float]:
        """Shares the stop signal with all ranks. Returns the largest GPU memory of any rank."""
        device = self.engine.device
        on_gpu = device.type == "cuda"
        memory = torch.cuda.max_memory_allocated(device) / 2**30 if on_gpu else 0.0
        shared = torch.tensor([float(self.signals.received), memory], dtype=torch.float64, device=device)
        dist.all_reduce(shared, op=dist.ReduceOp.MAX)
        stop_signal, most_memory = shared.tolist()
        self.stop_signal = int(stop_signal)
        return {MEMORY: most_memory} if on_gpu else {}

    def finish(self) -> RunOutcome:
        """Exports the model and writes the report. Raises `UnhealthyRun` if the last optimizer step was skipped."""
        self.health.check_last_update(self.step)
        self.run.sync()
        self.engine.finish_saving()
        if self.config.export:
            export_run(self)
        outcome = self._end(RunOutcome("finished", self.step))
        push_run(self)  # last, so that no other rank waits for the upload
        return outcome

    def export(self, path: Path, card: ModelCard | None) -> None:
        """Writes the trained model. Every rank calls it."""
        self.engine.export_model(path, tokenizer=self.tokenizer, card=card, overwrite=True)

    def stop(self, request: StopRequested | None = None) -> RunOutcome:
        """Saves and ends the run after a signal. A step that `request` interrupted is repeated on resume."""
        if request is not None:
            self.stop_signal = request.number
        self.save()
        stopped_at = f"after step {self.step}, which is saved" if self.step else "before its first step"
        if self.unlogged_step is not None:
            stopped_at += "; resuming evaluates it"
        message = f"{signal.Signals(self.stop_signal).name} ended the run {stopped_at}; {self.resume_hint}"
        return self._end(RunOutcome("interrupted", self.step, message, 128 + self.stop_signal))

    def fail(self, message: str) -> RunOutcome:
        """Ends a run that cannot continue. Nothing is exported; the message says which checkpoint can be resumed."""
        self._log_unlogged_step({})
        self.engine.finish_saving()
        return self._end_as_failed(message)

    def _end_as_failed(self, message: str) -> RunOutcome:
        message = f"{message} {on_rank0(self._checkpoint_status)}"
        return self._end(RunOutcome("failed", self.step, message, EXIT_FAILED))

    def fail_in_rollout(self, error: ServerError | WeightsDiffer) -> RunOutcome:
        """Saves the finished steps and ends a run whose servers failed, or whose generator has wrong weights."""
        message = str(error)
        try:
            self.save()
            self.engine.finish_saving()
        except OSError as save_error:  # for example, a full disk
            message = f"{message} The steps since the last checkpoint could not be saved: {save_error}."
        return self._end_as_failed(message)

    def _checkpoint_status(self) -> str:
        checkpoints = self.run.checkpoints()
        if not checkpoints:
            return "No checkpoint was saved, and nothing was exported."
        if problem := checkpoint_problem(checkpoints[-1]):
            return f"{problem} Nothing was exported."
        newest = f"{checkpoints[-1].name} is complete and its weights are finite"
        return f"{newest}: {self.resume_hint}. Nothing was exported."

    def _end(self, outcome: RunOutcome) -> RunOutcome:
        if self.step:
            on_rank0(lambda: finish_run(self.config.run, outcome))
        return outcome


def run_training(trainer: Trainer, start_mode: StartMode = RESUME_NEWEST) -> RunOutcome:
    """Runs or resumes until the last step, a signal or a failure. Every rank calls it."""
    with closing(trainer), trainer.signals:
        try:
            trainer.start_or_resume(start_mode)
            title = f"{trainer.name} {trainer.config.model}"
            start, phases = trainer.step, trainer.schedule.phases
            with trainer.runtime.view(trainer.total_steps, title=title, start=start, phases=phases) as display:
                trainer.signals.show_notice = display.show_notice
                while trainer.step < trainer.total_steps and not trainer.stop_signal:
                    display.set_phase(trainer.phase)
                    metrics = trainer.train_and_log_step()
                    display.update(trainer.step, metrics)
                    if trainer.ends_early(metrics):
                        break
            return trainer.stop() if trainer.stop_signal else trainer.finish()
        except UnhealthyRun as reason:
            return trainer.fail(f"{reason}.")
        except StopRequested as request:
            return trainer.stop(request)
        except BaseException as error:
            if trainer.resumed_step is None or not trainer.step:  # nothing to report yet
                raise
            if isinstance(error, ServerError | WeightsDiffer):
                return trainer.fail_in_rollout(error)
            finish_failed_run(trainer.config.run, trainer.step, error)
            # After the first step an error is no mistake in the config: report a failed run.
            if isinstance(error, USER_ERRORS) and trainer.step > trainer.resumed_step:
                failure = f"{type(error).__name__}: {error}".removesuffix(".")
                raise RunFailed(
                    f"after step {trainer.step} the run failed: {failure}. When that is fixed, {trainer.resume_hint}"
                ) from error
            raise
