"""DPO and its kin: learn from pairs of answers, one of them preferred."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from postlude.data import Batch
from postlude.data.chat import EncodedSequence, preference_batch
from postlude.engine.reference import Reference
from postlude.recipes.checks.objective_trial import ANSWERS
from postlude.recipes.checks.preflight import Check, PreflightInputs, dataset_checks, training_checks
from postlude.recipes.config.recipe_configs import DPOConfig
from postlude.recipes.config.settings import build_objective
from postlude.recipes.data.encoded_rows import EncodedRows
from postlude.recipes.run.outcome import RunOutcome
from postlude.recipes.run.runtime import LOCAL_RUNTIME, Runtime
from postlude.recipes.run.start_mode import RESUME_NEWEST, StartMode
from postlude.recipes.supervised import SupervisedTrainer
from postlude.recipes.trainer import train


class DPOTrainer(SupervisedTrainer[tuple[EncodedSequence, EncodedSequence]]):
    """A run of preference training. The reference is the model that the run started from."""

    name = "dpo"

    def __init__(self, config: DPOConfig, device: str, runtime: Runtime = LOCAL_RUNTIME) -> None:
        self.config = config
        super().__init__(config, device, build_objective(config.objective), runtime)
        self.reference: Reference | None = self.engine.reference() if config.has_reference else None

    def read(self) -> EncodedRows[tuple[EncodedSequence, EncodedSequence]]:
        """The pairs to learn from."""
        return self.encoded(self.config.data)

    def batch_of(
        self, rows: Sequence[tuple[EncodedSequence, EncodedSequence]], *, held_out: bool = False
    ) -> tuple[Batch, dict[str, Any]]:
        """The two of each pair side by side, with what the reference says of them."""
        batch = preference_batch(rows)
        if self.reference is None:
            return batch, {}
        with self.timed("reference"):
            logprobs = self.reference.logprobs(batch).logprob
        return _with_reference(batch, logprobs), {}


def _with_reference(batch: Batch, logprobs: list[Tensor]) -> Batch:
    return replace(batch, columns={**batch.columns, "reference_logprobs": logprobs})


def checks(inputs: PreflightInputs) -> list[Check]:
    """What must hold before a run begins."""
    inputs.others += [inputs.config.model] if inputs.config.has_reference else []
    trial = preference_batch([(ANSWERS[0], ANSWERS[1]), (ANSWERS[2], ANSWERS[3])])
    if inputs.config.has_reference:
        trial = _with_reference(trial, [torch.full((length,), -1.0) for length in trial.lengths])
    return [*training_checks(inputs, trial), *dataset_checks(inputs, inputs.config.data)]


def run(
    config: DPOConfig, device: str = "cpu", start_mode: StartMode = RESUME_NEWEST, runtime: Runtime = LOCAL_RUNTIME
) -> RunOutcome:
    """Run or continue `config` on the ranks that are started."""
    return train(DPOTrainer(config, device, runtime), start_mode)
