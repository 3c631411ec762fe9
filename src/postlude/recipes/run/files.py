"""The files of a run directory, and what reads them: nothing here imports torch, so that a command does so at once."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from io import FileIO
from pathlib import Path
from typing import Any

import yaml

from postlude.durable_files import write_all, write_atomic
from postlude.recipes.config.secrets import mask

LAST_BYTES = 1 << 16  # in which the last line is looked for first
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
        return [_from_file(line) if b'nan"' in raw or b'inf"' in raw else line for raw, line in self._lines()]

    def read_last(self) -> dict[str, Any]:
        """Returns the last complete line, or {}. It reads the end of the file only."""
        if not self.path.is_file():
            return {}
        with self.path.open("rb") as file:
            size, length = file.seek(0, os.SEEK_END), LAST_BYTES
            while True:
                file.seek(max(0, size - length))
                lines = file.read(min(size, length)).split(b"\n")
                if len(lines) > 2 or length >= size:  # the first may be cut, and the last is partial or empty
                    break
                length *= 16
        line = lines[-2] if len(lines) > 1 else b""
        return _from_file(_parsed(self.path, "its last line", line)) if line else {}

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
            lines.append((raw, _parsed(self.path, f"line {number}", raw)))
        return lines

    def _cut_torn_line(self) -> None:
        if self.path.is_file():
            data = self.path.read_bytes()
            end = data.rfind(b"\n") + 1
            if end != len(data):
                write_atomic(self.path, data[:end])


class AppendedLines:
    """The lines of a JSON Lines file that are new since the last call. One that was replaced is read on at its end."""

    def __init__(self, path: Path) -> None:
        self.path, self._place, self._file = path, 0, -1

    def take(self) -> list[dict[str, Any]]:
        if not self.path.is_file():
            return []
        with self.path.open("rb") as file:
            found = os.fstat(file.fileno())
            if self._file not in (-1, found.st_ino) or found.st_size < self._place:  # a resumed run dropped steps
                self._place = found.st_size
            self._file = found.st_ino
            file.seek(self._place)
            complete = file.read().rpartition(b"\n")[0]
        self._place += len(complete) + 1 if complete else 0
        return [_from_file(_parsed(self.path, "a new line", raw)) for raw in complete.split(b"\n") if raw]


def _parsed(path: Path, place: str, raw: bytes) -> dict[str, Any]:
    try:
        line: dict[str, Any] = json.loads(raw)
        line["step"] = int(line["step"])
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path} {place} is not an object with a step ({error}); delete the line.") from error
    return line


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


CONFIG, RECORD = "config.yaml", "run.json"
METRICS, LAYERS, SAMPLES = "metrics.jsonl", "layers.jsonl", "samples.jsonl"
LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml's is ten times as fast, where PyYAML has it


def read_config(run: Path) -> dict[str, Any]:
    """Returns the config of a run without its secrets, or {}. Raises ValueError for a file that holds none."""
    path = run / CONFIG
    try:
        config = yaml.load(path.read_text(), LOADER) if path.is_file() else None
        if not isinstance(config, dict | None):
            raise ValueError(f"it holds {config!r:.60}")
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(
            f"{path} cannot be read ({' '.join(str(error).split())}), so it is unclear which run it is. Fix it, or "
            "give another directory (--run)."
        ) from error
    return mask(config or {})


def is_private(run: Path) -> bool:
    """Returns whether what holds the config of a run is for its owner alone, because the config had secrets."""
    path = run / CONFIG
    return path.is_file() and not path.stat().st_mode & 0o077


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """Returns the lines of metrics.jsonl, also while the run writes it."""
    return JSONLinesFile(run / METRICS).read()


def read_layers(run: Path) -> list[dict[str, Any]]:
    """Returns the lines of layers.jsonl; [] for a run without it."""
    return JSONLinesFile(run / LAYERS).read()


def read_samples(run: Path) -> list[dict[str, Any]]:
    """Returns the samples of a run: the fields of `Sample`, and `step`."""
    return JSONLinesFile(run / SAMPLES).read()


def read_record(run: Path) -> dict[str, Any]:
    path = run / RECORD
    try:
        record = json.loads(path.read_text()) if path.is_file() else {}
    except ValueError as error:
        raise ValueError(f"{path} cannot be read ({error}); fix it, or delete it.") from error
    starts = record.get("starts", []) if isinstance(record, dict) else None
    if not isinstance(starts, list) or not all(isinstance(start, dict) for start in starts):
        raise ValueError(f"{path} does not hold the starts of a run; delete it.")
    return record


def flatten(metrics: Mapping[str, Any], outer: str = "") -> dict[str, Any]:
    """Returns metrics as they are written: `outer/inner` for nested mappings, numbers for tensors, without None."""
    flat: dict[str, Any] = {}
    for name, value in metrics.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{outer}{name}/")
        elif value is not None:
            flat[f"{outer}{name}"] = plain_value(value)
    return flat


def plain_value(value: Any) -> Any:
    """Returns the value in the types of JSON and YAML."""
    if isinstance(value, Mapping):
        return {str(key): plain_value(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain_value(inner) for inner in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, str):
        return str(value)  # of a subclass too
    if hasattr(value, "tolist"):  # a tensor or an array
        return value.tolist()
    return value
