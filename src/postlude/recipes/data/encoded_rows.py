"""A dataset's rows as tokens: encoded once, with a bar to look at, and kept in the run's directory."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from postlude.data.chat import Encoder, RowFormat
from postlude.data.datasets import Rows, dataset_files, read_rows
from postlude.data.encoded_dataset import EncodedDataset, cache_key
from postlude.data.encoding import CHUNK, encode

log = logging.getLogger(__name__)

ROLES = frozenset({"system", "user", "assistant", "tool", "developer"})
"""The roles that chat templates know."""
CACHE = "cache"
"""Where in a run's directory they are kept."""
FEW = 2000  # rows that are done before anyone could look
Row = TypeVar("Row")


class Columns(Protocol):
    """The settings of a dataset: where its rows are, and which columns of theirs are learned."""

    @property
    def path(self) -> Path:
        """The file, or a directory of them."""
        ...

    @property
    def tools(self) -> str:
        """The column with the functions that messages may call."""
        ...

    @property
    def overlong(self) -> str:
        """What becomes of rows that are too long."""
        ...

    def form(self, rows: Rows) -> tuple[RowFormat, tuple[str | None, ...]]:
        """What rows are, and the columns that say it."""
        ...

    def model_dump(self) -> dict[str, Any]:
        """Every setting, by name."""
        ...


class EncodedRows(Generic[Row]):
    """Rows as tokens, without those that were left out."""

    def __init__(self, data: Columns, encoder: Encoder, cache: Path | None = None) -> None:
        self.cache = cache
        settings = data.model_dump() | {"path": None} | {"length": encoder.max_length, "options": dict(encoder.options)}
        self.digest = cache_key(dataset_files(data.path), encoder.tokenizer, settings | {"kind": type(data).__name__})
        kept = None if cache is None else EncodedDataset.load(cache, self.digest)
        self.rows = _encoded(data, encoder) if kept is None else kept

    def store(self) -> None:
        """Keep the rows for the next start."""
        if self.cache is not None:
            self.rows.store(self.cache, self.digest)

    def __str__(self) -> str:
        """How many there are, for a report of what was found."""
        left_out = f", {self.rows.dropped} more are too long and left out" if self.rows.dropped else ""
        conversations = len(np.unique(self.rows.sources))
        split = f" of {conversations} conversations, one a turn" if len(self) > conversations else ""
        return f"{len(self)} rows{split}{left_out}"

    @property
    def largest(self) -> int:
        """The largest token there is."""
        return int(self.rows.tokens.max())

    def content(self, index: int) -> bytes:
        """What tells rows apart that are held out."""
        return self.rows.content(index)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Row:
        found = self.rows.row(index)
        row: Any = found[0] if self.rows.sequences_per_row == 1 else tuple(found)
        return row  # type: ignore[no-any-return]


def _encoded(data: Columns, encoder: Encoder) -> EncodedDataset:
    rows = read_rows(data.path)
    form, columns = data.form(rows)
    optional = {None} if form != "preference" else {None, columns[0]}
    rows.require(*(column for column in columns if column is not None and column not in optional))
    values = [[None if column is None else row.get(column) for column in columns] for row in rows]
    if form == "completion" and columns[0] is None:
        values = [["", *rest] for _, *rest in values]
    names = [rows.location(index) for index in range(len(rows))]
    _warn_of_roles(values, names)
    if data.tools in rows.columns:
        values = [[*each, row.get(data.tools)] for each, row in zip(values, rows, strict=True)]
    chunks = []
    with encoding_bar(len(rows), f"encoding {rows.name}") as advance:
        for chunk in encode(encoder, form, values, names):
            if chunk.too_long and data.overlong != "drop":
                _, row, length = chunk.too_long[0]
                mends = "drop" if data.overlong == "cut" else "drop or cut"
                held = " and ".join(f'"{column}"' for column in columns if column is not None)
                raise ValueError(
                    f"{row} has {length} tokens in {held}, too many for the budget, which leaves {encoder.max_length}. "
                    f"Raise budget, or set data.overlong to {mends}."
                )
            chunks.append(chunk)
            advance(CHUNK)
    kept = EncodedDataset.of(chunks, sequences_per_row=2 if form == "preference" else 1)
    if not len(kept):
        raise ValueError(f"every row of {rows.name} is longer than the budget allows. Raise budget.")
    if kept.sequences_per_row == 2:
        _warn_of_equals(kept, names)
    return kept


def _warn_of_roles(values: Sequence[Sequence[Any]], names: Sequence[str]) -> None:
    """Name the first row with a message of a role that templates may not know."""
    found: list[tuple[str, str]] = []
    for row, name in zip(values, names, strict=True):
        messages = [message for value in row if isinstance(value, list) for message in value]
        roles = [message.get("role") for message in messages if isinstance(message, Mapping)]
        found += [(name, role) for role in roles if isinstance(role, str) and role not in ROLES][:1]
    if found:
        others = f", as have {len(found) - 1} more rows" if len(found) > 1 else ""
        log.warning(
            '%s has a message of role "%s"%s: the roles that chat templates know are %s, and only what the assistant '
            "says is learned.",
            *found[0],
            others,
            ", ".join(sorted(ROLES)),
        )


def _warn_of_equals(kept: EncodedDataset, names: Sequence[str]) -> None:
    """Name the first pair of which nothing can be learned, since both answers are the same tokens."""
    pairs = (kept.row(index) for index in range(len(kept)))
    equal = [index for index, (chosen, rejected) in enumerate(pairs) if chosen.tokens == rejected.tokens]
    if equal:
        others = f", as have {len(equal) - 1} more pairs" if len(equal) > 1 else ""
        log.warning(
            "%s has the same tokens chosen and rejected%s: nothing can be learned from it. Leave such pairs out.",
            names[int(kept.sources[2 * equal[0]])],
            others,
        )


@contextmanager
def encoding_bar(total: int, title: str) -> Iterator[Callable[[int], None]]:
    """Within, what is yielded is told how many more are done. It shows on a terminal alone, and leaves nothing."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=total < FEW or not console.is_terminal) as bar:
        task = bar.add_task(title, total=total)
        yield lambda count: bar.update(task, advance=count)
