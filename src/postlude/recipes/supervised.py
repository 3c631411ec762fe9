"""SupervisedTrainer: the base class of recipes that train on dataset rows, one optimizer step per batch."""

from __future__ import annotations

import logging
import os
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch.distributed as dist

from postlude.data import Batch
from postlude.data.chat import EncodedSequence
from postlude.data.datasets import RowSource
from postlude.data.streamed_rows import StreamedRows
from postlude.objectives import Objective
from postlude.recipes.chat_template import prepare_chat
from postlude.recipes.config.data import Examples, Mixture, Pairs, datasets_of
from postlude.recipes.config.recipe_configs import SupervisedConfig
from postlude.recipes.config.settings import fit_schedule
from postlude.recipes.dataset import EncodedRows, StreamEncoder, cache_folder
from postlude.recipes.report.metrics import EVAL, LOSS
from postlude.recipes.row_sources import (
    SEED_STRIDE,
    IndexedRows,
    MixedRows,
    ShuffledRows,
    StepSizes,
    dataset_names,
)
from postlude.recipes.run.directory import is_rank0
from postlude.recipes.run.runtime import LOCAL_RUNTIME, Runtime
from postlude.recipes.run.split import Split
from postlude.recipes.trainer import StepMetrics, Trainer

LOG = logging.getLogger(__name__)

Row = TypeVar("Row")


class SupervisedTrainer(Trainer, Generic[Row]):
    """A run over the rows of a dataset. `make_batch` turns rows into a batch."""

    config: SupervisedConfig
    min_rows = 1
    """A last step of fewer rows is left out."""

    def __init__(
        self, config: SupervisedConfig, device: str, objective: Objective, runtime: Runtime = LOCAL_RUNTIME
    ) -> None:
        super().__init__(config, device, runtime=runtime)
        self.objective = objective
        with self.close_on_error():
            self.rows = self.open_rows()
        self.step_sizes = self._step_sizes()
        self.total_steps = self.step_sizes.steps
        if config.steps and (size := self.rows.size) and size < config.batch_size and is_rank0():
            LOG.warning(
                "batch_size is %d, but there are %d rows to train on, so a step has rows more than once. Lower it.",
                config.batch_size,
                size,
            )
        optimizer = fit_schedule(config.optimizer, self.total_steps, "optimizer")
        if optimizer != config.optimizer:  # the length of the schedule is known only now
            self.engine.set_optimizer(optimizer)
        self.evaluate_every = config.held_out.every if config.held_out.rows else 0
        self.evaluate_at_start = config.held_out.at_start

    def open_rows(self) -> RowSource[Row]:
        """Returns the rows to train on: those of the dataset, or of several."""
        datasets = datasets_of(self.config.data)
        if not isinstance(self.config.data, Mixture):
            return self.open_dataset(self.config.data, self.config.seed)
        seeds = [self.config.seed + SEED_STRIDE * index for index in range(len(datasets))]
        sources = [self.open_dataset(data, seed) for data, seed in zip(datasets, seeds, strict=True)]
        names = dataset_names([data.path for data in datasets])
        return MixedRows(dict(zip(names, sources, strict=True)), [data.weight for data in datasets])

    def open_dataset(self, data: Any, seed: int) -> RowSource[Row]:
        """Returns the rows of one dataset: encoded already, or as a stream."""
        held_out = self.config.held_out.rows
        if not data.streaming:
            return ShuffledRows(self.read_rows(data), held_out=held_out, seed=seed, shuffle=data.shuffle)
        encode = StreamEncoder(data, self.tokenizer, self.limit, self.make_row)
        if encode.chat:
            prepare_chat(self.tokenizer, str(self.config.model))
        buffer = data.shuffle_buffer if data.shuffle else None
        return StreamedRows(encode.files, encode, encode.identity, seed=seed, buffer=buffer, held_out=held_out)

    def read_rows(self, data: Any) -> IndexedRows[Row]:
        """Returns the rows of a dataset, all in memory."""
        return self.encode_rows(data)

    def make_row(self, encoded: Any, row: Mapping[str, Any], location: str, data: Any) -> Row:
        """Returns a row to train on: the tokens of a row of a stream, with what else the recipe needs of it."""
        train_row: Row = encoded
        return train_row

    def sequences_of(self, row: Any) -> Sequence[EncodedSequence]:
        return [row] if isinstance(row, EncodedSequence) else row

    def _step_sizes(self) -> StepSizes:
        config, size = self.config, self.rows.size
        if config.steps is not None:
            return StepSizes(config.batch_size, config.batch_size * config.steps)
        assert size is not None, "the config of a stream has steps"
        return StepSizes.of_epochs(config.batch_size, config.epochs or 1, size, least=self.min_rows)

    def encode_rows(self, data: Examples | Pairs) -> EncodedRows[Any]:
        """Returns the rows of a dataset as tokens. One rank of a machine encodes them, the others read its cache."""
        cache = cache_folder(self.run.path, self.config.data, data)
        waits = int(os.environ.get("LOCAL_RANK", dist.get_rank())) > 0
        if waits:
            dist.barrier()
        rows: EncodedRows[Any] = EncodedRows(data, self.tokenizer, self.limit, cache)
        if not waits:
            rows.store()
            dist.barrier()
        if rows.rows.dropped and is_rank0():
            LOG.warning("%s: %s.", data.path, rows)
        if rows.rows.chat:
            prepare_chat(self.tokenizer, str(self.config.model))
        return rows

    @abstractmethod
    def make_batch(self, rows: Sequence[Row], *, held_out: bool = False) -> tuple[Batch, StepMetrics]:
        """Returns a batch with the columns that the objective reads, and metrics of how it was made.

        `held_out` rows are evaluated only: no samples are written.
        """

    def train_step(self) -> StepMetrics:
        """Does one optimizer step on the next rows."""
        batch, metrics = self.make_batch(self.rows.take(self.step_sizes.of_step(self.step)))
        return metrics | self.train_batch(batch, self.objective) | {"epoch": self.rows.progress} | self.rows.metrics()

    def evaluate(self) -> dict[str, float]:
        """Returns the objective on the held-out rows."""
        batch, _ = self.make_batch(self.rows.held_out, held_out=True)
        # Multi-token prediction is reported, but is not part of the compared loss.
        result = self.engine.evaluate_loss(batch, self.with_mtp_loss(self.objective, trained=False))
        return {f"{EVAL}{LOSS}": result.loss} | {f"{EVAL}{name}": value for name, value in result.metrics.items()}

    def split(self) -> Split:
        """Returns which tasks are held out, of which rows."""
        return Split(frozenset(self.rows.held_out_identities), frozenset(self.rows.identities))

    def state(self) -> dict[str, Any]:
        """Returns the position in the rows."""
        return {"sampler": self.rows.state()}

    def restore(self, checkpoint: Path) -> Mapping[str, Any]:
        """Loads a checkpoint."""
        extra = self.load_engine(checkpoint)
        self.rows.restore(extra["sampler"])
        return extra
