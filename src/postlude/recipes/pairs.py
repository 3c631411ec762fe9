"""DPO and reward models: trains on pairs of completions, one preferred, with a margin if the file has margins."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from postlude.data import Batch
from postlude.data.chat import EncodedSequence, preference_batch
from postlude.engine.export import export
from postlude.engine.reference import Reference
from postlude.hf.export import ModelCard, as_classifier
from postlude.hf.tensor_sources import hf_config
from postlude.objectives import Objective
from postlude.objectives.preference import MARGINS, BradleyTerry, Preference
from postlude.recipes.checks.objective_trial import TRIAL_SEQUENCES
from postlude.recipes.checks.preflight import Check, PreflightInputs, training_checks
from postlude.recipes.config.data import PairMixture, Pairs, datasets_of
from postlude.recipes.config.recipe_configs import DPOConfig, RMConfig
from postlude.recipes.config.settings import build_objective
from postlude.recipes.dataset import LabelledRows, read_column
from postlude.recipes.run.runtime import LOCAL_RUNTIME, Runtime
from postlude.recipes.supervised import SupervisedTrainer, dataset_checks
from postlude.recipes.trainer import StepMetrics

Pair: TypeAlias = tuple[EncodedSequence, EncodedSequence]
"""The chosen completion and the rejected one."""


@dataclass(frozen=True)
class PairRow:
    """A pair as tokens, and its margin."""

    pair: Pair
    margin: float | None = None


class PairTrainer(SupervisedTrainer[PairRow]):
    """A run over pairs, each with a margin if the data has margins."""

    def read_rows(self, data: Pairs) -> LabelledRows[PairRow]:
        return LabelledRows(self.encode_rows(data), read_margins(data), PairRow)

    def make_row(self, encoded: Pair, row: Mapping[str, Any], location: str, data: Pairs) -> PairRow:
        return PairRow(encoded, None if data.margin is None else read_margin(row, location, data.margin))

    def sequences_of(self, row: PairRow) -> Sequence[EncodedSequence]:
        return row.pair


def read_margins(data: Pairs) -> list[float] | None:
    """Returns the margin of each row; None if no column is named. Raises ValueError for a row without one."""
    return None if data.margin is None else read_column(data, data.margin, read_margin)


def read_margin(row: Mapping[str, Any], location: str, column: str) -> float:
    margin = row.get(column)
    if isinstance(margin, bool) or not isinstance(margin, int | float) or not math.isfinite(margin):
        raise ValueError(f"{location} has {margin!r} as its {column}, but a margin is a finite number.")
    return float(margin)


def has_margins(data: Pairs | PairMixture) -> bool:
    """Whether the pairs have margins. In a mixture, all datasets have them or none."""
    return datasets_of(data)[0].margin is not None


def pair_batch(rows: Sequence[PairRow]) -> Batch:
    """Returns both completions of each pair side by side, with the column "margins" if the pairs have margins."""
    batch = preference_batch([row.pair for row in rows])
    margins = [row.margin for row in rows for _ in row.pair]
    if None in margins:
        return batch
    return replace(batch, columns={**batch.columns, MARGINS: margins})


def trial_pairs(data: Pairs | PairMixture) -> Batch:
    """Returns a batch for the objective's trial call: two pairs."""
    margin, (first, second, third, fourth) = 1.0 if has_margins(data) else None, TRIAL_SEQUENCES
    return pair_batch([PairRow((first, second), margin), PairRow((third, fourth), margin)])


def with_margins(objective: Objective, data: Pairs | PairMixture) -> Objective:
    """Returns the objective, set to read margins if the data has them. A user's objective is returned unchanged."""
    if has_margins(data) and isinstance(objective, Preference | BradleyTerry):
        return replace(objective, margins=True)
    return objective


def margin_checks(inputs: PreflightInputs) -> Iterator[Check]:
    def check_margins() -> str:
        datasets = datasets_of(inputs.config.data)
        if any(data.streaming for data in datasets):
            return "read with the rows of the stream"
        margins = [margin for data in datasets for margin in read_margins(data) or []]
        return f"from {min(margins):g} to {max(margins):g}"

    if has_margins(inputs.config.data):
        yield Check("margins", check_margins, after=("data",))


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

    @staticmethod
    def checks(inputs: PreflightInputs) -> list[Check]:
        trial = trial_pairs(inputs.config.data)
        if inputs.config.has_reference:
            trial = _with_reference(trial, [torch.full((length,), -1.0) for length in trial.lengths])
        return [*training_checks(inputs, trial), *dataset_checks(inputs, inputs.config.data), *margin_checks(inputs)]


def _with_reference(batch: Batch, logprobs: list[Tensor]) -> Batch:
    return replace(batch, columns={**batch.columns, "reference_logprobs": logprobs})


class RMTrainer(PairTrainer):
    """A run that trains a reward model: a model with a value head, which is read at the last token."""

    name = "rm"
    config: RMConfig

    def __init__(self, config: RMConfig, device: str, runtime: Runtime = LOCAL_RUNTIME) -> None:
        super().__init__(config, device, with_margins(build_objective(config.objective), config.data), runtime)

    def make_batch(self, rows: Sequence[PairRow], *, held_out: bool = False) -> tuple[Batch, StepMetrics]:
        return pair_batch(rows), {}

    def export(self, path: Path, card: ModelCard | None) -> None:
        """Writes a model that transformers' AutoModelForSequenceClassification reads, with one label."""
        export(self.engine, path, self.tokenizer, self.engine.compute_dtype, card=card, overwrite=True, classifier=True)

    @staticmethod
    def checks(inputs: PreflightInputs) -> list[Check]:
        trial = trial_pairs(inputs.config.data)
        exported = [Check("export", lambda: _check_export(inputs), after=("model",))] if inputs.config.export else []
        return [
            *training_checks(inputs, trial),
            *exported,
            *dataset_checks(inputs, inputs.config.data),
            *margin_checks(inputs),
        ]


def _check_export(inputs: PreflightInputs) -> str:
    family = inputs.model[0]
    if family is None:
        raise ValueError(
            f"no Hugging Face family describes {inputs.config.model}, so that its reward model cannot be exported. Set "
            "export to false."
        )
    as_classifier(hf_config(inputs.model[1]))
    return "a model that transformers' AutoModelForSequenceClassification reads"
