"""What recipes that learn from rows of a dataset share: batches in order, held-out rows, one optimizer step a batch."""

from __future__ import annotations

import logging
import os
from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch.distributed as dist

from postlude.data import Batch
from postlude.objectives import Objective
from postlude.recipes.ahead import beside
from postlude.recipes.config.configs import Supervised
from postlude.recipes.config.settings import scheduled
from postlude.recipes.encodings import CACHE, Encodings
from postlude.recipes.examples import Course, Examples, Indexed, Pairs
from postlude.recipes.metrics import EVAL, LOSS
from postlude.recipes.run.directory import is_first_rank
from postlude.recipes.trainer import Trainer
from postlude.recipes.where import HERE, Where

log = logging.getLogger(__name__)

Row = TypeVar("Row")


class SupervisedTrainer(Trainer, Generic[Row]):
    """A run through rows. A recipe says how rows become a batch."""

    def __init__(self, config: Supervised, device: str, objective: Objective, where: Where = HERE) -> None:
        super().__init__(config, device, where=where)
        self.objective = objective
        with self.opening():
            self.course = Course(self.read(), batch=config.batch, held_out=config.held_out.rows, seed=config.seed)
        self.last = self.course.steps(config.epochs) if config.steps is None else config.steps
        optimizer = scheduled(config.optimizer, self.last, "optimizer")
        if optimizer != config.optimizer:  # how many steps a schedule is over is known now
            self.engine.set_optimizer(optimizer)
        self.evaluate_every = config.held_out.every if config.held_out.rows else 0

    @abstractmethod
    def read(self) -> Indexed[Row]:
        """The rows to learn from."""

    def encoded(self, data: Examples | Pairs) -> Encodings[Any]:
        """The rows of a dataset as tokens. One rank of a machine encodes them, the others read what it kept."""
        cache = self.run.path / CACHE
        first = int(os.environ.get("LOCAL_RANK", dist.get_rank())) == 0
        if first:
            found: Encodings[Any] = data.read(self.tokenizer, self.settings.budget, cache)
            found.store()
            if found.rows.dropped and is_first_rank():
                log.warning("%s: %s.", data.path, found)
        dist.barrier()
        return found if first else data.read(self.tokenizer, self.settings.budget, cache)

    @abstractmethod
    def batch_of(self, rows: Sequence[Row], *, held_out: bool = False) -> tuple[Batch, dict[str, Any]]:
        """A batch with the columns that the objective reads, and metrics of how it came to be.

        Rows that are `held_out` are measured alone: nothing is written of them.
        """

    def train_step(self) -> dict[str, Any]:
        """One optimizer step on the next rows."""
        batch, found = self.batch_of(self.course.take())
        return found | self.learn(batch, self.objective) | {"epoch": self.course.sampler.progress}

    def evaluate(self) -> dict[str, float]:
        """The objective on rows that are never trained on."""
        batch, _ = self.batch_of(self.course.held_out, held_out=True)
        # Predictions further ahead are shown, and are no part of what is compared.
        objective = beside(self.objective, self.settings.mtp, self.learned, counted=False)
        result = self.engine.measure(batch, objective)
        return {f"{EVAL}{LOSS}": result.loss} | {f"{EVAL}{name}": value for name, value in result.metrics.items()}

    def state(self) -> dict[str, Any]:
        """Where the run through the rows stands."""
        return {"sampler": self.course.sampler.state()}

    def restore(self, checkpoint: Path) -> None:
        """Go on from a checkpoint."""
        extra = self.engine.load(checkpoint)
        self.step, self.first_norm = extra["step"], extra.get("first_norm", 0.0)
        self.course.sampler.restore(extra["sampler"])
