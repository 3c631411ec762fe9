"""StateDirectory: what the server keeps on disk, in files that survive a kill at any moment.

    DIR/sessions/SESSION.json               a client's session, and its sampling sessions
    DIR/runs/RUN/run.json                   a model that was created: its base, adapters and owner
    DIR/runs/RUN/KIND/NAME/…                the files of a checkpoint, with checkpoint.json beside them
    DIR/runs/RUN/KIND/.NAME.new, .NAME.old  a checkpoint that replaces another: finished or removed at the next start
    DIR/aside/…                             checkpoints being written, and snapshots: removed at the next start

A checkpoint is written aside, synced to the disk, and renamed: it is there with all its files, or not at all.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, TypeAlias, TypeVar, get_args

from pydantic import BeforeValidator, PlainSerializer, TypeAdapter, ValidationError

from postlude.durable_files import publish, sync, write_atomic
from postlude.recipes.run.lock import RunLock
from postlude.tinker.backend import ModelSpec
from postlude.tinker.paths import Kind, TinkerPath, check_name

CHECKPOINT = "checkpoint.json"
SavedPath: TypeAlias = Annotated[
    TinkerPath,
    PlainSerializer(str),
    BeforeValidator(lambda path: TinkerPath.parse(path) if isinstance(path, str) else path),
]
Value = TypeVar("Value")


@dataclass(frozen=True)
class Run:
    """A model that a client created."""

    run_id: str
    owner: str
    session_id: str
    spec: ModelSpec
    created: float
    last_request: float
    user_metadata: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Checkpoint:
    """A saved checkpoint, without its files."""

    path: SavedPath
    owner: str
    spec: ModelSpec
    created: float
    size: int
    public: bool = False
    expires: float | None = None
    user_metadata: dict[str, str] = field(default_factory=dict)

    def is_expired(self) -> bool:
        """Whether its time to live is over."""
        return self.expires is not None and self.expires <= time.time()


@dataclass(frozen=True)
class SamplerRecord:
    """A sampling session. One without `path` and `snapshot` samples the base model."""

    sampler_id: str
    base_model: str
    path: str | None = None
    saved: float | None = None
    """When the checkpoint at `path` was saved: one that replaced it has other weights. Older records lack it."""
    snapshot: bool = False
    """Whether its weights are not saved with a name, and lost when the server ends."""
    full: bool = False
    """Whether a snapshot has all weights of a model."""


@dataclass(frozen=True)
class SessionRecord:
    """A client's session."""

    session_id: str
    owner: str
    created: float
    sdk_version: str = ""
    display_name: str | None = None
    project_id: str | None = None
    user_metadata: dict[str, str] = field(default_factory=dict)
    finished: str | None = None
    """How it ended: success, errored, interrupted (by the client) or expired."""
    ended: float | None = None
    """When it did."""
    samplers: tuple[SamplerRecord, ...] = ()


StateRecord = SessionRecord | Run | Checkpoint
_ADAPTERS: dict[Any, TypeAdapter[Any]] = {kind: TypeAdapter(kind) for kind in (SessionRecord, Run, Checkpoint)}
"""Read and write the records as JSON."""


class StateDirectory:
    """The files of a server. One server at a time may use a directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory.resolve()
        self._lock: RunLock | None = None
        self.runs: dict[str, Run] = {}
        self.checkpoints: dict[TinkerPath, Checkpoint] = {}
        self.sessions: dict[str, SessionRecord] = {}

    @property
    def scratch(self) -> Path:
        """The directory of files that are removed at the next start."""
        return self.directory / "aside"

    def open(self) -> None:
        """Locks the directory, finishes or removes what a kill left behind, and reads what was saved."""
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)  # others on this machine read no weights
        for name in ("sessions", "runs", "aside"):
            (self.directory / name).mkdir(exist_ok=True)
        self._lock = RunLock(self.directory, "--state")
        for leftover in self.scratch.iterdir():
            shutil.rmtree(leftover, ignore_errors=True)
        for file in sorted((self.directory / "sessions").glob("*.json")):
            session = _read(SessionRecord, file)
            self.sessions[session.session_id] = session
        for folder in sorted((self.directory / "runs").iterdir()):
            if (folder / "run.json").is_file():
                run = _read(Run, folder / "run.json")
                self.runs[run.run_id] = run
                for kind in get_args(Kind):
                    self._read_checkpoints(folder / kind)

    def close(self) -> None:
        """Lets another server use the directory."""
        if self._lock is not None:
            self._lock.release()

    def write(self, record: StateRecord) -> None:
        """Saves a record: atomically, so that a kill leaves the old one or the new one. May run in a thread."""
        match record:
            case SessionRecord():
                path = self.directory / "sessions" / f"{check_name(record.session_id, 'session')}.json"
            case Run():
                path = self.directory / "runs" / check_name(record.run_id, "training run") / "run.json"
                path.parent.mkdir(exist_ok=True)
            case Checkpoint():
                path = self.directory_of(record.path) / CHECKPOINT
        write_atomic(path, _ADAPTERS[type(record)].dump_json(record))

    def remember(self, record: StateRecord) -> None:
        """Replaces the record in memory by one that was saved. Runs in the thread that serves."""
        match record:
            case SessionRecord():
                self.sessions[record.session_id] = record
            case Run():
                self.runs[record.run_id] = record
            case Checkpoint():
                self.checkpoints[record.path] = record

    def forget(self, session: SessionRecord) -> None:
        """Deletes what is saved of a session, and its runs without checkpoints."""
        del self.sessions[session.session_id]
        (self.directory / "sessions" / f"{session.session_id}.json").unlink(missing_ok=True)
        saved = {path.run_id for path in self.checkpoints}
        for run in [run for run in self.runs.values() if run.session_id == session.session_id]:
            if run.run_id not in saved:
                del self.runs[run.run_id]
                shutil.rmtree(self.directory / "runs" / run.run_id, ignore_errors=True)

    # Checkpoints

    def directory_of(self, path: TinkerPath) -> Path:
        """Returns the directory of a checkpoint's files, which need not exist, inside the state directory."""
        directory = self.directory / "runs" / path.run_id / path.kind / path.name
        if directory.resolve() != directory:
            raise ValueError(f"{path} leads out of the state directory through a symbolic link; it is not read.")
        return directory

    @contextlib.contextmanager
    def new_directory(self) -> Iterator[Path]:
        """Yields an empty directory aside, removed at the end unless `publish` has renamed it."""
        aside = self.scratch / secrets.token_hex(8)
        aside.mkdir()
        try:
            yield aside
        finally:
            shutil.rmtree(aside, ignore_errors=True)

    def publish(self, aside: Path, checkpoint: Checkpoint, *, overwrite: bool = False) -> Checkpoint:
        """Makes the files written aside the files of a checkpoint, all at once. Returns it with its size.

        May run in a thread; `remember` then has it served.
        """
        final = self.directory_of(checkpoint.path)
        if final.exists() and not overwrite:
            raise ValueError(f"{checkpoint.path} exists already: give another name, or overwrite=True where it is one.")
        checkpoint = replace(checkpoint, size=sum(file.stat().st_size for file in _files(aside)))
        (aside / CHECKPOINT).write_bytes(_ADAPTERS[Checkpoint].dump_json(checkpoint))
        final.parent.mkdir(exist_ok=True)
        sync(final.parent.parent)
        if final.exists():
            replacement, old = _sibling(final, "new"), _sibling(final, "old")
            shutil.rmtree(old, ignore_errors=True)
            publish(aside, replacement)
            final.rename(old)
            replacement.rename(final)
            sync(final.parent)
            shutil.rmtree(old, ignore_errors=True)
        else:
            publish(aside, final)
        return checkpoint

    def delete_files(self, path: TinkerPath) -> None:
        """Deletes the files of a checkpoint that is not served any more. May run in a thread."""
        renamed = self.scratch / secrets.token_hex(8)
        with contextlib.suppress(FileNotFoundError):
            self.directory_of(path).rename(renamed)
        shutil.rmtree(renamed, ignore_errors=True)

    def files_of(self, path: TinkerPath) -> dict[str, Path]:
        """Returns the files of a checkpoint by their names in it."""
        directory = self.directory_of(path)
        files = {str(file.relative_to(directory)): file for file in _files(directory)}
        files.pop(CHECKPOINT, None)
        return files

    def _read_checkpoints(self, folder: Path) -> None:
        if not folder.is_dir():
            return
        for replacement in folder.glob(".*.new"):  # complete: it was renamed from aside
            final = folder / replacement.name.removeprefix(".").removesuffix(".new")
            if final.exists():
                final.rename(_sibling(final, "old"))
            replacement.rename(final)
        for old in folder.glob(".*.old"):
            shutil.rmtree(old, ignore_errors=True)
        for directory in sorted(folder.iterdir()):
            if (directory / CHECKPOINT).is_file() and not directory.is_symlink():
                checkpoint = _read(Checkpoint, directory / CHECKPOINT)
                self.checkpoints[checkpoint.path] = checkpoint


def _read(kind: type[Value], path: Path) -> Value:
    try:
        value: Value = _ADAPTERS[kind].validate_json(path.read_bytes())
    except ValidationError as error:
        reason = error.errors(include_url=False)[0]["msg"]
        raise ValueError(
            f"{path} cannot be read ({reason}); it was changed by hand. Delete it or restore it."
        ) from error
    return value


def is_full(error: OSError) -> bool:
    """Whether a write failed because a disk is full. The error of a rank says so in its text alone."""
    return any(error.errno == number or os.strerror(number) in str(error) for number in (errno.ENOSPC, errno.EDQUOT))


def storage_sentence(error: OSError, directory: Path) -> str:
    """Returns a sentence about a write that failed, for the client."""
    if is_full(error):
        return (
            f"the disk of the server's state directory {directory} is full, so nothing of this was saved. Delete "
            "checkpoints, or have space made, and save again; training goes on meanwhile."
        )
    return f"the server's state directory {directory} cannot be written: {error.strerror or error}; nothing was saved."


def _sibling(path: Path, suffix: str) -> Path:
    return path.with_name(f".{path.name}.{suffix}")


def _files(directory: Path) -> list[Path]:
    return sorted(file for file in directory.rglob("*") if file.is_file() and not file.is_symlink())
