"""SupervisedTrainer: the base class of recipes that train on dataset rows, one optimizer step per batch; and SFT."""

from __future__ import annotations

import logging
import os
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch.distributed as dist

from postlude.data import Batch
from postlude.data.chat import EncodedSequence, sft_batch
from postlude.data.datasets import RowSource
from postlude.data.streamed_rows import StreamedRows
from postlude.objectives import Objective
from postlude.recipes.checks.objective_trial import TRIAL_SEQUENCES
from postlude.recipes.checks.preflight import Check, PreflightInputs, check_vocabulary, training_checks
from postlude.recipes.config.data import Examples, Mixture, Pairs, datasets_of
from postlude.recipes.config.recipe_configs import SFTConfig, SupervisedConfig
from postlude.recipes.config.settings import build_objective, fit_schedule
from postlude.recipes.dataset import EncodedRows, StreamEncoder, cache_folder, prepare_chat
from postlude.recipes.report.metrics import EVAL, LOSS
from postlude.recipes.row_sources import (
    ROWS_TAKEN,
    SEED_STRIDE,
    IndexedRows,
    MixedRows,
    ShuffledRows,
    StepSizes,
    dataset_names,
    hold_out_rows,
)
from postlude.recipes.run.directory import is_rank0
from postlude.recipes.run.runtime import LOCAL_RUNTIME, Runtime
from postlude.recipes.run.split import Split
from postlude.recipes.trainer import StepMetrics, Trainer


def dataset_checks(inputs: PreflightInputs, data: Examples | Pairs | Mixture) -> Iterator[Check]:
    """Check of datasets: every row can be encoded within the budget; of a stream, the first rows."""
    yield Check(
        "data",
        lambda: "; ".join(_check_dataset(inputs, data, dataset) for dataset in datasets_of(data)),
        after=("tokenizer",),
    )


def _check_dataset(inputs: PreflightInputs, section: Any, data: Examples | Pairs) -> str:
    config = inputs.config
    if data.streaming:
        line, largest = StreamEncoder(data, inputs.tokenizer, inputs.limit, lambda encoded, *_: encoded).check()
        check_vocabulary(largest, inputs)
        return line
    cache = cache_folder(config.run, section, data)
    rows: EncodedRows[Any] = EncodedRows(data, inputs.tokenizer, inputs.limit, cache)
    check_vocabulary(rows.largest, inputs)
    inputs.on_success.append(rows.store)
    if config.held_out.rows:
        hold_out_rows(rows, config.held_out.rows)
    return str(rows)


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
        self._plan_steps(self._step_sizes())
        if config.steps and (size := self.rows.size) and size < config.batch_size and is_rank0():
            LOG.warning(
                "batch_size is %d, but there are %d rows to train on, so a step has rows more than once. Lower it.",
                config.batch_size,
                size,
            )
        self.evaluate_every = config.held_out.every if config.held_out.rows else 0
        self.evaluate_at_start = config.held_out.at_start

    def _plan_steps(self, sizes: StepSizes) -> None:
        """Sets the number of steps, and the optimizer, whose schedule depends on it."""
        self.step_sizes, self.total_steps = sizes, sizes.steps
        optimizer = fit_schedule(self.config.optimizer, self.total_steps, "optimizer")
        if optimizer != self.engine.options.optimizer:  # the length of the schedule is known only now
            self.engine.set_optimizer(optimizer)

    def open_rows(self) -> RowSource[Row]:
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
        batch, metrics = self.make_batch(self.rows.take(self.step_sizes.of_step(self.step)))
        return metrics | self.train_batch(batch, self.objective) | {"epoch": self.rows.progress} | self.rows.metrics()

    def evaluate(self) -> dict[str, float]:
        batch, _ = self.make_batch(self.rows.held_out, held_out=True)
        # Multi-token prediction is reported, but is not part of the compared loss.
        result = self.engine.evaluate_loss(batch, self.with_mtp_loss(self.objective, trained=False))
        return {f"{EVAL}{LOSS}": result.loss} | {f"{EVAL}{name}": value for name, value in result.metrics.items()}

    def split(self) -> Split:
        return Split(frozenset(self.rows.held_out_identities), frozenset(self.rows.identities))

    def state(self) -> dict[str, Any]:
        return {"sampler": self.rows.state(), ROWS_TAKEN: self.step_sizes.rows_before(self.step)}

    def restore(self, checkpoint: Path) -> Mapping[str, Any]:
        extra = self.load_engine(checkpoint)
        self.rows.restore(extra["sampler"])
        sizes = self.step_sizes.continued(self.step, extra[ROWS_TAKEN])
        if self.config.steps is None:
            if sizes.steps != self.total_steps:  # the last step of fewer epochs was short
                self._plan_steps(sizes)
                self.load_engine(checkpoint)  # into an optimizer whose schedule has the new length
            self.step_sizes = sizes
        return extra


class SFTTrainer(SupervisedTrainer[EncodedSequence]):
    """An SFT run."""

    name = "sft"
    config: SFTConfig
    loss_column = "loss_mask"

    def __init__(self, config: SFTConfig, device: str, runtime: Runtime = LOCAL_RUNTIME) -> None:
        super().__init__(config, device, build_objective(config.objective), runtime)

    def make_batch(self, rows: Sequence[EncodedSequence], *, held_out: bool = False) -> tuple[Batch, StepMetrics]:
        return sft_batch(rows), {}

    @staticmethod
    def checks(inputs: PreflightInputs) -> list[Check]:
        return [*training_checks(inputs, sft_batch(TRIAL_SEQUENCES)), *dataset_checks(inputs, inputs.config.data)]
