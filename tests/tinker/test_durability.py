"""Saved state survives a kill, unsaved state gives a clear error, and a full disk fails only the save."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from postlude.tinker import service as service_module
from postlude.tinker import state as state_module
from postlude.tinker.state import StateDirectory

from .asgi_client import Client, running_server
from .fake_backend import FakeBackend


def test_restarted_server_serves_saved_state_and_reports_lost_state(tmp_path: Path) -> None:
    async def before() -> tuple[str, str, str, str, str, str]:
        async with running_server(tmp_path) as (app, backend, _):
            client = await Client(app).open()
            model = await client.create_model()
            await client.run_pass(model, 1, 3.0)
            await client.step(model, 2)
            state = await client.call("save_weights", {"model_id": model, "path": "state", "seq_id": 3})
            sampler = await client.call("save_weights_for_sampler", {"model_id": model, "path": "s", "seq_id": 4})
            body = {"session_id": client.session, "sampling_session_seq_id": 0, "model_path": sampler["path"]}
            named = (await client.post("create_sampling_session", body)).json["sampling_session_id"]
            body = {"model_id": model, "sampling_session_seq_id": 1, "seq_id": 5}
            snapshot = (await client.call("save_weights_for_sampler", body))["sampling_session_id"]
            backend.gate.clear()
            running = await client.run_pass(model, 6, 1.0)
            await asyncio.sleep(0.05)
            return client.session, model, state["path"], named, snapshot, running

    async def after(session: str, model: str, state: str, named: str, snapshot: str, running: str) -> None:
        async with running_server(tmp_path) as (app, _, _service):
            client = Client(app)
            client.session = session
            assert (await client.post("session_heartbeat", {"session_id": session})).status == 200
            lost = await client.result(running)
            assert lost["category"] == "server"
            assert "was started again" in lost["error"]
            assert state in lost["error"]
            refused = await client.post("optim_step", {"model_id": model, "seq_id": 7})
            assert refused.status == 410
            assert state in refused.json["error"]
            sample = {"seq_id": 9, "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]}}
            result = await client.call("asample", sample | {"sampling_session_id": named})
            assert isinstance(result, bytes)
            unsaved = await client.call("asample", sample | {"sampling_session_id": snapshot})
            assert "not saved with a name" in unsaved["error"]
            runs = (await client.get("training_runs")).json["training_runs"]
            assert [run["training_run_id"] for run in runs] == [model]
            assert runs[0]["last_checkpoint"]["tinker_path"] == state
            body = {"session_id": session, "model_seq_id": 1, "path": state, "optimizer": True}
            loaded = (await client.call("load_weights", body))["model_id"]
            assert (await client.result(await client.step(loaded, 1)))["metrics"]["weight"] == 3.0

    asyncio.run(after(*asyncio.run(before())))


SAVER = """
import sys, itertools, time
from pathlib import Path
from postlude.tinker.backend import LoRAConfig, ModelSpec
from postlude.tinker.paths import TinkerPath
from postlude.tinker.state import Checkpoint, Run, StateDirectory
state = StateDirectory(Path(sys.argv[1]))
state.open()
spec = ModelSpec("base", LoRAConfig(4))
first = max((c.user_metadata["n"] for c in state.checkpoints.values()), key=int, default="0")
state.write(Run("run", "owner", "session", spec, 0.0, 0.0))
print("ready", flush=True)
for n in itertools.count(int(first) + 1):
    for name in ("same", f"own{n % 3}"):
        path = TinkerPath("run", "weights", name)
        with state.new_directory() as aside:
            for file in "abc":
                (aside / file).write_text(str(n) * 2000)
            state.publish(aside, Checkpoint(path, "owner", spec, 0.0, 0, user_metadata={"n": str(n)}), overwrite=True)
        print(name, n, flush=True)
"""


def test_checkpoint_is_complete_or_absent_after_kill(tmp_path: Path) -> None:
    for kill in range(3):
        process = subprocess.Popen([sys.executable, "-c", SAVER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        lines = [process.stdout.readline()]  # at least one is acknowledged, however busy the machine is
        time.sleep(0.05 + 0.013 * kill)
        process.send_signal(signal.SIGKILL)
        acknowledged: dict[str, int] = {}
        for line in (*lines, *process.stdout.read().splitlines()):
            name, _, number = line.strip().partition(" ")
            if number.isdigit():
                acknowledged[name] = int(number)
        process.wait()
        state = StateDirectory(tmp_path)
        state.open()
        saved = {
            path.name: int(saved_checkpoint.user_metadata["n"]) for path, saved_checkpoint in state.checkpoints.items()
        }
        assert acknowledged
        for name, number in acknowledged.items():
            assert saved[name] in (number, number + (1 if name == "same" else 3)), "older than what was acknowledged"
        for path, checkpoint in state.checkpoints.items():
            files = state.files_of(path)
            assert set(files) == set("abc")
            assert {file.read_text() for file in files.values()} == {checkpoint.user_metadata["n"] * 2000}
            assert checkpoint.size == 3 * 2000 * len(checkpoint.user_metadata["n"])
        assert not list((tmp_path / "aside").iterdir())
        assert not list((tmp_path / "runs" / "run" / "weights").glob(".*"))
        state.close()


def test_checkpoint_replacement_interrupted_by_kill_is_completed(tmp_path: Path) -> None:
    """The kill happens between the two renames, when neither name has the checkpoint."""
    process = subprocess.Popen([sys.executable, "-c", SAVER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    while not process.stdout.readline().startswith("own2"):
        pass
    process.kill()
    process.wait()
    folder = tmp_path / "runs" / "run" / "weights"
    shutil.copytree(folder / "own2", folder / ".own2.old")
    (folder / "own2").rename(folder / ".own2.new")
    state = StateDirectory(tmp_path)
    state.open()
    assert "own2" in {path.name for path in state.checkpoints}
    assert not list(folder.glob(".*"))
    state.close()


FULL = os.strerror(errno.ENOSPC)


@pytest.mark.parametrize(
    "failure",
    [OSError(errno.ENOSPC, FULL), OSError(f"state could not be written: rank 0 raised OSError: [Errno 28] {FULL}.")],
    ids=["here", "in a rank"],
)
async def test_full_disk_fails_save_with_clear_error_and_training_continues(failure: OSError, tmp_path: Path) -> None:
    async with running_server(tmp_path) as (app, backend, _):
        client = await Client(app).open()
        model = await client.create_model()
        await client.run_pass(model, 1, 3.0)
        backend.failure = None
        await client.result(await client.step(model, 2))
        backend.failure = failure
        full = await client.call("save_weights", {"model_id": model, "path": "a", "seq_id": 3})
        assert full["category"] == "server"
        assert "is full" in full["error"]
        assert not list((tmp_path / "aside").iterdir())
        assert (await client.get("checkpoints")).json["checkpoints"] == []
        saved = await client.call("save_weights", {"model_id": model, "path": "a", "seq_id": 4})
        assert saved["path"].endswith("/weights/a")
        shutil.rmtree(tmp_path / "sessions")
        refused = await client.post("create_session", {"sdk_version": "0.36.0"})
        assert refused.status == 503
        assert "cannot be written" in refused.json["error"]
        assert (await client.result(await client.step(model, 5)))["metrics"]["weight"] == 3.0


def test_second_server_on_state_directory_is_refused(tmp_path: Path) -> None:
    state = StateDirectory(tmp_path)
    state.open()
    with pytest.raises(OSError, match=r"is in use by process .* another directory \(--state\)"):
        StateDirectory(tmp_path).open()
    state.close()
    reopened = StateDirectory(tmp_path)
    reopened.open()
    reopened.close()


def test_session_without_heartbeats_expires_and_others_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    passed = 0.0  # seconds, besides those of this test
    monkeypatch.setattr(
        service_module, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + passed, time=time.time)
    )
    monkeypatch.setattr(service_module, "SWEEP_SECONDS", 0.01)

    async def run() -> None:
        nonlocal passed
        backend = FakeBackend()
        async with running_server(tmp_path, backend, session_seconds=300.0) as (app, _, service):
            silent, alive = await Client(app).open(), await Client(app).open()
            silent_model, alive_model = await silent.create_model(), await alive.create_model()
            for _ in range(4):
                passed += 100.0
                assert (await alive.post("session_heartbeat", {"session_id": alive.session})).status == 200
            async with asyncio.timeout(60):
                while ("remove", silent_model) not in backend.calls:
                    await asyncio.sleep(0.01)
            assert ("remove", alive_model) not in backend.calls
            assert (await silent.post("session_heartbeat", {"session_id": silent.session})).status == 410
            answer = await silent.post("optim_step", {"model_id": silent_model, "seq_id": 1})
            assert answer.status == 410
            assert "no heartbeat" in answer.json["error"]
            assert (await alive.result(await alive.step(alive_model, 1)))["metrics"] == {"weight": 0.0}
            record = json.loads((tmp_path / "sessions" / f"{silent.session}.json").read_text())
            assert record["finished"] == "expired"
            assert silent.session not in service.sessions

    asyncio.run(run())


async def test_a_finished_session_frees_its_models(tmp_path: Path) -> None:
    async with running_server(tmp_path) as (app, backend, _):
        client = await Client(app).open()
        model = await client.create_model()
        done = await client.post(f"sessions/{client.session}/finish", {"reason": {"type": "success"}})
        assert done.status == 204
        async with asyncio.timeout(60):
            while ("remove", model) not in backend.calls:
                await asyncio.sleep(0.01)
        assert (await client.post("session_heartbeat", {"session_id": client.session})).status == 410


def test_checkpoint_is_deleted_after_its_time_to_live(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    passed = 0.0  # seconds, besides those of this test
    monkeypatch.setattr(state_module, "time", SimpleNamespace(time=lambda: time.time() + passed))
    monkeypatch.setattr(service_module, "SWEEP_SECONDS", 0.5)

    async def run() -> None:
        nonlocal passed
        async with running_server(tmp_path) as (app, _, service):
            client = await Client(app).open()
            model = await client.create_model()
            body = {"model_id": model, "path": "short", "seq_id": 1, "ttl_seconds": 300}
            for seconds in (10**10, 2**62, 10**400):
                refused = await client.post("save_weights", body | {"ttl_seconds": seconds, "seq_id": 2})
                assert refused.status == 400
                assert "ttl_seconds is 1" in refused.json["error"] or "ttl_seconds is 4" in refused.json["error"]
            short = await client.call("save_weights", body)
            assert (await client.post("weights_info", {"tinker_path": short["path"]})).status == 200
            passed = 301.0
            assert (await client.post("weights_info", {"tinker_path": short["path"]})).status == 404
            async with asyncio.timeout(60):
                while service.state.checkpoints or list((tmp_path / "runs" / model / "weights").iterdir()):
                    await asyncio.sleep(0.05)

    asyncio.run(run())


def test_a_new_state_directory_is_for_its_owner(tmp_path: Path) -> None:
    for name, mode in (("new", 0o700), ("shared", 0o755)):
        if name == "shared":  # by the operator, whose choice stays
            (tmp_path / name).mkdir(mode=mode)
        state = StateDirectory(tmp_path / name)
        state.open()
        state.close()
        assert (tmp_path / name).stat().st_mode & 0o777 == mode
