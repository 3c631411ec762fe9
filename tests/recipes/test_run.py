"""Run directories: a killed and resumed run has the files of an uninterrupted one; only rank 0 writes."""

from __future__ import annotations

import io
import json
import math
import os
import re
import resource
import shutil
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rich.console import Console

from postlude.cli import main
from postlude.durable_files import write_atomic
from postlude.recipes.config import schema
from postlude.recipes.config.policy_configs import GRPOConfig
from postlude.recipes.report.formatting import format_duration, format_number
from postlude.recipes.report.live import LiveView, sparkline
from postlude.recipes.run.config_changes import AllowedChanges
from postlude.recipes.run.directory import ReadOnlyRun, RunDirectory, Sample, check_run, checkpoint_step, open_run
from postlude.recipes.run.files import read_config, read_metrics, read_record, read_samples
from postlude.recipes.run.machine_info import machine_info
from postlude.world.agreement import on_rank0
from tests.conftest import Ranks

CONFIG = {"model": "tiny-dense", "optimizer": {"lr": 1e-6, "betas": (0.9, 0.95)}, "data": Path("a/b"), "steps": 10}
FILES = ("metrics.jsonl", "layers.jsonl", "samples.jsonl", "config.yaml")


def metrics(step: int) -> dict[str, Any]:
    return {"loss": 1 / step, "rewards": [0.0, float(step)], "time": {"train": 0.5}, "odd": math.nan, "note": "ü\u2028"}


def resume(run: RunDirectory) -> Path | None:
    """Drops what was logged after the newest checkpoint, and returns that checkpoint."""
    newest = ([None, *run.checkpoints()])[-1]
    run.resume_at(-1 if newest is None else checkpoint_step(newest))
    return newest


def train(run: RunDirectory, first: int, last: int, *, save_every: int = 4) -> None:
    """Logs, writes samples and saves like a recipe."""
    for step in range(first, last + 1):
        run.log_layers(step, {"moe/layer_00/load": [0.0, float(step)]})
        run.log(step, metrics(step), phase="sft")
        run.log_samples(step, [Sample("p", f"answer {step}", 0.5, {"right": 1.0}, [1], ["a"], [-0.1])] * 2)
        if step % save_every == 0:
            save(run, step)


def save(run: RunDirectory, step: int, *, complete: bool = True) -> Path:
    path = run.checkpoint(step)
    path.mkdir(parents=True)
    if complete:
        (path / "state.json").write_text(json.dumps({"step": step}))
    return path


def kill(run: RunDirectory) -> None:
    """Ends as a killed process does: locks are released, and no file is closed or removed."""
    assert run._lock is not None
    assert run._lock._file is not None
    run._lock._file.close()


def contents(path: Path) -> dict[str, bytes]:
    return {name: (path / name).read_bytes() for name in FILES}


@pytest.mark.parametrize("killed_at", [0, 3, 4, 6, 9])
@pytest.mark.parametrize("torn", ["", '{"step": 3, "loss": 0.', '{"step": 3}', "\x00\x00"])
def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path: Path, killed_at: int, torn: str) -> None:
    with open_run(tmp_path / "whole", CONFIG) as run:
        assert resume(run) is None
        train(run, 1, 10)

    killed = open_run(tmp_path / "killed", CONFIG)
    resume(killed)
    train(killed, 1, killed_at)
    kill(killed)
    for name in FILES[:3]:
        with (tmp_path / "killed" / name).open("a") as file:
            file.write(torn)
    with open_run(tmp_path / "killed", CONFIG) as run:
        checkpoint = resume(run)
        done = killed_at // 4 * 4
        assert checkpoint == (run.checkpoint(done) if done else None)
        train(run, done + 1, 10)
    assert contents(tmp_path / "killed") == contents(tmp_path / "whole")
    assert not list((tmp_path / "killed").glob(".*"))


def test_incomplete_last_line_is_removed_without_resuming(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "phase": "sft", "loss": 2.0}\n{"step": 2, "phas')
    with RunDirectory(tmp_path) as run:
        run.log(2, {"loss": 1.0}, phase="sft")
    assert [line["loss"] for line in read_metrics(tmp_path)] == [2.0, 1.0]


def test_kill_while_dropping_lines_keeps_all_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_run(tmp_path, CONFIG) as run:
        train(run, 1, 6)
    before = contents(tmp_path)

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            resume(RunDirectory(tmp_path))
    assert contents(tmp_path) == before
    with open_run(tmp_path, CONFIG) as run:
        resume(run)
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2, 3, 4]


def test_lines_are_strict_json_and_read_back_as_they_were(tmp_path: Path) -> None:
    logged = {"a": math.inf, "b": -math.inf, "list": [1, math.nan], "t": torch.tensor(0.5), "none": None, "on": True}
    with open_run(tmp_path, CONFIG) as run:
        run.log(7, logged, phase="rollout/grpo")
        run.log_samples(7, [Sample("p", "half a pair: \ud83d", math.nan, {}, [5], ["x"], [-math.inf])])
    raw = (tmp_path / "metrics.jsonl").read_text()
    assert json.loads(raw, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))["step"] == 7
    (line,) = read_metrics(tmp_path)
    assert str(line.pop("list")) == "[1, nan]"
    assert line == {"step": 7, "phase": "rollout/grpo", "a": math.inf, "b": -math.inf, "t": 0.5, "on": True}
    (sample,) = read_samples(tmp_path)
    assert sample["logprobs"] == [-math.inf]
    assert math.isnan(sample["reward"])


@contextmanager
def limit_file_size(size: int) -> Iterator[None]:
    """Simulates a full disk: writing more than this to a file fails."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_line_that_does_not_fit_on_the_disk_is_removed(tmp_path: Path) -> None:
    with open_run(tmp_path, CONFIG) as run:
        run.log(1, {"loss": 1.0}, phase="sft")
        before = (tmp_path / "metrics.jsonl").read_bytes()
        with limit_file_size(len(before) + 10), pytest.raises(OSError, match=r"metrics.jsonl cannot be written: "):
            run.log(2, {"loss": 1.0}, phase="sft")
        assert (tmp_path / "metrics.jsonl").read_bytes() == before
        run.log(2, {"loss": 0.5}, phase="sft")
    assert [line["loss"] for line in read_metrics(tmp_path)] == [1.0, 0.5]


@pytest.mark.parametrize("name", ["metrics.jsonl", "samples.jsonl"])
@pytest.mark.parametrize("replaced", [False, True])
def test_a_deleted_file_of_a_live_run_is_an_error(tmp_path: Path, name: str, replaced: bool) -> None:
    def write(step: int) -> None:
        run.log(step, {"loss": 1.0}, phase="sft")
        run.log_samples(step, [Sample("prompt", "completion")])

    with open_run(tmp_path, CONFIG) as run:
        write(1)
        (tmp_path / name).unlink()
        if replaced:
            (tmp_path / name).write_text("")
        with pytest.raises(
            FileNotFoundError, match=rf"{name} was deleted, moved or replaced while the run was writing"
        ):
            write(2)


def test_a_live_run_without_its_directory_is_an_error(tmp_path: Path) -> None:
    with open_run(tmp_path / "run", CONFIG) as run:
        run.log(1, {"loss": 1.0}, phase="sft")
        shutil.rmtree(tmp_path / "run")
        with pytest.raises(FileNotFoundError, match="was deleted, moved or replaced"):
            run.sync()  # before a checkpoint makes the directory again
        with pytest.raises(FileNotFoundError, match="was deleted, moved or replaced"):
            run.log(2, {"loss": 1.0}, phase="sft")
    assert not (tmp_path / "run").exists()


def test_each_line_is_flushed_immediately(tmp_path: Path) -> None:
    run = open_run(tmp_path, CONFIG)
    for step in (1, 2, 3):
        run.log(step, {"loss": 0.0}, phase="sft")
        assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == step


def test_step_that_decreases_is_refused(tmp_path: Path) -> None:
    with open_run(tmp_path, CONFIG) as run:
        run.log(5, {"loss": 1.0}, phase="sft")
        run.log(5, {"eval": {"accuracy": 0.5}}, phase="sft")
        with pytest.raises(ValueError, match=r"step 4 come after those of step 5 .* call resume_at\(3\)"):
            run.log(4, {"loss": 1.0}, phase="sft")
        run.resume_at(3)
        run.log(4, {"loss": 1.0}, phase="sft")


def test_error_names_a_broken_line(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\nnonsense\n{"step": 3}\n')
    with pytest.raises(ValueError, match=r"metrics.jsonl line 2 is not an object with a step"):
        RunDirectory(tmp_path).resume_at(1)


def test_failed_write_names_the_file_and_keeps_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    write_atomic(path, b"old")
    with limit_file_size(1000), pytest.raises(OSError, match=r"File too large: '.*/config\.yaml'"):
        write_atomic(path, b"new" * 1000)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == {"config.yaml": b"old"}


@pytest.mark.parametrize("text", ["[]", '{"starts": 3}', '{"starts": [3]}'])
def test_invalid_run_record_gives_clear_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(ValueError, match=r"run\.json does not hold the starts of a run; delete it"):
        read_record(tmp_path)


def test_only_complete_checkpoints_count(tmp_path: Path) -> None:
    run = open_run(tmp_path, CONFIG)
    assert resume(run) is None
    newest = [save(run, step) for step in (90, 100, 1_000_000)][-1]
    save(run, 2_000_000, complete=False)
    (tmp_path / "checkpoints" / ".step-3000000.partial").mkdir()
    (tmp_path / "checkpoints" / "best").mkdir()
    assert run.checkpoints()[-1] == newest
    assert run.checkpoints(incomplete=True)[-1] == run.checkpoint(2_000_000)
    with pytest.raises(ValueError, match="step-1000000 is later than step 100"):
        run.resume_at(100)


def test_pruning_keeps_the_newest_checkpoints_and_unknown_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = open_run(tmp_path, CONFIG)
    paths = [save(run, step) for step in (1, 2, 3, 4)]
    unknown = [save(run, 5, complete=False), tmp_path / "checkpoints" / ".step-000006.partial"]
    unknown[1].mkdir()
    with pytest.raises(ValueError, match="keep at least 1"):
        run.prune(0)

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:  # after the rename nothing half-deleted counts
        patch.setattr("shutil.rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            run.prune(3)
    assert run.checkpoints() == paths[1:]
    assert run.prune(2) == [paths[1]]
    assert sorted((tmp_path / "checkpoints").iterdir()) == sorted([*paths[2:], *unknown])
    assert run.prune(2) == []


def test_a_run_of_another_config_is_refused(tmp_path: Path) -> None:
    with open_run(tmp_path / "run", CONFIG) as run:
        train(run, 1, 4)
    before = contents(tmp_path / "run")
    other_config = CONFIG | {"optimizer": {"lr": 2e-6, "betas": (0.9, 0.95)}, "steps": 20}
    for config, sentence in (
        (
            other_config,
            r"another run: optimizer\.lr is 1e-06 there and 2e-06 here; steps is 10 there and 20 here\. Give the ",
        ),
        (other_config, r"another directory \(--run\), or .* --run OTHER --from .*/run/step-000004\.$"),
        (CONFIG | {"extra": 1}, r"extra is nothing there and 1 here"),
        ({key: CONFIG[key] for key in CONFIG if key != "steps"}, r"steps is 10 there and nothing here"),
        (dict.fromkeys("abcdefgh", 1), r"a is nothing there and 1 here; .*; and 9 more"),
    ):
        with pytest.raises(ValueError, match=sentence):
            open_run(tmp_path / "run", config)
        with pytest.raises(ValueError, match=sentence):
            check_run(tmp_path / "run", config)
    assert contents(tmp_path / "run") == before
    assert not (tmp_path / "run" / "run.lock").exists()


def test_a_changed_config_is_written_and_the_old_one_is_kept(tmp_path: Path) -> None:
    with open_run(tmp_path / "run", CONFIG) as run:
        train(run, 1, 4)
        assert run.changed == {}
    first = contents_of_config(tmp_path / "run")
    for number, changes in enumerate(({"steps": 20}, {"steps": 30, "optimizer": {"lr": 1.0, "betas": [0.9, 0.95]}})):
        with open_run(tmp_path / "run", CONFIG | changes, changes=AllowedChanges(["steps", "optimizer.lr"])) as run:
            run.record_start(step=4)
            assert run.changed == {"steps": [10 + 10 * number, 20 + 10 * number]} | (
                {"optimizer.lr": [1e-6, 1.0]} if number else {}
            )
    assert (tmp_path / "run" / "configs" / "001.yaml").read_text() == first
    assert "steps: 20" in (tmp_path / "run" / "configs" / "002.yaml").read_text()
    assert "steps: 30" in contents_of_config(tmp_path / "run")
    starts = read_record(tmp_path / "run")["starts"]
    assert starts[1] == {"step": 4, "changed": {"steps": [20, 30], "optimizer.lr": [1e-6, 1.0]}}
    open_run(tmp_path / "run", read_config(tmp_path / "run")).close()


@pytest.mark.parametrize("leftover", ["config", "start", "samples", "partial checkpoint", "broken config"])
def test_config_may_change_before_the_first_step(tmp_path: Path, leftover: str) -> None:
    run = open_run(tmp_path / "run", CONFIG)
    if leftover == "start":
        run.log(0, {"eval/loss": 1.0}, phase="start")
    elif leftover == "samples":
        run.log_samples(1, [Sample("p", "c")])
    elif leftover == "partial checkpoint":
        save(run, 1, complete=False)
    elif leftover == "broken config":
        (tmp_path / "run" / "config.yaml").write_text("a: [")
    kill(run)
    other_config = CONFIG | {"model": "tiny-moe"}
    with open_run(tmp_path / "run", other_config) as run:
        assert resume(run) is None
        train(run, 1, 2)
    with open_run(tmp_path / "whole", other_config) as run:
        resume(run)
        train(run, 1, 2)
    assert contents(tmp_path / "run") == contents(tmp_path / "whole")


def test_run_of_an_older_version_resumes_with_the_default_of_a_new_key(tmp_path: Path) -> None:
    defaults = schema.default_values(GRPOConfig)
    assert {"mtp.processor", "dynamic_sampling", "sampling.top_p"} <= defaults.keys()
    old = schema.plain(GRPOConfig(model="tiny-dense", run=tmp_path))
    del old["dynamic_sampling"], old["sampling"]["top_p"], old["mtp"]
    with open_run(tmp_path, old) as run:
        train(run, 1, 2)
    new = schema.plain(GRPOConfig(model="tiny-dense", run=tmp_path))
    with pytest.raises(ValueError, match="dynamic_sampling is nothing there and 3 here"):
        open_run(tmp_path, new | {"dynamic_sampling": 3}, changes=AllowedChanges(defaults=defaults))
    with open_run(tmp_path, new, changes=AllowedChanges(defaults=defaults)) as run:
        assert not run.changed


@pytest.mark.parametrize("text", [b"a: [", b"\0" * 9, b"\xff\xfe", b"5", b"[a]"])
def test_broken_config_of_a_run_gives_clear_error(
    text: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with open_run(tmp_path, CONFIG) as run:
        train(run, 1, 1)
    (tmp_path / "config.yaml").write_bytes(text)
    sentence = r"config.yaml cannot be read \(.*\), so it is unclear which run it is"
    with pytest.raises(ValueError, match=sentence):
        open_run(tmp_path, CONFIG)
    assert main(["report", str(tmp_path)]) == 2
    assert re.search(sentence, capsys.readouterr().err)


def test_second_process_on_a_run_is_refused(tmp_path: Path) -> None:
    with open_run(tmp_path, CONFIG) as run:
        words = rf"{tmp_path} is in use by process {os.getpid()} on .*, since .*\. Wait for it, end it, or give another"
        with pytest.raises(OSError, match=words):
            open_run(tmp_path, CONFIG)
        train(run, 1, 2)
    holder = "import sys, time; from pathlib import Path; from postlude.recipes.run.lock import RunLock; "
    holder += "lock = RunLock(Path(sys.argv[1])); print(flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", holder, str(tmp_path)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        with pytest.raises(OSError, match=f"in use by process {process.pid} on "):
            open_run(tmp_path, CONFIG)
        process.kill()
    assert (tmp_path / "run.lock").exists(), "a kill leaves the file"
    with open_run(tmp_path, CONFIG) as run:
        assert resume(run) is None
    assert not (tmp_path / "run.lock").exists()


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not there")
def test_machine_info_has_commit_host_and_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*words: str) -> str:
        author = ("-c", "user.name=a", "-c", "user.email=a@b")
        return subprocess.run(["git", *author, *words], check=True, capture_output=True, text=True).stdout.strip()

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    info = machine_info(torch.device("cpu"))
    assert info["commit"] is None
    assert info["versions"]["torch"] == torch.__version__
    assert {"python", "postlude"} <= info["versions"].keys()
    assert info["pid"] == os.getpid()
    git("init", "-q")
    (tmp_path / "file").write_text("1")
    git("add", "file")
    git("commit", "-qm", "first")
    assert machine_info(torch.device("cpu"))["commit"] == git("rev-parse", "HEAD")
    (tmp_path / "file").write_text("2")
    assert machine_info(torch.device("cpu"))["commit"] == git("rev-parse", "HEAD") + "+"


def test_checkpoints_set_aside_are_ignored_and_kept(tmp_path: Path) -> None:
    with open_run(tmp_path, CONFIG) as run:
        for _ in range(2):
            train(run, 1, 8)
            run.rename_checkpoints(run.checkpoints()[1:], "later")
            run.rename_checkpoints(run.checkpoints()[:1], "damaged")
            run.resume_at(0)
        assert run.checkpoints() == []
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == [f"step-00000{step}" for step in ("4.damaged", "4.damaged-2", "8.later", "8.later-2")]


def contents_of_config(path: Path) -> str:
    return (path / "config.yaml").read_text()


def test_new_empty_and_unrelated_directories_are_accepted(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "slurm.out").touch()
    for name in ("empty", "logs", "new/below"):
        open_run(tmp_path / name, CONFIG).close()
    (tmp_path / "strange").mkdir()
    (tmp_path / "strange" / "metrics.jsonl").write_text('{"step": 1, "phase": "sft"}\n')
    with pytest.raises(ValueError, match=r"metrics.jsonl but no config.yaml"):
        open_run(tmp_path / "strange", CONFIG)
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError, match="is a file"):
        open_run(tmp_path / "file", CONFIG)
    with pytest.raises(TypeError, match=r"config.yaml cannot hold"):
        open_run(tmp_path / "x", {"bad": object()})


def log_on_rank(_: dist.ProcessGroup, path: str) -> tuple[str, str | None, list[str]]:
    """Logs like a recipe on any rank, then raises a user error."""
    out = io.StringIO()
    errors = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with open_run(path, CONFIG) as run, LiveView(3, console=Console(file=out)) as view:
            resume(run)
            for step in (1, 2, 3):
                run.log(step, metrics(step), phase="sft")
                run.log_samples(step, [Sample("p", "c")])
                view.update(step, metrics(step))
            if dist.get_rank() == 0:
                for step in (2, 3):
                    save(run, step)
            run.prune(1)
            checkpoint = on_rank0(lambda: run.checkpoints()[-1])
            for wrong in ({**CONFIG, "steps": 11}, {**CONFIG, "bad": object()}):
                try:
                    open_run(path, wrong)
                except (ValueError, TypeError) as error:
                    errors.append(str(error))
            kind = type(run).__name__
    return f"{kind} printed {len(out.getvalue().splitlines())}", checkpoint and checkpoint.name, errors


def test_only_rank_0_writes_and_prints(ranks: Ranks, tmp_path: Path) -> None:
    first, second = ranks(2, log_on_rank, str(tmp_path / "run"))
    assert first[0] == "RunDirectory printed 3"
    assert second[0] == "ReadOnlyRun printed 0"
    assert first[1] == second[1] == "step-000003"
    assert first[2] == second[2]
    assert len(first[2]) == 2
    assert "steps is 10 there and 11 here" in first[2][0]
    assert [line["step"] for line in read_metrics(tmp_path / "run")] == [1, 2, 3]


def test_read_only_run_writes_nothing(tmp_path: Path) -> None:
    with open_run(tmp_path, CONFIG) as run:
        train(run, 1, 8)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    with ReadOnlyRun(tmp_path) as reader:
        assert resume(reader) == run.checkpoint(8)
        train(reader, 9, 11)
        assert reader.prune(1) == []
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


@pytest.mark.parametrize(
    ("start", "expected"),
    [(0, ""), (2, "resuming after step 2/3\n"), (3, "step 3/3 is done, and nothing is left to do: ")],
)
def test_a_resumed_run_prints_its_step(start: int, expected: str) -> None:
    out = io.StringIO()
    with LiveView(3, console=Console(file=out), start=start):
        pass
    assert out.getvalue().startswith(expected)
    assert bool(out.getvalue()) == bool(expected)


def test_live_view_without_a_terminal_prints_one_line_per_step() -> None:
    out = io.StringIO()
    with LiveView(500, console=Console(file=out, width=40)) as view:
        for step in (1, 2):
            view.set_phase("rollout")
            view.update(step, {"reward_mean": 0.5, "loss": math.nan, "lr": 1e-6, "tokens_per_second": 51234.5})
    first, second = out.getvalue().splitlines()
    assert first.startswith("step 1/500  reward 0.5  loss nan  lr 1.0e-06  tokens/s 51,234  eta ")
    assert second.startswith("step 2/500")


def test_live_view_labels_kl_by_its_reference() -> None:
    out = io.StringIO()
    with LiveView(3, console=Console(file=out, width=200)) as view:
        view.update(1, {"kl_old": 0.25})
        view.update(2, {"kl_old": 0.25, "kl": 0.5})
        view.update(3, {"kl_forward": 0.75})
    first, second, third = out.getvalue().splitlines()
    assert "kl to old 0.25" in first
    assert " kl 0.25" not in first
    assert "kl 0.5  kl to old 0.25" in second
    assert "kl to teacher 0.75" in third


def test_live_view_on_a_terminal_limits_redraws_and_shows_every_metric(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TERM", raising=False)
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=100, height=30, color_system=None, legacy_windows=False)
    monkeypatch.setattr(type(console), "is_dumb_terminal", property(lambda self: False))
    began = time.perf_counter()
    with LiveView(2000, title="[grpo]", console=console, start=0) as view:
        for step in range(1, 2001):
            view.update(step, {"reward_mean": step / 2000, "kl_old": 0.1, "time": {"rollout": 3.0, "train": 1.0}})
    spent = time.perf_counter() - began
    assert out.getvalue().count("step ") <= 3 + 8 * spent
    last = out.getvalue()[-2500:]
    for words in ("[grpo]", "step 2,000/2,000", "reward", "▁", "█", "kl", "rollout 3 s", "train 1 s", "━━━", "eta"):
        assert words in last, words


@pytest.mark.parametrize("width", [20, 60, 200])
def test_live_view_fits_any_terminal_width(width: int) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=width, color_system=None)
    view = LiveView(10, console=console, silent=False)
    for step in (0, 1):
        if step:
            view._live = None
            view.update(1, {"reward_mean": math.nan, "loss": 1e9, "time": {"a": 0.0, "b": math.inf}})
        with console.capture() as capture:
            console.print(view._render())
        assert all(len(line) <= width for line in capture.get().splitlines())


def test_sparklines_span_their_range() -> None:
    assert sparkline([], 8) == ""
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline(list(range(800)), 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([1.0, math.nan, 1.0], 8) == "▁ ▁"


def test_numbers_and_durations_are_formatted_briefly() -> None:
    assert [format_number(value) for value in (0, 0.5, 1e-6, 51234.5, 1e12, math.inf)] == [
        "0",
        "0.5",
        "1.0e-06",
        "51,234",
        "1.00e+12",
        "inf",
    ]
    assert [format_duration(value) for value in (0.123, 12, 185, 7800, math.nan)] == [
        "0.12 s",
        "12 s",
        "3:05",
        "2:10:00",
        "–",
    ]
