"""The metrics port of a run: what it serves, and that nobody at it disturbs the run."""

from __future__ import annotations

import socket
import time
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
import torch.distributed as dist

from postlude.cli import main
from postlude.prometheus import CONTENT_TYPE, metric_name
from postlude.recipes.config.settings import ObserveSettings
from postlude.recipes.run.directory import RunDirectory
from postlude.recipes.run.files import read_metrics
from postlude.recipes.run.monitor import RunMonitor
from postlude.recipes.run.progress import RunProgress
from tests.conftest import Ranks
from tests.test_prometheus import read

ANY_PORT = ObserveSettings(metrics_port=0)


def address(output: str) -> str:
    """Returns the address that was printed."""
    (line,) = [line for line in output.splitlines() if line.startswith("metrics at ")]
    return line.removeprefix("metrics at ")


def scrape(url: str, **headers: str) -> dict[Any, float]:
    with urlopen(Request(url, headers=headers), timeout=60) as reply:
        assert reply.headers["content-type"] == CONTENT_TYPE
        return read(reply.read())


def test_each_metric_is_served_as_it_was_logged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    progress = RunProgress()
    progress.start('sft "tiny"', 0, 9)
    directory = RunDirectory(tmp_path, loggers=())
    with closing(RunMonitor(tmp_path, ANY_PORT, progress)) as monitor:
        url = address(capsys.readouterr().out)
        before = scrape(url)
        monitor.watch(directory)
        directory.log(
            1, {"loss": 0.5, "eval/pass@4": 0.25, "time/train": 2.0, "tokens": 100, "rewards": [1.0]}, phase="sft"
        )
        directory.log(2, {"loss": float("nan"), "time": {"train": 1.0}, "tokens": 50}, phase="sft")
        progress.step = 2
        values = scrape(url)
        (port,) = {int(url.rpartition(":")[2].partition("/")[0])}
        for headers in ({"Host": "evil.example"}, {"Host": f"localhost:{port}", "Origin": "http://evil.example"}):
            with pytest.raises(HTTPError, match="403"):
                scrape(url, **headers)
    assert before["postlude_run_step", ()] == 0
    assert before["postlude_run_step_seconds_count", ()] == 0
    assert values["postlude_run_step", ()] == 2
    assert values["postlude_run_last_step", ()] == 9
    assert values["postlude_eval_pass_4", ()] == 0.25  # until the next evaluation
    assert values["postlude_run_seconds_total", (("part", "train"),)] == 3.0
    assert values["postlude_time_train", ()] == 1.0
    assert values["postlude_run_tokens_total", ()] == 150
    assert values["postlude_run_step_seconds_sum", ()] == 3.0
    assert str(values["postlude_loss", ()]) == "nan"
    assert ("title", 'sft "tiny"') in next(labels for name, labels in values if name == "postlude_run_info")
    with pytest.raises(OSError, match="refused"):
        scrape(url)


def test_a_run_on_another_address_is_open_to_any_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = ObserveSettings(metrics_port=0, metrics_host="0.0.0.0")
    with closing(RunMonitor(tmp_path, settings, RunProgress())):
        url = address(capsys.readouterr().out).replace("0.0.0.0", "127.0.0.1")
        assert scrape(url, Host="node-7.example:9105")["postlude_run_step", ()] == 0


def test_of_two_metrics_with_one_name_the_second_is_named_and_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    directory = RunDirectory(tmp_path, loggers=())
    with closing(RunMonitor(tmp_path, ANY_PORT, RunProgress())) as monitor:
        monitor.watch(directory)
        directory.log(1, {"a/b": 1.0, "a_b": 2.0, "run/step": 3.0}, phase="sft")
        url = address(capsys.readouterr().out)
        values = [scrape(url) for _ in range(2)][-1]
    assert values["postlude_a_b", ()] == 1.0
    assert values["postlude_run_step", ()] == 0
    assert [record.getMessage() for record in caplog.records if record.name == "postlude"] == [
        f"the metrics port leaves out {name}, as another metric is {metric_name(name)} there too."
        for name in ("a_b", "run/step")
    ]


def test_a_port_in_use_is_one_sentence_before_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        words = ["grpo", "demo", "--run", str(tmp_path / "run"), "--observe.metrics_port", str(port)]
        assert main(words) == 2
        assert capsys.readouterr().err == (
            f"postlude grpo: cannot listen at 127.0.0.1, port {port}: address already in use. Give another "
            "observe.metrics_host or observe.metrics_port (0 takes a free one).\n"
        )
        assert not (tmp_path / "run").exists()
        with pytest.raises(OSError, match="address already in use"):  # taken since the preflight
            RunMonitor(tmp_path, ObserveSettings(metrics_port=port), RunProgress())


def test_scrapers_that_read_nothing_delay_no_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = RunDirectory(tmp_path, loggers=())
    with closing(RunMonitor(tmp_path, ANY_PORT, RunProgress())) as monitor:
        monitor.watch(directory)
        url = address(capsys.readouterr().out)
        port = int(url.rpartition(":")[2].partition("/")[0])
        clients = [socket.create_connection(("127.0.0.1", port)) for _ in range(20)]
        for number, client in enumerate(clients):
            client.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n" + b"\r\n" * (number % 2))
        began = time.monotonic()
        for step in range(1, 101):
            directory.log(step, {f"reward/part_{index}": float(step) for index in range(100)}, phase="grpo")
        assert scrape(url)["postlude_reward_part_7", ()] == 100
        assert time.monotonic() - began < 30
        closing_began = time.monotonic()
    assert time.monotonic() - closing_began < 30
    for client in clients:
        client.close()
    assert len(read_metrics(tmp_path)) == 100


def _open_on_every_rank(group: Any, run: str, port: int) -> str:
    try:
        with closing(RunMonitor(Path(run), ObserveSettings(metrics_port=port), RunProgress())):
            dist.barrier()
        return ""
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def test_rank_0_alone_listens_and_all_ranks_know_if_it_cannot(ranks: Ranks, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        errors = ranks(2, _open_on_every_rank, str(tmp_path), port)
        assert all("already in use" in error for error in errors), errors
    assert ranks(2, _open_on_every_rank, str(tmp_path), port) == ["", ""]
