"""Dataset rows as tokens: encoded once and cached in the run directory, or row by row as a stream is read.

Without streaming all rows are encoded before a run starts, so that a bad row is reported then.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from postlude.data.chat import Encoder, RowFormat, TooLongError
from postlude.data.chat_template import PLACEHOLDER, PLAIN_TEMPLATE, QUESTION, ChatTemplate
from postlude.data.chat_tokenizer import ChatTokenizer
from postlude.data.datasets import Rows, stream_files
from postlude.data.encoded_dataset import CHUNK, EncodedDataset, cache_key, encode
from postlude.data.row_formats import ALPACA, SHAREGPT, alpaca_prompt, read_cells, with_system_column
from postlude.data.streamed_rows import RowStream
from postlude.data.task_identity import row_identity
from postlude.data.turn_encoding import turn_ends
from postlude.recipes.config.data import DatasetPath, Examples, Mixture, Pairs
from postlude.recipes.run.directory import is_rank0
from postlude.recipes.sequence_limit import SequenceLimit

LOG = logging.getLogger(__name__)

ROLES = frozenset({"system", "user", "assistant", "tool", "developer"})
"""Roles of chat templates."""
NOT_IN_TOKENS = ("path", "config", "split", "weight", "shuffle", "shuffle_buffer", "streaming")
"""Settings of a dataset that do not change the tokens of its rows. The bytes of its files are part of the digest."""
CACHE = "cache"
"""Folder of the cache in the run directory."""
FEW = 2000  # rows that are encoded too fast for a progress bar
Row = TypeVar("Row")


def cache_folder(run: Path, section: Any, data: Examples | Pairs) -> Path:
    """Returns where the rows of a dataset are cached: each of several in `section` has a folder of its own."""
    return run / CACHE / str(section.datasets.index(data)) if isinstance(section, Mixture) else run / CACHE


class EncodedRows(Generic[Row]):
    """Rows as tokens, without those that were dropped."""

    def __init__(
        self, data: Examples | Pairs, tokenizer: ChatTokenizer, limit: SequenceLimit, cache: Path | None = None
    ) -> None:
        self.cache, encoder = cache, data.encoder(tokenizer, limit)
        settings = data.model_dump(exclude=set(NOT_IN_TOKENS)) | {"length": encoder.max_length}
        self.digest = cache_key(data.files(), encoder.tokenizer, settings | {"kind": type(data).__name__})
        cached = None if cache is None else EncodedDataset.load(cache, self.digest)
        self.rows = _encoded(data, encoder, limit) if cached is None else cached

    def store(self) -> None:
        if self.cache is not None:
            self.rows.store(self.cache, self.digest)

    def __str__(self) -> str:
        dropped = f", {self.rows.dropped} more are too long and dropped" if self.rows.dropped else ""
        conversations = len(np.unique(self.rows.sources))
        split = f" of {conversations} conversations, one per turn" if len(self) > conversations else ""
        return f"{len(self)} rows{split}{dropped}"

    @property
    def largest(self) -> int:
        return int(self.rows.tokens.max())

    def identity(self, index: int) -> bytes:
        return self.rows.identity(index)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Row:
        sequences = self.rows.row(index)
        row: Any = sequences[0] if self.rows.sequences_per_row == 1 else tuple(sequences)
        return row  # type: ignore[no-any-return]


class LabelledRows(Generic[Row]):
    """Encoded rows, each with the value that its source row has in another column: `make(row, value)`."""

    def __init__(self, rows: EncodedRows[Any], values: Sequence[Any] | None, make: Callable[[Any, Any], Row]) -> None:
        self.rows, self.values, self.make = rows, values, make

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Row:
        source = int(self.rows.rows.sources[index * self.rows.rows.sequences_per_row])
        return self.make(self.rows[index], None if self.values is None else self.values[source])

    def identity(self, index: int) -> bytes:
        return self.rows.identity(index)


def read_column(data: DatasetPath, column: str, read: Callable[[Mapping[str, Any], str, str], Row]) -> list[Row]:
    """Returns what `read(row, location, column)` returns for each row of a dataset."""
    rows = data.read().require(column)
    return [read(row, rows.location(index), column) for index, row in enumerate(rows)]


def _encoded(data: Examples | Pairs, encoder: Encoder, limit: SequenceLimit) -> EncodedDataset:
    rows = data.read()
    form, columns = data.form(rows)
    values, names = row_values(data, rows, form, columns), list(rows.locations)
    _report_format(rows, columns, values)
    _warn_of_roles(values, names)
    chunks = []
    with encoding_bar(len(rows), f"encoding {rows.name}") as advance:
        for chunk in encode(encoder, form, values, names):
            if chunk.too_long and data.overlong != "drop":
                _, row, length = chunk.too_long[0]
                raise ValueError(_overlong(data, columns, row, length, limit))
            chunks.append(chunk)
            advance(CHUNK)
    sequences_per_row = 2 if form == "preference" else 1
    dataset = EncodedDataset.of(chunks, sequences_per_row=sequences_per_row, chat=has_messages(form, values))
    if not len(dataset):
        raise ValueError(
            f"every row of {rows.name} is too long for {limit.reason(data.sequences)}. {limit.fix(data.sequences)}."
        )
    if dataset.sequences_per_row == 2:
        _warn_of_equals(dataset, names)
    return dataset


def row_values(data: Examples | Pairs, rows: Rows, form: RowFormat, columns: Sequence[str | None]) -> list[list[Any]]:
    """Returns the arguments of the encoder's method for each row. Raises if a row has no value where it needs one."""
    optional = {None} if form != "preference" else {None, columns[0]}
    rows.require(*(column for column in columns if column is not None and column not in optional))
    values = []
    for index, row in enumerate(rows):
        location = rows.location(index)
        if columns[0] is None:
            cells = ["", *(row[column] for column in columns if column is not None)]
        elif columns == ALPACA:
            cells = [alpaca_prompt(row, location), row[columns[1] or ""]]
        else:
            cells = read_cells(form, [row.get(column or "") for column in columns], location)
        if columns == SHAREGPT:
            cells = [with_system_column(cells[0], row, location)]
        values.append([*cells, row.get(data.tools)])
    return values


def has_messages(form: RowFormat, values: Sequence[Sequence[Any]]) -> bool:
    """Whether rows, as `row_values` returns them, are messages, which the chat template formats."""
    cells = [cell for *row, _ in values for cell in row if isinstance(cell, list)]
    return form == "conversation" or any(isinstance(message, Mapping) for cell in cells for message in cell)


def _report_format(rows: Rows, columns: Sequence[str | None], values: Sequence[Sequence[Any]]) -> None:
    """Says in one line what format was recognised, of rows that are not in Postlude's own."""
    read = {SHAREGPT: "rows of ShareGPT", ALPACA: "rows of Alpaca"}.get(tuple(map(str, columns)))
    for row, cells in zip(rows, values, strict=True):
        pairs = [(row.get(name or ""), cell) for name, cell in zip(columns, cells, strict=False)]
        if read is None and any(isinstance(text, str) and isinstance(cell, list) for text, cell in pairs):
            read = "messages, from JSON text"
        if read is None and columns[0] is not None and pairs[0][0] is None and isinstance(pairs[0][1], str):
            read = "texts that begin with the prompt that they share"
    if read is not None:
        LOG.warning("%s is read as %s (columns %s).", rows.name, read, ", ".join(str(column) for column in columns))


def _overlong(
    data: Examples | Pairs, columns: Sequence[str | None], row: str, length: int, limit: SequenceLimit
) -> str:
    choices = "drop" if data.overlong == "cut" else "drop or cut"
    column_names = " and ".join(f'"{column}"' for column in columns if column is not None)
    return (
        f"{row} has {length} tokens in {column_names}, too many for {limit.reason(data.sequences)}. "
        f"{limit.fix(data.sequences)}, or set data.overlong to {choices}."
    )


class StreamEncoder(Generic[Row]):
    """Encodes rows of a stream as `EncodedRows` does. The first rows of the dataset say which format it has.

    `make_row` turns an encoded row, the row that it comes from, where that is and the dataset's settings into a row to
    train on.
    """

    def __init__(
        self,
        data: Examples | Pairs,
        tokenizer: ChatTokenizer,
        limit: SequenceLimit,
        make_row: Callable[[Any, Mapping[str, Any], str, Any], Row],
    ) -> None:
        self.data, self.encoder, self.make_row = data, data.encoder(tokenizer, limit), make_row
        self.limit = limit
        self.files = stream_files(data.path, data.config, data.split)
        first = RowStream(self.files).read(CHUNK)
        if not first:
            raise ValueError(f"dataset {data.path} has no rows. Give a file with at least one.")
        self.first_rows = Rows(data.path.name, [row for _, row in first], [location for location, _ in first])
        self.form, self.columns = data.form(self.first_rows)
        self.chat = has_messages(self.form, row_values(data, self.first_rows, self.form, self.columns))

    def __call__(self, rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> list[list[Row]]:
        """Returns what each row gives: nothing if it is dropped, several rows where a turn is a row."""
        values = row_values(self.data, Rows(self.data.path.name, rows, names), self.form, self.columns)
        results: list[list[Row]] = []
        for encoded, row, name in zip(self.encoder.encode_rows(self.form, values, names), rows, names, strict=True):
            parts = [encoded] if isinstance(encoded, tuple | TooLongError) else encoded
            too_long = next((part for part in parts if isinstance(part, TooLongError)), None)
            if too_long is not None and self.data.overlong != "drop":
                raise ValueError(_overlong(self.data, self.columns, too_long.row, too_long.length, self.limit))
            encoded_rows = [part for part in parts if not isinstance(part, TooLongError)]
            results.append([self.make_row(part, row, name, self.data) for part in encoded_rows])
        return results

    def identity(self, row: Mapping[str, Any]) -> bytes:
        (values,) = row_values(self.data, Rows(self.data.path.name, [row], ["a row"]), self.form, self.columns)
        return row_identity(self.form, values, self.encoder.turns)

    def check(self) -> tuple[str, int]:
        """Encodes the first rows. Returns a line about them, and their largest token."""
        names = list(self.first_rows.locations)
        values = row_values(self.data, self.first_rows, self.form, self.columns)
        _report_format(self.first_rows, self.columns, values)
        _warn_of_roles(values, names)
        largest = 0
        for encoded in self.encoder.encode_rows(self.form, values, names):
            for part in encoded if isinstance(encoded, list | tuple) else ():
                largest = max(largest, *part.tokens) if not isinstance(part, TooLongError) else largest
        self(self.first_rows.rows, names)  # raises if one is too long
        return f"a stream of {len(self.files)} file(s), of which the first {len(names)} rows can be encoded", largest


def _warn_of_roles(values: Sequence[Sequence[Any]], names: Sequence[str]) -> None:
    """Warns of the first row with an unknown role."""
    unknown: list[tuple[str, str]] = []
    for row, name in zip(values, names, strict=True):
        messages = [message for value in row if isinstance(value, list) for message in value]
        roles = [message.get("role") for message in messages if isinstance(message, Mapping)]
        unknown += [(name, role) for role in roles if isinstance(role, str) and role not in ROLES][:1]
    if unknown:
        more_rows = f", as have {len(unknown) - 1} more rows" if len(unknown) > 1 else ""
        LOG.warning(
            '%s has a message of role "%s"%s: chat templates know the roles %s, and only assistant messages '
            "are trained on.",
            *unknown[0],
            more_rows,
            ", ".join(sorted(ROLES)),
        )


def _warn_of_equals(dataset: EncodedDataset, names: Sequence[str]) -> None:
    """Warns of the first pair with equal completions, from which nothing can be learned."""
    pairs = (dataset.row(index) for index in range(len(dataset)))
    equal = [index for index, (chosen, rejected) in enumerate(pairs) if chosen.tokens == rejected.tokens]
    if equal:
        more_pairs = f", as have {len(equal) - 1} more pairs" if len(equal) > 1 else ""
        LOG.warning(
            "%s has the same tokens chosen and rejected%s: nothing can be learned from it. Leave such pairs out.",
            names[int(dataset.sources[2 * equal[0]])],
            more_pairs,
        )


@contextmanager
def encoding_bar(total: int, title: str) -> Iterator[Callable[[int], None]]:
    """Shows a progress bar on a terminal. The yielded function takes the number of rows done."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=total < FEW or not console.is_terminal) as bar:
        task = bar.add_task(title, total=total)
        yield lambda count: bar.update(task, advance=count)


def prepare_chat(tokenizer: Any, model: str) -> None:
    """Prepares the tokenizer of a run that trains on or samples messages. Rank 0 logs what a user should know.

    A tokenizer without a chat template gets the plain one, which is exported with the model.
    """
    answer = {"role": "assistant", "content": PLACEHOLDER}
    if not tokenizer.chat_template:
        tokenizer.chat_template = PLAIN_TEMPLATE
        if is_rank0():
            example = ChatTemplate(tokenizer, {}).render([QUESTION, answer])
            LOG.warning(
                "%s has no chat template, so messages are written like %r, and this template is exported with the "
                "model. Set chat_template for another.",
                model,
                example,
            )
    try:
        last = Encoder(tokenizer=tokenizer).conversation([QUESTION, answer])[-1]
    except ValueError:  # a template for other conversations
        return
    trained = [token for token, mask in zip(last.tokens, last.mask, strict=True) if mask]
    if trained[-1] not in turn_ends(tokenizer) and is_rank0():
        LOG.warning(
            "the chat template of %s ends an assistant's turn with %r, which is no special token, so training on turns "
            "does not teach the model to stop. Set chat_template to one that ends turns with a special token (in its "
            "generation marks, if it has any).",
            model,
            tokenizer.decode(trained[-8:]),
        )
