"""Rows of a dataset from JSONL, JSON, CSV or parquet files, the order in which they are visited, and RowSource."""

from __future__ import annotations

import csv
import difflib
import gzip
import importlib
import io
import json
import logging
import sys
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from postlude.data.hub import HubRepo, HubSnapshot, choose_files, hub_repo
from postlude.data.task_identity import first_different

log = logging.getLogger(__name__)

LINES = (".jsonl", ".ndjson", ".json")
FORMATS = (*LINES, ".csv", ".parquet")
READABLE = ".jsonl, .json, .csv (each also as .gz) and .parquet"
DESCRIPTIONS = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")
"""Files that describe a dataset and hold no rows of it."""
DOCUMENTS = (".", "_", "README", "LICENSE")
"""Prefixes of files that are skipped without a warning."""
Row = TypeVar("Row")


@dataclass(frozen=True)
class Rows:
    """Every row of a dataset, in memory. `rows.location(i)` is where row i is, for error messages."""

    name: str
    """The file's name, or the folder's."""
    rows: Sequence[Mapping[str, Any]]
    locations: Sequence[str]
    """Where each row is, such as "line 7 of train.jsonl"."""

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        return self.rows[index]

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        return iter(self.rows)

    def location(self, index: int) -> str:
        return self.locations[index]

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for row in self.rows for name in row))

    def require(self, *columns: str) -> Rows:
        """Returns these rows. Raises if one has no value in one of `columns`."""
        for column in columns:
            missing = [index for index, row in enumerate(self.rows) if row.get(column) is None]
            if len(missing) == len(self.rows) and column not in self.columns:
                raise ValueError(_no_column(self.name, column, self.columns))
            if missing:
                more_rows = f", as do {len(missing) - 1} more" if len(missing) > 1 else ""
                raise ValueError(
                    f'{self.location(missing[0])} has no value in column "{column}"{more_rows}. '
                    f"Fill it in, or leave such rows out."
                )
        return self


def read_rows(path: str | Path, *, config: str | None = None, split: str | None = None) -> Rows:
    """Reads a .jsonl, .json, .csv or .parquet file, a folder of such files by their names, or a dataset of the Hub.

    Every row is read and checked here, so that a broken one stops a run before it starts. JSONL has one object per
    line, in UTF-8; blank lines are skipped. A .json file is the same, or one list of objects. All but parquet may be
    compressed: `rows.jsonl.gz`.
    """
    path = Path(path)
    rows: list[Mapping[str, Any]] = []
    locations: list[str] = []
    for file in dataset_files(path, config, split):
        for location, row in read_file(file):
            rows.append(row)
            locations.append(location)
    if not rows:
        raise ValueError(f"dataset {path} has no rows. Give a file with at least one.")
    return Rows(path.name, rows, locations)


def dataset_files(path: Path, config: str | None = None, split: str | None = None) -> list[Path]:
    """Returns the files of a dataset in order, downloaded if it is a name on the Hugging Face Hub.

    `config` and `split` choose among the files of a folder or of a dataset of the Hub, whose default split is "train".
    Logs files of a folder that cannot be read.
    """
    if (hub_files := _hub_files(path, config, split)) is not None:
        return hub_files.repo.download(hub_files.snapshot, hub_files.names)
    if config is not None or split is not None:
        if not path.is_dir():
            raise ValueError(f"{path} is not a folder, so it has no config or split to choose. Leave them out.")
        listed = [str(file.relative_to(path)) for file in sorted(path.rglob("*")) if file.is_file()]
        return [path / file for file in choose_dataset_files(path, listed, config, split, str(path))]
    if path.is_dir():
        candidates = sorted(file for file in path.iterdir() if file.is_file() and not _is_description(file))
        files = [file for file in candidates if file_format(file) is not None]
        if not files:
            folders = sorted(entry.name for entry in path.iterdir() if entry.is_dir() and entry.name[0] != ".")
            hint = f" It has the folder {folders[0]}: did you mean {path / folders[0]}?" if folders else ""
            raise FileNotFoundError(f"folder {path} has no rows to read, which are {READABLE}.{hint}")
        skipped = [file.name for file in candidates if file_format(file) is None]
        if skipped:
            log.warning("folder %s: not read, since rows are %s: %s.", path, READABLE, ", ".join(skipped))
        return files
    if path.exists() and not path.is_file():
        raise ValueError(f"dataset {path} is neither a file nor a folder. Give a file that can be read again.")
    if not path.is_file():
        siblings = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
        near = difflib.get_close_matches(path.name, siblings, 1)
        hint = f"did you mean {path.parent / near[0]}?" if near else f"the current directory is {Path.cwd()}."
        raise FileNotFoundError(f"there is no dataset {path}; {hint}")
    if file_format(path) is None:
        raise ValueError(f'dataset {path} ends in "{path.suffix}", but {READABLE} can be read. Convert it.')
    return [path]


class HubFiles(Sequence[Path]):
    """Files of a dataset of the Hub. Each is downloaded when it is first asked for."""

    def __init__(self, repo: HubRepo, snapshot: HubSnapshot, names: Sequence[str]) -> None:
        self.repo, self.snapshot, self.names = repo, snapshot, names

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: Any) -> Any:
        return self.repo.download(self.snapshot, [self.names[index]])[0]


def stream_files(path: Path, config: str | None = None, split: str | None = None) -> Sequence[Path]:
    """Returns what `dataset_files` returns, but those of the Hub are downloaded one by one."""
    hub_files = _hub_files(path, config, split)
    return dataset_files(path, config, split) if hub_files is None else hub_files


def _hub_files(path: Path, config: str | None, split: str | None) -> HubFiles | None:
    repo = hub_repo(path, "dataset") if file_format(path) is None else None
    if repo is None:
        return None
    snapshot = repo.snapshot()
    return HubFiles(repo, snapshot, choose_dataset_files(snapshot.folder, snapshot.files, config, split, repo.id))


def choose_dataset_files(
    folder: Path, files: Sequence[str], config: str | None, split: str | None, name: str
) -> list[str]:
    """Returns the files of a split among the `files` of a dataset. Its README.md, if any, is in `folder`."""
    rows = [file for file in files if file_format(Path(file)) is not None and not _is_description(Path(file))]
    if not rows:
        kinds = ", ".join(sorted({Path(file).suffix for file in files if Path(file).suffix})) or "none"
        raise ValueError(f"dataset {name} has no rows to read, which are {READABLE}; its files are: {kinds}.")
    readme = folder / "README.md"
    return choose_files(rows, readme.read_text("utf-8", "replace") if readme.is_file() else "", config, split, name)


def _is_description(file: Path) -> bool:
    return file.name.startswith(DOCUMENTS) or file.name in DESCRIPTIONS


def file_format(file: Path) -> str | None:
    """Returns the suffix of a file's format, without that of compression; None if the format is unknown."""
    name = file.name.lower()
    bare = name.removesuffix(".gz")
    suffix = Path(bare).suffix
    return suffix if suffix in FORMATS and (bare == name or suffix != ".parquet") else None


def read_file(file: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    suffix = file_format(file)
    if suffix == ".parquet":
        yield from read_parquet(file)
        return
    try:
        with gzip.open(file) if file.name.lower().endswith(".gz") else file.open("rb") as opened:
            if suffix == ".csv":
                yield from _read_csv(opened, file.name)
            elif suffix == ".json" and _is_list(opened):
                yield from _read_list(opened, file.name)
            else:
                yield from _read_lines(opened, file.name)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(
            f"{file} cannot be read as gzip: {error}. Was it cut off? Fetch or compress it again."
        ) from error


def _is_list(file: io.BufferedIOBase) -> bool:
    """Whether a JSON file is one list of objects, not one object per line."""
    start = file.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()
    file.seek(0)
    return start.startswith(b"[") and start[1:].lstrip()[:1] in (b"{", b"", b"]")


def _read_list(file: io.BufferedIOBase, name: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    try:
        rows = json.loads(file.read().decode("utf-8-sig"), object_pairs_hook=_object)
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} is not UTF-8 text: {error.reason} at byte {error.start}.") from error
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        raise ValueError(f"{name} is not JSON: {_json_fault(error)} at {place}.") from error
    except (ValueError, RecursionError) as error:  # a key twice, a number of thousands of digits, lists in lists
        raise ValueError(f"{name} cannot be read: {error}. Write one object per line to find the row.") from error
    for number, row in enumerate(rows):
        yield _checked_row(row, f"row {number} of {name}", "Give a list of objects.")


def _read_lines(file: io.BufferedIOBase, name: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for number, line in enumerate(file, start=1):
        if (parsed := parse_line(line, number, name)) is not None:
            yield parsed


def parse_line(line: bytes, number: int, name: str) -> tuple[str, Mapping[str, Any]] | None:
    """Returns where a line of JSONL is, and its row; None if it is blank. Lines count from 1."""
    location = f"line {number} of {name}"
    try:
        text = line.decode("utf-8-sig" if number == 1 else "utf-8").strip()
        row = json.loads(text, object_pairs_hook=_object) if text else None
    except UnicodeDecodeError as error:
        raise ValueError(f"{location} is not UTF-8 text: {error.reason} at byte {error.start}.") from error
    except json.JSONDecodeError as error:
        torn = "" if line.endswith(b"\n") else " It is the last line and has no end: was the file cut off?"
        raise ValueError(f"{location} is not JSON: {_json_fault(error)} at column {error.colno}.{torn}") from error
    except (ValueError, RecursionError) as error:  # a key twice, a number of thousands of digits, lists in lists
        raise ValueError(f"{location} cannot be read: {error}. Fix it, or leave it out.") from error
    return _checked_row(row, location, "Write one object per line.") if text else None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns an object of JSON. Raises if it has a key twice, of which all but the last value would be lost."""
    values = dict(pairs)
    if len(values) < len(pairs):
        raise ValueError(f'it has the key "{_repeated([key for key, _ in pairs])}" twice')
    return values


def _repeated(names: Sequence[str]) -> str | None:
    return next((name for name in names if names.count(name) > 1), None)


def _check_columns(columns: Sequence[str], name: str) -> None:
    if twice := _repeated([column for column in columns if column]):  # tables have nameless columns at their end
        raise ValueError(f'{name} has the column "{twice}" twice. Rename one, or leave it out.')


def _json_fault(error: json.JSONDecodeError) -> str:
    return error.msg.removesuffix(" at")  # as in "Unterminated string starting at"


def _checked_row(row: Any, location: str, fix: str) -> tuple[str, Mapping[str, Any]]:
    if not isinstance(row, dict):
        raise ValueError(
            f'{location} holds a JSON {type(row).__name__}, but a row is an object such as {{"prompt": "..."}}. {fix}'
        )
    return location, row


def _read_csv(file: io.BufferedIOBase, name: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yields rows of text by the column names in the first line. An empty cell has no value."""
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))  # a conversation may be longer than csv's default limit
    binary: Any = file
    reader = csv.reader(io.TextIOWrapper(binary, encoding="utf-8-sig", newline=""), strict=True)
    try:
        columns = next(reader, [])
        _check_columns(columns, name)
        for cells in reader:
            if len(cells) not in (0, len(columns)):
                raise ValueError(
                    f"line {reader.line_num} of {name} has {len(cells)} cells, but its first line names "
                    f"{len(columns)} columns. Put cells that hold a comma or a line break in quotes."
                )
            if cells:
                row = {column: cell or None for column, cell in zip(columns, cells, strict=True)}
                yield f"line {reader.line_num} of {name}", row
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} is not UTF-8 text after line {reader.line_num}: {error.reason}.") from error
    except csv.Error as error:
        raise ValueError(f"line {reader.line_num} of {name} is not CSV: {error}.") from error


def read_parquet(path: Path, skip: int = 0) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yields where each row is, and the row, after the first `skip`. One row group is in memory at a time."""
    try:
        parquet: Any = importlib.import_module("pyarrow.parquet")  # large, and only parquet needs it
    except ImportError as error:
        raise ImportError(
            f"reading {path} needs the package pyarrow: pip install pyarrow, or convert the file to .jsonl."
        ) from error
    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            _check_columns(file.schema_arrow.names, "it")
            for group in range(file.num_row_groups):
                size = file.metadata.row_group(group).num_rows
                if number + size > skip:
                    for batch in file.read_row_group(group).to_batches(max_chunksize=4096):
                        for row in batch.to_pylist():
                            if number >= skip:
                                yield f"row {number} of {path.name}", {key: _unpadded(row[key]) for key in row}
                            number += 1
                else:
                    number += size
    except Exception as error:  # whatever Arrow raises
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(f"{path} cannot be read as parquet: {reason}") from error


def _unpadded(value: Any) -> Any:
    """Returns a value without the keys that are null in it.

    In parquet every object of a column has the keys of all objects, and the missing ones are null.
    """
    if isinstance(value, dict):
        return {name: _unpadded(entry) for name, entry in value.items() if entry is not None}
    return [_unpadded(entry) for entry in value] if isinstance(value, list) else value


def _no_column(name: str, column: str, columns: Sequence[str]) -> str:
    near = difflib.get_close_matches(column, columns, 1)
    hint = f'; did you mean "{near[0]}"?' if near else "."
    listed = ", ".join(f'"{name}"' for name in columns) or "none"
    return f'dataset {name} has no column "{column}"; it has: {listed}{hint}'


class HeldOutRows:
    """`count` of `size` rows that are held out, together with every row of the same task.

    `identity` returns the identity of a row's task. The last rows that are different tasks are held out. Identities are
    read when needed, since generating a task may take long. `noun` and `fix` are for the error about too few rows.
    """

    def __init__(self, size: int, identity: Callable[[int], bytes], count: int, *, noun: str, fix: str) -> None:
        self.identity, self.size = identity, size
        places, self.tasks = first_different(((index, identity(index)) for index in reversed(range(size))), count)
        self.indices = sorted(places)
        if count < 1 or all(index in self for index in range(size)):
            raise ValueError(
                f"{count} {noun} are to be held out, but {size} {noun} have {len(places)} different prompts, "
                f"and at least one must be left to train on. {fix}"
            )

    def exclude(self, identities: Iterable[bytes]) -> None:
        """Leaves rows of these tasks out as well: those that another dataset holds out."""
        self.tasks.update(identities)
        if all(index in self for index in range(self.size)):
            raise ValueError(
                "every row of a dataset has a prompt that another dataset holds out, and at least one must be left to "
                "train on. Lower held_out.rows."
            )

    def __contains__(self, index: object) -> bool:
        return isinstance(index, int) and self.identity(index) in self.tasks


class RowOrder:
    """The order in which `size` rows are visited: each once per epoch, shuffled by `seed` and the epoch's number.

    Without `shuffle` it is the order of the rows. Rows in `skip` are left out; it must not hold all of them. `state()`
    is plain JSON. An order restored from it continues with exactly the rows that would have followed.
    """

    def __init__(self, size: int, seed: int = 0, *, skip: Container[int] = (), shuffle: bool = True) -> None:
        if size < 1:
            raise ValueError(f"size is {size}, but an order needs at least one row.")
        if seed < 0:
            raise ValueError(f"seed is {seed}, but the minimum is 0.")
        self.size = size
        self.seed = seed
        self.skip = skip
        self.shuffle = shuffle
        self.epoch = 0
        self.position = 0  # rows of this epoch already returned or skipped
        self._order = self._permutation()

    def take(self, count: int) -> list[int]:
        """Returns the next `count` rows. They may run from one epoch into the next."""
        if count < 0:
            raise ValueError(f"count is {count}, but the minimum is 0.")
        rows: list[int] = []
        while len(rows) < count:
            if self.position == self.size:
                self.epoch, self.position = self.epoch + 1, 0
                self._order = self._permutation()
            next_rows = self._order[self.position : self.position + count - len(rows)]
            rows += [row for row in next_rows if row not in self.skip]
            self.position += len(next_rows)
            while self.position < self.size and self._order[self.position] in self.skip:
                self.position += 1  # so that after the last row that is not skipped, the epoch is done
        return rows

    @property
    def progress(self) -> float:
        return self.epoch + self.position / self.size

    def state(self) -> dict[str, Any]:
        return {"size": self.size, "seed": self.seed, "epoch": self.epoch, "position": self.position}

    def restore(self, state: Mapping[str, Any]) -> None:
        for name in ("size", "seed"):
            if state.get(name) != getattr(self, name):
                raise ValueError(
                    f"the saved order has {name} {state.get(name)}, but this one has {getattr(self, name)}, so the "
                    f"rows already visited are unknown. Start again, or restore the dataset and its settings."
                )
        epoch, position = int(state["epoch"]), int(state["position"])
        if epoch < 0 or not 0 <= position <= self.size:
            raise ValueError(
                f"the saved order stands at row {position} of {self.size} in epoch {epoch}. It is damaged."
            )
        self.epoch, self.position = epoch, position
        self._order = self._permutation()

    def _permutation(self) -> list[int]:
        return permutation(self.size, self.seed, self.epoch) if self.shuffle else list(range(self.size))


def permutation(size: int, *seed: int) -> list[int]:
    """Returns the numbers below `size` in an order that follows from the numbers of the seed."""
    import numpy as np

    # This generator of numpy is frozen: the order is the same in every version, so a run resumes anywhere.
    generator = np.random.RandomState(np.random.MT19937(np.random.SeedSequence(list(seed))))
    order: list[int] = generator.permutation(size).tolist()
    return order


class RowSource(ABC, Generic[Row]):
    """Rows without end, epoch after epoch, and rows that are held out. Every rank gets the same ones.

    A new kind of source is one class. One that overrides nothing else holds out no rows.
    """

    @property
    @abstractmethod
    def size(self) -> int | None:
        """Rows of an epoch, without those held out; None if that is unknown."""

    @property
    def identities(self) -> set[bytes]:
        """The identities of the tasks of all rows; empty if they are not known before they are read."""
        return set()

    @property
    def held_out(self) -> Sequence[Row]:
        return ()

    @property
    def held_out_identities(self) -> set[bytes]:
        return set()

    @property
    @abstractmethod
    def progress(self) -> float:
        """Epochs done, with the fraction of the current one."""

    @abstractmethod
    def take(self, count: int) -> list[Row]:
        """Returns the next rows."""

    def exclude(self, identities: set[bytes]) -> None:
        """Leaves out rows of these tasks, which another dataset holds out. A source that holds out none ignores it."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """Returns its position as JSON."""

    @abstractmethod
    def restore(self, state: Mapping[str, Any]) -> None:
        """Continues from a state."""

    def metrics(self) -> dict[str, float]:
        """Returns what a step reports about the rows so far."""
        return {}
