"""What every recipe does around its steps: open the run or continue it, count, log, evaluate, save, report.

A recipe is a config (a `Training`) and a `Trainer` that says what one step is. Everything random follows from the seed
and the step, so a run that is continued is the run that was not interrupted.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from postlude.data import Batch
from postlude.engine import Engine
from postlude.hf.card import ModelCard
from postlude.hf.load import load_tokenizer
from postlude.objectives import Objective
from postlude.optimizer import OptimizerConfig
from postlude.recipes import schema
from postlude.recipes.beginning import NEWEST, Beginning
from postlude.recipes.changes import MAY_CHANGE
from postlude.recipes.clock import Clock
from postlude.recipes.conclusion import conclude
from postlude.recipes.ending import Ending, Outcome, forget_ending
from postlude.recipes.live import LiveView
from postlude.recipes.metrics import LOSS, SKIPPED, SPEED
from postlude.recipes.run import (
    Onlooker,
    RunDirectory,
    check_run,
    first_rank_says,
    is_first_rank,
    open_run,
    read_config,
    step_of,
)
from postlude.recipes.settings import Training
from postlude.recipes.surroundings import surroundings
from postlude.recipes.verdict import MODEL, facts, read_verdict

NOT_THE_MODELS = ("run", "model", "wandb")  # settings that say nothing about what was made
LATER = "later"  # what checkpoints are called after which the run was gone back


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

    def __init__(self, config: Training, device: str, optimizer: OptimizerConfig | None = None) -> None:
        self.settings = config
        self.run: RunDirectory = Onlooker(config.run)  # until it is resumed
        self.asked = schema.plain(config)
        check_run(config.run, self.asked, may_change=MAY_CHANGE)
        torch.manual_seed(config.seed)  # nothing here draws from it, but an objective of the user's may
        self.tokenizer: Any = load_tokenizer(config.model)
        self.engine = Engine(
            config.model,
            layout=config.layout,
            optimizer=optimizer or config.optimizer,
            budget=config.budget,
            compute_dtype=None if config.dtype is None else getattr(torch, config.dtype),
            device=device,
            recompute=config.recompute,
            seed=config.seed,
        )
        self.step = 0
        self.skipped = 0  # optimizer steps in a row
        self.timed = Clock()

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

    def close(self) -> None:
        """Give back what the run holds."""
        self.run.close()

    def resume(self, beginning: Beginning) -> None:
        """Take the directory, and go on from a checkpoint. A run without one begins by measuring where it starts."""
        self.run = open_run(self.settings.run, self.asked, may_change=MAY_CHANGE, wandb=self.settings.wandb)
        checkpoint = self._chosen(beginning.resume_from)
        at = -1 if checkpoint is None else step_of(checkpoint)
        if at > self.last:
            raise ValueError(
                f"{self.run.path} is at step {at} already, but is to end at step {self.last}. Raise steps, or go back "
                "with --resume-from."
            )
        if is_first_rank():
            forget_ending(self.run.path)
        self.run.set_aside([path for path in self.run.checkpoints() if step_of(path) > at], LATER)
        self.run.resume_at(at)
        if checkpoint is not None:
            self.restore(checkpoint)
        self.run.record(step=self.step, command=beginning.command, **surroundings(self.engine.device))
        if checkpoint is None and (found := self._evaluated()):
            self.run.log(0, found | self.timed.take(), phase="start")

    def _chosen(self, step: int | None) -> Path | None:
        """The checkpoint to go on from: that of a step, or the newest. The first rank looks."""

        def look() -> Path | None:
            found = {step_of(path): path for path in self.run.checkpoints()}
            if step is None:
                return found[max(found)] if found else None
            if step not in found:
                there = ", ".join(path.name for path in found.values()) or "none"
                raise ValueError(f"{self.run.path} has no checkpoint of step {step} to go back to; it has {there}.")
            return found[step]

        return first_rank_says(look)

    def advance(self) -> dict[str, Any]:
        """One step with all that belongs to it; returns its metrics."""
        phase = self.phase
        metrics = self.train_step()
        self.step += 1
        if "tokens" in metrics:
            metrics[SPEED] = metrics["tokens"] / sum(self.timed.seconds.values())
        metrics |= self._evaluated()
        metrics |= self.timed.take()
        self.run.log(self.step, metrics, phase=phase)
        every = self.settings.save_every
        if self.step == self.last or (every and self.step % every == 0):
            extra = {"step": self.step, **self.state()}
            self.engine.save(self.run.checkpoint(self.step), extra=extra, tokenizer=self.tokenizer)
            self.run.prune(self.settings.keep)
        return metrics

    def learn(self, batch: Batch, objective: Objective) -> dict[str, Any]:
        """One optimizer step on a batch; returns its metrics."""
        with self.timed("train"):
            result = self.engine.forward_backward(batch, objective)
            moved = self.engine.optimizer_step()
        self.skipped = self.skipped + 1 if moved.skipped else 0
        if self.skipped > self.settings.max_skipped:
            raise ValueError(
                f"the gradient was not finite in {self.skipped} optimizer steps in a row, up to step {self.step + 1}; "
                f"max_skipped is {self.settings.max_skipped}. The last checkpoint is good: lower optimizer.lr, or look "
                "at the samples of the last steps."
            )
        found = {LOSS: result.loss, **result.metrics, "grad_norm": moved.grad_norm, "lr": moved.lr}
        return found | {SKIPPED: float(moved.skipped), "tokens": result.tokens}

    def finish(self) -> Ending:
        """Write the report, and the model as a Hugging Face directory."""
        self.engine.finish_saving()
        if self.settings.export:
            card = self._card() if is_first_rank() else None
            # The directory is the run's own: what an earlier end of it wrote is replaced.
            self.engine.export_hf(self.run.path / MODEL, tokenizer=self.tokenizer, card=card, overwrite=True)
        ending = Ending("finished", self.step)
        conclude(self.settings.run, ending)
        dist.barrier()
        return ending

    def _card(self) -> ModelCard:
        """What came of the run, for those who get the model alone."""
        settings = {name: value for name, value in read_config(self.run.path).items() if name not in NOT_THE_MODELS}
        verdict = read_verdict(self.run.path)
        scores = {fact.label: f"{fact.text} {fact.note}".strip() for fact in facts(verdict)}
        how = f"Trained with `postlude {self.name}` for {self.step} steps."
        return ModelCard(str(self.settings.model), how, settings, scores)

    def _evaluated(self) -> dict[str, float]:
        done = self.step - self.warm
        if not self.evaluate_every or done < 0 or (done % self.evaluate_every and self.step != self.last):
            return {}
        with self.timed("evaluation"):
            return self.evaluate()


def train(trainer: Trainer, beginning: Beginning = NEWEST) -> Ending:
    """Run or continue until the last step."""
    with closing(trainer):
        try:
            trainer.resume(beginning)
            title = f"{trainer.name} {trainer.settings.model}"
            with LiveView(trainer.last, title=title, start=trainer.step) as live:
                while trainer.step < trainer.last:
                    live.doing(trainer.phase)
                    metrics = trainer.advance()
                    live.update(trainer.step, metrics)
            return trainer.finish()
        except BaseException as error:
            if trainer.step:  # there is something to conclude
                outcome: Outcome = "failed" if isinstance(error, Exception) else "interrupted"
                _conclude_badly(trainer, Ending(outcome, trainer.step, str(error)), error)
            raise


def _conclude_badly(trainer: Trainer, ending: Ending, error: BaseException) -> None:
    try:
        conclude(trainer.settings.run, ending)
    except Exception as second:  # the first is the one to be told
        error.add_note(f"Nor could the report be written: {second}")
