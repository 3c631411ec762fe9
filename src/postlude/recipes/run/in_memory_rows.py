"""Datasets that a call from Python gives as values: lists, DataFrames, datasets of Hugging Face, any iterable of rows.

They are written to the run directory as JSON Lines, in a file named by its content. So every rank reads the same rows,
config.yaml names them, and a call with the same rows continues the run.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from postlude.durable_files import write_atomic
from postlude.recipes.run.start_mode import ROWS

DATA, PATH = "data", "path"
"""Keys of a config that take rows: the section of a dataset, and the path in one."""


class InMemoryRows:
    """Takes the rows out of the settings of a call. `in_run` has the settings with paths in their place."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.files: dict[str, bytes] = {}
        self._settings = self._taken(settings, "", "")

    def in_run(self, run: Path) -> dict[str, Any]:
        """Returns the settings, with the paths that the rows have in a run directory."""

        def placed(value: Any) -> Any:
            if isinstance(value, Mapping):
                return {name: placed(inner) for name, inner in value.items()}
            if type(value) is list:
                return [placed(inner) for inner in value]
            return run / ROWS / value.name if isinstance(value, _File) else value

        return {name: placed(value) for name, value in self._settings.items()}

    @contextmanager
    def written(self, run: Path) -> Any:
        """Writes the files. If the block raises, those that are new are removed."""
        folder = run.expanduser().absolute() / ROWS
        new = [folder / name for name in self.files if not (folder / name).is_file()]
        existing = next(path for path in (folder, *folder.parents) if path.exists())
        try:
            for path in new:
                folder.mkdir(parents=True, exist_ok=True)
                write_atomic(path, self.files[path.name])
            yield
        except BaseException:
            for path in new:
                path.unlink(missing_ok=True)
            with suppress(OSError):  # not empty
                while new and folder != existing:
                    folder.rmdir()
                    folder = folder.parent
            raise

    def _taken(self, value: Any, key: str, path: str) -> Any:
        if isinstance(value, Mapping):
            below = f"{path}." if path else ""
            return {name: self._taken(inner, str(name), f"{below}{name}") for name, inner in value.items()}
        if key not in (DATA, PATH) or not _is_iterable(value):
            return value
        if key == DATA and isinstance(value, list) and all(isinstance(row, Mapping) and PATH in row for row in value):
            return [self._taken(dataset, "", f"{path}.{index}") for index, dataset in enumerate(value)]
        content = b"".join(_line(row, number, path) for number, row in enumerate(_rows_of(value)))
        file = _File(f"{hashlib.sha256(content).hexdigest()[:16]}.jsonl")
        self.files[file.name] = content
        return {PATH: file} if key == DATA else file


class _File:
    """Stands for the path of a file until the run directory is known."""

    def __init__(self, name: str) -> None:
        self.name = name


def _is_iterable(value: Any) -> bool:
    return isinstance(value, Iterable) and not isinstance(value, str | bytes | os.PathLike)


def _rows_of(value: Any) -> Iterable[Any]:
    """Returns the rows of a table or an iterable."""
    if hasattr(value, "notna"):  # a DataFrame of pandas, whose missing cells are NaN
        return value.astype(object).where(value.notna(), None).to_dict("records")  # type: ignore[no-any-return]
    for name in ("to_dicts", "to_pylist"):  # polars, Arrow
        if hasattr(value, name):
            return getattr(value, name)()  # type: ignore[no-any-return]
    return value  # type: ignore[no-any-return]


def _line(row: Any, number: int, path: str) -> bytes:
    if not isinstance(row, Mapping):
        raise TypeError(
            f'row {number} of {path} is a {type(row).__name__}, but a row is a mapping such as {{"prompt": "..."}}.'
        )
    try:
        return json.dumps(dict(row), ensure_ascii=False, allow_nan=False, default=_number).encode() + b"\n"
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"row {number} of {path} cannot be written as JSON ({error}). Give text, finite numbers, lists and "
            "mappings."
        ) from error


def _number(value: Any) -> Any:
    """Returns a number or an array of numpy or torch as Python's."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"a {type(value).__name__}")
