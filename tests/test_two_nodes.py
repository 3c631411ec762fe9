"""Two machines, in network namespaces: the commands of the documentation run, and a node that is lost can come back."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from postlude.cli import main
from postlude.jobs.kubernetes import CONFIG_DIRECTORY
from tests.commands import run_command
from tests.conftest import PATIENCE
from tests.network_nodes import NodeNetwork, why_no_namespaces

pytestmark = pytest.mark.thorough  # a minute each: two starts of two ranks

ROOT = Path(__file__).parents[1]
SFT = """
model: tiny-dense
budget: 128
layout: dp_shard=2
batch_size: 4
steps: 50
save_every: 10
data: {path: rows.jsonl}
optimizer: {lr: 1e-3}
loggers: []
"""
GRPO = """
model: tiny-dense
budget: 256
layout: dp_shard=2
environment: {kind: dataset, path: tasks.jsonl, reward: "reward.py:score", workers: 1}
rollout: {kind: generators, count: 1}
steps: 16
old_logprobs: recompute # those of the servers depend in the last bits on what is in their batch
prompts_per_step: 4
samples_per_prompt: 2
sampling: {max_new_tokens: 4}
optimizer: {lr: 1e-3}
evaluation: {every: 0}
save_every: 4
loggers: []
"""
REWARD = "def score(completion):\n    return sum(map(ord, completion)) % 7 / 7\n"


@pytest.fixture
def network(tmp_path: Path) -> Iterator[NodeNetwork]:
    if reason := why_no_namespaces():
        pytest.skip(reason)
    with NodeNetwork(tmp_path, ["n1", "n2"]) as nodes:
        yield nodes


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A directory with configs and their data."""
    rows = [{"prompt": f"{a} + {b} = ", "completion": str(a + b)} for a in range(6) for b in range(6)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps({"prompt": row["prompt"]}) + "\n" for row in rows))
    (tmp_path / "reward.py").write_text(REWARD)
    (tmp_path / "sft.yaml").write_text(SFT)
    (tmp_path / "grpo.yaml").write_text(GRPO)
    return tmp_path


def documented_command() -> list[str]:
    """Returns the command for two nodes, up to the recipe's name."""
    (line,) = re.findall(r"^(torchrun --nnodes 2 .*) sft ", (ROOT / "docs" / "recipes.md").read_text(), re.MULTILINE)
    words = shlex.split(line.replace("HOST", "n1").replace("--nproc-per-node 8", "--nproc-per-node 1"))
    return [str(Path(sys.executable).with_name("torchrun")), *words[1:]]


class Starter:
    """Starts a command on each of the nodes, with the output of each in a file."""

    def __init__(self, network: NodeNetwork, place: Path, command: list[str]) -> None:
        self.network, self.place, self.command = network, place, command
        self.processes: dict[str, subprocess.Popen[str]] = {}

    def start(self, *names: str) -> None:
        for name in names:
            with (self.place / f"{name}.out").open("a") as output:
                environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
                self.processes[name] = self.network.nodes[name].start(
                    *self.command, cwd=self.place, env=environment, stdout=output, stderr=output
                )

    def code(self, name: str, seconds: float = PATIENCE) -> int:
        return self.processes[name].wait(seconds)

    def output(self) -> str:
        return "".join(path.read_text() for path in sorted(self.place.glob("n?.out")))

    def wait_for_step(self, run: str, step: int) -> None:
        end = time.monotonic() + PATIENCE
        while len(logged_steps(self.place / run)) < step:
            ended = [name for name, process in self.processes.items() if process.poll() is not None]
            assert not ended, self.output()
            assert time.monotonic() < end, self.output()
            time.sleep(0.05)


def logged_steps(run: Path) -> list[int]:
    path = run / "metrics.jsonl"
    return [json.loads(line)["step"] for line in path.read_text().splitlines()] if path.is_file() else []


def assert_equal_models(*runs: Path) -> None:
    first, second = (load_file(run / "model" / "model.safetensors") for run in runs)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_the_documented_command_trains_and_continues_after_a_node_was_lost(network: NodeNetwork, place: Path) -> None:
    """The node loses its power: nothing closes its connections."""
    recipe = ["sft", "sft.yaml", "--run", "pair", "--device", "cpu", "--timeout", "20"]
    starter = Starter(network, place, [*documented_command(), *recipe])
    starter.start("n1", "n2")
    starter.wait_for_step("pair", 12)
    network.nodes["n2"].run("ip", "link", "set", "eth0", "down")
    network.nodes["n2"].kill()
    assert starter.code("n1") == 1, starter.output()
    assert "rank 1 of 2" in starter.output()
    assert len(logged_steps(place / "pair")) < 50
    network.nodes["n2"].run("ip", "link", "set", "eth0", "up")
    starter.start("n1", "n2")
    assert [starter.code("n1"), starter.code("n2")] == [0, 0], starter.output()
    assert logged_steps(place / "pair") == list(range(1, 51))
    alone = run_command(["sft", "sft.yaml", "--run", "alone", "--device", "cpu"], place)
    assert alone.returncode == 0, alone.stderr
    assert_equal_models(place / "pair", place / "alone")


def test_grpo_with_servers_goes_on_when_a_lost_node_is_back(network: NodeNetwork, place: Path) -> None:
    """The other node waits for it (--max-restarts), and the last checkpoint is where both continue."""
    launcher = [sys.executable, "-m", "postlude.world.torchrun", "--max-restarts", "3", *documented_command()[1:]]
    starter = Starter(network, place, [*launcher, "grpo", "grpo.yaml", "--run", "pair", "--device", "cpu"])
    starter.start("n1", "n2")
    starter.wait_for_step("pair", 6)
    network.nodes["n2"].kill()
    assert starter.code("n2") == -signal.SIGKILL
    starter.start("n2")
    assert [starter.code("n1"), starter.code("n2")] == [0, 0], starter.output()
    assert logged_steps(place / "pair") == list(range(1, 17))
    alone = run_command(["grpo", "grpo.yaml", "--run", "alone", "--device", "cpu"], place)
    assert alone.returncode == 0, alone.stderr
    assert_equal_models(place / "pair", place / "alone")


def pod_command(job: str, place: Path) -> str:
    """Returns the shell command of a PyTorchJob's first pod, with the config where it is here."""
    config, _, manifest = yaml.safe_load_all(job)
    (place / "config.yaml").write_text(config["data"]["config.yaml"])
    (container,) = manifest["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]["containers"]
    return str(container["command"][2]).replace(f"{CONFIG_DIRECTORY}/config.yaml", str(place / "config.yaml"))


@pytest.mark.parametrize("scheduler", ["kubernetes", "skypilot"])
def test_the_nodes_of_a_job_find_each_other(
    scheduler: str, tmp_path: Path, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a cluster starts them: the variables are those that the training operator and SkyPilot set."""
    if reason := why_no_namespaces():
        pytest.skip(reason)
    words = ["--nodes", "2", "--device", "cpu", "--name", "two", "--mount", f"claim:{place}", "--image", "image"]
    words += ["--python", sys.executable, "--run", str(place / "pair"), "--steps", "2"]
    words += ["--data.path", str(place / "rows.jsonl")]
    assert main(["launch", scheduler, "sft", str(place / "sft.yaml"), *words]) == 0
    job = capsys.readouterr().out
    script = pod_command(job, place) if scheduler == "kubernetes" else yaml.safe_load(job)["run"]
    with NodeNetwork(tmp_path, ["two-master-0", "two-worker-0"]) as network:
        processes = []
        addresses = "\n".join(node.address for node in network.nodes.values())
        for rank, (name, node) in enumerate(network.nodes.items()):
            (place / name).mkdir()
            of_node = {"RANK": str(rank), "POD_IP": node.address, "HOME": str(place / name)}
            of_sky = {"SKYPILOT_NODE_IPS": addresses, "SKYPILOT_NODE_RANK": str(rank)}
            environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""} | of_node | of_sky
            processes.append(node.start("bash", "-c", script, cwd=place, env=environment))
        assert [process.wait(PATIENCE) for process in processes] == [0, 0]
    assert logged_steps(place / "pair") == [1, 2]
