"""vLLM on the trainer's GPUs: what the preflight refuses, and how the servers are started."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from postlude.checks import USER_ERRORS
from postlude.recipes.checks import servers
from postlude.recipes.checks.preflight import LaunchInfo, PreflightInputs
from postlude.recipes.checks.servers import check_shared_gpus
from postlude.recipes.config.rollout import sleeps, sync_method
from postlude.recipes.rollouts.server_commands import build_server_command
from postlude.recipes.sequence_limit import SequenceLimit
from tests.recipes.test_grpo import config_of

SHARED = ("--rollout=vllm", "--rollout.share_gpu=true")
GIB = 1 << 30


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Two ranks on two GPUs of 80 GiB."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=80 * GIB))
    return LaunchInfo("cuda", ranks=2)


def finding(tmp_path: Path, launch: LaunchInfo, *overrides: str) -> str:
    config = config_of(tmp_path, *SHARED, *overrides)
    try:
        check_shared_gpus(PreflightInputs(config, launch), config.rollout)
    except USER_ERRORS as error:
        return str(error)
    return ""


def test_servers_have_to_fit_on_the_ranks_gpus(tmp_path: Path, machine: LaunchInfo) -> None:
    assert finding(tmp_path, machine, "--rollout.count=2") == ""
    assert finding(tmp_path, machine, "--rollout.gpus=2") == ""
    assert "the trainer's 2 GPUs, but rollout needs 2 servers with 2" in finding(
        tmp_path, machine, "--rollout.count=2", "--rollout.gpus=2"
    )
    assert "1 servers with 0.5 GPUs each" in finding(tmp_path, machine, "--rollout.gpus=0.5")
    assert "needs a trainer on cuda" in finding(tmp_path, LaunchInfo("cpu", ranks=2))
    assert "but 2 of 16 ranks are on this one" in finding(tmp_path, LaunchInfo("cuda", ranks=16))
    assert "rollout.sync is disk" in finding(tmp_path, machine, "--rollout.sync=disk")


def test_memory_of_trainer_and_vllm_is_compared_with_the_gpus(
    tmp_path: Path, machine: LaunchInfo, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servers, "generator_bytes", lambda *_, **__: 100 * GIB)
    message = finding(tmp_path, machine)
    assert "100.0 GiB of vLLM's weights, two buffers of 1.0 GiB" in message
    assert "but has 80.0 GiB. Raise layout.dp_shard or rollout.gpus" in message
    assert finding(tmp_path, machine, "--rollout.gpus=2") == "", "each has half of the weights"


def test_servers_that_share_gpus_are_started_with_room_for_sleep(tmp_path: Path) -> None:
    limit = SequenceLimit(budget=256, context_length=None, model=None)

    def words(*overrides: str) -> str:
        rollout = config_of(tmp_path, *SHARED, *overrides).rollout
        assert sync_method(rollout, ray=False) == "ipc"
        assert sleeps(rollout, ray=False)
        assert (sync_method(rollout, ray=True), sleeps(rollout, ray=True)) == ("disk", False)
        options: dict[str, Any] = {"weights": False, "limit": limit, "model_limit": 4096}
        command = build_server_command(
            rollout, "tiny", torch.bfloat16, "cuda", **options, sync="ipc", memory_fraction=0.834
        )
        return " ".join(command.command)

    started = words()
    assert f"--weight-transfer-config {json.dumps({'backend': 'postlude'})}" in started
    assert "--worker-extension-cls postlude_worker.Extension" in started
    assert "--enable-sleep-mode --gpu-memory-utilization 0.83" in started
    assert "--tensor-parallel-size" not in started
    assert "--tensor-parallel-size 2" in words("--rollout.gpus=2")
    assert "--tensor-parallel-size" not in words("--rollout.gpus=2", "--rollout.arguments=[--data-parallel-size=2]")
    chosen = words("--rollout.arguments=[--gpu-memory-utilization, '0.5']")
    assert "0.83" not in chosen
    assert "--gpu-memory-utilization 0.5" in chosen
