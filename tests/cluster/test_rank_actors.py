"""Runs on Ray equal runs without it; lost ranks restart from the last checkpoint; user errors end the run."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from postlude.checks import USER_ERRORS
from postlude.cli import main
from postlude.cluster import driver
from postlude.cluster.rank_actors import RankLost, RankResult, failure_of
from postlude.cluster.ray_cluster import death_reason
from postlude.cluster.server_actors import RayLauncher
from postlude.recipes.run.files import read_record
from postlude.world.failure_report import RankError, RankStatus
from tests.conftest import PATIENCE
from tests.recipes.test_killed import logged_files, order_kill, output_files, place

pytestmark = pytest.mark.slow
__all__ = ["place"]  # a fixture


def run_grpo(place: Path, name: str, *words: str) -> int:
    return main(["grpo", str(place / "small.yaml"), "--run", str(place / name), *words])


@pytest.mark.thorough
def test_killed_rank_restarts_from_last_checkpoint(
    local_ray: None, place: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    assert run_grpo(place, "whole") == 0
    order_kill(place, "backward")
    assert run_grpo(place, "parts", "--ray") == 0
    assert not (place / "order").exists(), "the moment never came"
    logged = logged_files(place / "parts")
    for row in logged["metrics"]:
        assert row.pop("workers/lost", 0.0) == 0.0
    assert logged == logged_files(place / "whole"), "no step is lost or learned twice"
    assert output_files(place / "parts") == output_files(place / "whole")
    assert [start["step"] for start in read_record(place / "parts")["starts"]] == [0, 2]
    assert "rank 0 of 1 was lost: its worker process has died. All ranks start again from step-000002" in caplog.text
    logged_steps = [line.split()[1] for line in capfd.readouterr().out.splitlines() if line.startswith("step ")]
    once = [f"{step}/5" for step in range(1, 6)]
    assert logged_steps == [*once, *once[:3], *once[2:]], (
        "the driver shows every step, and those again that are done again"
    )


def test_run_that_needs_more_than_the_cluster_has_is_refused(
    local_ray: None, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_grpo(place, "run", "--ray", "--layout", "dp_shard=3", "--cluster.cpus_per_rank", "4") == 2
    sentence = "3 rank(s) of 4 CPU(s) are needed, but the cluster has room for 2: 8 CPU(s) and 0 GPU(s) on 1 node(s)."
    assert sentence in capsys.readouterr().err
    assert not (place / "run" / "metrics.jsonl").exists()


def test_servers_of_local_ray_listen_on_localhost_only(
    local_ray: None, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a cluster given by its address, servers listen on all interfaces, since nodes may join later."""
    states: list[bool] = []

    def make_launcher(logs: Path, *, single_machine: bool) -> RayLauncher:
        states.append(single_machine)
        raise ValueError("seen")

    monkeypatch.setattr(driver, "RayLauncher", make_launcher)
    for address in ("local", "auto"):
        assert run_grpo(place, "run", "--ray", address) == 2
        assert "postlude grpo: seen" in capsys.readouterr().err
    assert states == [True, False]


def test_missing_ray_package_gives_install_hint(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *arguments: None if name == "ray" else find_spec(name, *arguments)
    )
    assert main(["grpo", "--run", str(tmp_path / "run"), "--ray"]) == 2
    assert "--ray needs Ray, which is not installed. Install it: pip install 'postlude[ray]'" in capsys.readouterr().err


def failed_rank(error: BaseException, at: float = 0.0) -> RankResult:
    word = RankStatus.of(error)
    return RankResult(status=RankStatus(word.state, word.text, word.traceback, at, word.user_error), error=error)


def test_lost_ranks_are_restarted_and_user_errors_are_not() -> None:
    lost, mistake = RankLost("its node has died."), failed_rank(ValueError("no such row"), 2.0)
    stopped, own_outcome = (
        failed_rank(RankError("rank 1 of 2 does not reply any more"), 1.0),
        failed_rank(AssertionError("ours"), 3.0),
    )
    assert failure_of({0: stopped, 1: lost}, 2).can_restart
    assert str(failure_of({0: stopped, 1: lost}, 2).error) == "rank 1 of 2 was lost: its node has died."
    assert failure_of({0: stopped, 1: failed_rank(RuntimeError("NCCL timed out"), 4.0)}, 2).can_restart, "a lost peer"
    for results in ({0: stopped, 1: mistake}, {0: lost, 1: mistake}, {0: stopped, 1: own_outcome}):
        assert not failure_of(results, 2).can_restart  # type: ignore[arg-type]
    named = failure_of({0: stopped, 1: mistake}, 2).error
    assert isinstance(named, RankError)
    assert (str(named), named.user_error) == ("rank 1 of 2 failed: ValueError: no such row", True)
    assert isinstance(failure_of({0: mistake}, 1).error, USER_ERRORS), "alone, it is told as without ranks"


def test_ray_errors_are_shortened_to_the_reason() -> None:
    long = "The actor died.\n\tpid: 7\nThe actor is dead because its worker process has died. Worker exit type: SYSTEM"
    assert death_reason(RuntimeError(long)) == "its worker process has died."
    assert death_reason(RuntimeError("The actor is dead because its node has died.\nmore")) == "its node has died."
    lost = "The actor 3cac is unavailable: The actor is temporarily unavailable: RpcError: Socket closed. The task may"
    assert death_reason(RuntimeError(lost)) == "its node does not reply any more."


MISTAKEN = """
import os
from torch import distributed
from postlude.objectives import PolicyGradient

def mistaken(inputs):
    if distributed.is_initialized():  # not in the trial call before the run
        raise ValueError("this objective has no idea")
    return PolicyGradient()(inputs)

def deadly(inputs):
    if distributed.is_initialized():
        os._exit(9)
    return PolicyGradient()(inputs)
"""


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["mistaken", "deadly"])
def test_user_error_ends_run_immediately_and_lost_ranks_after_max_restarts(
    local_ray: None, place: Path, name: str, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    (place / "mistaken.py").write_text(MISTAKEN)
    words = [f"--objective.file={place}/mistaken.py:{name}", "--objective.settings={}", "--reference=false"]
    code = run_grpo(place, "parts", "--ray", "--cluster.max_restarts=1", *words)
    sentence = capsys.readouterr().err.splitlines()[-1]
    if name == "mistaken":
        assert code == 1, "there was a step before it"
        assert "after step 1 the run failed: ValueError: this objective has no idea" in sentence
        assert "start again" not in caplog.text
    else:
        assert code == 1
        assert (
            "The ranks were started again 1 times without a new checkpoint (cluster.max_restarts); go on with"
            in sentence
        )
        assert caplog.text.count("All ranks start again from the beginning (1 of 1)") == 1


def start_command(place: Path, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "postlude", "grpo", "small.yaml", "--run", "parts", "--ray", *words],
        cwd=place,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def read_until(command: subprocess.Popen[str], begins: str) -> None:
    assert command.stdout is not None
    for line in command.stdout:
        if line.startswith(begins):
            return
    raise AssertionError(f"it ended before {begins}")


@pytest.mark.thorough
def test_same_command_resumes_after_driver_is_killed(place: Path) -> None:
    pytest.importorskip("ray", reason="needs ray: pip install 'postlude[ray]'")
    steps = ("--steps=20",)
    assert run_grpo(place, "whole", *steps) == 0
    first = start_command(place, *steps)
    read_until(first, "step 6/21")
    first.kill()
    first.wait()
    second = start_command(place, *steps)  # at once: the ranks of the first may not have noticed yet
    output, _ = second.communicate(timeout=2 * PATIENCE)
    assert second.returncode == 0, output
    logged = logged_files(place / "parts")
    for row in logged["metrics"]:
        row.pop("workers/lost", None)
    assert logged == logged_files(place / "whole")
    starts = [start["step"] for start in read_record(place / "parts")["starts"]]
    assert starts[0] == 0
    assert starts[1] >= 4


@pytest.mark.thorough
@pytest.mark.parametrize(("by", "send"), [(signal.SIGINT, os.kill), (signal.SIGTERM, os.killpg)])
def test_signal_lets_two_ranks_finish_step_and_save(
    place: Path, by: signal.Signals, send: Callable[[int, int], None]
) -> None:
    """To the command alone, or to all processes of its group."""
    pytest.importorskip("ray", reason="needs ray: pip install 'postlude[ray]'")
    command = start_command(place, "--steps=60", "--layout=dp_shard=2")
    read_until(command, "step 4/61")
    send(command.pid, by)
    output, _ = command.communicate(timeout=2 * PATIENCE)
    assert command.returncode == 128 + by, output
    ending = json.loads((place / "parts" / "ending.json").read_text())
    assert ending["outcome"] == "interrupted"
    last = output.splitlines()[-1]
    assert f"{by.name} ended the run after step {ending['step']}, which is saved; resume with: postlude grpo" in last
    assert (place / "parts" / "checkpoints" / f"step-{ending['step']:06d}" / "state.json").is_file()
