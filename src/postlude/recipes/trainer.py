"""What every recipe does around its steps: open the run or continue it, count, log, evaluate, save, report.

A recipe is a config (a `Training`) and a `Trainer` that says what one step is. Everything random follows from the seed
and the step, so a run that is continued is the run that was not interrupted.
"""

from __future__ import annotations

import functools
import logging
import signal
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from postlude.checks import USER_ERRORS
from postlude.data import Batch
from postlude.engine import Engine
from postlude.engine.checkpoint import check
from postlude.hf.load import load_tokenizer
from postlude.hf.model_card import ModelCard
from postlude.objectives import Objective
from postlude.objectives.loss import Reduction
from postlude.optimizer import OptimizerConfig
from postlude.recipes.config import schema
from postlude.recipes.config.recipe_configs import MASK
from postlude.recipes.config.settings import TrainingConfig
from postlude.recipes.mtp import model_source, with_mtp_loss
from postlude.recipes.report.finish import conclude
from postlude.recipes.report.metrics import LOSS, MEMORY, SKIPPED, SPEED
from postlude.recipes.report.summary import read_summary, summary_lines
from postlude.recipes.run.config_changes import MAY_CHANGE, differences, format_value, user_code_hashes
from postlude.recipes.run.directory import (
    ReadOnlyRun,
    RunDirectory,
    changed_code,
    check_run,
    checkpoint_step,
    is_rank0,
    open_run,
    read_config,
)
from postlude.recipes.run.health import Health, UnhealthyRun
from postlude.recipes.run.machine_info import machine_info
from postlude.recipes.run.outcome import FAILED, OutcomeStatus, RunFailed, RunOutcome, clear_outcome
from postlude.recipes.run.phase_timer import PhaseTimer
from postlude.recipes.run.runtime import LOCAL_RUNTIME, Runtime
from postlude.recipes.run.signals import StopRequested, StopSignals
from postlude.recipes.run.start_mode import MODEL, RESUME_NEWEST, StartMode
from postlude.serving.errors import ServerError
from postlude.world.agreement import RankFailure, gather_and_decide, on_rank0

NOT_THE_MODELS = ("run", "model", "loggers")  # settings that say nothing about what was made
LOG = logging.getLogger("postlude")
LATER, DAMAGED = "later", "damaged"  # what checkpoints are called that a run goes on before


class Closes(Protocol):
    """Something that is open until it is closed."""

    def close(self) -> None:
        """Give back what it holds."""
        ...


Closing = TypeVar("Closing", bound=Closes)


class Trainer(ABC):
    """A run in progress: its directory, its engine, and how far it has come. Every rank holds one.

    To make one reads and checks all that the run needs; its directory is not touched before `resume`.
    """

    name: str
    """What the recipe is called."""
    last: int
    """The step after which the run is over."""
    evaluate_every: int = 0
    """Steps between evaluations, which are also made before the first step and after the last; 0 makes none."""
    warm: int = 0
    """Steps that come before those of the recipe itself."""
    learned: str = MASK
    """The column of its batches that marks the tokens to learn."""

    def __init__(
        self,
        config: TrainingConfig,
        device: str,
        optimizer: OptimizerConfig | None = None,
        runtime: Runtime = LOCAL_RUNTIME,
    ) -> None:
        self.settings, self.runtime = config, runtime
        self.held = ExitStack()  # what is open, which `close` gives back, the last first
        self.run: RunDirectory = ReadOnlyRun(config.run)  # until it is resumed
        self.asked = schema.plain(config)
        _check_alike(self.asked)
        check_run(config.run, self.asked, may_change=MAY_CHANGE)
        torch.manual_seed(config.seed)  # nothing here draws from it, but an objective of the user's may
        self.tokenizer: Any = load_tokenizer(config.model)
        self.engine = Engine(
            model_source(config.model, config.mtp),
            layout=config.layout,
            optimizer=optimizer or config.optimizer,
            budget=config.budget,
            compute_dtype=None if config.dtype is None else getattr(torch, config.dtype),
            device=device,
            recompute=config.recompute,
            head=config.head,
            overlap=config.overlap,
            gather_once=config.gather_once,
            weights=config.weights,
            selection_bias_rate=config.selection_bias_rate,
            seed=config.seed,
            mtp=config.mtp is not None,
        )
        self.step = 0
        self.saved = 0  # the step of the last checkpoint
        self.began: int | None = None  # the step that this start went on from, once it has
        self.position: dict[str, Any] | None = None  # what `state` was before the step that is being done
        self.first_norm = 0.0  # of the weights that the run began with
        self.again = ""  # how to go on
        self.asked_to_end = 0  # by which signal
        self.signals = StopSignals(speaks=is_rank0())
        self.reductions: dict[str, Reduction] = {}  # of metrics, as the objective has them
        self.health = Health(config.limits, config.max_skipped_steps, speaks=is_rank0())
        self.timed = PhaseTimer()

    @property
    def phase(self) -> str:
        """What the coming step is a step of."""
        return self.name

    @abstractmethod
    def train_step(self) -> dict[str, Any]:
        """Do the coming step, and say how it went."""

    @abstractmethod
    def evaluate(self) -> dict[str, float]:
        """Measure the model as it is on what is held out."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """What a checkpoint must hold besides the engine, as JSON."""

    @abstractmethod
    def restore(self, checkpoint: Path) -> None:
        """Load a checkpoint: the engine, and what `state` said."""

    def hold(self, opened: Closing) -> Closing:
        """Keep something that was opened until `close`."""
        return self.held.enter_context(closing(opened))

    @contextmanager
    def opening(self) -> Iterator[None]:
        """Around what a trainer opens as it is made: where some of it fails, what is open is given back."""
        try:
            yield
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Give back what the run holds."""
        with closing(self.run):
            self.held.close()

    def resume(self, start_mode: StartMode) -> None:
        """Take the directory, and go on from a checkpoint. A run without one begins by measuring where it starts."""
        on_rank0(lambda: self._candidates(start_mode.resume_from))  # one that is not there touches nothing
        self.run = open_run(self.settings.run, self.asked, may_change=MAY_CHANGE, loggers=self.settings.loggers)
        self.again = f"go on with: {start_mode.command}" if start_mode.command else "the same config goes on"
        checkpoint = self._restored(start_mode.resume_from)
        at = -1 if checkpoint is None else checkpoint_step(checkpoint)
        if at > self.last:
            raise ValueError(
                f"{self.run.path} is at step {at} already, but is to end at step {self.last}. Raise steps, or go back "
                "with --resume-from."
            )
        if is_rank0():
            clear_outcome(self.run.path)
            if changed := changed_code(self.run.path, self.asked):
                LOG.warning("%s was changed since the run was last started; it goes on with the new code.", changed)
        self.run.set_aside([path for path in self.run.checkpoints() if checkpoint_step(path) > at], LATER)
        self.run.resume_at(at)
        self.run.record(
            step=self.step,
            command=start_mode.command,
            **machine_info(self.engine.device),
            code=user_code_hashes(self.asked),
        )
        if checkpoint is None:
            self.first_norm = self.engine.weight_norm()
            if found := self._evaluated():
                self.run.log(0, found | self.timed.take(), phase="start")
        self.saved, self.began = self.step, self.step
        self._agree()

    def _restored(self, step: int | None) -> Path | None:
        """Load the checkpoint of a step, or the newest. One that is damaged is set aside for the one before it."""
        damaged: list[Path] = []
        for checkpoint in on_rank0(lambda: self._candidates(step)):
            try:
                self.restore(checkpoint)
            except (OSError, ValueError):
                damage = on_rank0(functools.partial(_damage, checkpoint))
                if not damage or step is not None:
                    raise
                damaged.append(checkpoint)
                if is_rank0():
                    LOG.warning("%s The one before it is taken, and later steps are done again.", damage)
                continue
            self.run.set_aside(damaged, DAMAGED)
            return checkpoint
        if damaged:
            raise ValueError(
                f"no checkpoint of {self.run.path} is whole any more, {damaged[0].name} being the newest. Give another "
                "directory (--run) to begin again."
            )
        return None

    def _candidates(self, step: int | None) -> list[Path]:
        found = {checkpoint_step(path): path for path in self.run.checkpoints()}
        if step is None:
            return [found[each] for each in sorted(found, reverse=True)]
        if step not in found:
            there = ", ".join(path.name for path in found.values()) or "none"
            raise ValueError(f"{self.run.path} has no checkpoint of step {step} to go back to; it has {there}.")
        return [found[step]]

    def advance(self) -> dict[str, Any]:
        """One step with all that belongs to it; returns its metrics."""
        phase, self.position = self.phase, self.state()
        metrics = self.train_step()
        self.step, self.position = self.step + 1, None
        if "tokens" in metrics:
            metrics[SPEED] = metrics["tokens"] / sum(self.timed.seconds.values())
        metrics |= self._evaluated()
        metrics |= self._agree()
        metrics |= self.timed.take()
        self.run.log(self.step, metrics, phase=phase)
        self.health.step(metrics, self.step)
        every = self.settings.save_every
        if self.step == self.last or (every and self.step % every == 0):
            self.save()
        return metrics

    def save(self) -> None:
        """Write a checkpoint of the step that is done, unless there is one or its weights are bad."""
        if self.saved == self.step:
            return
        self.health.weights(self.engine.weight_norm(), self.first_norm, self.step)
        extra = {"step": self.step, "first_norm": self.first_norm, **(self.position or self.state())}
        self.engine.save(self.run.checkpoint(self.step), extra=extra, tokenizer=self.tokenizer)
        self.saved = self.step
        self.run.prune(self.settings.keep_checkpoints)

    def learn(self, batch: Batch, objective: Objective) -> dict[str, Any]:
        """One optimizer step on a batch; returns its metrics."""
        with self.timed("train"):
            result = self.engine.forward_backward(batch, with_mtp_loss(objective, self.settings.mtp, self.learned))
            moved = self.engine.optimizer_step()
        self.reductions.update(result.reductions)
        self.health.learned(result.loss, moved.skipped, self.step + 1)
        found = {LOSS: result.loss, **result.metrics, "grad_norm": moved.grad_norm, "lr": moved.lr}
        return found | {SKIPPED: float(moved.skipped), "tokens": result.tokens}

    def finish(self) -> RunOutcome:
        """Write the report, and the model as a directory: Hugging Face's, or Postlude's own where no family fits."""
        self.engine.finish_saving()
        if self.settings.export:
            card = self._card() if is_rank0() else None
            # The directory is the run's own: what an earlier end of it wrote is replaced.
            self.engine.export_model(self.run.path / MODEL, tokenizer=self.tokenizer, card=card, overwrite=True)
        return self._end(RunOutcome("finished", self.step))

    def interrupt(self) -> RunOutcome:
        """Save what is done, for a signal asked to end."""
        self.save()
        done = f"after step {self.step}, which is saved" if self.step else "before its first step"
        return self._ended_by_signal(done)

    def leave(self, asked: StopRequested) -> RunOutcome:
        """As `interrupt`, in the middle of a step: it is done again. So is one whose own evaluation was not over."""
        self.asked_to_end = asked.number
        if self.position is not None:
            return self.interrupt()
        self.engine.finish_saving()
        return self._ended_by_signal(f"in the evaluation after step {self.step}; step {self.saved} is saved")

    def _ended_by_signal(self, done: str) -> RunOutcome:
        name = signal.Signals(self.asked_to_end).name
        sentence = f"{name} ended the run {done}; {self.again}"
        return self._end(RunOutcome("interrupted", self.step, sentence, 128 + self.asked_to_end))

    def give_up(self, reason: UnhealthyRun) -> RunOutcome:
        """End a run that learns nothing any more. Nothing is exported; a checkpoint is called whole if it is."""
        self.engine.finish_saving()
        sentence = f"{reason}. {on_rank0(self._what_is_left)}"
        return self._end(RunOutcome("failed", self.step, sentence, FAILED))

    def strand(self, lost: ServerError) -> RunOutcome:
        """End a run that has nobody left to ask for answers. What is done is saved, without the step it was in."""
        said = str(lost)
        try:
            if self.position is not None:  # else a step's own evaluation had nobody to ask: that step is done again
                self.save()
            self.engine.finish_saving()
        except OSError as error:  # as where a disk is full
            said = f"{said} What was done since the last checkpoint could not be saved: {error}."
        return self._end(RunOutcome("failed", self.step, f"{said} {on_rank0(self._what_is_left)}", FAILED))

    def _what_is_left(self) -> str:
        found = self.run.checkpoints()
        if not found:
            return "No checkpoint was saved, and nothing was exported."
        damage = _damage(found[-1])
        if damage:
            return f"{damage} Nothing was exported."
        return f"{found[-1].name} is whole and its weights are finite: {self.again}. Nothing was exported."

    def _card(self) -> ModelCard:
        """What came of the run, for those who get the model alone."""
        settings = {name: value for name, value in read_config(self.run.path).items() if name not in NOT_THE_MODELS}
        summary = read_summary(self.run.path)
        scores = {fact.label: f"{fact.text} {fact.note}".strip() for fact in summary_lines(summary)}
        how = f"Trained with `postlude {self.name}` for {self.step} steps."
        return ModelCard(str(self.settings.model), how, settings, scores)

    def _end(self, outcome: RunOutcome) -> RunOutcome:
        if self.step:
            conclude(self.settings.run, outcome)
        dist.barrier()
        return outcome

    def _agree(self) -> dict[str, float]:
        """Hear from all ranks whether a signal asked to end; returns the most memory that one of them used."""
        device = self.engine.device
        on_gpu = device.type == "cuda"
        memory = torch.cuda.max_memory_allocated(device) / 2**30 if on_gpu else 0.0
        told = torch.tensor([float(self.signals.heard), memory], dtype=torch.float64, device=device)
        dist.all_reduce(told, op=dist.ReduceOp.MAX)
        asked, most = told.tolist()
        self.asked_to_end = int(asked)
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(device)
        return {MEMORY: most} if on_gpu else {}

    def _evaluated(self) -> dict[str, float]:
        done = self.step - self.warm
        if not self.evaluate_every or done < 0 or (done % self.evaluate_every and self.step != self.last):
            return {}
        with self.timed("evaluation"):
            return self.evaluate()


def train(trainer: Trainer, start_mode: StartMode = RESUME_NEWEST) -> RunOutcome:
    """Run or continue until the last step, a signal, or until there is nothing to learn any more."""
    with closing(trainer), trainer.signals:
        try:
            trainer.resume(start_mode)
            title = f"{trainer.name} {trainer.settings.model}"
            with trainer.runtime.view(trainer.last, title=title, start=trainer.step) as live:
                while trainer.step < trainer.last and not trainer.asked_to_end:
                    live.doing(trainer.phase)
                    metrics = trainer.advance()
                    live.update(trainer.step, metrics)
            return trainer.interrupt() if trainer.asked_to_end else trainer.finish()
        except UnhealthyRun as reason:
            return trainer.give_up(reason)
        except StopRequested as asked:
            return trainer.leave(asked)
        except BaseException as error:
            if isinstance(error, ServerError) and trainer.began is not None and trainer.step:
                return trainer.strand(error)
            if trainer.began is not None and trainer.step:  # there is something to conclude
                outcome: OutcomeStatus = "failed" if isinstance(error, Exception) else "interrupted"
                _conclude_badly(trainer, RunOutcome(outcome, trainer.step, str(error), FAILED), error)
                if (
                    isinstance(error, USER_ERRORS) and trainer.step > trainer.began
                ):  # it would have shown in a first step
                    failed = f"after step {trainer.step} the run failed: {_told(error)}"
                    raise RunFailed(f"{failed}. When that is mended, {trainer.again}") from error
            raise


def _check_alike(asked: Mapping[str, Any]) -> None:
    """Refuse ranks that were given different configs: they would part at some collective, each waiting for another."""

    def compare(configs: list[Mapping[str, Any]]) -> None:
        for rank, other in enumerate(configs):
            if found := list(differences(other, configs[0])):
                path, first, own = found[0]
                raise ValueError(
                    f"rank {rank} was given another config than rank 0: {path} is {format_value(own)} and "
                    f"{format_value(first)}. "
                    "Start all ranks with the same command and the same file."
                )

    try:
        gather_and_decide(lambda: asked, compare)
    except RankFailure as failure:
        raise failure.cause from None


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".removesuffix(".")


def _damage(checkpoint: Path) -> str:
    """What is wrong with a checkpoint; empty where nothing is."""
    try:
        check(checkpoint)
    except (OSError, ValueError) as error:
        return str(error)
    return ""


def _conclude_badly(trainer: Trainer, outcome: RunOutcome, error: BaseException) -> None:
    try:
        conclude(trainer.settings.run, outcome)
    except Exception as second:  # the first is the one to be told
        error.add_note(f"Nor could the report be written: {second}")
