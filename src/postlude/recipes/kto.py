"""KTO: train on single completions, each desirable or not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from postlude.data import Batch
from postlude.data.chat import EncodedSequence
from postlude.objectives.preference import BATCH_KL, DESIRABLE, REFERENCE
from postlude.recipes.checks.objective_trial import TRIAL_SEQUENCES
from postlude.recipes.checks.preflight import Check, PreflightInputs, training_checks
from postlude.recipes.config.data import LabelledExamples, datasets_of
from postlude.recipes.config.recipe_configs import MASK, KTOConfig
from postlude.recipes.config.settings import build_objective
from postlude.recipes.dataset import LabelledRows, read_column
from postlude.recipes.run.runtime import LOCAL_RUNTIME, Runtime
from postlude.recipes.supervised import SupervisedTrainer, dataset_checks
from postlude.recipes.trainer import StepMetrics

LABELS = {"true": True, "false": False, "1": True, "0": False, "1.0": True, "0.0": False}


@dataclass(frozen=True)
class LabelledRow:
    """A completion as tokens, and whether it is desirable."""

    sequence: EncodedSequence
    desirable: bool


class KTOTrainer(SupervisedTrainer[LabelledRow]):
    """A KTO run. The reference is the model that the run started from."""

    name = "kto"
    config: KTOConfig
    min_rows = 2

    def __init__(self, config: KTOConfig, device: str, runtime: Runtime = LOCAL_RUNTIME) -> None:
        super().__init__(config, device, build_objective(config.objective), runtime)
        self.reference = self.engine.reference()

    def read_rows(self, data: LabelledExamples) -> LabelledRows[LabelledRow]:
        return LabelledRows(self.encode_rows(data), read_column(data, data.label, read_label), LabelledRow)

    def make_row(self, encoded: EncodedSequence, row: Mapping[str, Any], location: str, data: Any) -> LabelledRow:
        return LabelledRow(encoded, read_label(row, location, data.label))

    def sequences_of(self, row: LabelledRow) -> Sequence[EncodedSequence]:
        return [row.sequence]

    def make_batch(self, rows: Sequence[LabelledRow], *, held_out: bool = False) -> tuple[Batch, StepMetrics]:
        """Returns the completions with their reference log-probs, labels and the estimate of the KL."""
        sequences = [row.sequence for row in rows]
        batch = _batch(sequences, [float(row.desirable) for row in rows])
        unrelated = _batch(unrelated_pairs(sequences, self.limit.tokens()), [0.0] * len(rows))
        with self.timer("reference"):
            reference = self.reference.logprobs(batch).logprob
            gaps = zip(
                self.engine.logprobs(unrelated).logprob,
                self.reference.logprobs(unrelated).logprob,
                unrelated.columns[MASK],
                strict=True,
            )
            deltas = [float(((policy - reference) * torch.as_tensor(mask)).sum()) for policy, reference, mask in gaps]
        kl = max(sum(deltas) / len(deltas), 0.0)
        columns = {**batch.columns, REFERENCE: reference, BATCH_KL: [kl] * len(rows)}
        return replace(batch, columns=columns), {}

    @staticmethod
    def checks(inputs: PreflightInputs) -> list[Check]:
        trial = _batch(TRIAL_SEQUENCES, [1.0, 0.0, 1.0, 0.0])
        numbers = [torch.full((length,), -1.0) for length in trial.lengths]
        trial = replace(trial, columns={**trial.columns, REFERENCE: numbers, BATCH_KL: [0.1] * len(trial)})

        return [
            *training_checks(inputs, trial),
            *dataset_checks(inputs, inputs.config.data),
            Check("labels", lambda: check_labels(datasets_of(inputs.config.data))),
        ]


def unrelated_pairs(sequences: Sequence[EncodedSequence], budget: int) -> list[EncodedSequence]:
    """Returns the prompt of each sequence with the completion of the next, cut off at `budget` tokens."""
    starts = [sequence.mask.index(1) for sequence in sequences]
    pairs = []
    for index, sequence in enumerate(sequences):
        other = (index + 1) % len(sequences)
        tokens = [*sequence.tokens[: starts[index]], *sequences[other].tokens[starts[other] :]]
        mask = [*[0] * starts[index], *sequences[other].mask[starts[other] :]]
        pairs.append(EncodedSequence(tokens[:budget], mask[:budget]))
    return pairs


def read_label(row: Mapping[str, Any], location: str, column: str) -> bool:
    """Returns the label of a row. Raises ValueError if it has none."""
    label: Any = row.get(column)
    value = LABELS.get(label.strip().lower()) if isinstance(label, str) else label  # a cell of CSV is text
    if not (isinstance(value, bool | int | float) and value in (0, 1)):
        raise ValueError(f"{location} has {label!r} as its {column}, but a label is true or false, or 1 or 0.")
    return bool(value)


def check_labels(datasets: Sequence[LabelledExamples]) -> str:
    """Returns a line about the labels of all datasets. Raises ValueError if all are equal, unless one is a stream."""
    if any(data.streaming for data in datasets):
        return "read with the rows of the stream"
    labels = [label for data in datasets for label in read_column(data, data.label, read_label)]
    if len(set(labels)) < 2:
        kind = "desirable" if labels and labels[0] else "undesirable"
        name = " and ".join(data.path.name for data in datasets)
        raise ValueError(f"every row of {name} is {kind}, but KTO needs both kinds. Use postlude sft, or add rows.")
    return f"{sum(labels)} desirable rows of {len(labels)}"


def _batch(sequences: Sequence[EncodedSequence], desirable: Sequence[float]) -> Batch:
    columns: dict[str, Any] = {MASK: [sequence.mask for sequence in sequences], DESIRABLE: list(desirable)}
    return Batch([sequence.tokens for sequence in sequences], columns)
