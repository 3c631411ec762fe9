"""Reward models: train a score of completions on pairs, one of them preferred (Bradley-Terry)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from postlude.data import Batch
from postlude.engine.export import export
from postlude.hf.export import ModelCard, as_classifier
from postlude.hf.tensor_sources import hf_config
from postlude.recipes.checks.dataset import dataset_checks
from postlude.recipes.checks.preflight import Check, PreflightInputs, training_checks
from postlude.recipes.config.recipe_configs import RMConfig
from postlude.recipes.config.settings import build_objective
from postlude.recipes.pairs import PairRow, PairTrainer, margin_checks, pair_batch, trial_pairs, with_margins
from postlude.recipes.run.runtime import LOCAL_RUNTIME, Runtime
from postlude.recipes.trainer import StepMetrics
from postlude.recipes.training_run import run_recipe


class RMTrainer(PairTrainer):
    """A run that trains a reward model: a model with a value head, which is read at the last token."""

    name = "rm"
    config: RMConfig

    def __init__(self, config: RMConfig, device: str, runtime: Runtime = LOCAL_RUNTIME) -> None:
        super().__init__(config, device, with_margins(build_objective(config.objective), config.data), runtime)

    def make_batch(self, rows: Sequence[PairRow], *, held_out: bool = False) -> tuple[Batch, StepMetrics]:
        """Returns both completions of each pair."""
        return pair_batch(rows), {}

    def export(self, path: Path, card: ModelCard | None) -> None:
        """Writes a model that transformers' AutoModelForSequenceClassification reads, with one label."""
        export(self.engine, path, self.tokenizer, self.engine.compute_dtype, card=card, overwrite=True, classifier=True)


def _check_export(inputs: PreflightInputs) -> str:
    family = inputs.model[0]
    if family is None:
        raise ValueError(
            f"no Hugging Face family describes {inputs.config.model}, so that its reward model cannot be exported. Set "
            "export to false."
        )
    as_classifier(hf_config(inputs.model[1]))
    return "a model that transformers' AutoModelForSequenceClassification reads"


def checks(inputs: PreflightInputs) -> list[Check]:
    trial = trial_pairs(inputs.config.data)
    exported = [Check("export", lambda: _check_export(inputs), after=("model",))] if inputs.config.export else []
    return [
        *training_checks(inputs, trial),
        *exported,
        *dataset_checks(inputs, inputs.config.data),
        *margin_checks(inputs),
    ]


run = partial(run_recipe, RMTrainer)
