"""RowStream: the rows of a dataset in order, epoch after epoch, read from its files as they are needed.

Its position is plain JSON. A stream that is moved to a position continues with the row that would have followed: of a
.jsonl file it goes to the byte, of a .parquet file to the row group, and any other file it reads from its start.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from postlude.data.datasets import file_format, parse_line, read_file, read_parquet


@dataclass(frozen=True)
class StreamPosition:
    """The place of the next row: rows read of a file, and in a .jsonl file also lines and bytes."""

    epoch: int = 0
    file: int = 0
    row: int = 0
    line: int = 0
    offset: int = 0

    def state(self) -> dict[str, int]:
        """Returns it as JSON."""
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
        """Continues from a position."""
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
