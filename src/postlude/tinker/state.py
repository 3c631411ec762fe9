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
import fcntl
import json
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, get_args

from postlude.recipes.run.durable_files import sync, write_atomic
from postlude.tinker.backend import LoRAConfig, ModelSpec
from postlude.tinker.paths import Kind, TinkerPath, check_name

CHECKPOINT = "checkpoint.json"


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

    path: TinkerPath
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
    samplers: tuple[SamplerRecord, ...] = ()


Record = SessionRecord | Run | Checkpoint


class StateDirectory:
    """The files of a server. One server at a time may use a directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory.resolve()
        self._lock: int | None = None
        self.runs: dict[str, Run] = {}
        self.checkpoints: dict[TinkerPath, Checkpoint] = {}
        self.sessions: dict[str, SessionRecord] = {}

    @property
    def scratch(self) -> Path:
        """The directory of files that are removed at the next start."""
        return self.directory / "aside"

    def open(self) -> None:
        """Locks the directory, finishes or removes what a kill left behind, and reads what was saved."""
        for name in ("sessions", "runs", "aside"):
            (self.directory / name).mkdir(parents=True, exist_ok=True)
        self._lock = os.open(self.directory / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self.close()
            raise ValueError(
                f"--state {self.directory} is used by another server. Give another directory, or stop that server."
            ) from error
        for leftover in self.scratch.iterdir():
            shutil.rmtree(leftover, ignore_errors=True)
        for file in sorted((self.directory / "sessions").glob("*.json")):
            session = _session_of(_read_json(file))
            self.sessions[session.session_id] = session
        for folder in sorted((self.directory / "runs").iterdir()):
            if (folder / "run.json").is_file():
                run = _run_of(_read_json(folder / "run.json"))
                self.runs[run.run_id] = run
                for kind in get_args(Kind):
                    self._read_checkpoints(folder / kind)

    def close(self) -> None:
        """Lets another server use the directory."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def write(self, record: Record) -> None:
        """Saves a description: atomically, so that a kill leaves the old one or the new one. May run in a thread."""
        match record:
            case SessionRecord():
                path = self.directory / "sessions" / f"{check_name(record.session_id, 'session')}.json"
                value = asdict(record)
            case Run():
                path = self.directory / "runs" / check_name(record.run_id, "training run") / "run.json"
                path.parent.mkdir(exist_ok=True)
                value = asdict(record)
            case Checkpoint():
                path, value = self.directory_of(record.path) / CHECKPOINT, _plain_checkpoint(record)
        write_atomic(path, json.dumps(value).encode())

    def remember(self, record: Record) -> None:
        """Makes a description that was saved the one that is served. Runs in the thread that serves."""
        match record:
            case SessionRecord():
                self.sessions[record.session_id] = record
            case Run():
                self.runs[record.run_id] = record
            case Checkpoint():
                self.checkpoints[record.path] = record

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
        (aside / CHECKPOINT).write_text(json.dumps(_plain_checkpoint(checkpoint)))
        _sync_tree(aside)
        final.parent.mkdir(exist_ok=True)
        sync(final.parent.parent)
        if final.exists():
            replacement, old = _beside(final, "new"), _beside(final, "old")
            shutil.rmtree(old, ignore_errors=True)
            aside.rename(replacement)
            final.rename(old)
            replacement.rename(final)
            sync(final.parent)
            shutil.rmtree(old, ignore_errors=True)
        else:
            aside.rename(final)
            sync(final.parent)
        return checkpoint

    def delete_files(self, path: TinkerPath) -> None:
        """Deletes the files of a checkpoint that is not served any more. May run in a thread."""
        doomed = self.scratch / secrets.token_hex(8)
        with contextlib.suppress(FileNotFoundError):
            self.directory_of(path).rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)

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
                final.rename(_beside(final, "old"))
            replacement.rename(final)
        for old in folder.glob(".*.old"):
            shutil.rmtree(old, ignore_errors=True)
        for directory in sorted(folder.iterdir()):
            if (directory / CHECKPOINT).is_file() and not directory.is_symlink():
                checkpoint = _checkpoint_of(_read_json(directory / CHECKPOINT))
                self.checkpoints[checkpoint.path] = checkpoint


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}); it was changed by hand. Delete it or restore it.") from error
    assert isinstance(value, dict)
    return value


def _spec_of(value: dict[str, Any]) -> ModelSpec:
    return ModelSpec(value["base_model"], LoRAConfig(**value["lora"]) if value["lora"] is not None else None)


def _run_of(value: dict[str, Any]) -> Run:
    return Run(**{**value, "spec": _spec_of(value["spec"])})


def _session_of(value: dict[str, Any]) -> SessionRecord:
    return SessionRecord(**{**value, "samplers": tuple(SamplerRecord(**sampler) for sampler in value["samplers"])})


def _checkpoint_of(value: dict[str, Any]) -> Checkpoint:
    return Checkpoint(**{**value, "path": TinkerPath.parse(value["path"]), "spec": _spec_of(value["spec"])})


def _plain_checkpoint(checkpoint: Checkpoint) -> dict[str, Any]:
    return asdict(checkpoint) | {"path": str(checkpoint.path)}


def _beside(path: Path, suffix: str) -> Path:
    return path.with_name(f".{path.name}.{suffix}")


def _files(directory: Path) -> list[Path]:
    return sorted(file for file in directory.rglob("*") if file.is_file() and not file.is_symlink())


def _sync_tree(directory: Path) -> None:
    for path in (*directory.rglob("*"), directory):
        if not path.is_symlink():
            sync(path)
