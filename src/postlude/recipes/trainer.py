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
from postlude.hf.load import load_tokenizer
from postlude.objectives import Objective
from postlude.optimizer import OptimizerConfig
from postlude.recipes import schema
from postlude.recipes.clock import Clock
from postlude.recipes.conclusion import conclude
from postlude.recipes.ending import Ending, Outcome, forget_ending
from postlude.recipes.live import LiveView
from postlude.recipes.metrics import LOSS, SKIPPED, SPEED
from postlude.recipes.run import RunDirectory, is_first_rank, open_run
from postlude.recipes.settings import Training
from postlude.recipes.verdict import MODEL, REPORT

MAY_CHANGE = ("run", "layout", "budget", "recompute", "save_every", "keep", "wandb", "steps", "max_skipped", "export")


class Trainer(ABC):
    """A run in progress: its directory, its engine, and how far it has come. Every rank holds one."""

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
        self.run: RunDirectory = open_run(
            config.run, schema.plain(type(config), config), may_change=MAY_CHANGE, wandb=config.wandb
        )
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

    def resume(self) -> None:
        """Go on from the newest checkpoint. A run without one begins by measuring where it starts."""
        checkpoint = self.run.resume()
        if checkpoint is not None:
            self.restore(checkpoint)
        elif found := self._evaluated():
            self.run.log(0, found | self.timed.take(), phase="start")

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
            self.engine.save(self.run.checkpoint(self.step), extra=extra)
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

    def finish(self) -> Path:
        """Write the report, and the model as a Hugging Face directory; returns the report's path."""
        self.engine.finish_saving()
        if self.settings.export:
            self.engine.export_hf(self.run.path / MODEL, tokenizer=self.tokenizer)
        conclude(self.settings.run, Ending("finished", self.step))
        dist.barrier()
        return self.settings.run / REPORT

    def _evaluated(self) -> dict[str, float]:
        done = self.step - self.warm
        if not self.evaluate_every or done < 0 or (done % self.evaluate_every and self.step != self.last):
            return {}
        with self.timed("evaluation"):
            return self.evaluate()


def train(trainer: Trainer) -> Path:
    """Run or continue until the last step. Returns the report's path."""
    with closing(trainer):
        if is_first_rank():
            forget_ending(trainer.run.path)
        try:
            trainer.resume()
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
