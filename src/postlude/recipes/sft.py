"""SFT: trains on the completions of a dataset."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from postlude.data import Batch
from postlude.data.chat import EncodedSequence, sft_batch
from postlude.recipes.checks.dataset import dataset_checks
from postlude.recipes.checks.objective_trial import TRIAL_SEQUENCES
from postlude.recipes.checks.preflight import Check, PreflightInputs, training_checks
from postlude.recipes.config.recipe_configs import SFTConfig
from postlude.recipes.config.settings import build_objective
from postlude.recipes.run.runtime import LOCAL_RUNTIME, Runtime
from postlude.recipes.supervised import SupervisedTrainer
from postlude.recipes.trainer import StepMetrics
from postlude.recipes.training_run import run_recipe


class SFTTrainer(SupervisedTrainer[EncodedSequence]):
    """An SFT run."""

    name = "sft"
    config: SFTConfig
    loss_column = "loss_mask"

    def __init__(self, config: SFTConfig, device: str, runtime: Runtime = LOCAL_RUNTIME) -> None:
        super().__init__(config, device, build_objective(config.objective), runtime)

    def make_batch(self, rows: Sequence[EncodedSequence], *, held_out: bool = False) -> tuple[Batch, StepMetrics]:
        """Returns sequences and their loss mask."""
        return sft_batch(rows), {}


def checks(inputs: PreflightInputs) -> list[Check]:
    return [*training_checks(inputs, sft_batch(TRIAL_SEQUENCES)), *dataset_checks(inputs, inputs.config.data)]


run = partial(run_recipe, SFTTrainer)
