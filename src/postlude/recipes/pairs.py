"""Rows of preference data: the two completions of a pair, and its margin if the file has a column of margins."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from postlude.data import Batch
from postlude.data.chat import EncodedSequence, preference_batch
from postlude.objectives import Objective
from postlude.objectives.preference import MARGINS, Preference
from postlude.objectives.reward_model import BradleyTerry
from postlude.recipes.checks.objective_trial import TRIAL_SEQUENCES
from postlude.recipes.checks.preflight import Check, PreflightInputs
from postlude.recipes.config.data import Pairs
from postlude.recipes.dataset import EncodedRows

Pair: TypeAlias = tuple[EncodedSequence, EncodedSequence]
"""The chosen completion and the rejected one."""


@dataclass(frozen=True)
class PairRow:
    """A pair as tokens, and its margin."""

    pair: Pair
    margin: float | None = None


class PairRows:
    """Encoded pairs with the margins of their source rows, if there are any."""

    def __init__(self, rows: EncodedRows[Pair], margins: Sequence[float] | None) -> None:
        self.rows, self.margins = rows, margins

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> PairRow:
        source = int(self.rows.rows.sources[index * self.rows.rows.sequences_per_row])
        return PairRow(self.rows[index], None if self.margins is None else self.margins[source])

    def content(self, index: int) -> bytes:
        """Returns the content by which held-out rows are told from the others."""
        return self.rows.content(index)


def read_margins(data: Pairs) -> list[float] | None:
    """Returns the margin of each row of the file, or None if no column is named. Raises ValueError if one is none."""
    if data.margin is None:
        return None
    rows = data.read()
    rows.require(data.margin)
    margins: list[float] = []
    for index, row in enumerate(rows):
        margin = row.get(data.margin)
        if isinstance(margin, bool) or not isinstance(margin, int | float) or not math.isfinite(margin):
            raise ValueError(
                f"{rows.location(index)} has {margin!r} as its {data.margin}, but a margin is a finite number."
            )
        margins.append(float(margin))
    return margins


def pair_batch(rows: Sequence[PairRow]) -> Batch:
    """Returns both completions of each pair side by side, with the column "margins" if the pairs have margins."""
    batch = preference_batch([row.pair for row in rows])
    margins = [row.margin for row in rows for _ in row.pair]
    if None in margins:
        return batch
    return replace(batch, columns={**batch.columns, MARGINS: margins})


def trial_pairs(data: Pairs) -> Batch:
    """Returns a batch for the objective's trial call: two pairs."""
    margin, (first, second, third, fourth) = None if data.margin is None else 1.0, TRIAL_SEQUENCES
    return pair_batch([PairRow((first, second), margin), PairRow((third, fourth), margin)])


def with_margins(objective: Objective, data: Pairs) -> Objective:
    """Returns the objective that reads the margins of the data. An objective of the user reads what it likes."""
    if data.margin is not None and isinstance(objective, Preference | BradleyTerry):
        return replace(objective, margins=True)
    return objective


def margin_checks(inputs: PreflightInputs) -> Iterator[Check]:
    """Check of the column of margins, if one is named."""

    def look() -> str:
        margins = read_margins(inputs.config.data) or []
        return f"from {min(margins):g} to {max(margins):g}"

    if inputs.config.data.margin is not None:
        yield Check("margins", look, after=("data",))
