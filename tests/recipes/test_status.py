"""`postlude status` and `watch`: the state of a run, from its directory alone."""

from __future__ import annotations

import json
import logging
import os
import signal
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from postlude.cli import main
from postlude.commands import watch
from postlude.recipes.config.settings import ObserveSettings
from postlude.recipes.report.status import MISSED, RunStatus, read_status, status_lines
from postlude.recipes.run.directory import RunDirectory, open_run
from postlude.recipes.run.files import AppendedLines, JSONLinesFile, read_metrics
from postlude.recipes.run.monitor import RunMonitor
from postlude.recipes.run.outcome import RunOutcome, write_outcome
from postlude.recipes.run.progress import CHECKPOINT, START, STEP, RunProgress, WarningCount
from postlude.recipes.run.schedule import StepTimer
from postlude.recipes.run.status import WRITTEN, StatusFile, clear_status, status_path
from tests.conftest import SERVER, Ranks

CONFIG = {"model": "tiny-dense"}
HOUR = 3600.0


def begin(run: Path, steps: int = 3) -> RunProgress:
    """Makes a run directory with `steps` logged steps of 9. Returns where the run is."""
    with open_run(run, CONFIG, loggers=()) as directory:
        directory.record_start(command="postlude sft --run it")
        for step in range(1, steps + 1):
            directory.log(step, {"loss": 1 / step, "tokens_per_second": 100.0}, phase="sft")
    progress = RunProgress(phase="sft")
    progress.start("sft tiny-dense", 0, 9)
    progress.step = steps
    return progress


def status_file(run: Path, progress: RunProgress, **ranks: int) -> StatusFile:
    return StatusFile(run, progress, WarningCount(), **ranks)


def changed(run: Path, rank: int = 0, **values: Any) -> None:
    """Changes entries of a rank's file."""
    path = status_path(run, rank)
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def text(status: RunStatus) -> str:
    return "\n".join(f"{label}: {text}" for label, text in status_lines(status))


def test_the_time_is_that_of_the_step_and_not_of_its_part() -> None:
    run = RunStatus("it", "running", "", phase="grpo", activity_seconds=60.0)
    in_part = replace(run, activity=STEP, place="rollout")
    assert "step: 0 · grpo, rollout, 1:00 into this step" in text(in_part)
    assert "step: 0 · grpo, 1:00 into this step" in text(replace(in_part, place=STEP))
    assert "step: 0 · grpo, 1:00 into this start" in text(replace(run, activity=START, place=START))


def test_a_running_run_says_where_it_is(tmp_path: Path) -> None:
    progress = begin(tmp_path)
    timer = StepTimer(progress)
    with progress.during(STEP):
        with timer("rollout"):
            with closing(status_file(tmp_path, progress)) as file:
                status = read_status(tmp_path)
            assert file.path == status_path(tmp_path, 0)
            assert json.loads(file.path.read_text()).keys() == WRITTEN
        file = status_file(tmp_path, progress)
        after = read_status(tmp_path)
        file.close()
    assert (status.state, status.step, status.total, status.phase, status.place) == ("running", 3, 9, "sft", "rollout")
    assert status.well
    assert after.place == "after rollout"
    assert status.metrics == {"loss": 1 / 3, "tokens_per_second": 100.0}
    assert status.remaining_seconds is not None
    assert "3 of 9 · sft, rollout, " in text(status)
    assert "1 on " in text(status)
    assert "0 in rollout" in text(status)
    assert "0 after rollout" in text(after)
    read = json.loads(status.as_json())
    assert (read["state"], read["ranks"][0]["pid"], read["metrics"]["loss"]) == ("running", os.getpid(), 1 / 3)


def test_an_ended_run_says_how(tmp_path: Path) -> None:
    for number, (outcome, error) in enumerate({"finished": "", "interrupted": "SIGINT", "failed": "no space"}.items()):
        run = tmp_path / str(number)
        progress = begin(run)
        with closing(status_file(run, progress)):
            progress.end(outcome, error)
        later = time.time() + HOUR
        status = read_status(run, later)
        assert (status.state, status.explanation, status.step) == (outcome, error, 3)
        assert status.well == (outcome != "failed")
        assert status.elapsed_seconds < HOUR
        assert ("resume: postlude sft --run it" in text(status)) == (outcome != "finished")


def test_an_error_is_what_ended_the_run(tmp_path: Path) -> None:
    progress = begin(tmp_path)
    with pytest.raises(OSError, match="No space"), closing(status_file(tmp_path, progress)), progress.until_end():
        raise OSError(28, "No space left on device")
    status = read_status(tmp_path)
    assert status.state == "failed"
    assert "No space left on device" in status.explanation


def _write_and_wait(run: str, event: Any) -> None:
    status_file(Path(run), RunProgress(total=9))
    event.set()
    signal.pause()


def test_a_killed_run_is_named_at_once(tmp_path: Path) -> None:
    begin(tmp_path)
    event = SERVER.Event()
    process = SERVER.Process(target=_write_and_wait, args=(str(tmp_path), event))
    process.start()
    assert event.wait(HOUR)
    assert read_status(tmp_path).state == "running"
    assert process.pid is not None
    os.kill(process.pid, signal.SIGSTOP)
    stopped = read_status(tmp_path, time.time() + HOUR)
    assert stopped.state == "unresponsive"
    assert f"process {process.pid}" in stopped.explanation
    assert "it is stopped, or cannot write" in stopped.explanation
    process.kill()
    process.join()
    status = read_status(tmp_path)
    assert status.state == "killed"
    assert "it was killed, or its disk was full" in status.explanation
    assert f"process {process.pid}" in status.explanation
    assert not status.well
    assert main(["status", str(tmp_path)]) == 1
    assert main(["watch", str(tmp_path)]) == 1


def test_a_run_of_another_machine_is_lost_after_missed_heartbeats(tmp_path: Path) -> None:
    with closing(status_file(tmp_path, begin(tmp_path))):
        pass
    changed(tmp_path, machine="another", host="node-7", ended=False)
    heartbeat = json.loads(status_path(tmp_path, 0).read_text())["heartbeat"]
    assert read_status(tmp_path, heartbeat + 5 * (MISSED - 1)).state == "running"
    status = read_status(tmp_path, heartbeat + 5 * MISSED + 1)
    assert status.state == "unresponsive"
    assert "on node-7 is not of this machine, and it wrote its last heartbeat 31 s ago" in status.explanation


def test_a_rank_that_is_lost_is_named(tmp_path: Path) -> None:
    progress = begin(tmp_path)
    files = [status_file(tmp_path, progress, rank=rank, ranks=4) for rank in range(3)]
    status = read_status(tmp_path)
    assert (status.state, [rank.place for rank in status.ranks]) == (
        "running",
        [*["start"] * 3, "an unknown place"],
    )
    assert "0-2 in start; 3 in an unknown place" in text(status)
    changed(tmp_path, 2, pid=2**30, host="node-2")
    lost = read_status(tmp_path)
    assert lost.state == "unresponsive"
    assert lost.explanation.startswith(f"rank 2 (node-2, process {2**30}) has given no sign of life for ")
    assert "2 lost" in text(lost)
    for file in files:
        file.close()
    clear_status(tmp_path)
    assert read_status(tmp_path).state == "unknown"


def test_a_step_that_takes_far_longer_than_all_before_has_stalled(tmp_path: Path) -> None:
    progress = begin(tmp_path)
    with progress.during(STEP):
        pass
    with progress.during(STEP), closing(status_file(tmp_path, progress)):
        progress.enter("train")
        now = time.time()
    changed(tmp_path, ended=False, part="train", in_part=True, longest={"step": 30.0}, activity="step", heartbeat=now)
    values = {"heartbeat": now + 301.0, "activity_began": now}
    changed(tmp_path, **values)
    status = read_status(tmp_path, now + 301.0)
    assert status.state == "stalled"
    assert status.explanation == ("this step has taken 5:01, and none before took more than 30 s. Rank 0 is in train.")
    assert not status.well
    assert read_status(tmp_path, now + 299.0).state == "running"
    changed(tmp_path, activity=CHECKPOINT)  # the first one may take as long as it does
    assert read_status(tmp_path, now + 301.0).state == "running"


def test_warnings_are_counted_and_the_last_one_shown(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    progress, log = begin(tmp_path), logging.getLogger("postlude")
    before = list(log.filters)
    with closing(RunMonitor(tmp_path, ObserveSettings(), progress)) as monitor:
        monitor.watch(RunDirectory(tmp_path, loggers=()))
        log.info("nothing")
        log.warning("server %s is slow", "http://a?token=abcdefgh")
        log.error("it is gone")
    log.warning("after the end")
    assert log.filters == before
    assert [record.getMessage() for record in caplog.records][-2:] == ["it is gone", "after the end"]
    status = read_status(tmp_path)
    assert (status.warnings, status.last_warning) == (2, "it is gone")
    assert "2, the last " in text(status)
    assert "ago: it is gone" in text(status)


def test_a_directory_that_cannot_be_written_is_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    progress = begin(tmp_path)
    (tmp_path / "status").write_text("in the way")
    with closing(status_file(tmp_path, progress)) as file:
        for _ in range(3):
            file.write()
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 1
    assert "status/rank-0.json cannot be written (File exists)" in messages[0]
    assert messages[0].endswith("The run continues.")
    status = read_status(tmp_path)
    assert (status.state, status.step) == ("unknown", 3)
    write_outcome(tmp_path, RunOutcome("failed", 3, "it failed."))
    assert (read_status(tmp_path).state, read_status(tmp_path).explanation) == ("failed", "it failed.")


def test_a_file_of_another_version_or_none_is_unknown(tmp_path: Path) -> None:
    with closing(status_file(tmp_path, begin(tmp_path))):
        pass
    for content in ("", "[]", '{"rank": 0}'):
        status_path(tmp_path, 0).write_text(content)
        assert read_status(tmp_path).state == "unknown"
    with pytest.raises(FileNotFoundError, match=r"nothing has no config.yaml, so it is not the directory of a run"):
        read_status(tmp_path / "nothing")
    assert main(["status", str(tmp_path / "nothing")]) == 2


def _run_on_every_rank(group: Any, run: str) -> None:
    progress = RunProgress(phase="sft")
    directory = open_run(run, CONFIG, loggers=())
    with closing(directory), closing(RunMonitor(Path(run), ObserveSettings(), progress)) as monitor:
        monitor.watch(directory)
        progress.start("sft", 0, 2)
        dist.barrier()
        if dist.get_rank() == 0:
            assert len(read_status(Path(run)).ranks) == 2
            assert read_status(Path(run)).state == "running"
        dist.barrier()
        progress.end("finished")


def test_every_rank_writes_its_file(ranks: Ranks, tmp_path: Path) -> None:
    for _ in range(2):  # an earlier start's are replaced
        ranks(2, _run_on_every_rank, str(tmp_path / "run"))
        assert sorted(path.name for path in (tmp_path / "run" / "status").iterdir()) == ["rank-0.json", "rank-1.json"]
        status = read_status(tmp_path / "run")
        assert (status.state, [rank.rank for rank in status.ranks]) == ("finished", [0, 1])


def test_the_last_line_is_read_from_the_end_of_the_file(tmp_path: Path) -> None:
    file = JSONLinesFile(tmp_path / "metrics.jsonl")
    assert file.read_last() == {}
    for size in (1, 100, 70_000):
        file.append([{"step": size, "loss": float("nan"), "lengths": [0.5] * size}])
        assert str(file.read_last()) == str(file.read()[-1])
    with file.path.open("ab") as torn:
        torn.write(b'{"step": 4')
    assert file.read_last()["step"] == 70_000
    file.path.write_bytes(b'{"step": 4')
    assert file.read_last() == {}


def test_appended_lines_come_once(tmp_path: Path) -> None:
    file = JSONLinesFile(tmp_path / "metrics.jsonl")
    lines = AppendedLines(file.path)
    assert lines.take() == []
    file.append([{"step": 1}, {"step": 2}])
    assert [line["step"] for line in lines.take()] == [1, 2]
    with file.path.open("ab") as torn:
        torn.write(b'{"step":')
        torn.flush()
        assert lines.take() == []
        torn.write(b" 3}\n")
    assert [line["step"] for line in lines.take()] == [3]
    file.keep(lambda line: line["step"] <= 1)  # a run that was resumed
    assert lines.take() == []
    file.append([{"step": 2}])
    assert [line["step"] for line in lines.take()] == [2]


def test_watch_shows_the_steps_of_a_run_until_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    progress = begin(tmp_path)
    file, metrics = status_file(tmp_path, progress), JSONLinesFile(tmp_path / "metrics.jsonl")

    def next_step(_: float) -> None:
        if progress.step == 8:
            progress.end("finished")
            file.close()
        progress.step += 1
        metrics.append([{"step": progress.step, "phase": "sft", "loss": 0.25}])
        file.write()

    monkeypatch.setattr(watch.time, "sleep", next_step)
    assert main(["watch", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines if line.startswith("step ")][:6] == [
        f"step {step}/9" for step in range(4, 10)
    ]
    assert "loss 0.25" in lines[0]
    assert "state      finished" in lines
    assert len(read_metrics(tmp_path)) == 9


def test_interrupting_watch_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(watch.time, "sleep", interrupt)
    with closing(status_file(tmp_path, begin(tmp_path))):
        assert main(["watch", str(tmp_path)]) == 0
        assert read_status(tmp_path).state == "running"
    assert capsys.readouterr().out.splitlines()[-1] == "The run goes on."
