"""MetricLoggers: each receives what was logged, a resumed run continues there, and none can end a run."""

from __future__ import annotations

import importlib
import logging
import sqlite3
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from postlude.checks import USER_ERRORS
from postlude.recipes.config.load import load
from postlude.recipes.config.recipe_configs import SFTConfig
from postlude.recipes.run import loggers
from postlude.recipes.run.directory import open_run, read_metrics
from postlude.recipes.run.loggers import LOGGERS, LoggerKind, RunInfo, check_loggers, parse_logger

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
