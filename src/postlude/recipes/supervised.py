"""SupervisedTrainer: the base class of recipes that train on dataset rows, one optimizer step per batch."""

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
from postlude.recipes.config.data import Examples, Pairs
from postlude.recipes.config.recipe_configs import SupervisedConfig
from postlude.recipes.config.settings import fit_schedule
from postlude.recipes.dataset import CACHE, EncodedRows, IndexedRows, RowBatches
from postlude.recipes.report.metrics import EVAL, LOSS
from postlude.recipes.run.directory import is_rank0
from postlude.recipes.run.runtime import LOCAL_RUNTIME, Runtime
from postlude.recipes.trainer import StepMetrics, Trainer

LOG = logging.getLogger(__name__)

Row = TypeVar("Row")


class SupervisedTrainer(Trainer, Generic[Row]):
    """A run over the rows of a dataset. `make_batch` turns rows into a batch."""

    config: SupervisedConfig

    def __init__(
        self, config: SupervisedConfig, device: str, objective: Objective, runtime: Runtime = LOCAL_RUNTIME
    ) -> None:
        super().__init__(config, device, runtime=runtime)
        self.objective = objective
        with self.close_on_error():
            self.rows = RowBatches(
                self.read_rows(), batch=config.batch_size, held_out=config.held_out.rows, seed=config.seed
            )
        self.total_steps = self.rows.steps(config.epochs) if config.steps is None else config.steps
        optimizer = fit_schedule(config.optimizer, self.total_steps, "optimizer")
        if optimizer != config.optimizer:  # the length of the schedule is known only now
            self.engine.set_optimizer(optimizer)
        self.evaluate_every = config.held_out.every if config.held_out.rows else 0

    @abstractmethod
    def read_rows(self) -> IndexedRows[Row]:
        """Returns the rows to train on."""

    def encode_rows(self, data: Examples | Pairs) -> EncodedRows[Any]:
        """Returns the rows of a dataset as tokens. One rank of a machine encodes them, the others read its cache."""
        cache = self.run.path / CACHE
        if int(os.environ.get("LOCAL_RANK", dist.get_rank())):
            dist.barrier()
            return EncodedRows(data, self.tokenizer, self.config.budget, cache)
        rows: EncodedRows[Any] = EncodedRows(data, self.tokenizer, self.config.budget, cache)
        rows.store()
        if rows.rows.dropped and is_rank0():
            LOG.warning("%s: %s.", data.path, rows)
        dist.barrier()
        return rows

    @abstractmethod
    def make_batch(self, rows: Sequence[Row], *, held_out: bool = False) -> tuple[Batch, StepMetrics]:
        """Returns a batch with the columns that the objective reads, and metrics of how it was made.

        `held_out` rows are evaluated only: no samples are written.
        """

    def train_step(self) -> StepMetrics:
        """Does one optimizer step on the next rows."""
        batch, metrics = self.make_batch(self.rows.take())
        return metrics | self.train_batch(batch, self.objective) | {"epoch": self.rows.sampler.progress}

    def evaluate(self) -> dict[str, float]:
        """Returns the objective on the held-out rows."""
        batch, _ = self.make_batch(self.rows.held_out, held_out=True)
        # Multi-token prediction is reported, but is not part of the compared loss.
        result = self.engine.evaluate_loss(batch, self.with_mtp_loss(self.objective, trained=False))
        return {f"{EVAL}{LOSS}": result.loss} | {f"{EVAL}{name}": value for name, value in result.metrics.items()}

    def state(self) -> dict[str, Any]:
        """Returns the position in the rows."""
        return {"sampler": self.rows.sampler.state()}

    def restore(self, checkpoint: Path) -> None:
        """Loads a checkpoint."""
        self.rows.sampler.restore(self.load_engine(checkpoint)["sampler"])
