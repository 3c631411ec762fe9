"""DPO, IPO and SimPO: trains on pairs of completions, one of them preferred."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from postlude.data import Batch
from postlude.engine.reference import Reference
from postlude.recipes.checks.dataset import dataset_checks
from postlude.recipes.checks.preflight import Check, PreflightInputs, training_checks
from postlude.recipes.config.recipe_configs import DPOConfig
from postlude.recipes.config.settings import build_objective
from postlude.recipes.pairs import PairRow, PairTrainer, margin_checks, pair_batch, trial_pairs, with_margins
from postlude.recipes.run.runtime import LOCAL_RUNTIME, Runtime
from postlude.recipes.trainer import StepMetrics
from postlude.recipes.training_run import run_recipe


class DPOTrainer(PairTrainer):
    """A run of preference training. The reference is the model that the run started from."""

    name = "dpo"
    config: DPOConfig

    def __init__(self, config: DPOConfig, device: str, runtime: Runtime = LOCAL_RUNTIME) -> None:
        super().__init__(config, device, with_margins(build_objective(config.objective), config.data), runtime)
        self.reference: Reference | None = self.engine.reference() if config.has_reference else None

    def make_batch(self, rows: Sequence[PairRow], *, held_out: bool = False) -> tuple[Batch, StepMetrics]:
        """Returns both completions of each pair, with their reference log-probs."""
        batch = pair_batch(rows)
        if self.reference is None:
            return batch, {}
        with self.timer("reference"):
            logprobs = self.reference.logprobs(batch).logprob
        return _with_reference(batch, logprobs), {}


def _with_reference(batch: Batch, logprobs: list[Tensor]) -> Batch:
    return replace(batch, columns={**batch.columns, "reference_logprobs": logprobs})


def checks(inputs: PreflightInputs) -> list[Check]:
    trial = trial_pairs(inputs.config.data)
    if inputs.config.has_reference:
        trial = _with_reference(trial, [torch.full((length,), -1.0) for length in trial.lengths])
    return [*training_checks(inputs, trial), *dataset_checks(inputs, inputs.config.data), *margin_checks(inputs)]


run = partial(run_recipe, DPOTrainer)
