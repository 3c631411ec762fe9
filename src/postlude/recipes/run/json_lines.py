"""JSONLinesFile: a file of JSON Lines that a run appends to."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from io import FileIO
from pathlib import Path
from typing import Any

from postlude.durable_files import write_all, write_atomic

NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}  # as they stand in a file


class JSONLinesFile:
    """A JSON Lines file. Each line is one write, so a kill can only tear the last one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: FileIO | None = None

    def append(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Appends lines in one write. Raises FileNotFoundError if the file was deleted or replaced since the last."""
        if self._file is None:
            self._cut_torn_line()
            self._file = self.path.open("ab", buffering=0)
        text = "".join(json.dumps(_to_file(line), ensure_ascii=False, allow_nan=False) + "\n" for line in lines)
        content = text.encode(errors="backslashreplace")  # half a surrogate pair must not end the run
        before = self._check_in_place(self._file)
        try:
            write_all(self._file, content)
        except OSError as error:
            self._file.truncate(before.st_size)  # leaves no partial line, even on a full disk
            raise OSError(f"{self.path} cannot be written: {error.strerror}") from error

    def read(self) -> list[dict[str, Any]]:
        """Returns all complete lines."""
        return [_from_file(line) if b'nan"' in raw or b'inf"' in raw else line for raw, line in self._lines()]

    def keep(self, predicate: Callable[[Mapping[str, Any]], bool]) -> None:
        """Drops the lines that the predicate refuses, and a partial last line, atomically."""
        self.close()
        if self.path.is_file():
            data = b"".join(raw for raw, line in self._lines() if predicate(line))
            if len(data) != self.path.stat().st_size:
                write_atomic(self.path, data)

    def sync(self) -> None:
        """Syncs what was appended to the disk. Raises FileNotFoundError if the file was deleted or replaced."""
        if self._file is not None:
            self._check_in_place(self._file)
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Closes the file and syncs it to the disk."""
        if self._file is not None:
            file, self._file = self._file, None
            with file:
                os.fsync(file.fileno())

    def _check_in_place(self, file: FileIO) -> os.stat_result:
        opened = os.fstat(file.fileno())
        if not self.path.exists() or not os.path.samestat(opened, self.path.stat()):
            raise FileNotFoundError(
                f"{self.path} was deleted, moved or replaced while the run was writing it, so it and what follows "
                "would be lost. Put it back to resume, or start in another directory (--run)."
            )
        return opened

    def _lines(self) -> list[tuple[bytes, dict[str, Any]]]:
        if not self.path.is_file():
            return []
        lines = []
        for number, raw in enumerate(self.path.read_bytes().splitlines(keepends=True), start=1):
            if not raw.endswith(b"\n"):
                break  # partial
            try:
                line = json.loads(raw)
                line["step"] = int(line["step"])
            except (ValueError, TypeError, KeyError) as error:
                raise ValueError(
                    f"{self.path} line {number} is not an object with a step ({error}); delete the line."
                ) from error
            lines.append((raw, line))
        return lines

    def _cut_torn_line(self) -> None:
        if self.path.is_file():
            data = self.path.read_bytes()
            end = data.rfind(b"\n") + 1
            if end != len(data):
                write_atomic(self.path, data[:end])


def _to_file(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {key: _to_file(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_to_file(inner) for inner in value]
    return value


def _from_file(line: dict[str, Any]) -> dict[str, Any]:
    """Restores the numbers that JSON cannot hold."""

    def number(value: Any) -> Any:
        return NOT_FINITE.get(value, value) if isinstance(value, str) else value

    return {
        key: [number(item) for item in value] if isinstance(value, list) else number(value)
        for key, value in line.items()
    }
