"""The rows of each step: from one dataset, or from several in proportion to their weights."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any, Protocol, Self, TypeVar

from postlude.data.datasets import HeldOutRows, RowOrder, RowSource
from postlude.recipes.report.metrics import ROWS
from postlude.rollout.tasks import task_identity

ROWS_TAKEN = "rows_taken"  # in a checkpoint: how many rows the steps so far took
SEED_STRIDE = 1_000_003  # difference between the seeds of two parts of a mixture
Row = TypeVar("Row")
Row_co = TypeVar("Row_co", covariant=True)


class IndexedRows(Protocol[Row_co]):
    """Rows by index."""

    def __len__(self) -> int:
        """Returns their number."""
        ...

    def __getitem__(self, index: int) -> Row_co:
        """Returns one row."""
        ...


def hold_out_rows(rows: IndexedRows[Any], count: int) -> HeldOutRows:
    """Returns the last `count` rows with different prompts, and every row with one of their prompts.

    If every turn of a conversation is a row, their prompt is that of the conversation.
    """
    fix = "Lower held_out.rows, give more prompts, or set held_out.rows to 0."
    return HeldOutRows(len(rows), _identity_by_index(rows), count, noun="rows", fix=fix)


def _identity_by_index(rows: IndexedRows[Any]) -> Callable[[int], bytes]:
    return getattr(rows, "identity", None) or (lambda index: task_identity(rows[index]))  # encoded rows, or tasks


@dataclass(frozen=True)
class StepSizes:
    """How many rows, or prompts, each step takes: `size`, and the last one what is left of `total`."""

    size: int
    total: int
    least: int = 1
    """A last step of fewer rows is left out."""
    first_step: int = 0
    """The first step of a continued run, whose `total` may have been another before."""
    first_row: int = 0
    """Rows that the steps before it took."""

    @classmethod
    def of_epochs(cls, size: int, epochs: float, rows: int, *, least: int = 1) -> Self:
        """Returns the sizes of the steps of `epochs` passes over `rows` rows."""
        return cls(size, max(least, round(epochs * rows)), least)

    def continued(self, step: int, rows: int) -> Self:
        """Returns the sizes of a run whose steps before `step` took `rows` rows. Later steps take all that are left."""
        return replace(self, first_step=step, first_row=rows)

    @property
    def steps(self) -> int:
        full, rest = divmod(self.total - self.first_row, self.size)
        return self.first_step + full + (rest >= self.least)

    def of_step(self, step: int) -> int:
        return max(0, min(self.size, self.total - self.rows_before(step))) if step < self.steps else 0

    def rows_before(self, step: int) -> int:
        """Returns how many rows the steps before this one take."""
        return min(self.total, self.first_row + (step - self.first_step) * self.size)


class OrderedRows(RowSource[Row]):
    """Rows by index, in an order that skips those that others hold out. `count` returns how many are left."""

    def __init__(self, rows: IndexedRows[Row], order: RowOrder, count: Callable[[], int] | None = None) -> None:
        self.rows, self.order, self._count = rows, order, functools.cache(count or rows.__len__)

    def take(self, count: int) -> list[Row]:
        return [self.rows[index] for index in self.order.take(count)]

    @property
    def size(self) -> int:
        return self._count()

    @property
    def progress(self) -> float:
        return self.order.progress

    def state(self) -> dict[str, Any]:
        return self.order.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        self.order.restore(state)


class ShuffledRows(OrderedRows[Row]):
    """Rows of known number: each once an epoch, in shuffled order or, without `shuffle`, in their own."""

    def __init__(self, rows: IndexedRows[Row], *, held_out: int, seed: int, shuffle: bool = True) -> None:
        self.skip = hold_out_rows(rows, held_out) if held_out else None
        self._held_out_identities = set[bytes]() if self.skip is None else set(self.skip.tasks.identities)
        super().__init__(rows, RowOrder(len(rows), seed, skip=self.skip or (), shuffle=shuffle))

    @property
    def identities(self) -> set[bytes]:
        return set(map(_identity_by_index(self.rows), range(len(self.rows))))

    @property
    def held_out(self) -> Sequence[Row]:
        return [] if self.skip is None else [self.rows[index] for index in self.skip.indices]

    @property
    def held_out_identities(self) -> set[bytes]:
        return self._held_out_identities

    def exclude(self, identities: set[bytes]) -> None:
        if self.skip is not None:
            self.skip.exclude(identities)

    @property
    def size(self) -> int:
        skip = self.skip
        return len(self.rows) if skip is None else sum(index not in skip for index in range(len(self.rows)))


class MixedRows(RowSource[Row]):
    """Rows of several datasets in proportion to their weights.

    After n rows, a dataset with the share p of the weights has given less than one row more or fewer than n·p, and
    exactly n·p where that is a whole number. Without weights, the share is that of the dataset's rows, so that an epoch
    has each row once. Each dataset goes through its own epochs.
    """

    def __init__(self, sources: Mapping[str, RowSource[Row]], weights: Sequence[float | None]) -> None:
        self.sources = dict(sources)
        for name, source in self.sources.items():
            other_sources = [other_source for key, other_source in self.sources.items() if key != name]
            source.exclude(set().union(*(other_source.held_out_identities for other_source in other_sources)))
        self.weights = whole_weights([source.size for source in self.sources.values()], weights)
        self.counts = [0] * len(self.weights)

    def take(self, count: int) -> list[Row]:
        sources, rows = list(self.sources.values()), []
        for _ in range(count):
            index = next_dataset(self.weights, self.counts)
            rows += sources[index].take(1)
            self.counts[index] += 1
        return rows

    @property
    def identities(self) -> set[bytes]:
        return set().union(*(source.identities for source in self.sources.values()))

    @property
    def held_out(self) -> Sequence[Row]:
        return [row for source in self.sources.values() for row in source.held_out]

    @property
    def held_out_identities(self) -> set[bytes]:
        return set().union(*(source.held_out_identities for source in self.sources.values()))

    def exclude(self, identities: set[bytes]) -> None:
        for source in self.sources.values():
            source.exclude(identities)

    @property
    def size(self) -> int | None:
        """Rows of an epoch: as many as all datasets have together; None if one does not know."""
        sizes = [source.size for source in self.sources.values()]
        return None if None in sizes else sum(size for size in sizes if size is not None)

    @property
    def progress(self) -> float:
        """Rows so far in epochs; if the size of one is unknown, the epochs of the dataset with the fewest."""
        size = self.size
        return min(source.progress for source in self.sources.values()) if size is None else sum(self.counts) / size

    def metrics(self) -> dict[str, float]:
        return {f"{ROWS}{name}": float(count) for name, count in zip(self.sources, self.counts, strict=True)}

    def state(self) -> dict[str, Any]:
        states = {name: source.state() for name, source in self.sources.items()}
        return {"weights": self.weights, "counts": list(self.counts), "sources": states}

    def restore(self, state: Mapping[str, Any]) -> None:
        if list(state.get("sources", ())) != list(self.sources) or list(state.get("weights", ())) != self.weights:
            raise ValueError(
                f"the saved mixture is of {', '.join(state.get('sources', ())) or 'one dataset'} with weights "
                f"{state.get('weights')}, but this one is of {', '.join(self.sources)} with weights {self.weights}, so "
                "the rows already visited are unknown. Start again, or restore the datasets and their weights."
            )
        self.counts = list(state["counts"])
        for name, source in self.sources.items():
            source.restore(state["sources"][name])


def whole_weights(sizes: Sequence[int | None], weights: Sequence[float | None]) -> list[int]:
    """Returns weights as whole numbers without a common factor; without weights, the sizes."""
    shares = [Fraction(str(weight)) for weight in weights if weight is not None]
    if not shares:
        shares = [Fraction(size) for size in sizes if size is not None]
    if len(shares) < len(weights):
        raise ValueError("some datasets have a weight or a known size and others do not. Give each a weight.")
    scale = math.lcm(*(share.denominator for share in shares))
    integers = [int(share * scale) for share in shares]
    return [weight // math.gcd(*integers) for weight in integers]


def next_dataset(weights: Sequence[int], counts: Sequence[int]) -> int:
    """Returns which dataset gives the next row, after `counts` rows of each (Tijdeman's chairman assignment).

    Of the datasets that are behind by at least a small part of a row, it is the one that must come soonest, or else
    would fall behind by a row. Whole numbers keep it exact, and the same on every machine.
    """
    total, row, slack = sum(weights), sum(counts) + 1, max(2 * len(weights) - 2, 1)
    behind = [
        index
        for index, (weight, count) in enumerate(zip(weights, counts, strict=True))
        if (row * weight - count * total) * slack >= total
    ]
    return min(behind, key=lambda index: (Fraction((counts[index] + 1) * slack - 1, weights[index]), index))


def dataset_names(paths: Sequence[Path]) -> list[str]:
    """Returns a name for each dataset in metrics: its file or folder without extension; numbered if repeated."""
    names: list[str] = []
    for path in paths:
        name = path.name.partition("@")[0].partition(".")[0] or path.name
        names.append(name if name not in names else f"{name}-{len(names) + 1}")
    return names
