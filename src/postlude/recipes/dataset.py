"""Dataset rows to train on: encoded once and cached in the run directory, in shuffled batches, some held out.

All rows are encoded before a run starts, so that a bad row is reported at once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from postlude.data.chat import Encoder
from postlude.data.chat_tokenizer import ChatTokenizer
from postlude.data.datasets import HeldOutRows, Sampler
from postlude.data.encoded_dataset import EncodedDataset, cache_key
from postlude.data.encoding import CHUNK, encode
from postlude.recipes.config.data import Examples, Pairs
from postlude.rollout.tasks import task_digest

LOG = logging.getLogger(__name__)

ROLES = frozenset({"system", "user", "assistant", "tool", "developer"})
"""Roles of chat templates."""
CACHE = "cache"
"""Folder of the cache in the run directory."""
FEW = 2000  # rows that are encoded too fast for a progress bar
Row = TypeVar("Row")
Row_co = TypeVar("Row_co", covariant=True)


class EncodedRows(Generic[Row]):
    """Rows as tokens, without those that were dropped."""

    def __init__(
        self, data: Examples | Pairs, tokenizer: ChatTokenizer, budget: int, cache: Path | None = None
    ) -> None:
        self.cache, encoder = cache, data.encoder(tokenizer, budget)
        settings = data.model_dump() | {"path": None} | {"length": encoder.max_length, "options": dict(encoder.options)}
        self.digest = cache_key(data.files(), encoder.tokenizer, settings | {"kind": type(data).__name__})
        kept = None if cache is None else EncodedDataset.load(cache, self.digest)
        self.rows = _encoded(data, encoder) if kept is None else kept

    def store(self) -> None:
        """Writes the cache."""
        if self.cache is not None:
            self.rows.store(self.cache, self.digest)

    def __str__(self) -> str:
        """Describes the rows for the preflight."""
        dropped = f", {self.rows.dropped} more are too long and dropped" if self.rows.dropped else ""
        conversations = len(np.unique(self.rows.sources))
        split = f" of {conversations} conversations, one per turn" if len(self) > conversations else ""
        return f"{len(self)} rows{split}{dropped}"

    @property
    def largest(self) -> int:
        """The largest token id."""
        return int(self.rows.tokens.max())

    def content(self, index: int) -> bytes:
        """Returns the content that identifies a row as held out or trained."""
        return self.rows.content(index)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Row:
        sequences = self.rows.row(index)
        row: Any = sequences[0] if self.rows.sequences_per_row == 1 else tuple(sequences)
        return row  # type: ignore[no-any-return]


def _encoded(data: Examples | Pairs, encoder: Encoder) -> EncodedDataset:
    rows = data.read()
    form, columns = data.form(rows)
    optional = {None} if form != "preference" else {None, columns[0]}
    rows.require(*(column for column in columns if column is not None and column not in optional))
    values = [[None if column is None else row.get(column) for column in columns] for row in rows]
    if form == "completion" and columns[0] is None:
        values = [["", *rest] for _, *rest in values]
    names = [rows.location(index) for index in range(len(rows))]
    _warn_of_roles(values, names)
    if data.tools in rows.columns:
        values = [[*cells, row.get(data.tools)] for cells, row in zip(values, rows, strict=True)]
    chunks = []
    with encoding_bar(len(rows), f"encoding {rows.name}") as advance:
        for chunk in encode(encoder, form, values, names):
            if chunk.too_long and data.overlong != "drop":
                _, row, length = chunk.too_long[0]
                choices = "drop" if data.overlong == "cut" else "drop or cut"
                held = " and ".join(f'"{column}"' for column in columns if column is not None)
                raise ValueError(
                    f"{row} has {length} tokens in {held}, too many for the budget, which leaves {encoder.max_length}. "
                    f"Raise budget, or set data.overlong to {choices}."
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
    """Warns of the first row with an unknown role."""
    unknown: list[tuple[str, str]] = []
    for row, name in zip(values, names, strict=True):
        messages = [message for value in row if isinstance(value, list) for message in value]
        roles = [message.get("role") for message in messages if isinstance(message, Mapping)]
        unknown += [(name, role) for role in roles if isinstance(role, str) and role not in ROLES][:1]
    if unknown:
        others = f", as have {len(unknown) - 1} more rows" if len(unknown) > 1 else ""
        LOG.warning(
            '%s has a message of role "%s"%s: chat templates know the roles %s, and only assistant messages '
            "are trained on.",
            *unknown[0],
            others,
            ", ".join(sorted(ROLES)),
        )


def _warn_of_equals(kept: EncodedDataset, names: Sequence[str]) -> None:
    """Warns of the first pair with equal completions, from which nothing can be learned."""
    pairs = (kept.row(index) for index in range(len(kept)))
    equal = [index for index, (chosen, rejected) in enumerate(pairs) if chosen.tokens == rejected.tokens]
    if equal:
        others = f", as have {len(equal) - 1} more pairs" if len(equal) > 1 else ""
        LOG.warning(
            "%s has the same tokens chosen and rejected%s: nothing can be learned from it. Leave such pairs out.",
            names[int(kept.sources[2 * equal[0]])],
            others,
        )


@contextmanager
def encoding_bar(total: int, title: str) -> Iterator[Callable[[int], None]]:
    """Shows a progress bar on a terminal. The yielded function takes the number of rows done."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=total < FEW or not console.is_terminal) as bar:
        task = bar.add_task(title, total=total)
        yield lambda count: bar.update(task, advance=count)


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
    content = getattr(rows, "content", None) or (lambda index: task_digest(rows[index]))  # encoded rows, or tasks
    return HeldOutRows(len(rows), content, count, what="rows", fix=fix)


class RowBatches(Generic[Row]):
    """The rows of each step: `batch` rows of shuffled epochs. Held-out rows are skipped."""

    def __init__(self, rows: IndexedRows[Row], *, batch: int, held_out: int, seed: int) -> None:
        self.rows, self.batch = rows, batch
        self.skip = hold_out_rows(rows, held_out) if held_out else None
        self.sampler = Sampler(len(rows), seed, skip=self.skip or ())

    def take(self) -> list[Row]:
        """Returns the rows of the next step."""
        return [self.rows[index] for index in self.sampler.take(self.batch)]

    @property
    def held_out(self) -> Sequence[Row]:
        """The rows that are never trained on."""
        return [] if self.skip is None else [self.rows[index] for index in self.skip.indices]

    def steps(self, epochs: float) -> int:
        """Returns the number of steps of `epochs` passes over the rows that are not held out."""
        skip = self.skip
        rows = len(self.rows) if skip is None else sum(index not in skip for index in range(len(self.rows)))
        return max(1, round(epochs * rows / self.batch))
