"""MetricLoggers: each receives what was logged, a resumed run continues there, and none can end a run."""

from __future__ import annotations

import importlib
import json
import logging
import math
import re
import sqlite3
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from postlude.checks import USER_ERRORS
from postlude.recipes.config.load import load
from postlude.recipes.config.recipe_configs import SFTConfig
from postlude.recipes.run import loggers
from postlude.recipes.run.completion_tables import LoggedTurn
from postlude.recipes.run.directory import Sample, open_run
from postlude.recipes.run.files import read_metrics, read_samples
from postlude.recipes.run.loggers import COLUMNS, LOGGERS, TABLE_ROWS, LoggerKind, RunInfo, check_loggers, parse_logger

CONFIG = {"model": "tiny-dense", "optimizer": {"lr": 1e-6, "betas": [0.9, 0.95]}, "steps": 10}


class FailingLogger:
    """A logger that fails at a given call."""

    def __init__(self, faults: dict[str, list[int]]) -> None:
        self.faults, self.steps = faults, []
        self.opened: list[RunInfo] = []

    def open(self, opening: RunInfo) -> FailingLogger:
        self.opened.append(opening)
        if "open" in self.faults:
            raise RuntimeError("nobody is there")
        return self

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        if step in self.faults.get("log", []):
            raise OSError(28, "No space left on device")
        self.steps.append(step)

    def close(self) -> None:
        if "close" in self.faults:
            raise KeyError("project")


def log_messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "postlude"]


@pytest.mark.parametrize(
    ("faults", "logged_steps", "sentences"),
    [
        ({"open": [1]}, [], ["FailingLogger failed to open: RuntimeError: nobody is there."]),
        ({"log": [2, 4]}, [1, 3, 5, 6], ["FailingLogger failed to log: OSError: [Errno 28] No space left"]),
        (
            {"log": [2, 3, 4]},
            [1],
            ["FailingLogger failed to log: OSError", "FailingLogger has failed in 3 steps in a row and is dropped."],
        ),
        ({"close": [1]}, [1, 2, 3, 4, 5, 6], ["FailingLogger failed to write its last metrics: KeyError: 'project'"]),
    ],
    ids=["open", "log", "log-for-good", "close"],
)
def test_a_failing_logger_is_named_once_and_does_not_end_the_run(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    faults: dict[str, list[int]],
    logged_steps: list[int],
    sentences: list[str],
) -> None:
    bad, good = FailingLogger(faults), FailingLogger({})
    monkeypatch.setitem(LOGGERS, "bad", LoggerKind("FailingLogger", "json", bad.open))
    monkeypatch.setitem(LOGGERS, "good", LoggerKind("Taking", "json", good.open))
    with caplog.at_level(logging.WARNING, "postlude"), open_run(tmp_path, CONFIG, loggers=("bad:sums", "good")) as run:
        for step in range(1, 7):
            run.log(step, {"loss": 1.0}, phase="sft")
    assert (bad.steps, good.steps) == (logged_steps, [1, 2, 3, 4, 5, 6])
    messages = log_messages(caplog)
    assert len(messages) == len(sentences)
    assert all(sentence in line for sentence, line in zip(sentences, messages, strict=True))
    assert messages[0].endswith("The run continues; metrics.jsonl has everything.")
    assert [opening.project for opening in (bad.opened[0], good.opened[0])] == ["sums", "postlude"]
    assert len(read_metrics(tmp_path)) == 6
    assert not (tmp_path / "run.lock").exists()


def test_a_logger_that_cannot_be_opened_is_reported_in_the_preflight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loggers, "find_spec", lambda name: None)
    for name in ("wandb", "mlflow", "trackio"):
        with pytest.raises(ImportError, match=f"loggers has {name}, but .* is missing. Run `pip install {name}`, or"):
            open_run(tmp_path / "run", CONFIG, loggers=(f"{name}:sums",))
    assert not (tmp_path / "run").exists()
    assert check_loggers(("tensorboard",)) == (
        "no TensorBoard files, because its package is missing (pip install tensorboard), metrics.jsonl"
    )


def test_unknown_logger_gives_clear_error() -> None:
    assert [parse_logger(text) for text in ("wandb", "mlflow:a:b")] == [("wandb", "postlude"), ("mlflow", "a:b")]
    for text, sentence in {
        "wanb:sums": r'there is no logger "wanb"; did you mean "wandb"\?',
        "neptune": 'there is no logger "neptune"; there are tensorboard, wandb, mlflow, trackio',
        "wandb:": 'the logger "wandb:" names no project',
    }.items():
        with pytest.raises(ValueError, match=sentence):
            parse_logger(text)
        with pytest.raises(USER_ERRORS, match=sentence):
            load(SFTConfig, None, [f"--loggers=[{text!r}]", "--data.path=rows.jsonl"])
    with pytest.raises(USER_ERRORS, match="loggers has wandb more than once"):
        load(SFTConfig, None, ["--loggers=[wandb:a, wandb:b]", "--data.path=rows.jsonl"])
    assert load(SFTConfig, None, ["--loggers=[]", "--data.path=rows.jsonl"]).loggers == ()


def test_a_run_without_tensorboard_warns_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(loggers, "find_spec", lambda name: None)
    with open_run(tmp_path, CONFIG) as run:
        for step in (1, 2, 3):
            run.log(step, {"loss": 1.0}, phase="sft")
    assert len(log_messages(caplog)) == 1
    assert "no TensorBoard files, because its package is missing (pip install tensorboard)" in log_messages(caplog)[0]
    assert len(read_metrics(tmp_path)) == 3


def interrupted_run(path: Path, logger: str, *, wait: float = 0.0) -> None:
    """Logs steps 1 to 6, then resumes from the checkpoint after step 4 and logs 5 to 8."""
    for first, last in ((1, 6), (5, 8)):
        time.sleep(wait if first > 1 else 0.0)
        with open_run(path, CONFIG, loggers=(logger,)) as run:
            run.resume_at(first - 1 if first > 1 else -1)
            for step in range(first, last + 1):
                run.log(step, {"loss": 1 / step, "rewards": [0.0, 1.0], "eval/pass@4": step / 8}, phase="sft")


def test_tensorboard_drops_repeated_steps(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="the package is missing: pip install tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    interrupted_run(tmp_path, "tensorboard", wait=1.1)  # an event file's name has the second in it
    events = EventAccumulator(str(tmp_path / "tensorboard"), {"histograms": 0})
    events.Reload()
    assert len(list((tmp_path / "tensorboard").iterdir())) == 2
    assert [event.step for event in events.Scalars("loss")] == list(range(1, 9))
    assert [event.step for event in events.Histograms("rewards")] == list(range(1, 9))


class Client:
    """Stands for the client of every tracker: it refuses the names that the real one forbids."""

    def __init__(self) -> None:
        self.metrics: dict[int, dict[str, float]] = {}
        self.tables: list[tuple[int, Any]] = []
        self.table_error: Exception | None = None

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Puts itself in the place of the packages."""
        self.info = SimpleNamespace(run_id="1")
        self.init = self.set_terminated = self.finish = self.update_run = lambda *_, **__: self
        self.define_metric = self.log_param = self.flush = self.close = lambda *_, **__: None
        self.get_experiment_by_name = lambda _: SimpleNamespace(experiment_id="1")
        self.create_run = lambda *_, **__: self
        modules = {
            "wandb": SimpleNamespace(init=self.init, Table=self.table),
            "trackio": SimpleNamespace(init=self.init, Table=self.table),
            "mlflow": SimpleNamespace(
                MlflowClient=lambda **_: self, entities=SimpleNamespace(Metric=lambda *fields: fields)
            ),
            "torch.utils.tensorboard": SimpleNamespace(SummaryWriter=lambda *_, **__: self),
        }
        for name, module in modules.items():
            monkeypatch.setitem(sys.modules, name, module)
        monkeypatch.setattr(loggers, "find_spec", lambda _: True)

    def table(self, columns: list[str], data: list[list[Any]]) -> dict[str, Any]:
        return {"columns": columns, "data": data}

    def add_table(self, step: int, table: Any) -> None:
        if self.table_error is not None:
            raise self.table_error
        self.tables.append((step, table))

    def log(self, values: dict[str, Any], step: int | None = None) -> None:  # W&B and trackio
        reserved = {"project", "run", "timestamp", "time", "metrics"} | ({"step"} if step is not None else set())
        assert not reserved & values.keys()
        at = int(values.pop("step", step))
        if "samples" in values:
            self.add_table(at, values.pop("samples"))
        self.metrics.setdefault(at, {}).update(values)

    def log_batch(self, run: str, metrics: list[tuple[str, float, int, int]]) -> None:  # MLflow
        for name, value, _, step in metrics:
            assert re.fullmatch(r"[\w\-. :/]+", name)
            assert name not in self.metrics.setdefault(step, {})
            self.metrics[step][name] = value

    def log_text(self, run: str, text: str, artifact_file: str) -> None:
        step = int(artifact_file.removeprefix("samples/step-").removesuffix(".json"))
        self.add_table(step, json.loads(text))

    def add_scalar(self, name: str, value: float, step: int) -> None:  # TensorBoard
        self.metrics.setdefault(step, {})[name] = value

    def add_text(self, name: str, text: str, step: int) -> None:
        assert name == "samples"
        self.add_table(step, text)


DOCUMENTED = re.findall(r"^\| `([^`]+)`", (Path(__file__).parents[2] / "docs/metrics.md").read_text(), re.MULTILINE)


@pytest.mark.parametrize("logger", LOGGERS)
def test_every_tracker_keeps_the_names_of_the_metrics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logger: str
) -> None:
    client = Client()
    client.install(monkeypatch)
    assert len(DOCUMENTED) > 50
    values = {name: float(number) for number, name in enumerate([*DOCUMENTED, "eval/pass@4", "rows/a b.jsonl"])}
    with open_run(tmp_path, CONFIG, loggers=(logger,)) as run:
        run.log(1, values | {"eval/pass_4": -1.0}, phase="grpo")
    if logger == "mlflow":  # "_" for what it forbids; the first of two names that become one
        expected = {re.sub(r"[@]", "_", name): value for name, value in values.items()}
    else:
        expected = values | {"eval/pass_4": -1.0}
    assert client.metrics == {1: expected}


@pytest.mark.parametrize("logger", LOGGERS)
def test_samples_are_a_table_that_may_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, logger: str
) -> None:
    client = Client()
    client.install(monkeypatch)
    turns = [LoggedTurn(0, "read", 2)] * 2
    sample = Sample("1+1=", "# *2*\n<b>", 0.5, {"right": 1.0}, turns=turns, finish_reason="stop")
    failed = Sample("x" * 9000, "half \ud83d", math.nan, error="timeout")
    with open_run(tmp_path, CONFIG, loggers=(logger,)) as run, caplog.at_level(logging.WARNING, "postlude"):
        run.log_samples(1, [sample, failed] * 20)
        run.log(1, {"loss": 1.0}, phase="grpo")
        client.table_error = OSError("no space")
        for step in (2, 3):
            run.log_samples(step, [sample])
            run.log(step, {"loss": 1.0}, phase="grpo")
    ((step, table),) = client.tables
    assert step == 1
    if logger == "tensorboard":
        assert "**completion**\n\n    # *2*\n    <b>\n\n**reward**\n\n    0.5\n\n" in table
        assert table.count("**prompt**") == TABLE_ROWS
    else:
        assert table["columns"] == list(COLUMNS)
        assert len(table["data"]) == TABLE_ROWS
        first, second = (dict(zip(COLUMNS, row, strict=True)) for row in table["data"][:2])
        assert first == {
            "step": 1, "prompt": "1+1=", "completion": "# *2*\n<b>", "reward": 0.5, "components": '{"right": 1.0}',
            "turns": 2, "finish_reason": "stop", "error": None,
        }  # fmt: skip
        assert (second["reward"], second["error"], second["completion"]) == (None, "timeout", "half \\ud83d")
        assert len(second["prompt"]) < 8010
    assert client.metrics == {step: {"loss": 1.0} for step in (1, 2, 3)}
    (message,) = log_messages(caplog)
    assert message.endswith(
        "failed to log the samples of step 2: OSError: no space. It gets no more of them; samples.jsonl has everything."
    )
    assert len(read_samples(tmp_path)) == 42


def package(name: str) -> Any:
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"the package is missing: pip install {name}")
    return importlib.import_module(name)


@pytest.mark.slow
def test_mlflow_continues_the_same_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    mlflow = package("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    interrupted_run(tmp_path / "sums", "mlflow:arithmetic")
    assert log_messages(caplog) == []
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path / 'sums' / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("arithmetic")
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == ("sums", "FINISHED")
    assert run.data.params["optimizer.lr"] == "1e-06"
    assert run.info.run_id == (tmp_path / "sums" / "mlflow.id").read_text()
    losses = {point.step: point.value for point in client.get_metric_history(run.info.run_id, "loss")}
    assert losses == {step: pytest.approx(1 / step) for step in range(1, 9)}
    assert run.data.metrics["eval/pass_4"] == 1.0


@pytest.mark.slow
def test_trackio_continues_the_same_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "there"))
    for name in [module for module in sys.modules if module.partition(".")[0] == "trackio"]:
        monkeypatch.delitem(sys.modules, name)  # it reads its directory when it is imported
    package("trackio")
    interrupted_run(tmp_path / "sums", "trackio:arithmetic")
    assert log_messages(caplog) == []
    (database,) = (tmp_path / "there").glob("arithmetic*.db")
    with sqlite3.connect(database) as connection:
        rows = connection.execute("select run_name, step, json_extract(metrics, '$.loss') from metrics").fetchall()
    assert {name for name, _, _ in rows} == {(tmp_path / "sums" / "trackio.id").read_text()}
    assert {step: loss for _, step, loss in rows} == {step: pytest.approx(1 / step) for step in range(1, 9)}


@pytest.mark.slow
def test_weights_and_biases_continues_the_same_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    package("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    interrupted_run(tmp_path / "sums", "wandb:arithmetic")
    assert log_messages(caplog) == []
    name = (tmp_path / "sums" / "wandb.id").read_text()
    files = sorted((tmp_path / "sums" / "wandb").glob("offline-run-*/*.wandb"))
    assert len(files) == 2
    assert {file.name for file in files} == {f"run-{name}.wandb"}
    steps = [step for file in files for step in wandb_steps(file)]
    assert steps == [1, 2, 3, 4, 5, 6, 5, 6, 7, 8]


def wandb_steps(file: Path) -> list[int]:
    """Returns the steps in a Weights & Biases file: a short header, then LevelDB's log format."""
    from wandb.proto import wandb_internal_pb2

    data, place, message, results = file.read_bytes(), 7, b"", []
    while place + 7 <= len(data):
        if (room := 32768 - place % 32768) < 7:  # what is left of a block has no room for a piece
            place += room
            continue
        length, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
        message += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # a whole one, or the last piece of one
            record, message = wandb_internal_pb2.Record.FromString(message), b""
            items = {item.key or item.nested_key[0]: item.value_json for item in record.history.item}
            results += [int(items["step"])] if "step" in items else []
    return results
