"""Where a run's metrics go besides `metrics.jsonl`: TensorBoard, Weights & Biases, MLflow, trackio.

Each is a `MetricLogger`, named in a config by `name` or `name:project`. `MetricLoggers` holds those that a run
asked for: one that fails costs its own lines, and never the run.
"""

from __future__ import annotations

import contextlib
import difflib
import logging
import math
import os
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from postlude.recipes.run.durable_files import write_atomic

LOG = logging.getLogger("postlude")
TENSORBOARD = "tensorboard"
DEFAULT_PROJECT = "postlude"
PATIENCE = 3  # steps in a row that a logger may fail in before it is let go of: each may have waited for a network


class MetricLogger(Protocol):
    """Something that wants each step's metrics."""

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Take the flat metrics of a step: numbers, and lists of numbers."""
        ...

    def close(self) -> None:
        """Put everything where it belongs."""
        ...


@dataclass(frozen=True)
class RunInfo:
    """What a logger is told about the run it is opened for."""

    project: str
    directory: Path
    config: Mapping[str, Any]
    first_step: int | None
    """The step that a run which goes on does next. What was logged of it and later ones is done again."""

    def identity(self, logger: str, make: Callable[[], str]) -> str:
        """Which run this is to a logger: as it was made at first, for as long as the directory lives."""
        name = self.directory / f"{logger}.id"
        if not name.is_file():
            write_atomic(name, make().encode())
        return name.read_text()

    def fresh_name(self) -> str:
        """The directory's name, and letters that no other has."""
        return f"{self.directory.name}-{os.urandom(4).hex()}"


class TensorBoard:
    """Event files. A run that goes on starts a new one, which tells TensorBoard to forget what is done again."""

    def __init__(self, opening: RunInfo) -> None:
        from torch import float64, tensor
        from torch.utils.tensorboard import SummaryWriter  # slow

        self._writer = SummaryWriter(str(opening.directory / TENSORBOARD), purge_step=opening.first_step)
        self._numbers = lambda values: tensor(values, dtype=float64)

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Numbers become scalars, lists histograms."""
        for key, value in metrics.items():
            if isinstance(value, list):
                finite = [entry for entry in value if isinstance(entry, int | float) and math.isfinite(entry)]
                if finite:
                    self._writer.add_histogram(key, self._numbers(finite), step)
            elif isinstance(value, int | float):
                self._writer.add_scalar(key, value, step)
        self._writer.flush()

    def close(self) -> None:
        """Finish the file."""
        self._writer.close()


class WeightsAndBiases:
    """A run there. WANDB_MODE=offline keeps it in the run's directory, to be sent by `wandb sync`."""

    def __init__(self, opening: RunInfo) -> None:
        self._run = import_module("wandb").init(
            project=opening.project,
            name=opening.directory.name,
            id=opening.identity("wandb", opening.fresh_name),
            resume="allow",
            dir=str(opening.directory),
            config=dict(opening.config),
        )
        self._run.define_metric("*", step_metric="step")  # its own count cannot go back, and a resumed run does

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Take a step's numbers; lists stay at home."""
        self._run.log({"step": step} | _numbers(metrics))

    def close(self) -> None:
        """Finish the upload."""
        self._run.finish()


class MLflow:
    """A run of an experiment, at MLFLOW_TRACKING_URI, or in mlflow.db (SQLite) in the run's directory."""

    def __init__(self, opening: RunInfo) -> None:
        mlflow: Any = import_module("mlflow")
        home = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{opening.directory / 'mlflow.db'}"
        self._client = mlflow.MlflowClient(tracking_uri=home)
        self._metric = mlflow.entities.Metric
        self._run = opening.identity("mlflow", lambda: self._create(opening))
        self._client.update_run(self._run, status="RUNNING")  # it is, if it was ended before

    def _create(self, opening: RunInfo) -> str:
        known = self._client.get_experiment_by_name(opening.project)
        experiment = self._client.create_experiment(opening.project) if known is None else known.experiment_id
        run: str = self._client.create_run(experiment, run_name=opening.directory.name).info.run_id
        for key, value in _leaves(opening.config):
            self._client.log_param(run, _mlflow_key(key), str(value)[:6000])  # the longest that it takes
        return run

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Take a step's numbers, all in one call."""
        now = int(time.time() * 1000)
        values = [self._metric(_mlflow_key(key), value, now, step) for key, value in _numbers(metrics).items()]
        for first in range(0, len(values), 1000):  # the most that it takes
            self._client.log_batch(self._run, metrics=values[first : first + 1000])

    def close(self) -> None:
        """Say that it is over."""
        self._client.set_terminated(self._run)


class Trackio:
    """A run in trackio's own folder (TRACKIO_DIR), or in a Space if TRACKIO_SPACE_ID names one."""

    def __init__(self, opening: RunInfo) -> None:
        with contextlib.redirect_stdout(sys.stderr):  # it prints, and results of ours go there
            self._run = import_module("trackio").init(
                opening.project,
                name=opening.identity("trackio", opening.fresh_name),
                resume="allow",
                config=dict(opening.config),
                embed=False,
            )

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Take a step's numbers; lists stay at home."""
        self._run.log(_numbers(metrics), step=step)

    def close(self) -> None:
        """Wait until everything is written."""
        with contextlib.redirect_stdout(sys.stderr):
            self._run.finish()


class LoggerKind(NamedTuple):
    """A logger that can be asked for."""

    title: str
    package: str
    open: Callable[[RunInfo], MetricLogger]


LOGGERS = {
    TENSORBOARD: LoggerKind("TensorBoard", "tensorboard", TensorBoard),
    "wandb": LoggerKind("Weights & Biases", "wandb", WeightsAndBiases),
    "mlflow": LoggerKind("MLflow", "mlflow", MLflow),
    "trackio": LoggerKind("trackio", "trackio", Trackio),
}


def parse_logger(logger: str) -> tuple[str, str]:
    """The name and the project of a logger as a config has it, `name` or `name:project`."""
    name, colon, project = logger.partition(":")
    if name not in LOGGERS:
        near = difflib.get_close_matches(name, LOGGERS, 1)
        hint = f'did you mean "{near[0]}"?' if near else f"there are {', '.join(LOGGERS)}."
        raise ValueError(f'there is no logger "{name}"; {hint}')
    if colon and not project:
        raise ValueError(f'the logger "{logger}" names no project. Write "{name}", or "{name}:project".')
    return name, project or DEFAULT_PROJECT


def check_loggers(loggers: Sequence[str]) -> str:
    """Refuse what cannot be opened for lack of a package, all but TensorBoard, which is missed but not asked for."""
    found = []
    for name, _ in map(parse_logger, loggers):
        kind = LOGGERS[name]
        if find_spec(kind.package) is None:
            if name != TENSORBOARD:
                raise ImportError(
                    f"loggers has {name}, but the package of {kind.title} is missing. Run `pip install "
                    f"{kind.package}`, "
                    "or leave it out."
                )
            found.append(_no_tensorboard())
        else:
            found.append(kind.title)
    return ", ".join([*found, "metrics.jsonl"])


class MetricLoggers:
    """The loggers of a run, opened when the first metrics come. A failure of one is told once, and ends nothing."""

    def __init__(self, loggers: Sequence[str], opening: Callable[[str], RunInfo]) -> None:
        self._asked, self._opening = [parse_logger(logger) for logger in loggers], opening
        self._open: dict[str, MetricLogger] = {}
        self._failed: dict[str, int] = {}
        """Steps in a row that were not taken."""
        self._told: set[str] = set()
        self._begun = False

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Give a step's metrics to every logger that still takes them."""
        if not self._begun:
            self._begin()
        for name, logger in list(self._open.items()):
            try:
                logger.log(step, metrics)
                self._failed[name] = 0
            except Exception as error:  # whatever a package raises: the run is worth more
                self._tell(name, "does not take the metrics", error)
                self._failed[name] += 1
                if self._failed[name] == PATIENCE:
                    LOG.warning("%s has failed in %d steps in a row and gets no more.", LOGGERS[name].title, PATIENCE)
                    del self._open[name]

    def close(self) -> None:
        """Close them all. They open again with the next metrics."""
        loggers, self._open, self._begun = self._open, {}, False
        for name, logger in loggers.items():
            try:
                logger.close()
            except Exception as error:  # the metrics are on disk; and who closes may have worse to tell
                self._tell(name, "lacks the last metrics", error)

    def _begin(self) -> None:
        self._begun = True
        for name, project in self._asked:
            if name == TENSORBOARD and find_spec("tensorboard") is None:
                self._tell(name, _no_tensorboard(), None)
                continue
            try:
                self._open[name] = LOGGERS[name].open(self._opening(project))
                self._failed[name] = 0
            except Exception as error:
                self._tell(name, "cannot be opened", error)

    def _tell(self, name: str, what: str, error: Exception | None) -> None:
        if name not in self._told:
            self._told.add(name)
            why = "" if error is None else f"{LOGGERS[name].title} {what}: {type(error).__name__}: {error}. "
            LOG.warning("%s", f"{why or what + '. '}The run goes on; metrics.jsonl has everything.")


def _no_tensorboard() -> str:
    return "no TensorBoard files, as its package is missing (pip install tensorboard)"


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    return {key: value for key, value in metrics.items() if isinstance(value, int | float)}


def _leaves(config: Mapping[str, Any], outer: str = "") -> list[tuple[str, Any]]:
    """A config's values by their dotted paths."""
    found: list[tuple[str, Any]] = []
    for name, value in config.items():
        found += _leaves(value, f"{outer}{name}.") if isinstance(value, Mapping) else [(f"{outer}{name}", value)]
    return found


def _mlflow_key(key: str) -> str:
    """A name as MLflow has it, which knows no "@": pass@4 is pass_4."""
    return re.sub(r"[^\w\-. :/]", "_", key)
