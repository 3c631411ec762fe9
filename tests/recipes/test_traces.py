"""Traces of a run: its spans are what the run did, and a collector that is gone does not disturb it."""

from __future__ import annotations

import socket
import time
from collections import Counter
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest

from postlude.recipes.config.settings import ObserveSettings
from postlude.recipes.registry import RECIPES
from postlude.recipes.run.directory import RunDirectory
from postlude.recipes.run.files import read_metrics
from postlude.recipes.run.monitor import RunMonitor
from postlude.recipes.run.progress import STEP, RunProgress
from postlude.recipes.run.run_traces import check_traces
from postlude.recipes.run.schedule import OTHER, StepTimer
from postlude.trace.spans import Span
from tests.conftest import PATIENCE, Ranks
from tests.recipes.test_grpo import UNKEPT, config_of

pytest.importorskip("opentelemetry.sdk", reason="the package is missing: pip install opentelemetry-sdk")


class Sent(NamedTuple):
    """A span as the exporter got it."""

    name: str
    identity: int
    parent: int | None
    trace: int
    start: int
    end: int
    attributes: dict[str, Any]
    ok: bool


def processor_of(exporter: Any) -> Any:
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor

    return SimpleSpanProcessor(exporter)


def spans_of(exporter: Any) -> list[Sent]:
    return [
        Sent(
            span.name,
            span.context.span_id,
            span.parent and span.parent.span_id,
            span.context.trace_id,
            span.start_time,
            span.end_time,
            dict(span.attributes),
            span.status.status_code.name != "ERROR",
        )
        for span in exporter.get_finished_spans()
    ]


def run_traced(group: Any, directory: str, *overrides: str) -> tuple[list[Sent], list[dict[str, Any]]]:
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    config = config_of(Path(directory), "--observe.traces=true", *overrides)
    with patch("postlude.recipes.run.monitor.open_processor", lambda: processor_of(exporter)):
        RECIPES["grpo"].run(config)
    return spans_of(exporter), read_metrics(config.run)


def test_spans_of_a_run_are_its_steps_requests_and_rewards(ranks: Ranks, tmp_path: Path) -> None:
    options = (*UNKEPT, "--evaluation.every=0", "--evaluation.tasks=0")
    ((spans, metrics),) = ranks(1, run_traced, str(tmp_path), *options)
    by_identity = {span.identity: span for span in spans}
    steps = [span for span in spans if span.name == "step"]
    assert [span.attributes["postlude.step"] for span in steps] == [line["step"] for line in metrics]
    assert [span.attributes["postlude.phase"] for span in steps] == [line["phase"] for line in metrics]
    assert [span.attributes["postlude.loss"] for span in steps] == [line["loss"] for line in metrics]
    assert [span.parent for span in steps] == [None] * len(steps)
    assert len({span.trace for span in steps}) == len(steps)
    for span in spans:
        assert span.start <= span.end
        if span.parent is not None:
            parent = by_identity[span.parent]
            assert parent.trace == span.trace
            names = {"request": "rollout", "queue": "request", "sample": "request", "reward call": "reward"}
            assert parent.name == names.get(span.name, "step")
    # Parts have the seconds of the metrics.
    for step, line in zip(steps, metrics, strict=True):
        parts = {span.name: span for span in spans if span.parent == step.identity}
        seconds = {name: part.attributes.get("postlude.seconds", 0.0) for name, part in parts.items()}
        timed = {name.removeprefix("time/"): value for name, value in line.items() if name.startswith("time/")}
        assert timed.pop(OTHER) >= 0.0
        assert timed.keys() <= seconds.keys()
        assert all(abs(seconds[name] - timed[name]) < 0.05 for name in timed)
    sampled = Counter(span.name for span in spans if span.name in ("request", "queue", "sample", "reward call"))
    completions = 3 * 4 * 3  # steps, prompts and samples
    assert sampled == dict.fromkeys(("request", "queue", "sample", "reward call"), completions)
    lengths = sum(span.attributes["postlude.tokens"] for span in spans if span.name == "request")
    assert lengths == sum(sum(line["lengths"]) for line in metrics if "lengths" in line)
    keys = [f"postlude.{name}" for name in ("step", "group", "completion")]
    calls = [span.attributes for span in spans if span.name == "reward call"]
    assert len({tuple(call[key] for key in keys) for call in calls}) == completions


def test_a_step_that_failed_ends_with_the_error(tmp_path: Path) -> None:
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter, progress = InMemorySpanExporter(), RunProgress()
    with (
        patch("postlude.recipes.run.monitor.open_processor", lambda: processor_of(exporter)),
        closing(RunMonitor(tmp_path, ObserveSettings(traces=True), progress)) as monitor,
        suppress(RuntimeError),
        progress.until_end(),
    ):
        timer = StepTimer(progress, monitor.recorder)
        with progress.during(STEP), timer("train"):
            raise RuntimeError("it broke")
    part, step = spans_of(exporter)
    assert (part.name, part.parent, step.name, step.ok) == ("train", step.identity, "step", False)
    assert step.attributes["postlude.step"] == 1


def test_parts_and_other_are_the_whole_step(monkeypatch: pytest.MonkeyPatch) -> None:
    timer, now = StepTimer(), [0.0]
    monkeypatch.setattr("postlude.recipes.run.schedule.time.perf_counter", lambda: now[0])

    def pass_time(seconds: float) -> None:
        now[0] += seconds

    with timer("offload"):  # before the first step
        pass_time(5.0)
    with timer.step():
        pass_time(0.25)
        with timer("wake"), timer("sleep"):
            pass_time(1.0)
        with timer("wake"):
            pass_time(2.0)
        pass_time(0.5)
    assert timer.take() == {"time/offload": 5.0, "time/wake": 3.0, "time/other": 0.75}


def test_a_collector_that_is_gone_is_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    progress, directory = RunProgress(), RunDirectory(tmp_path, loggers=())
    with closing(RunMonitor(tmp_path, ObserveSettings(traces=True), progress)) as monitor:
        monitor.watch(directory)
        began = time.monotonic()
        for step in range(1, 51):
            for _ in range(100):
                monitor.recorder.add(Span(0, "request", "request", time.perf_counter(), time.perf_counter()))
            directory.log(step, {"loss": 1.0}, phase="sft")
        assert time.monotonic() - began < 30
        while not any(record.name == "postlude" for record in caplog.records) and time.monotonic() - began < PATIENCE:
            time.sleep(0.01)
        closed = time.monotonic()
    assert time.monotonic() - closed < 30
    warnings = [record.getMessage() for record in caplog.records if record.name == "postlude"]
    assert len(warnings) == 1
    assert warnings[0].startswith("traces cannot be sent: ")
    assert warnings[0].endswith("The run continues.")
    assert len(read_metrics(tmp_path)) == 50


def test_what_cannot_export_is_named_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://collector:4318")
    assert check_traces() == "traces to http://collector:4318"
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "zipkin")
    with pytest.raises(ImportError, match="OTEL_TRACES_EXPORTER is 'zipkin', of which this Python has no exporter"):
        check_traces()
