"""A recipe of your own: postlude examples/recipe.py:RowMeanTrainer tiny-sft --short_row_weight 2

SFT in which every row of the dataset counts the same, whatever its length, except that short rows can have another
weight. The command has --help, --dry-run, every parallel layout, checkpoints that continue, and a report.
"""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import PositiveFloat

from postlude.data import Batch
from postlude.data.chat import EncodedSequence
from postlude.objectives import SFT, weights
from postlude.recipes.checks.objective_trial import TRIAL_SEQUENCES
from postlude.recipes.checks.preflight import Check, PreflightInputs, training_checks
from postlude.recipes.config.recipe_configs import SFTConfig, SFTObjective
from postlude.recipes.config.settings import build_objective
from postlude.recipes.run.runtime import LOCAL_RUNTIME, Runtime
from postlude.recipes.supervised import SupervisedTrainer, dataset_checks
from postlude.recipes.trainer import StepMetrics


class RowMeanConfig(SFTConfig):
    """The config of a run."""

    objective: SFTObjective = SFT(over="row_mean")
    """The objective. It finds the columns "loss_mask" and "row_mean"."""
    short_row_weight: PositiveFloat = 1.0
    """Weight of rows with at most 8 tokens to learn. Other rows have weight 1."""


class RowMeanTrainer(SupervisedTrainer[EncodedSequence]):
    name = "row_mean"
    Config = RowMeanConfig
    config: RowMeanConfig

    def __init__(self, config: RowMeanConfig, device: str, runtime: Runtime = LOCAL_RUNTIME) -> None:
        super().__init__(config, device, build_objective(config.objective), runtime)

    @staticmethod
    def checks(inputs: PreflightInputs) -> list[Check]:
        trial = weighted_batch(TRIAL_SEQUENCES, inputs.config.short_row_weight)
        return [*training_checks(inputs, trial), *dataset_checks(inputs, inputs.config.data)]

    def make_batch(self, rows: Sequence[EncodedSequence], *, held_out: bool = False) -> tuple[Batch, StepMetrics]:
        return weighted_batch(rows, self.config.short_row_weight), {}


def weighted_batch(rows: Sequence[EncodedSequence], short: float) -> Batch:
    masks = [row.mask for row in rows]
    means = zip(masks, weights(masks, "sequences"), strict=True)
    row_mean = [(short if sum(mask) <= 8 else 1.0) * mean for mask, mean in means]
    return Batch([row.tokens for row in rows], {"loss_mask": masks, "row_mean": row_mean})
