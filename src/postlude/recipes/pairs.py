"""Rows of preference data: the two completions of a pair, and its margin if the file has a column of margins."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from postlude.data import Batch
from postlude.data.chat import EncodedSequence, preference_batch
from postlude.objectives import Objective
from postlude.objectives.preference import MARGINS, BradleyTerry, Preference
from postlude.recipes.checks.objective_trial import TRIAL_SEQUENCES
from postlude.recipes.checks.preflight import Check, PreflightInputs
from postlude.recipes.config.data import PairMixture, Pairs, datasets_of
from postlude.recipes.dataset import LabelledRows, read_column
from postlude.recipes.supervised import SupervisedTrainer

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
        """Returns the pairs as tokens."""
        return LabelledRows(self.encode_rows(data), read_margins(data), PairRow)

    def make_row(self, encoded: Pair, row: Mapping[str, Any], location: str, data: Pairs) -> PairRow:
        """Returns a pair of a stream with its margin."""
        return PairRow(encoded, None if data.margin is None else read_margin(row, location, data.margin))

    def sequences_of(self, row: PairRow) -> Sequence[EncodedSequence]:
        """Returns both completions."""
        return row.pair


def read_margins(data: Pairs) -> list[float] | None:
    """Returns the margin of each row; None if no column is named. Raises ValueError for a row without one."""
    return None if data.margin is None else read_column(data, data.margin, read_margin)


def read_margin(row: Mapping[str, Any], location: str, column: str) -> float:
    """Returns the margin of a row. Raises ValueError if it has none."""
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
    """Yields the check of the column of margins, if one is named."""

    def check_margins() -> str:
        datasets = datasets_of(inputs.config.data)
        if any(data.streaming for data in datasets):
            return "read with the rows of the stream"
        margins = [margin for data in datasets for margin in read_margins(data) or []]
        return f"from {min(margins):g} to {max(margins):g}"

    if has_margins(inputs.config.data):
        yield Check("margins", check_margins, after=("data",))
