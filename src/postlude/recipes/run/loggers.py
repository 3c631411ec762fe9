"""Loggers of a run besides `metrics.jsonl`: TensorBoard, Weights & Biases, MLflow, trackio.

A config names each as `name` or `name:project`. A logger that fails loses its own metrics, and never ends the run.
"""

from __future__ import annotations

import contextlib
import difflib
import json
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
from typing import Any, NamedTuple, Protocol, TypeAlias

from postlude.durable_files import write_atomic

LOG = logging.getLogger("postlude")
TENSORBOARD = "tensorboard"
DEFAULT_PROJECT = "postlude"
SAMPLES = "samples"
COLUMNS = ("step", "prompt", "completion", "reward", "components", "turns", "finish_reason", "error")
TABLE_ROWS, TABLE_TEXT = 16, 8_000  # of a step, and characters of a text
PATIENCE = 3  # failed steps in a row before a logger is dropped: each may have waited for the network


SampleRow: TypeAlias = list[str | int | float | None]


class MetricLogger(Protocol):
    """Takes the metrics of every step."""

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Logs the metrics of a step: numbers and lists of numbers."""
        ...

    def log_samples(self, step: int, rows: Sequence[SampleRow]) -> None:
        """Logs a table of samples of a step, whose columns are `COLUMNS`."""
        ...

    def close(self) -> None:
        """Writes everything that is buffered."""
        ...


@dataclass(frozen=True)
class RunInfo:
    """The run that a logger logs."""

    project: str
    directory: Path
    config: Mapping[str, Any]
    first_step: int | None
    """The next step of a resumed run. Earlier logs of it and of later steps are repeated."""

    def identity(self, logger: str, make: Callable[[], str]) -> str:
        """Returns the id of this run at a logger, made once and kept in the run directory."""
        name = self.directory / f"{logger}.id"
        if not name.is_file():
            write_atomic(name, make().encode())
        return name.read_text()

    def random_name(self) -> str:
        return f"{self.directory.name}-{os.urandom(4).hex()}"


class TensorBoard:
    """Event files. A resumed run starts a new one, which makes TensorBoard drop the repeated steps."""

    def __init__(self, run_info: RunInfo) -> None:
        from torch import float64, tensor
        from torch.utils.tensorboard import SummaryWriter  # slow

        self._writer = SummaryWriter(str(run_info.directory / TENSORBOARD), purge_step=run_info.first_step)
        self._numbers = lambda values: tensor(values, dtype=float64)

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        for key, value in metrics.items():
            if isinstance(value, list):
                finite = [entry for entry in value if isinstance(entry, int | float) and math.isfinite(entry)]
                if finite:
                    self._writer.add_histogram(key, self._numbers(finite), step)
            elif isinstance(value, int | float):
                self._writer.add_scalar(key, value, step)
        self._writer.flush()

    def log_samples(self, step: int, rows: Sequence[SampleRow]) -> None:
        """Logs a text, in which each value is a block of code: it is not read as Markdown."""
        values = (
            f"**{name}**\n\n" + "\n".join(f"    {line}" for line in str(value).splitlines() or [""])
            for row in rows
            for name, value in zip(COLUMNS[1:], row[1:], strict=True)
            if value is not None
        )
        self._writer.add_text(SAMPLES, "\n\n".join(values), step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A W&B run. WANDB_MODE=offline keeps it in the run directory, for `wandb sync`."""

    def __init__(self, run_info: RunInfo) -> None:
        wandb: Any = import_module("wandb")
        self._table = wandb.Table
        self._run = wandb.init(
            project=run_info.project,
            name=run_info.directory.name,
            id=run_info.identity("wandb", run_info.random_name),
            resume="allow",
            dir=str(run_info.directory),
            config=dict(run_info.config),
        )
        self._run.define_metric("*", step_metric="step")  # W&B's own step cannot go back, as a resumed run does

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._run.log({"step": step} | _numbers(metrics))

    def log_samples(self, step: int, rows: Sequence[SampleRow]) -> None:
        self._run.log({"step": step, SAMPLES: self._table(columns=list(COLUMNS), data=list(rows))})

    def close(self) -> None:
        self._run.finish()


class MLflow:
    """An MLflow run, at MLFLOW_TRACKING_URI or in mlflow.db (SQLite) in the run directory."""

    def __init__(self, run_info: RunInfo) -> None:
        mlflow: Any = import_module("mlflow")
        remote = os.environ.get("MLFLOW_TRACKING_URI")
        home = remote or f"sqlite:///{run_info.directory / 'mlflow.db'}"
        self._artifacts = None if remote else (run_info.directory / "mlflow-artifacts").as_uri()  # else where it runs
        self._client = mlflow.MlflowClient(tracking_uri=home)
        self._metric = mlflow.entities.Metric
        self._run = run_info.identity("mlflow", lambda: self._create(run_info))
        self._client.update_run(self._run, status="RUNNING")  # also if it was terminated before

    def _create(self, run_info: RunInfo) -> str:
        known = self._client.get_experiment_by_name(run_info.project)
        experiment = known.experiment_id if known else self._client.create_experiment(run_info.project, self._artifacts)
        run: str = self._client.create_run(experiment, run_name=run_info.directory.name).info.run_id
        for key, value in dotted(run_info.config).items():
            self._client.log_param(run, _mlflow_key(key), str(value)[:6000])  # MLflow's limit
        return run

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        now = int(time.time() * 1000)
        by_name: dict[str, float] = {}
        for key, value in _numbers(metrics).items():
            by_name.setdefault(_mlflow_key(key), value)
        values = [self._metric(name, value, now, step) for name, value in by_name.items()]
        for first in range(0, len(values), 1000):  # MLflow's limit
            self._client.log_batch(self._run, metrics=values[first : first + 1000])

    def log_samples(self, step: int, rows: Sequence[SampleRow]) -> None:
        table = {"columns": COLUMNS, "data": rows}
        self._client.log_text(self._run, json.dumps(table, ensure_ascii=False), f"{SAMPLES}/step-{step:06d}.json")

    def close(self) -> None:
        self._client.set_terminated(self._run)


class Trackio:
    """A trackio run, in its folder (TRACKIO_DIR) or in the Space TRACKIO_SPACE_ID."""

    def __init__(self, run_info: RunInfo) -> None:
        with contextlib.redirect_stdout(sys.stderr):  # trackio prints to stdout, where our results go
            trackio: Any = import_module("trackio")
            self._table = trackio.Table
            self._run = trackio.init(
                run_info.project,
                name=run_info.identity("trackio", run_info.random_name),
                resume="allow",
                config=dict(run_info.config),
                embed=False,
            )

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._run.log(_numbers(metrics), step=step)

    def log_samples(self, step: int, rows: Sequence[SampleRow]) -> None:
        self._run.log({SAMPLES: self._table(columns=list(COLUMNS), data=list(rows))}, step=step)

    def close(self) -> None:
        with contextlib.redirect_stdout(sys.stderr):
            self._run.finish()


class LoggerKind(NamedTuple):
    """A kind of logger."""

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
    """Returns the name and the project of `name` or `name:project`."""
    name, colon, project = logger.partition(":")
    if name not in LOGGERS:
        near = difflib.get_close_matches(name, LOGGERS, 1)
        hint = f'did you mean "{near[0]}"?' if near else f"there are {', '.join(LOGGERS)}."
        raise ValueError(f'there is no logger "{name}"; {hint}')
    if colon and not project:
        raise ValueError(f'the logger "{logger}" names no project. Write "{name}", or "{name}:project".')
    return name, project or DEFAULT_PROJECT


def check_loggers(loggers: Sequence[str]) -> str:
    """Refuses loggers whose package is missing, except TensorBoard, the default. Returns a line about them."""
    lines = []
    for name, _ in map(parse_logger, loggers):
        kind = LOGGERS[name]
        if find_spec(kind.package) is None:
            if name != TENSORBOARD:
                raise ImportError(
                    f"loggers has {name}, but the package of {kind.title} is missing. Run `pip install "
                    f"{kind.package}`, "
                    "or leave it out."
                )
            lines.append(_no_tensorboard())
        else:
            lines.append(kind.title)
    return ", ".join([*lines, "metrics.jsonl"])


class MetricLoggers:
    """The loggers of a run, opened with the first metrics. A failure is reported once and ends nothing."""

    def __init__(self, loggers: Sequence[str], run_info: Callable[[str], RunInfo]) -> None:
        self._names, self._run_info = [parse_logger(logger) for logger in loggers], run_info
        self._open: dict[str, MetricLogger] = {}
        self._failed: dict[str, int] = {}  # steps in a row
        self._reported: set[str] = set()
        self._without_samples: set[str] = set()
        self._opened = False

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Logs a step with every logger that still works."""
        if not self._opened:
            self._open_all()
        for name, logger in list(self._open.items()):
            try:
                logger.log(step, metrics)
                self._failed[name] = 0
            except Exception as error:  # whatever a package raises must not end the run
                self._report(name, "failed to log", error)
                self._failed[name] += 1
                if self._failed[name] == PATIENCE:
                    LOG.warning("%s has failed in %d steps in a row and is dropped.", LOGGERS[name].title, PATIENCE)
                    del self._open[name]

    def log_samples(self, step: int, rows: Sequence[SampleRow]) -> None:
        """Logs samples of a step with every logger. One that fails gets no more of them, but still the metrics."""
        if not self._opened:
            self._open_all()
        for name, logger in self._open.items():
            if rows and name not in self._without_samples:
                try:
                    logger.log_samples(step, rows)
                except Exception as error:  # whatever a package raises must not end the run
                    self._without_samples.add(name)
                    LOG.warning(
                        "%s failed to log the samples of step %d: %s: %s. It gets no more of them; samples.jsonl has "
                        "everything.",
                        LOGGERS[name].title,
                        step,
                        type(error).__name__,
                        error,
                    )

    def close(self) -> None:
        """Closes all loggers. They open again with the next metrics."""
        loggers, self._open, self._opened = self._open, {}, False
        for name, logger in loggers.items():
            try:
                logger.close()
            except Exception as error:  # the metrics are on disk, and the caller may raise something worse
                self._report(name, "failed to write its last metrics", error)

    def _open_all(self) -> None:
        self._opened = True
        for name, project in self._names:
            if name == TENSORBOARD and find_spec("tensorboard") is None:
                self._report(name, _no_tensorboard(), None)
                continue
            try:
                self._open[name] = LOGGERS[name].open(self._run_info(project))
                self._failed[name] = 0
            except Exception as error:
                self._report(name, "failed to open", error)

    def _report(self, name: str, event: str, error: Exception | None) -> None:
        if name not in self._reported:
            self._reported.add(name)
            reason = "" if error is None else f"{LOGGERS[name].title} {event}: {type(error).__name__}: {error}. "
            LOG.warning("%s", f"{reason or event + '. '}The run continues; metrics.jsonl has everything.")


def _no_tensorboard() -> str:
    return "no TensorBoard files, because its package is missing (pip install tensorboard)"


def sample_rows(step: int, samples: Sequence[Mapping[str, Any]]) -> list[SampleRow]:
    """Returns rows of `COLUMNS` for lines of samples.jsonl: at most `TABLE_ROWS`, long texts without their middle."""
    return [
        [
            step,
            _shortened(sample["prompt"]),
            _shortened(sample["completion"]),
            _finite(sample["reward"]),
            json.dumps({name: _finite(value) for name, value in sample["components"].items()}, ensure_ascii=False),
            len(sample["turns"]),
            sample["finish_reason"],
            None if sample["error"] is None else _shortened(sample["error"]),
        ]
        for sample in samples[:TABLE_ROWS]
    ]


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _shortened(text: str) -> str:
    text = text.encode(errors="backslashreplace").decode()  # half a surrogate pair is no UTF-8
    return text if len(text) <= TABLE_TEXT else f"{text[: TABLE_TEXT // 2]} … {text[-TABLE_TEXT // 2 :]}"


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    return {key: value for key, value in metrics.items() if isinstance(value, int | float)}


def dotted(config: Mapping[str, Any], outer: str = "") -> dict[str, Any]:
    """Returns a config's values by dotted path. An empty mapping is a value."""
    flat: dict[str, Any] = {}
    for name, value in config.items():
        inner = isinstance(value, Mapping) and value
        flat |= dotted(value, f"{outer}{name}.") if inner else {f"{outer}{name}": value}
    return flat


def _mlflow_key(key: str) -> str:
    """Returns a name with "_" for each character that MLflow forbids, such as "@": pass@4 becomes pass_4."""
    return re.sub(r"[^\w\-. :/]", "_", key)
