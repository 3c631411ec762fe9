"""SFT: learn the answers that were written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from postlude.data import Batch
from postlude.data.chat import EncodedSequence, sft_batch
from postlude.recipes.checks.objective_trial import ANSWERS
from postlude.recipes.checks.preflight import Check, PreflightInputs, dataset_checks, training_checks
from postlude.recipes.config.recipe_configs import SFTConfig
from postlude.recipes.config.settings import build_objective
from postlude.recipes.data.encoded_rows import EncodedRows
from postlude.recipes.run.outcome import RunOutcome
from postlude.recipes.run.runtime import LOCAL_RUNTIME, Runtime
from postlude.recipes.run.start_mode import RESUME_NEWEST, StartMode
from postlude.recipes.supervised import SupervisedTrainer
from postlude.recipes.trainer import train


class SFTTrainer(SupervisedTrainer[EncodedSequence]):
    """A run of SFT."""

    name = "sft"
    learned = "loss_mask"

    def __init__(self, config: SFTConfig, device: str, runtime: Runtime = LOCAL_RUNTIME) -> None:
        self.config = config
        super().__init__(config, device, build_objective(config.objective), runtime)

    def read(self) -> EncodedRows[EncodedSequence]:
        """The rows to learn from."""
        return self.encoded(self.config.data)

    def batch_of(self, rows: Sequence[EncodedSequence], *, held_out: bool = False) -> tuple[Batch, dict[str, Any]]:
        """Sequences, and which of their tokens are learned."""
        return sft_batch(rows), {}


def checks(inputs: PreflightInputs) -> list[Check]:
    """What must hold before a run begins."""
    return [*training_checks(inputs, sft_batch(ANSWERS)), *dataset_checks(inputs, inputs.config.data)]


def run(
    config: SFTConfig, device: str = "cpu", start_mode: StartMode = RESUME_NEWEST, runtime: Runtime = LOCAL_RUNTIME
) -> RunOutcome:
    """Run or continue `config` on the ranks that are started."""
    return train(SFTTrainer(config, device, runtime), start_mode)
