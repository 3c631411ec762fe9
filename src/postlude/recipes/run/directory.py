"""RunDirectory: config, metrics, samples and checkpoints of a run on disk. A killed run resumes as if it had not been.

    config.yaml                 the config, secrets masked; configs/ has earlier ones that were changed
    status/                     where each rank is, while the run goes on
    run.json                    every start: time, host, versions, step; the best step, and the exported one
    split.npz                   the tasks that are held out, and all of the data
    metrics.jsonl               one JSON object per step
    layers.jsonl                lists of each layer, one JSON object per step; only if a block has any (load of experts)
    samples.jsonl               one JSON object per sample
    completions/                all completions as Parquet, one file per step; only with save_completions
    tensorboard/                the metrics as event files
    cache/                      the dataset's rows as tokens
    checkpoints/step-000100/    training state after step 100, as `Engine.save` writes it

Every rank makes the same calls. Rank 0 writes; the others have a `ReadOnlyRun`.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
import yaml

from postlude.durable_files import sync, write_atomic
from postlude.recipes.config.keys import is_covered, written_key
from postlude.recipes.config.secrets import mask, with_masks_of
from postlude.recipes.run.completion_tables import CompletionRow, CompletionTables, LoggedTurn
from postlude.recipes.run.config_changes import (
    MISSING,
    NO_CHANGES,
    AllowedChanges,
    InputFiles,
    describe_differences,
    differences,
    refused_files,
)
from postlude.recipes.run.files import (
    CONFIG,
    LAYERS,
    LOADER,
    METRICS,
    RECORD,
    SAMPLES,
    JSONLinesFile,
    flatten,
    is_private,
    plain_value,
    read_config,
    read_metrics,
    read_record,
)
from postlude.recipes.run.lock import RunLock
from postlude.recipes.run.loggers import TENSORBOARD, MetricLoggers, RunInfo, check_loggers, sample_rows
from postlude.recipes.run.start_mode import CHECKPOINTS, STEP
from postlude.recipes.run.status import clear_status
from postlude.world.agreement import on_rank0

EARLIER = "configs"
COMPLETIONS = "completions"
COMPLETE = "state.json"  # a checkpoint has it once it is complete
DELETING = ".deleting"
DUMPER: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
Value = TypeVar("Value")


@dataclass(frozen=True)
class Sample:
    """A completion for samples.jsonl. `tokens`, `token_strings` and `logprobs` have an entry for each of its tokens."""

    prompt: str
    completion: str
    reward: float | None = None
    components: Mapping[str, float] = field(default_factory=dict)
    """The components of the reward, by name."""
    tokens: Sequence[int] = ()
    token_strings: Sequence[str] = ()
    logprobs: Sequence[float] = ()
    error: str | None = None
    """Why the reward call, or the episode, failed."""
    turns: Sequence[LoggedTurn] = ()
    """What the model read before each part of the tokens."""
    finish_reason: str | None = None
    """Why the last completion ended, such as "stop" or "length"."""


class OtherRun(ValueError):
    """The directory holds a run of another config."""


class RunDirectory:
    """The directory of a run, for rank 0. `open_run` returns the right one on every rank.

    Call `resume_at` first. Call `log` and `log_samples` for a step before its checkpoint is saved: then the metrics of
    every step of a checkpoint are on disk. Those of a step that is still to be evaluated are in the checkpoint.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        loggers: Sequence[str] = (TENSORBOARD,),
        lock: RunLock | None = None,
        changed: Mapping[str, Any] | None = None,
    ) -> None:
        self.path = Path(path).expanduser().absolute()
        self.changed = dict(changed or {})
        self._lock = lock
        self._metrics = JSONLinesFile(self.path / METRICS)
        self._layers = JSONLinesFile(self.path / LAYERS)
        self._samples = JSONLinesFile(self.path / SAMPLES)
        self._completions = CompletionTables(self.path / COMPLETIONS)
        self._loggers = MetricLoggers(loggers, self._run_info)
        self.listeners: list[Callable[[int, Mapping[str, Any]], None]] = []
        """Called with the number and the metrics of each step that is logged."""
        self._step: int | None = None
        self._resumed_at: int | None = None

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def log(self, step: int, metrics: Mapping[str, Any], *, phase: str) -> None:
        """Writes the metrics of a step: numbers, lists of numbers, or mappings of them, named `outer/inner`.

        Steps never go back. Numbers that are not finite are written as "nan", "inf" or "-inf".
        """
        values = flatten(metrics)
        if self._step is not None and step < self._step:
            raise ValueError(
                f"metrics of step {step} come after those of step {self._step} in {self.path / METRICS}; "
                f"call resume_at({step - 1}) to write that step again."
            )
        self._step = step
        self._metrics.append([{"step": step, "phase": phase} | values])
        self._loggers.log(step, values)
        for listener in self.listeners:
            listener(step, values)

    def log_layers(self, step: int, vectors: Mapping[str, Sequence[float]]) -> None:
        """Writes lists of a step that belong to one layer each, such as the load of its experts, for the report."""
        if vectors:
            self._layers.append([{"step": step} | {name: list(map(_shortest, row)) for name, row in vectors.items()}])

    def log_samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Writes samples of a step, for the report, and logs a table of them."""
        lines = [plain_value(asdict(sample)) for sample in samples]
        self._samples.append([{"step": step} | line for line in lines])
        self._loggers.log_samples(step, sample_rows(step, lines))

    def log_completions(self, step: int, rows: Sequence[CompletionRow]) -> None:
        self._completions.write(step, rows)

    def sync(self) -> None:
        """Writes what was logged through to the disk, before a checkpoint of its step. Raises if it was deleted."""
        for lines in (self._metrics, self._layers, self._samples):
            lines.sync()

    def checkpoint(self, step: int) -> Path:
        return self.path / CHECKPOINTS / f"step-{step:06d}"

    def checkpoints(self, *, incomplete: bool = False) -> list[Path]:
        """Returns the complete checkpoints, oldest first; with `incomplete` also those without a state.json."""
        folder = self.path / CHECKPOINTS
        entries = folder.iterdir() if folder.is_dir() else ()
        named = [path for path in entries if STEP.fullmatch(path.name)]
        return sorted((path for path in named if incomplete or (path / COMPLETE).is_file()), key=checkpoint_step)

    def checkpoints_to_try(self, step: int | None) -> list[Path]:
        """Returns the checkpoint of `step`, or all, newest first. Raises ValueError if `step` has none."""
        by_step = {checkpoint_step(path): path for path in self.checkpoints(incomplete=step is None)}
        if step is None:
            return [by_step[saved] for saved in sorted(by_step, reverse=True)]
        if step not in by_step:
            names = ", ".join(path.name for path in by_step.values()) or "none"
            raise ValueError(f"{self.path} has no checkpoint of step {step}; it has {names}.")
        return [by_step[step]]

    def rename_checkpoints(self, checkpoints: Sequence[Path], suffix: str) -> None:
        """Renames checkpoints to step-000100.SUFFIX, so that they are ignored."""
        for path in checkpoints:
            renamed, count = path.with_name(f"{path.name}.{suffix}"), 1
            while renamed.exists():
                count += 1
                renamed = path.with_name(f"{path.name}.{suffix}-{count}")
            path.rename(renamed)
            sync(path.parent)

    def discard(self, name: str) -> None:
        """Deletes something below the directory. Every rank calls it."""

        def remove() -> None:
            shutil.rmtree(self.path / name, ignore_errors=True)

        on_rank0(remove)

    def record_start(self, **entries: Any) -> None:
        """Adds a start to `run.json`: `entries`, and the settings that changed."""
        starts = read_record(self.path).get("starts", [])
        changed = {"changed": self.changed} if self.changed else {}
        self._write_record({"starts": [*starts, plain_value(entries) | changed]})

    def record(self, **entries: Any) -> None:
        """Sets entries of `run.json`, which the next start removes."""
        self._write_record(read_record(self.path) | plain_value(entries))

    def _write_record(self, record: Mapping[str, Any]) -> None:
        text = json.dumps(mask(record), indent=2, ensure_ascii=False)
        write_atomic(self.path / RECORD, text.encode() + b"\n", private=is_private(self.path))

    def resume_at(self, step: int) -> None:
        """Drops what was logged of later steps, which will be repeated, and a partial line. -1 drops everything."""
        later = [path for path in self.checkpoints() if checkpoint_step(path) > step]
        if later:
            raise ValueError(
                f"{later[0]} is later than step {step}, where the run would resume. Move it away, or resume from it."
            )
        self._loggers.close()
        for lines in (self._metrics, self._layers, self._samples):
            lines.keep(lambda line: int(line["step"]) <= step)
        self._completions.drop_after(step)
        self._step = None if step < 0 else step
        self._resumed_at = step

    def prune(self, keep: int, best: int | None = None) -> list[Path]:
        """Deletes all complete checkpoints except the newest `keep` and that of step `best`. Returns the deleted.

        Each is renamed first, so that a kill leaves no partial checkpoint.
        """
        if keep < 1:
            raise ValueError(f"prune(keep={keep}) would leave no checkpoint to resume from; keep at least 1.")
        old = [path for path in self.checkpoints()[:-keep] if checkpoint_step(path) != best]
        for path in old:
            path.rename(path.with_name(f".{path.name}{DELETING}"))
        if old:
            sync(self.path / CHECKPOINTS)
        for renamed in (self.path / CHECKPOINTS).glob(f".step-*{DELETING}"):  # also those that a kill left
            shutil.rmtree(renamed)
        return old

    def close(self) -> None:
        """Writes everything to disk and releases the run."""
        try:
            self._metrics.close()
            self._layers.close()
            self._samples.close()
            self._loggers.close()
        finally:
            if self._lock is not None:
                self._lock.release()

    def _run_info(self, project: str) -> RunInfo:
        first = None if self._resumed_at is None else self._resumed_at + 1
        return RunInfo(project, self.path, read_config(self.path), first)


class ReadOnlyRun(RunDirectory):
    """The run directory of ranks other than 0: it lists checkpoints and writes nothing."""

    def _do_nothing(self, *_: Any, **__: Any) -> None:
        pass

    log = log_layers = log_samples = log_completions = sync = resume_at = rename_checkpoints = record_start = record = (
        _do_nothing
    )

    def prune(self, keep: int, best: int | None = None) -> list[Path]:
        return []


def open_run(
    path: str | os.PathLike[str],
    config: Mapping[str, Any],
    *,
    changes: AllowedChanges = NO_CHANGES,
    loggers: Sequence[str] = (TENSORBOARD,),
) -> RunDirectory:
    """Creates a run directory, or opens it again if `config` allows. Every rank calls it.

    Refuses a directory that another process holds, or that has steps of another config, unless it differs by `changes`
    only. A refusal changes nothing.
    """
    directory = Path(path).expanduser().absolute()

    def prepare() -> tuple[RunLock, dict[str, Any]]:
        check_loggers(loggers)
        _changes(directory, config, changes)
        directory.mkdir(parents=True, exist_ok=True)
        sync(directory.parent)
        lock = RunLock(directory)
        try:
            changed = _changes(directory, config, changes)  # again: now no other can write
            _write_config(directory, config, bool(changed))
            clear_status(directory)
        except BaseException:
            lock.release()
            raise
        return lock, changed

    if not is_rank0():
        on_rank0(lambda: None)
        return ReadOnlyRun(directory)
    prepared: list[tuple[RunLock, dict[str, Any]]] = []
    on_rank0(lambda: prepared.append(prepare()))
    lock, changed = prepared[0]
    return RunDirectory(directory, loggers=loggers, lock=lock, changed=changed)


def check_run(path: str | os.PathLike[str], config: Mapping[str, Any], *, changes: AllowedChanges = NO_CHANGES) -> None:
    """Raises what `open_run` would raise for this config, and writes nothing. Every rank calls it."""
    directory = Path(path).expanduser().absolute()
    on_rank0(lambda: _changes(directory, config, changes))


def is_rank0() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def checkpoint_step(checkpoint: Path) -> int:
    match = STEP.fullmatch(checkpoint.name)
    if match is None:
        raise ValueError(f"{checkpoint} is not named as a checkpoint; it should end in step-000100, or another number.")
    return int(match[1])


def _changes(path: Path, config: Mapping[str, Any], allowed: AllowedChanges) -> dict[str, Any]:
    """Returns the settings that differ from those of the run in a directory, each as [old, new], or raises.

    A directory without steps is not a run yet: its config may be replaced.
    """
    if path.exists() and not path.is_dir():
        raise NotADirectoryError(f"{path} is a file; a run needs a directory (--run).")
    masked = _masked(config)
    steps = _has_steps(path)
    if not (path / CONFIG).is_file():
        if steps:
            raise ValueError(
                f"{path} holds {steps} but no {CONFIG}, so it is unclear which run it is. Give another --run."
            )
        return {}
    if not steps:
        return {}
    if (changed := changed_files(path, allowed.files)) and config.get("file_changes") != "allow":
        raise ValueError(refused_files(path, changed))
    written = read_config(path)
    changed_keys = [
        (key, old, new)
        for key, old, new in differences(with_masks_of(written, masked), written)
        if not (old is MISSING and new in allowed.defaults.get(re.sub(r"\.\d+\.", ".*.", key), ()))
    ]
    refused = [change for change in changed_keys if not is_covered(change[0], allowed.keys)]
    if refused:
        saved = RunDirectory(path).checkpoints()
        other = f", or begin a new run with its weights: --run OTHER --from {path}/{saved[-1].name}" if saved else ""
        raise OtherRun(
            f"{path} belongs to another run: {describe_differences(refused)}. Give the same config to resume it, "
            f"another directory (--run), or --overwrite to delete that run{other}."
        )
    return {
        written_key(key): [None if value is MISSING else value for value in (old, new)]
        for key, old, new in changed_keys
    }


def changed_files(run: Path, files: Callable[[], InputFiles]) -> dict[str, str]:
    """Returns the files, and functions of a call, that changed since the run was last started, by their keys."""
    starts = read_record(run).get("starts") or [{}]
    old = starts[-1].get("files", {})
    new = files() if old else {}
    changed = [key for key in new if key in old and old[key][0] == new[key][0] and old[key][1] != new[key][1]]
    return {written_key(key): new[key][0] for key in changed}


def _has_steps(path: Path) -> str:
    """Returns the name of the file that shows that the run has steps, or ""."""
    if RunDirectory(path).checkpoints():
        return CHECKPOINTS
    return METRICS if any(line.get("phase") != "start" for line in read_metrics(path)) else ""


def _write_config(path: Path, config: Mapping[str, Any], changed: bool) -> None:
    """Writes the config. An earlier one that has steps is kept in configs/."""
    (path / CHECKPOINTS).mkdir(exist_ok=True)
    masked, written = _masked(config), read_config(path) if _has_steps(path) else {}
    private = mask(plain_value(config)) != plain_value(config) or is_private(path)
    if changed:
        (path / EARLIER).mkdir(exist_ok=True)
        number = 1 + len(list((path / EARLIER).iterdir()))
        write_atomic(path / EARLIER / f"{number:03d}.yaml", _as_yaml(written).encode(), private=private)
    write_atomic(path / CONFIG, _as_yaml(with_masks_of(written, masked)).encode(), private=private)


def _masked(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the config as it is read from its file: masked, in the types of YAML."""
    masked: dict[str, Any] = yaml.load(_as_yaml(mask(plain_value(config))), LOADER)
    return masked


def _as_yaml(config: Mapping[str, Any]) -> str:
    try:
        return yaml.dump(config, Dumper=DUMPER, sort_keys=False, allow_unicode=True)
    except yaml.YAMLError as error:
        raise TypeError(
            f"{CONFIG} cannot hold this config ({error}); use numbers, strings, lists and dicts."
        ) from error


def _shortest(number: float) -> float:
    """Returns a whole number as an int, which JSON writes without ".0"."""
    return int(number) if float(number).is_integer() else number
