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
from postlude.recipes.config.recipe_configs import SupervisedConfig
from postlude.recipes.config.settings import fit_schedule
from postlude.recipes.data.encoded_rows import CACHE, EncodedRows
from postlude.recipes.data.rows import Examples, IndexedRows, Pairs, RowBatches
from postlude.recipes.mtp import with_mtp_loss
from postlude.recipes.report.metrics import EVAL, LOSS
from postlude.recipes.run.directory import is_rank0
from postlude.recipes.run.runtime import LOCAL_RUNTIME, Runtime
from postlude.recipes.trainer import Trainer

log = logging.getLogger(__name__)

Row = TypeVar("Row")


class SupervisedTrainer(Trainer, Generic[Row]):
    """A run through rows. A recipe says how rows become a batch."""

    def __init__(
        self, config: SupervisedConfig, device: str, objective: Objective, runtime: Runtime = LOCAL_RUNTIME
    ) -> None:
        super().__init__(config, device, runtime=runtime)
        self.objective = objective
        with self.opening():
            self.batches = RowBatches(
                self.read(), batch=config.batch_size, held_out=config.held_out.rows, seed=config.seed
            )
        self.last = self.batches.steps(config.epochs) if config.steps is None else config.steps
        optimizer = fit_schedule(config.optimizer, self.last, "optimizer")
        if optimizer != config.optimizer:  # how many steps a schedule is over is known now
            self.engine.set_optimizer(optimizer)
        self.evaluate_every = config.held_out.every if config.held_out.rows else 0

    @abstractmethod
    def read(self) -> IndexedRows[Row]:
        """The rows to learn from."""

    def encoded(self, data: Examples | Pairs) -> EncodedRows[Any]:
        """The rows of a dataset as tokens. One rank of a machine encodes them, the others read what it kept."""
        cache = self.run.path / CACHE
        first = int(os.environ.get("LOCAL_RANK", dist.get_rank())) == 0
        if first:
            found: EncodedRows[Any] = data.read(self.tokenizer, self.settings.budget, cache)
            found.store()
            if found.rows.dropped and is_rank0():
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
        batch, found = self.batch_of(self.batches.take())
        return found | self.learn(batch, self.objective) | {"epoch": self.batches.sampler.progress}

    def evaluate(self) -> dict[str, float]:
        """The objective on rows that are never trained on."""
        batch, _ = self.batch_of(self.batches.held_out, held_out=True)
        # Predictions further ahead are shown, and are no part of what is compared.
        objective = with_mtp_loss(self.objective, self.settings.mtp, self.learned, counted=False)
        result = self.engine.evaluate_loss(batch, objective)
        return {f"{EVAL}{LOSS}": result.loss} | {f"{EVAL}{name}": value for name, value in result.metrics.items()}

    def state(self) -> dict[str, Any]:
        """Where the run through the rows stands."""
        return {"sampler": self.batches.sampler.state()}

    def restore(self, checkpoint: Path) -> None:
        """Go on from a checkpoint."""
        extra = self.engine.load(checkpoint)
        self.step, self.first_norm = extra["step"], extra.get("first_norm", 0.0)
        self.batches.sampler.restore(extra["sampler"])
