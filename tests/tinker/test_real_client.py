"""The newest and oldest real Tinker API client against `postlude tinker` (`make test-tinker`)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from postlude.tinker.wire_messages import MESSAGES, message_class

PYTHON = os.environ.get("TINKER_PYTHON", "")
CLIENTS = {"newest": "", "oldest": str(Path(PYTHON).parent.parent / "oldest")}
SCRIPT = Path(__file__).parent / "client_script.py"
START_SECONDS, CLIENT_SECONDS = 120, 300

pytestmark = [
    pytest.mark.tinker,
    pytest.mark.slow,  # a server and a client with its tokenizers start
    pytest.mark.skipif(not PYTHON, reason="needs TINKER_PYTHON, an interpreter that has the client"),
]


class Server:
    """Runs `postlude tinker` in another process."""

    def __init__(self, state: Path, port: int = 0, model: str = "tiny-dense") -> None:
        self.state, self.model = state, model
        self.log = (state.parent / f"server-{time.time()}.log").open("w+")
        command = [sys.executable, "-m", "postlude", "tinker", model, "--state", str(state), "--port", str(port)]
        self.process = subprocess.Popen(command, stdout=self.log, stderr=subprocess.STDOUT)
        deadline = time.monotonic() + START_SECONDS
        while "TINKER_API_KEY" not in (text := Path(self.log.name).read_text()):
            assert self.process.poll() is None, text
            assert time.monotonic() < deadline, text
            time.sleep(0.1)
        exports = dict(line.removeprefix("export ").split("=", 1) for line in text.splitlines() if "export" in line)
        self.environment = {name: exports[name].strip() for name in ("TINKER_BASE_URL", "TINKER_API_KEY")}
        self.port = int(self.environment["TINKER_BASE_URL"].rpartition(":")[2])

    def client(self, part: str, which: str = "newest") -> subprocess.Popen[str]:
        environment = os.environ | self.environment | {"PYTHONPATH": CLIENTS[which], "TINKER_TELEMETRY": "1"}
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen([PYTHON, str(SCRIPT), part], env=environment, text=True, **pipes)

    def stop(self) -> None:
        self.process.terminate()
        assert self.process.wait(timeout=60) == 0, Path(self.log.name).read_text()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    running = Server(tmp_path_factory.mktemp("server") / "state")
    yield running
    running.stop()


def read_client_result(process: subprocess.Popen[str]) -> Any:
    output, errors = process.communicate(timeout=CLIENT_SECONDS)
    assert process.returncode == 0, errors
    return json.loads(output.splitlines()[-1])


@pytest.mark.parametrize("which", CLIENTS)
def test_client_trains_saves_loads_and_samples(server: Server, which: str) -> None:
    result = read_client_result(server.client("loop", which))
    assert result["version"].startswith("0.36" if which == "newest" else "0.34")
    losses = result["losses"]
    assert losses == sorted(losses, reverse=True)
    np.testing.assert_allclose(result["before"], result["after"], rtol=1e-5)  # the loaded state is the saved one
    np.testing.assert_allclose(result["logprobs"], result["scored"], atol=1e-4)  # sampled, and scored as a prompt
    assert result["sequences"] == result["named_sequences"]  # a snapshot and a saved sampler of the same weights
    np.testing.assert_allclose(result["custom"]["loss:sum"], result["after"], rtol=1e-5)
    assert result["custom"]["mine"] == 1.0
    assert "'no_such_loss' is not supported" in result["refused"]


def test_full_model_trains_next_to_adapter(server: Server) -> None:
    result = read_client_result(server.client("full"))
    assert result["losses"] == sorted(result["losses"], reverse=True)
    assert result["losses"][-1] < 0.9 * result["losses"][0]
    assert result["adapter"][0] == result["adapter"][1]  # the base is as it was
    assert result["sampled"][0] == result["sampled"][1]
    np.testing.assert_allclose(*result["loaded"], rtol=1e-5)
    assert result["is_lora"] is False
    run, kind, name = result["named"].removeprefix("tinker://").split("/")
    assert (server.state / "runs" / run / kind / name / "model.safetensors").is_file()


def test_concurrent_clients_are_isolated(server: Server) -> None:
    alone = read_client_result(server.client("loop"))
    together = [read_client_result(process) for process in [server.client("loop") for _ in range(2)]]
    for result in together:
        np.testing.assert_allclose(result["losses"], alone["losses"], rtol=1e-5)
        assert result["sequences"] == alone["sequences"]


def test_restarted_server_serves_saved_state_and_client_gets_error_for_lost_state(tmp_path: Path) -> None:
    first = Server(tmp_path / "state")
    client = first.client("killed")
    assert client.stdout is not None
    assert client.stdin is not None
    assert json.loads(client.stdout.readline())["ready"]
    first.process.kill()
    first.process.wait()
    second = Server(tmp_path / "state", first.port)
    client.stdin.write("\n")
    client.stdin.flush()
    result = read_client_result(client)
    second.stop()
    assert result["same"]
    assert "was started again" in result["sentence"]
    assert result["state"] in result["sentence"]
    np.testing.assert_allclose(*result["loss"], rtol=1e-5)


def rank_of(server: subprocess.Popen[bytes]) -> int:
    """Returns the process of the only rank."""
    children = subprocess.check_output(
        ["ps", "-ww", "-o", "pid=,args=", "--ppid", str(server.pid)], text=True
    ).splitlines()
    (rank,) = (int(line.split()[0]) for line in children if "spawn_main" in line)
    return rank


def test_killed_rank_restarts_and_only_unsaved_state_is_lost(tmp_path: Path) -> None:
    server = Server(tmp_path / "state")
    client = server.client("killed")
    assert client.stdout is not None
    assert json.loads(client.stdout.readline())["ready"]
    os.kill(rank_of(server.process), signal.SIGKILL)
    result = read_client_result(client)  # its input ends, so it goes on
    server.stop()
    assert result["same"]
    assert "the ranks of tiny-dense have ended: its process was killed" in result["sentence"]
    assert result["state"] in result["sentence"]
    np.testing.assert_allclose(*result["loss"], rtol=1e-5)


def run_recipe(server: Server, module: str, logs: Path, **settings: Any) -> list[dict[str, Any]]:
    """Runs a cookbook recipe in its log directory. Returns its metrics."""
    logs.parent.mkdir(exist_ok=True)
    settings |= {"model_name": server.model, "renderer_name": "role_colon", "log_path": logs}
    command = [PYTHON, "-m", f"tinker_cookbook.recipes.{module}", *(f"{name}={settings[name]}" for name in settings)]
    environment = os.environ | server.environment | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(logs.parent / "hf")}
    pipes: dict[str, Any] = {"capture_output": True, "text": True, "timeout": CLIENT_SECONDS}
    done = subprocess.run(command, env=environment, cwd=logs.parent, check=False, **pipes)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in (logs / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def recipe_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Serves a model directory whose tokenizer the recipes load by the model's name."""
    directory = tmp_path_factory.mktemp("recipes")
    model = directory / "model"
    subprocess.run([sys.executable, "-m", "postlude", "convert", "tiny-dense", str(model)], check=True)
    running = Server(directory / "state", model=str(model))
    yield running
    running.stop()


def test_cookbook_rl_recipe_trains(recipe_server: Server, tmp_path: Path) -> None:
    """The unchanged RL recipe on sums. The log-probs of samples equal the trainer's, so their KL is 0."""
    settings = {"env": "arithmetic", "groups_per_batch": 4, "group_size": 4, "max_steps": 2, "lora_rank": 4}
    metrics = run_recipe(recipe_server, "math_rl.train", tmp_path / "logs", eval_every=0, **settings)
    kl = [line["optim/kl_sample_train_v2"] for line in metrics if "optim/kl_sample_train_v2" in line]
    assert len(kl) == 2
    assert max(map(abs, kl)) < 1e-4
    saved = json.loads((tmp_path / "logs" / "checkpoints.jsonl").read_text().splitlines()[-1])["sampler_path"]
    run, kind, name = saved.removeprefix("tinker://").split("/")
    directory = recipe_server.state / "runs" / run / kind / name
    assert {"adapter_config.json", "adapter_model.safetensors"} <= {file.name for file in directory.iterdir()}
    environment = os.environ | recipe_server.environment
    answer = subprocess.check_output(
        [PYTHON, str(SCRIPT), "openai", saved], env=environment, text=True, timeout=CLIENT_SECONDS
    )
    assert json.loads(answer)["usage"]["completion_tokens"] == 4


def test_cookbook_supervised_recipe_trains(recipe_server: Server, tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "What is 2 + 2?"}, {"role": "assistant", "content": "It is 4."}]
    (tmp_path / "data.jsonl").write_text("\n".join([json.dumps({"messages": messages})] * 64))
    settings = {"dataset": "data.jsonl", "learning_rate": 1e-2, "batch_size": 8, "max_steps": 8, "eval_every": 0}
    metrics = run_recipe(recipe_server, "chat_sl.train", tmp_path / "logs", **settings)
    losses = [line["train_mean_nll"] for line in metrics if "train_mean_nll" in line]
    assert len(losses) == 8
    assert losses[-1] < 0.9 * losses[0]


def test_cookbook_dpo_recipe_trains_with_custom_loss(recipe_server: Server, tmp_path: Path) -> None:
    """DPO uses forward_backward_custom. Its dataset is a directory with the dataset's name on the Hub."""
    data = tmp_path / "Anthropic" / "hh-rlhf"
    data.mkdir(parents=True)
    row = {name: f"\n\nHuman: Hello.\n\nAssistant: {text}" for name, text in (("chosen", "Yes."), ("rejected", "No!"))}
    for name in ("train", "test"):
        (data / f"{name}.jsonl").write_text("\n".join([json.dumps(row)] * 48))
    settings = {"dataset": "hhh", "learning_rate": 1e-3, "batch_size": 8, "max_steps": 6}
    metrics = run_recipe(recipe_server, "preference.dpo.train", tmp_path / "logs", **settings)
    losses = [line["dpo_loss"] for line in metrics if "dpo_loss" in line]
    assert len(losses) == 6
    np.testing.assert_allclose(losses[0], np.log(2), rtol=1e-3)  # the policy is the reference
    assert losses[-1] < 0.9 * losses[0]
    assert metrics[-1]["accuracy"] == 1.0


def test_protobuf_messages_match_the_client() -> None:
    client_messages = json.loads(subprocess.check_output([PYTHON, str(SCRIPT), "messages"], text=True))
    for name in MESSAGES:
        fields = message_class(name).DESCRIPTOR.fields
        assert {field.name: [field.number, field.type, field.is_repeated] for field in fields} == client_messages[
            name
        ], name
