"""A run on disk: its config, metrics, samples and checkpoints. A run that was killed goes on as if it had not been.

    config.yaml                 what was asked for, secrets masked; configs/ has those that changed commands replaced
    run.json                    each start: when, where, with which versions, from which step
    metrics.jsonl               a JSON object a step
    samples.jsonl               a JSON object a sample rollout
    tensorboard/                the metrics again, as event files
    cache/                      the dataset's rows as tokens, to begin faster next time
    checkpoints/step-000100/    training state after step 100, as `Engine.save` writes it

Every rank makes the same calls. The first rank writes; the others hold an `ReadOnlyRun`, which only reads.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
import yaml

from postlude.recipes.config.secrets import mask
from postlude.recipes.run.config_changes import MISSING, describe_differences, differences, is_covered, user_code_hashes
from postlude.recipes.run.durable_files import JSONLinesFile, write_atomic
from postlude.recipes.run.lock import RunLock
from postlude.recipes.run.loggers import TENSORBOARD, MetricLoggers, RunInfo, check_loggers
from postlude.recipes.run.start_mode import CHECKPOINTS, STEP
from postlude.world.agreement import on_rank0

CONFIG, EARLIER, RECORD = "config.yaml", "configs", "run.json"
METRICS, SAMPLES = "metrics.jsonl", "samples.jsonl"
COMPLETE = "state.json"  # what a checkpoint has once it is all there
DELETING = ".deleting"
Value = TypeVar("Value")


@dataclass(frozen=True)
class Sample:
    """A rollout to look at. The last three lists have an entry for each token of the completion."""

    prompt: str
    completion: str
    reward: float | None = None
    parts: Mapping[str, float] = field(default_factory=dict)
    """What the reward is made of."""
    tokens: Sequence[int] = ()
    token_strings: Sequence[str] = ()
    logprobs: Sequence[float] = ()


class RunDirectory:
    """One run's directory, for the rank that writes. `open_run` gives each rank the one it needs.

    At the start call `resume`, then `log` (and `sample`) a step before its checkpoint is saved: so a checkpoint never
    knows of a step whose metrics are not on disk.
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
        self._samples = JSONLinesFile(self.path / SAMPLES)
        self._loggers = MetricLoggers(loggers, self._opening)
        self._step: int | None = None
        self._resumed_at: int | None = None

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def log(self, step: int, metrics: Mapping[str, Any], *, phase: str) -> None:
        """Add a step's metrics: numbers, lists of numbers (distributions), or mappings of them, named `outer/inner`.

        Steps never go back. What is not a finite number is written as "nan", "inf" or "-inf", as JSON has none.
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

    def sample(self, step: int, samples: Sequence[Sample]) -> None:
        """Keep some rollouts of a step, to be read in the report."""
        self._samples.append([{"step": step} | _plain(asdict(sample)) for sample in samples])

    def checkpoint(self, step: int) -> Path:
        """Where the checkpoint after `step` belongs."""
        return self.path / CHECKPOINTS / f"step-{step:06d}"

    def checkpoints(self) -> list[Path]:
        """The complete checkpoints, oldest first."""
        folder = self.path / CHECKPOINTS
        found = folder.iterdir() if folder.is_dir() else ()
        complete = [path for path in found if STEP.fullmatch(path.name) and (path / COMPLETE).is_file()]
        return sorted(complete, key=checkpoint_step)

    def latest_checkpoint(self) -> Path | None:
        """The newest complete checkpoint, the same on every rank: the first one looks."""

        def look() -> Path | None:
            found = self.checkpoints()
            return found[-1] if found else None

        return on_rank0(look)

    def resume(self) -> Path | None:
        """Go back to the newest checkpoint, or to nothing where there is none; returns it. Load it next."""
        checkpoint = self.latest_checkpoint()
        self.resume_at(-1 if checkpoint is None else checkpoint_step(checkpoint))
        return checkpoint

    def set_aside(self, checkpoints: Sequence[Path], why: str) -> None:
        """Keep checkpoints under names by which they no longer count, step-000100.why."""
        for path in checkpoints:
            aside, count = path.with_name(f"{path.name}.{why}"), 1
            while aside.exists():
                count += 1
                aside = path.with_name(f"{path.name}.{why}-{count}")
            path.rename(aside)

    def discard(self, name: str) -> None:
        """Take away something below the directory that will be made again; every rank calls it."""

        def remove() -> None:
            shutil.rmtree(self.path / name, ignore_errors=True)

        on_rank0(remove)

    def record(self, **entries: Any) -> None:
        """Add a start to what `run.json` says of the run: `entries`, and which settings it came with anew."""
        starts = read_record(self.path).get("starts", [])
        changed = {"changed": self.changed} if self.changed else {}
        record = {"starts": [*starts, _plain(entries) | changed]}
        write_atomic(self.path / RECORD, json.dumps(record, indent=2, ensure_ascii=False).encode() + b"\n")

    def resume_at(self, step: int) -> None:
        """Forget what was written of later steps: they will be done again. -1 forgets everything.

        A torn last line, as a kill leaves it, goes as well.
        """
        later = [path for path in self.checkpoints() if checkpoint_step(path) > step]
        if later:
            raise ValueError(
                f"{later[0]} is later than step {step}, where the run would go on. Move it away, or resume from it."
            )
        self._loggers.close()
        for lines in (self._metrics, self._samples):
            lines.keep(lambda line: int(line["step"]) <= step)
        self._step = None if step < 0 else step
        self._resumed_at = step

    def prune(self, keep: int) -> list[Path]:
        """Delete all complete checkpoints but the newest `keep`; returns the deleted.

        Each is renamed first, so a kill in the middle leaves no half that could be taken for a whole.
        """
        if keep < 1:
            raise ValueError(f"prune(keep={keep}) would leave no checkpoint to resume from; keep at least 1.")
        old = self.checkpoints()[:-keep]
        for path in old:
            path.rename(path.with_name(f".{path.name}{DELETING}"))
        for left in (self.path / CHECKPOINTS).glob(f".step-*{DELETING}"):  # an earlier kill's, too
            shutil.rmtree(left)
        return old

    def close(self) -> None:
        """Put everything on disk for good, and let another process have the run."""
        try:
            self._metrics.close()
            self._samples.close()
            self._loggers.close()
        finally:
            if self._lock is not None:
                self._lock.release()

    def _opening(self, project: str) -> RunInfo:
        first = None if self._resumed_at is None else self._resumed_at + 1
        return RunInfo(project, self.path, read_config(self.path), first)


class ReadOnlyRun(RunDirectory):
    """The run as the other ranks see it: it knows the checkpoints and writes nothing."""

    def log(self, step: int, metrics: Mapping[str, Any], *, phase: str) -> None:
        """Nothing: the first rank does."""

    def sample(self, step: int, samples: Sequence[Sample]) -> None:
        """Nothing: the first rank does."""

    def resume_at(self, step: int) -> None:
        """Nothing: the first rank does."""

    def set_aside(self, checkpoints: Sequence[Path], why: str) -> None:
        """Nothing: the first rank does."""

    def record(self, **entries: Any) -> None:
        """Nothing: the first rank does."""

    def prune(self, keep: int) -> list[Path]:
        """Nothing: the first rank does."""
        return []


def open_run(
    path: str | os.PathLike[str],
    config: Mapping[str, Any],
    *,
    resume: bool = True,
    may_change: Collection[str] = (),
    loggers: Sequence[str] = (TENSORBOARD,),
) -> RunDirectory:
    """Make a run's directory, or open it again if `resume` and `config` allow; every rank calls it.

    No other process may hold it. A directory with the steps of another config is refused, by the keys that differ, save
    those in `may_change` (dotted: it or what is below it), whose new values take the place of the old. `loggers` are
    where metrics go besides. What is refused leaves everything as it was.
    """
    directory = Path(path).expanduser().absolute()

    def prepare() -> tuple[RunLock, dict[str, Any]]:
        check_loggers(loggers)
        _changes(directory, config, resume, may_change)
        directory.mkdir(parents=True, exist_ok=True)
        lock = RunLock(directory)
        try:
            changed = _changes(directory, config, resume, may_change)  # again, now that no one else writes there
            _claim(directory, config, bool(changed))
        except BaseException:
            lock.release()
            raise
        return lock, changed

    if not is_rank0():
        on_rank0(lambda: None)
        return ReadOnlyRun(directory)
    held: list[tuple[RunLock, dict[str, Any]]] = []
    on_rank0(lambda: held.append(prepare()))
    lock, changed = held[0]
    return RunDirectory(directory, loggers=loggers, lock=lock, changed=changed)


def check_run(path: str | os.PathLike[str], config: Mapping[str, Any], *, may_change: Collection[str] = ()) -> None:
    """Refuse what `open_run` would refuse of this config, and touch nothing; every rank calls it."""
    directory = Path(path).expanduser().absolute()
    on_rank0(lambda: _changes(directory, config, True, may_change))


def is_rank0() -> bool:
    """Whether this process is the one that writes and speaks."""
    return not dist.is_initialized() or dist.get_rank() == 0


def checkpoint_step(checkpoint: Path) -> int:
    """The step after which a checkpoint was saved, by its name."""
    found = STEP.fullmatch(checkpoint.name)
    if found is None:
        raise ValueError(f"{checkpoint} is not named as a checkpoint; it should end in step-000100, or another number.")
    return int(found[1])


def flatten(metrics: Mapping[str, Any], outer: str = "") -> dict[str, Any]:
    """Metrics as they are written: `outer/inner` for a mapping in a mapping, numbers for tensors, no Nones."""
    found: dict[str, Any] = {}
    for name, value in metrics.items():
        if isinstance(value, Mapping):
            found |= flatten(value, f"{outer}{name}/")
        elif value is not None:
            found[f"{outer}{name}"] = _plain(value)
    return found


def read_config(run: Path) -> dict[str, Any]:
    """The config a run was started with, without its secrets; empty where there is none."""
    path = run / CONFIG
    found = yaml.safe_load(path.read_text()) if path.is_file() else None
    return mask(found) if isinstance(found, dict) else found or {}


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """A run's metrics, line by line. Those of a run that is being written can be read, too."""
    return JSONLinesFile(run / METRICS).read()


def read_samples(run: Path) -> list[dict[str, Any]]:
    """A run's sample rollouts: the fields of `Sample`, and `step`."""
    return JSONLinesFile(run / SAMPLES).read()


def read_record(run: Path) -> dict[str, Any]:
    """What `run.json` says of a run's starts; empty where there is none."""
    path = run / RECORD
    try:
        found = json.loads(path.read_text()) if path.is_file() else {}
    except ValueError as error:
        raise ValueError(f"{path} cannot be read ({error}); mend it, or take it away.") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} does not hold the starts of a run; take it away.")
    return found


def _changes(path: Path, config: Mapping[str, Any], resume: bool, may_change: Collection[str]) -> dict[str, Any]:
    """Which settings are new to the run that a directory holds, each with its old and new value; or why it is refused.

    A directory without steps is no run yet: whatever config is there was of a start that came to nothing.
    """
    if path.exists() and not path.is_dir():
        raise NotADirectoryError(f"{path} is a file; a run needs a directory (--run).")
    written = _as_yaml(config)
    steps = _has_steps(path)
    if not (path / CONFIG).is_file():
        if steps:
            raise ValueError(
                f"{path} holds {steps} but no {CONFIG}, so whose it is cannot be told. Give another directory (--run)."
            )
        return {}
    if not steps:
        return {}
    if (changed := changed_code(path, config)) and config.get("code_changes") != "allow":
        raise ValueError(
            f"{changed} was changed since {path} was last started. Restore the file, set --code_changes allow to go on "
            "with the new one, or give another directory (--run)."
        )
    found = list(differences(yaml.safe_load(written), _config_of(path)))
    refused = [each for each in found if not is_covered(each[0], may_change)]
    if refused:
        saved = RunDirectory(path).checkpoints()
        other = f", or begin a new run with its weights: --run OTHER --from {path}/{saved[-1].name}" if saved else ""
        raise ValueError(
            f"{path} belongs to another run: {describe_differences(refused)}. Give the same config to go on with "
            f"it, or another "
            f"directory (--run){other}."
        )
    if not resume:
        raise ValueError(f"{path} holds a run of this config already. Resume it, or give another directory.")
    return {key: [None if value is MISSING else value for value in (old, new)] for key, old, new in found}


def changed_code(run: Path, config: Mapping[str, Any]) -> str:
    """The user's files that are not what a run was last started with, each with its key; empty where none is."""
    starts = read_record(run).get("starts") or [{}]
    old, new = starts[-1].get("code", {}), user_code_hashes(config)
    changed = [key for key in new if key in old and old[key][0] == new[key][0] and old[key][1] != new[key][1]]
    return " and ".join(f"{new[key][0]} ({key})" for key in changed)


def _has_steps(path: Path) -> str:
    """The name of what shows that a step was made here; empty where none was."""
    if RunDirectory(path).checkpoints():
        return CHECKPOINTS
    return METRICS if any(line.get("phase") != "start" for line in read_metrics(path)) else ""


def _config_of(path: Path) -> dict[str, Any]:
    try:
        return read_config(path)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(
            f"{path / CONFIG} cannot be read ({' '.join(str(error).split())}), so whose run it is cannot be told. Mend "
            "it, or give another directory (--run)."
        ) from error


def _claim(path: Path, config: Mapping[str, Any], changed: bool) -> None:
    """Write the config; one that it takes the place of is kept where the run has steps of it."""
    (path / CHECKPOINTS).mkdir(exist_ok=True)
    if changed:
        (path / EARLIER).mkdir(exist_ok=True)
        number = 1 + len(list((path / EARLIER).iterdir()))
        write_atomic(path / EARLIER / f"{number:03d}.yaml", (path / CONFIG).read_bytes())
    write_atomic(path / CONFIG, _as_yaml(config).encode())


def _as_yaml(config: Mapping[str, Any]) -> str:
    try:
        return yaml.safe_dump(mask(_plain(config)), sort_keys=False, allow_unicode=True)
    except yaml.YAMLError as error:
        raise TypeError(
            f"{CONFIG} cannot hold this config ({error}); use numbers, strings, lists and dicts."
        ) from error


def _plain(value: Any) -> Any:
    """The same in what JSON and YAML know."""
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if hasattr(value, "tolist"):  # a tensor or an array
        return value.tolist()
    return value
