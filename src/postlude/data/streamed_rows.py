"""StreamedRows: rows that are read and encoded while a run trains, shuffled within a buffer, resumed to the row.

RowStream reads the rows of a dataset in order from its files as they are needed. Its position is plain JSON. A stream
that is moved to a position continues with the row that would have followed: of a .jsonl file it goes to the byte, of a
.parquet file to the row group, and any other file it reads from its start.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from postlude.data.datasets import RowSource, file_format, parse_line, permutation, read_file, read_parquet
from postlude.data.task_identity import TaskSet, first_different

Row = TypeVar("Row")
RowEncoder: TypeAlias = Callable[[Sequence[Mapping[str, Any]], Sequence[str]], list[list[Row]]]
"""Encodes rows, given where each is. Each gives a list: of several where a turn is a row, empty if it is dropped."""
READ_TOGETHER = 256  # rows in their order; and the fewest that are encoded together


@dataclass(frozen=True)
class StreamPosition:
    """The place of the next row: rows read of a file, and in a .jsonl file also lines and bytes."""

    epoch: int = 0
    file: int = 0
    row: int = 0
    line: int = 0
    offset: int = 0

    def state(self) -> dict[str, int]:
        return asdict(self)


class RowStream:
    """Reads the rows of files in their order. `files[i]` may download a file when it is first read."""

    def __init__(self, files: Sequence[Path], position: StreamPosition | None = None) -> None:
        self.files, self.position = files, position or StreamPosition()
        self._reader: Iterator[tuple[str, Mapping[str, Any], int, int]] | None = None

    def read(self, count: int) -> list[tuple[str, Mapping[str, Any]]]:
        """Returns the next `count` rows, each after where it is; fewer where the epoch ends."""
        rows: list[tuple[str, Mapping[str, Any]]] = []
        while len(rows) < count and self.position.file < len(self.files):
            if self._reader is None:
                self._reader = _rows_from(self.files[self.position.file], self.position)
            entry = next(self._reader, None)
            if entry is None:
                self.seek(StreamPosition(self.position.epoch, self.position.file + 1))
            else:
                location, row, line, offset = entry
                rows.append((location, row))
                self.position = replace(self.position, row=self.position.row + 1, line=line, offset=offset)
        return rows

    def seek(self, position: StreamPosition) -> None:
        self.position, self._reader = position, None

    @property
    def progress(self) -> float:
        """Epochs done, with the fraction of files done in the current one."""
        return self.position.epoch + self.position.file / len(self.files)


def _rows_from(file: Path, position: StreamPosition) -> Iterator[tuple[str, Mapping[str, Any], int, int]]:
    """Yields where each row is, the row, and the lines and bytes up to it."""
    if file_format(file) in (".jsonl", ".ndjson") and not file.name.lower().endswith(".gz"):
        with file.open("rb") as opened:
            opened.seek(position.offset)
            offset = position.offset
            for number, line in enumerate(opened, start=position.line + 1):
                offset += len(line)
                if (parsed := parse_line(line, number, file.name)) is not None:
                    yield *parsed, number, offset
    elif file_format(file) == ".parquet":
        yield from ((location, row, 0, 0) for location, row in read_parquet(file, skip=position.row))
    else:
        rows = itertools.islice(read_file(file), position.row, None)
        yield from ((location, row, 0, 0) for location, row in rows)


class StreamedRows(RowSource[Row]):
    """The rows of a stream, epoch after epoch.

    With `buffer`, each `buffer` successive rows of the files (the last of an epoch may be fewer) are visited in an
    order that follows from the seed, the epoch and their number: a row is visited within `buffer` rows of its place.
    Without it the order is that of the files. Any position is thus found again by reading `buffer` rows.

    The first `held_out` rows of different tasks are held out, and no row of these tasks is returned. `identity` returns
    the identity of the task of a row as it is read.
    """

    def __init__(
        self,
        files: Sequence[Path],
        encode: RowEncoder[Row],
        identity: Callable[[Mapping[str, Any]], bytes],
        *,
        seed: int = 0,
        buffer: int | None = None,
        held_out: int = 0,
    ) -> None:
        self.files, self.encode, self.identity = files, encode, identity
        self.seed, self.buffer = seed, buffer
        self.stream = RowStream(files)
        self.start = self.stream.position  # of the current buffer
        self.number = 0  # of the current buffer in its epoch
        self.done = 0  # rows of the buffer that were returned as a whole, or left out
        self.part = 0  # what was returned of the next one, which may be several
        self._rows: list[tuple[str, Mapping[str, Any]]] | None = None  # the buffer, in the order of visits
        self._encoded: deque[list[Row]] = deque()  # from row `done` on
        self._in_epoch = 0  # rows returned in this epoch
        self._held_out: list[Row] = []
        self._held_out_identities: set[bytes] = set()
        self._excluded = TaskSet()
        if held_out:
            self._hold_out(held_out)

    def take(self, count: int) -> list[Row]:
        """Returns the next `count` rows. They may run from one epoch into the next."""
        taken_rows: list[Row] = []
        while len(taken_rows) < count:
            if not self._encoded:
                self._encode_more(count - len(taken_rows))
            rows = self._encoded[0]
            next_rows = rows[self.part : self.part + count - len(taken_rows)]
            taken_rows += next_rows
            self.part += len(next_rows)
            self._in_epoch += len(next_rows)
            if self.part == len(rows):
                self._encoded.popleft()
                self.done, self.part = self.done + 1, 0
        return taken_rows

    @property
    def size(self) -> None:
        return None

    @property
    def held_out(self) -> Sequence[Row]:
        return self._held_out

    @property
    def progress(self) -> float:
        """Epochs done, with the fraction of files read in the current one."""
        return self.stream.progress

    @property
    def held_out_identities(self) -> set[bytes]:
        return self._held_out_identities

    def exclude(self, identities: set[bytes]) -> None:
        self._excluded.update(identities)

    def state(self) -> dict[str, Any]:
        settings = {"files": len(self.files), "seed": self.seed, "buffer": self.buffer}
        place = {"start": self.start.state(), "number": self.number, "done": self.done, "part": self.part}
        return {**settings, **place}

    def restore(self, state: Mapping[str, Any]) -> None:
        for name, value in (("files", len(self.files)), ("seed", self.seed), ("buffer", self.buffer)):
            if name not in state or state[name] != value:
                raise ValueError(
                    f"the saved position of the stream has {name} {state.get(name)}, but this one has {value}, so the "
                    f"rows already visited are unknown. Start again, or restore the dataset and its settings."
                )
        self.start = StreamPosition(**state["start"])
        self.number, self.done, self.part = state["number"], state["done"], state["part"]
        self.stream.seek(self.start)
        self._rows = None
        self._encoded.clear()
        self._in_epoch = 1  # unknown

    def _encode_more(self, count: int) -> None:
        if self._rows is None:
            self._read_buffer()
        while self._rows is None or self.done == len(self._rows):
            self.start, self.number, self.done = self.stream.position, self.number + 1, 0
            self._read_buffer()
        chunk = self._rows[self.done : self.done + max(count, READ_TOGETHER)]
        for (_, row), rows in zip(chunk, self._encode(chunk), strict=True):
            excluded = bool(self._excluded) and self.identity(row) in self._excluded
            self._encoded.append([] if excluded else rows)

    def _encode(self, chunk: Sequence[tuple[str, Mapping[str, Any]]]) -> list[list[Row]]:
        return self.encode([row for _, row in chunk], [location for location, _ in chunk])

    def _read_buffer(self) -> None:
        rows = self.stream.read(self.buffer or READ_TOGETHER)
        if not rows:
            self._next_epoch()
            rows = self.stream.read(self.buffer or READ_TOGETHER)
            if not rows:
                raise ValueError(f"the dataset at {self.files[0]} has no rows. Give a file with at least one.")
        if self.buffer is not None:
            rows = [rows[index] for index in permutation(len(rows), self.seed, self.start.epoch, self.number)]
        self._rows = rows

    def _next_epoch(self) -> None:
        if self.stream.position.epoch == self.start.epoch and not self._in_epoch and self.stream.position.file:
            raise ValueError(
                f"an epoch of the dataset at {self.files[0]} has no row to train on: there is none, or all are held "
                "out or too long. Give more rows, raise budget, or lower held_out.rows."
            )
        self.start, self.number, self.done = StreamPosition(self.stream.position.epoch + 1), 0, 0
        self.stream.seek(self.start)
        self._in_epoch = 0

    def _hold_out(self, count: int) -> None:
        stream = RowStream(self.files)
        chunks = iter(lambda: stream.read(READ_TOGETHER), [])
        encoded = ((rows, row) for chunk in chunks for rows, (_, row) in zip(self._encode(chunk), chunk, strict=True))
        candidates = ((rows[0], self.identity(row)) for rows, row in encoded if rows)
        self._held_out, self._excluded = first_different(candidates, count)
        self._held_out_identities = set(self._excluded.identities)
        if len(self._held_out) < count:
            raise ValueError(
                f"{count} rows are to be held out, but the dataset at {self.files[0]} has {len(self._held_out)} "
                "different prompts, and at least one must be left to train on. Lower held_out.rows."
            )
