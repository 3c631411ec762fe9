"""A job of `postlude launch slurm` on a real Slurm with two nodes saves, is requeued and continues."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.commands import run_command
from tests.slurm_cluster import SlurmCluster, why_no_slurm

pytestmark = pytest.mark.thorough  # a minute: a cluster, three starts of two ranks

CONFIG = """
model: tiny-dense
budget: 128
layout: dp_shard=2
batch_size: 4
steps: 120
data: {{path: {place}/rows.jsonl}}
optimizer: {{lr: 1e-3}}
run: {place}/runs/{{name}}
loggers: []
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    if reason := why_no_slurm():
        pytest.skip(reason)
    with SlurmCluster(tmp_path_factory.mktemp("slurm")) as started:
        yield started


def steps_of(run: Path) -> list[int]:
    """Returns the steps that a run has logged, in their order."""
    path = run / "metrics.jsonl"
    return [json.loads(line)["step"] for line in path.read_text().splitlines()] if path.is_file() else []


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A directory with a config and its data."""
    rows = [{"prompt": f"{a} + {b} = ", "completion": str(a + b)} for a in range(6) for b in range(6)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "small.yaml").write_text(CONFIG.format(place=tmp_path))
    return tmp_path


def launch(cluster: SlurmCluster, place: Path, *more: str) -> str:
    """Runs `postlude launch` on the login node, and returns what it prints."""
    words = [sys.executable, "-m", "postlude", "launch", "slurm", "sft", str(place / "small.yaml"), "--nodes", "2"]
    words += ["--device", "cpu", "--grace", "60", "--time", "00:30:00", "--partition", "low", "--workdir", str(place)]
    return cluster.run(*words, "--setup", "export OMP_NUM_THREADS=1", *more)


def wait_for_steps(cluster: SlurmCluster, place: Path, count: int) -> None:
    cluster.wait(lambda: len(steps_of(place / "runs" / "small")) >= count, "the run does not train", 180)


def assert_completed(cluster: SlurmCluster, place: Path, number: str) -> str:
    """Checks that the job has finished and logged each step once. Returns its output."""
    job = cluster.wait_for_state(number, "COMPLETED", "FAILED", seconds=180)
    output = "".join(path.read_text() for path in place.glob("sft-small-*.out"))
    assert (job["JobState"], job["ExitCode"]) == ("COMPLETED", "0:0"), output
    assert steps_of(place / "runs" / "small") == list(range(1, 121)), output
    return output


def test_a_job_that_is_preempted_and_warned_equals_an_uninterrupted_run(cluster: SlurmCluster, place: Path) -> None:
    (place / "job.sh").write_text(launch(cluster, place))
    cluster.run("sbatch", "--test-only", str(place / "job.sh"))
    number = launch(cluster, place, "--submit").split()[-1]
    wait_for_steps(cluster, place, 5)
    other = ["sbatch", "--parsable", "--output=/dev/null", "-p", "high", "-N2", "--exclusive", "--wrap", "true"]
    cluster.wait_for_state(cluster.run(*other).strip(), "COMPLETED", seconds=120)
    done = len(steps_of(place / "runs" / "small"))
    assert done < 110
    wait_for_steps(cluster, place, done + 5)  # it was requeued
    cluster.run("scancel", "--batch", "--signal=USR1", number)  # what Slurm sends before the time limit (--signal)
    cluster.wait(lambda: cluster.job(number).get("Restarts") == "2", "the job was not requeued", 120)
    output = assert_completed(cluster, place, number)
    assert "SIGTERM ended the run" in output
    assert "SIGUSR1 ended the run" in output

    alone = run_command(["sft", "small.yaml", "--run", "alone", "--device", "cpu"], place)
    assert alone.returncode == 0, alone.stderr
    models = [load_file(place / run / "model" / "model.safetensors") for run in ("runs/small", "alone")]
    assert models[0].keys() == models[1].keys()
    assert all(torch.equal(models[0][name], models[1][name]) for name in models[0])


def test_a_job_continues_when_a_lost_node_is_back(cluster: SlurmCluster, place: Path) -> None:
    number = launch(cluster, place, "--save_every", "5", "--submit").split()[-1]
    wait_for_steps(cluster, place, 7)
    cluster.network.nodes["n2"].kill()
    cluster.wait(lambda: cluster.job(number).get("Restarts") == "1", "the job was not requeued", 120)
    cluster.start_node("n2")
    assert_completed(cluster, place, number)
