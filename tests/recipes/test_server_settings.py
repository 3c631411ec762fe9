"""Every setting of a recipe's servers reaches the client, the updates of weights or the servers."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from postlude.recipes.rollouts import engine as rollout_engine
from postlude.recipes.rollouts.engine import connect_servers, launch_servers, make_rollout_engine
from postlude.recipes.rollouts.server_commands import build_server_command
from postlude.recipes.sequence_limit import SequenceLimit
from postlude.serving.clients.sglang import SGLangAPI
from tests.recipes.test_grpo import config_of

CONNECTION = {"timeout": 7.0, "retries": 2, "backoff": 0.25, "concurrency": 3, "outage_timeout": 11.0}
CHANGED = tuple(f"--rollout.{name}={value}" for name, value in CONNECTION.items())


def test_settings_of_running_servers_reach_their_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVER_KEY", "secret")
    named = ("--rollout.api=sglang", "--rollout.model=policy", "--rollout.api_key=SERVER_KEY")
    urls = ("http://one:1", "http://two:2")
    rollout = config_of(
        tmp_path, "--rollout.kind=server", f"--rollout.urls=[{', '.join(urls)}]", *CHANGED, *named
    ).rollout
    with closing(connect_servers(rollout, None, 258)) as client:
        pool = client.pool
        assert [server.url for server in pool.servers] == list(urls)
        for server in pool.servers:
            assert (server.model, server.timeout, type(server.api)) == ("policy", 7.0, SGLangAPI)
            assert server.connection._headers["Authorization"] == "Bearer secret"
        assert {name: getattr(pool, name) for name in CONNECTION if name != "timeout"} == {
            name: value for name, value in CONNECTION.items() if name != "timeout"
        }


@pytest.mark.parametrize("kind", ["server", "vllm"])
def test_settings_of_weight_updates_reach_the_engine(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollout_engine, "ServerEngine", lambda make_client, *, sync, **others: sync)
    updates = ("--rollout.sync=network", "--rollout.sync_timeout=9", "--rollout.checksum_every=4")
    config = config_of(
        tmp_path, f"--rollout={'http://one:1' if kind == 'server' else kind}", *updates, "--rollout.probe_limit=0"
    )
    engine: Any = SimpleNamespace(config=SimpleNamespace(vocab_size=258))
    sync: Any = make_rollout_engine(config.rollout, engine, None, tmp_path, config.sampling, limit=SequenceLimit(64))
    assert (sync.method, sync.timeout, sync.checksum_every) == ("network", 9.0, 4)


@pytest.mark.parametrize("kind", ["generators", "vllm"])
def test_settings_of_launched_servers_reach_them(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The supervisor, the client and the command line together have all of them."""
    monkeypatch.setattr(rollout_engine, "ServerSupervisor", lambda *words, **settings: (words, settings))
    monkeypatch.setattr(rollout_engine, "SupervisedClient", lambda supervisor, **settings: (supervisor, settings))
    python = tmp_path / "python"
    python.symlink_to("/usr/bin/env")
    only = ("--rollout.device=cpu", "--rollout.threads=3") if kind == "generators" else (f"--rollout.python={python}",)
    rollout: Any = config_of(
        tmp_path,
        f"--rollout={kind}",
        *CHANGED,
        *only,
        *("--rollout.count=2", "--rollout.cpus=5", "--rollout.gpus=4", "--rollout.max_restarts=6"),
        *("--rollout.arguments=[--seed, '8']", "--rollout.env={A: b}", "--rollout.start_timeout=13"),
    ).rollout
    command = build_server_command(
        rollout, "tiny-dense", torch.float32, "cuda", weights=True, limit=SequenceLimit(64), model_limit=None
    )
    words = list(command.command)
    assert words[-2:] == ["--seed", "8"]
    assert command.environment["A"] == "b"
    assert (command.cpus, command.gpus, command.start_timeout) == (5.0, 4.0, 13.0)
    if kind == "generators":
        assert words[words.index("--device") + 1] == "cpu", "not the trainer's"
        assert words[words.index("--threads") + 1] == command.environment["OMP_NUM_THREADS"] == "3"
    else:
        assert words[0] == str(python)
    launcher: Any = object()
    client: Any = launch_servers(rollout, command, None, 258, launcher)
    (started, restarts), settings = client
    assert started == (command, 2, launcher)
    assert restarts == {"max_restarts": 6}
    assert settings == CONNECTION | {"tokenizer": None, "vocab_size": 258}
